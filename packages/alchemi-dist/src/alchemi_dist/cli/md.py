"""The command line: `alchemi md FILE` and `alchemi relax FILE`."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from alchemi_dist.cli.launch import Device, Dtype, on_ranks, one_line_errors
from alchemi_dynamics.report import Report
from alchemi_dynamics.run import Done, Job, MDSettings, RelaxSettings, Settings, molecular_dynamics, relaxation


class Ensemble(StrEnum):
    """What is kept constant, and by what."""

    nve = "nve"
    langevin = "langevin"
    nvt = "nvt"
    npt = "npt"


class Breathing(StrEnum):
    """How the cell of npt moves."""

    isotropic = "isotropic"
    full = "full"


class Cell(StrEnum):
    """What of the cell is relaxed."""

    none = "none"
    isotropic = "isotropic"
    full = "full"


Model = Annotated[str, typer.Option(help="sevennet[:NAME], mace:PATH|NAME, uma:PATH|NAME@TASK, lj, or module:factory.")]
Ranks = Annotated[int | None, typer.Option(min=1, help="Ranks to start; under torchrun, its own.")]
OnDevice = Annotated[Device, typer.Option(help="One rank a GPU while there are enough.")]
InDtype = Annotated[Dtype | None, typer.Option(help="The model's arithmetic. Default: the model's own.")]
Skin = Annotated[float, typer.Option(help="Å. How much longer than the cutoff listed edges are.")]
Compile = Annotated[str, typer.Option(help="How steps are made: auto (captured on CUDA), capture, inductor or off.")]
Strategy = Annotated[str, typer.Option(help="How atoms are shared out: halo, halo-grid, graph, graph-index, or any installed.")]
Traj = Annotated[Path | None, typer.Option(help="Write a trajectory: .extxyz, .traj, or .zarr for large systems.")]
Log = Annotated[Path | None, typer.Option(help="Write the reports as CSV.")]
Out = Annotated[Path | None, typer.Option(help="Write the last structure, in any format that ASE writes.")]
AsJson = Annotated[Path | None, typer.Option("--json", help="Write the reports as JSON; - for standard output.")]
Trust = Annotated[bool, typer.Option("--trust-pickle", help="Allow a model file to run code on loading.")]
Index = Annotated[int, typer.Option(help="Which frame of FILE.")]
Pressure = Annotated[float, typer.Option(help="GPa from outside, compression positive.")]


def md_command(
    file: Annotated[Path | None, typer.Argument(help="Any file that ASE reads; not read with --restart.")] = None,
    index: Index = -1,
    model: Model = "sevennet",
    ranks: Ranks = None,
    device: OnDevice = Device.cpu,
    dtype: InDtype = None,
    ensemble: Annotated[Ensemble, typer.Option(help="langevin: NVT by friction and noise; nvt: Nosé-Hoover.")] = Ensemble.nve,
    temperature: Annotated[
        float | None,
        typer.Option(help="K of the bath. Velocities are FILE's if it has momenta, else drawn at this temperature, else zero."),
    ] = None,
    pressure: Pressure = 0.0,
    cell: Annotated[Breathing, typer.Option(help="How the cell of npt moves.")] = Breathing.isotropic,
    timestep: Annotated[float, typer.Option(help="fs.")] = 1.0,
    steps: Annotated[int, typer.Option(min=1, help="In all, those before a restart included.")] = 1000,
    friction: Annotated[float, typer.Option(help="1/fs, of langevin.")] = 0.01,
    damping: Annotated[float, typer.Option(help="fs, of nvt's and npt's thermostats.")] = 100.0,
    pressure_damping: Annotated[float, typer.Option(help="fs, of npt's barostat.")] = 1000.0,
    seed: Annotated[int, typer.Option(help="Of drawn velocities and of Langevin's noise.")] = 0,
    stress: Annotated[bool, typer.Option("--stress", help="Compute the stress in other ensembles than npt, too.")] = False,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    compile: Compile = "auto",
    traj: Traj = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one report and frame to the next.")] = 100,
    log: Log = None,
    out: Out = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A folder that keeps the last whole state.")] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps from one checkpoint to the next.")] = 1000,
    restart: Annotated[Path | None, typer.Option(help="Go on from this checkpoint, on any number of ranks.")] = None,
    json_path: AsJson = None,
    trust_pickle: Trust = False,
) -> None:
    """Molecular dynamics of a structure. With --restart, trajectory and log are continued: nothing is in them twice."""
    console = Console(stderr=str(json_path) == "-")
    with one_line_errors(console):
        settings = MDSettings(
            **_plain(
                file=file,
                index=index,
                model=model,
                dtype=dtype,
                ensemble=ensemble,
                temperature=temperature,
                pressure=pressure,
                cell=cell,
                timestep=timestep,
                steps=steps,
                friction=friction,
                damping=damping,
                pressure_damping=pressure_damping,
                seed=seed,
                stress=stress,
                skin=skin,
                strategy=strategy,
                compile=compile,
                traj=traj,
                every=every,
                log=log,
                out=out,
                checkpoint=checkpoint,
                checkpoint_every=checkpoint_every,
                restart=restart,
                trust_pickle=trust_pickle,
            )
        )
        run = _run(on_ranks(ranks, device, model, molecular_dynamics, settings), settings, console)
        _write_json(json_path, settings, run)
    if run is not None:
        _show_end(*run, console)


def relax_command(
    file: Annotated[Path, typer.Argument(help="Any file that ASE reads.")],
    index: Index = -1,
    model: Model = "sevennet",
    ranks: Ranks = None,
    device: OnDevice = Device.cpu,
    dtype: InDtype = None,
    fmax: Annotated[float, typer.Option(help="eV/Å: no force is above it in the end, nor the cell's.")] = 0.05,
    steps: Annotated[int, typer.Option(min=1, help="At most.")] = 1000,
    cell: Annotated[Cell, typer.Option(help="What of the cell is relaxed, too.")] = Cell.none,
    pressure: Pressure = 0.0,
    skin: Skin = 0.5,
    strategy: Strategy = "halo",
    compile: Compile = "auto",
    traj: Traj = None,
    every: Annotated[int, typer.Option(min=1, help="Steps from one report and frame to the next.")] = 10,
    log: Log = None,
    out: Out = None,
    json_path: AsJson = None,
    trust_pickle: Trust = False,
) -> None:
    """Relax a structure to the nearest minimum by FIRE; exit with 1 if it is not reached in --steps."""
    console = Console(stderr=str(json_path) == "-")
    with one_line_errors(console):
        settings = RelaxSettings(
            **_plain(
                cell=None if cell is Cell.none else cell,
                file=file,
                index=index,
                model=model,
                dtype=dtype,
                fmax=fmax,
                steps=steps,
                pressure=pressure,
                skin=skin,
                strategy=strategy,
                compile=compile,
                traj=traj,
                every=every,
                log=log,
                out=out,
                trust_pickle=trust_pickle,
            )
        )
        run = _run(on_ranks(ranks, device, model, relaxation, settings), settings, console)
        _write_json(json_path, settings, run)
    if run is not None:
        _show_end(*run, console)
        if not run[1].converged:
            raise typer.Exit(1)


def _plain(**options: Any) -> dict[str, Any]:
    """Options as settings have them: paths and choices as text."""
    return {name: str(value) if isinstance(value, Path | StrEnum) else value for name, value in options.items()}


def _run(items: Iterator[Any], settings: Settings, console: Console) -> tuple[list[Report], Done] | None:
    """Show a bar while reports come; None on a rank of torchrun's other than 0."""
    job: Job | None = next(items, None)
    if job is None:
        return None
    console.print(_headline(job, settings), highlight=False, soft_wrap=True)
    for line in job.changed:
        console.print(f"[yellow]other than before the restart[/] {line}", highlight=False, soft_wrap=True)
    reports, done = [], None
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=job.last, completed=job.first)
        for item in items:
            if isinstance(item, Report):
                reports.append(item)
                progress.update(task, completed=item.step, description=_told(item))
            else:
                done = item
    assert done is not None
    return reports, done


def _headline(job: Job, settings: Settings) -> str:
    what = settings.ensemble if isinstance(settings, MDSettings) else "relaxation"
    where = f"{job.ranks} rank{'s' * (job.ranks > 1)}, {str(job.dtype).removeprefix('torch.')}"
    return f"{what}, {settings.model}, {job.n_atoms} atoms on {where}: steps {job.first} to {job.last}"


def _told(report: Report) -> str:
    """A report in a few words."""
    if report.time is None:
        return f"{report.potential:.6f} eV, largest force {report.max_force:.4f} eV/Å"
    rate = "" if report.steps_per_s is None else f"{report.steps_per_s:.1f} step/s, {report.ns_per_day:.3g} ns/day, "
    return f"{rate}{report.temperature:.1f} K, drift {report.drift:+.1e} eV/atom"


def _show_end(reports: list[Report], done: Done, console: Console) -> None:
    last = reports[-1]
    energy = "" if last.time is None else f"potential energy {last.potential:.6f} eV, "
    pressure = "" if last.pressure is None else f", {last.pressure:.4f} GPa"
    console.print(f"step {done.step}: {energy}{_told(last)}{pressure}", highlight=False, soft_wrap=True)
    console.print(f"{done.seconds:.1f} s, lists made anew {done.rebuilds} times", highlight=False, soft_wrap=True)
    if done.converged is not None:
        console.print("[green]converged[/]" if done.converged else "[bold red]not converged[/]: give more --steps")


def _write_json(path: Path | None, settings: Settings, run: tuple[list[Report], Done] | None) -> None:
    if path is None or run is None:
        return
    reports, done = run
    text = json.dumps({"settings": asdict(settings), "reports": [asdict(r) for r in reports], **asdict(done)}, indent=2) + "\n"
    sys.stdout.write(text) if str(path) == "-" else path.write_text(text, encoding="utf-8")
