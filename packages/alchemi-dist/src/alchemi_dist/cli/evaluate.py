"""The command line: `alchemi evaluate FILE`."""

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

from alchemi_dist.cli.launch import Launch, on_ranks, write_json
from alchemi_dist.cli.options import command
from alchemi_domain.evaluate import TOLERANCE, EvaluateSettings, StructureResult, evaluate, within_tolerance
from alchemi_domain.settings import FilePath, Option


class EvaluateLaunch(Launch):
    """Where it runs, and where it writes results."""

    out: Annotated[FilePath | None, Option("Write the frames with their results as extended xyz.")] = None


@command
def evaluate_command(settings: EvaluateSettings, launch: EvaluateLaunch, console: Console) -> None:
    """Compute energy, forces and stress of every frame of FILE."""
    items = on_ranks(launch, evaluate, settings)
    header = next(items, None)
    if header is None:  # a rank of torchrun's other than 0
        return
    results = _collect(items, header.n_frames, launch.out, console)
    report = _report(results, settings.model)
    n_ranks = len(results[0].ranks["owned"])
    where = f"{n_ranks} rank{'s' * (n_ranks > 1)} on {launch.device}"
    console.print(_table(results, f"{settings.model}, {str(header.dtype).removeprefix('torch.')}, {where}"))
    write_json(launch.json_path, report)
    if settings.check and not _show_parity(report["parity"], header.dtype, console):
        raise typer.Exit(1)


def _collect(items: Iterator[Any], n_frames: int, out: Path | None, console: Console) -> list[StructureResult]:
    """All results, each written when it comes. The file gets its name when it is complete."""
    columns = (TextColumn("[progress.description]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    partial = out.with_name(out.name + ".partial") if out is not None else None
    results: list[StructureResult] = []
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            for result in progress.track(items, n_frames, description="frames"):
                if partial is not None:
                    ase.io.write(partial, result.atoms, format="extxyz", append=bool(results), parallel=False)
                results.append(result)
        if partial is not None and out is not None:
            partial.replace(out)
    finally:
        if partial is not None:
            partial.unlink(missing_ok=True)
    return results


def _report(results: list[StructureResult], model: str) -> dict[str, Any]:
    """The JSON report: lists with one entry for each frame, and the largest difference from one rank."""
    report: dict[str, Any] = {"model": model}
    for name in ("energy", "stress", "stress_reason", "max_force", "ranks", "seconds"):
        report[name] = [getattr(result, name) for result in results]
    report["n_atoms"] = [len(result.atoms) for result in results]
    gaps = [result.parity for result in results if result.parity is not None]
    names = sorted({name for gap in gaps for name in gap})
    report["parity"] = {name: max(gap[name] for gap in gaps if name in gap) for name in names} if gaps else None
    return report


def _table(results: list[StructureResult], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption=_format_ranks(results[0]), caption_justify="left")
    for name in ("structure", "atoms", "energy (eV)", "max force (eV/Å)", "pressure (GPa)", "s"):
        table.add_column(name, justify="left" if name == "structure" else "right")
    for r in results:
        pressure = f"none: {r.stress_reason}" if r.stress is None else f"{-sum(r.stress[:3]) / 3 / GPa:.3f}"
        numbers = f"{r.energy:.6f}", f"{r.max_force:.6f}", pressure, f"{r.seconds:.2f}"
        table.add_row(r.atoms.get_chemical_formula("metal"), str(len(r.atoms)), *numbers)
    return table


def _format_ranks(result: StructureResult) -> str:
    """Atoms, ghosts and edges of each rank, for the first eight ranks."""
    counts = list(zip(result.ranks["owned"], result.ranks["ghosts"], result.ranks["edges"], strict=True))
    lines = [f"rank {r}: {owned} atoms, {ghosts} ghosts, {edges} edges" for r, (owned, ghosts, edges) in enumerate(counts[:8])]
    return "\n".join(lines + ["..."] * (len(counts) > 8))


def _show_parity(parity: dict[str, float], dtype: torch.dtype, console: Console) -> bool:
    """Print each difference beside its tolerance. Return whether all are within."""
    passed = within_tolerance(parity, dtype)
    gaps = ", ".join(f"{name} {gap:.1e} (at most {TOLERANCE[dtype][name]:.0e})" for name, gap in parity.items())
    console.print(f"parity against one rank: {gaps}: {'[green]passed[/]' if passed else '[bold red]FAILED[/]'}", soft_wrap=True)
    return passed
