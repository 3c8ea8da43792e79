"""The command line: `alchemi evaluate FILE`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import ase.io
import torch
import typer
from ase.units import GPa
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from alchemi_dist.cli.launch import Device, Dtype, on_ranks, one_line_errors
from alchemi_dist.cli.md import Model, Strategy
from alchemi_domain.evaluate import TOLERANCE, Frame, Job, evaluate, within_tolerance


def evaluate_command(
    file: Annotated[Path, typer.Argument(help="Any file that ASE reads.")],
    index: Annotated[str, typer.Option(help="Which frames, in ASE's notation: `:` for all.")] = ":",
    model: Model = "sevennet",
    ranks: Annotated[int | None, typer.Option(min=1, help="Ranks to start; under torchrun, its own.")] = None,
    device: Annotated[Device, typer.Option(help="One rank a GPU while there are enough.")] = Device.cpu,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: the model's own.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the frames with their results (extxyz).")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results as JSON; - for standard output.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with one rank; exit with 1 if over the tolerance.")] = False,
    trust_pickle: Annotated[bool, typer.Option("--trust-pickle", help="Allow a model file to run code on loading.")] = False,
    strategy: Strategy = "halo",
) -> None:
    """Energy, forces and stress of every frame of FILE."""
    console = Console(stderr=str(json_path) == "-")
    kind = getattr(torch, dtype) if dtype is not None else None
    with one_line_errors(console):
        items = on_ranks(ranks, device, model, evaluate, str(file), index, model, kind, check, trust_pickle, strategy)
        job = next(items, None)
        if job is None:  # a rank of torchrun's other than 0
            return
        frames = _write_and_show(items, job.n_frames, out, console)
    report = _report(frames, model)
    console.print(_table(frames, model, device, job))
    if json_path is not None:
        text = json.dumps(report, indent=2) + "\n"
        sys.stdout.write(text) if str(json_path) == "-" else json_path.write_text(text, encoding="utf-8")
    if check and not _show_parity(report["parity"], job.dtype, console):
        raise typer.Exit(1)


def _write_and_show(items: Iterator[Any], n_frames: int, out: Path | None, console: Console) -> list[Frame]:
    """All frames, each written as it comes; the file takes its name when it is whole."""
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    partial = out.with_name(out.name + ".partial") if out is not None else None
    frames = []
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("frames", total=n_frames)
            for number, frame in enumerate(items):
                frames.append(frame)
                progress.advance(task)
                if partial is not None:
                    ase.io.write(partial, frame.atoms, format="extxyz", append=number > 0, parallel=False)
        if partial is not None and out is not None:
            partial.replace(out)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return frames


def _report(frames: list[Frame], model: str) -> dict[str, Any]:
    """The JSON report: a list with one entry for each frame, and the largest parity gap of all."""
    report: dict[str, Any] = {"model": model}
    for name in ("energy", "stress", "stress_reason", "max_force", "ranks", "seconds"):
        report[name] = [getattr(frame, name) for frame in frames]
    report["n_atoms"] = [len(frame.atoms) for frame in frames]
    gaps = [frame.parity for frame in frames if frame.parity is not None]
    names = sorted({name for gap in gaps for name in gap})
    report["parity"] = {name: max(gap[name] for gap in gaps if name in gap) for name in names} if gaps else None
    return report


def _table(frames: list[Frame], model: str, device: Device, job: Job) -> Table:
    n_ranks = len(frames[0].ranks["owned"])
    title = f"{model}, {str(job.dtype).removeprefix('torch.')}, {n_ranks} rank{'s' * (n_ranks > 1)} on {device}"
    table = Table(title=title, title_justify="left", caption=_shares(frames[0]), caption_justify="left")
    for name in ("structure", "atoms", "energy (eV)", "max force (eV/Å)", "pressure (GPa)", "s"):
        table.add_column(name, justify="left" if name == "structure" else "right")
    for frame in frames:
        pressure = "none: " + str(frame.stress_reason) if frame.stress is None else f"{-sum(frame.stress[:3]) / 3 / GPa:.3f}"
        numbers = f"{frame.energy:.6f}", f"{frame.max_force:.6f}", pressure, f"{frame.seconds:.2f}"
        table.add_row(frame.atoms.get_chemical_formula("metal"), str(len(frame.atoms)), *numbers)
    return table


def _shares(frame: Frame) -> str:
    """Who had what of the first frame, the first ranks of many."""
    share = list(zip(frame.ranks["owned"], frame.ranks["ghosts"], frame.ranks["edges"], strict=True))
    lines = [f"rank {r}: {owned} atoms, {ghosts} ghosts, {edges} edges" for r, (owned, ghosts, edges) in enumerate(share[:8])]
    return "\n".join(lines + ["..."] * (len(share) > 8))


def _show_parity(parity: dict[str, float], dtype: torch.dtype, console: Console) -> bool:
    """Print each gap beside its tolerance; whether all are within."""
    passed = within_tolerance(parity, dtype)
    told = ", ".join(f"{name} {gap:.1e} (at most {TOLERANCE[dtype][name]:.0e})" for name, gap in parity.items())
    console.print(f"parity against one rank: {told}: {'[green]passed[/]' if passed else '[bold red]FAILED[/]'}", soft_wrap=True)
    return passed
