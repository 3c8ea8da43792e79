"""A run on the console, for `alchemi md` and `alchemi relax`: a bar while it goes on, and a summary at the end."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from alchemi_dist.cli.launch import Launch, on_ranks, write_json
from alchemi_dynamics.report import Report
from alchemi_dynamics.run import RunHeader, RunSummary
from alchemi_dynamics.settings import Settings


def run_and_show(
    name: str, function: Callable[..., Iterator[Any]], settings: Settings, launch: Launch, console: Console
) -> RunSummary | None:
    """Run with a progress bar, then show and write the results. None on other ranks than 0."""
    items = on_ranks(launch, function, settings)
    header: RunHeader | None = next(items, None)
    if header is None:
        return None
    console.print(f"{name}, {settings.model}, {format_header(header)}", highlight=False, soft_wrap=True)
    for line in header.changed:
        console.print(f"[yellow]changed since the checkpoint:[/] {line}", highlight=False, soft_wrap=True)
    reports, summary = _follow(items, header, console)
    results = {"settings": settings.model_dump(mode="json"), "reports": [asdict(r) for r in reports], **asdict(summary)}
    write_json(launch.json_path, results)
    _show_end(reports[-1], summary, console)
    return summary


def _follow(items: Iterator[Any], header: RunHeader, console: Console) -> tuple[list[Report], RunSummary]:
    """Show a bar until the summary comes."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    reports: list[Report] = []
    summary: RunSummary | None = None
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=header.last, completed=header.first)
        for item in items:
            if isinstance(item, Report):
                reports.append(item)
                progress.update(task, completed=item.step, description=format_report(item))
            else:
                summary = item
    assert summary is not None
    return reports, summary


def format_header(header: RunHeader) -> str:
    """Atoms, ranks, type and steps."""
    dtype = str(header.dtype).removeprefix("torch.")
    ranks = f"{header.ranks} rank{'s' * (header.ranks > 1)}"
    return f"{header.n_atoms} atoms on {ranks}, {dtype}: steps {header.first} to {header.last}"


def format_report(report: Report) -> str:
    """The most important numbers."""
    if report.time is None:
        return f"{report.potential:.6f} eV, largest force {report.max_force:.4f} eV/Å"
    rate = "" if report.steps_per_s is None else f"{report.steps_per_s:.1f} step/s, {report.ns_per_day:.3g} ns/day, "
    return f"{rate}{report.temperature:.1f} K, drift {report.drift:+.1e} eV/atom"


def _show_end(last: Report, summary: RunSummary, console: Console) -> None:
    energy = "" if last.time is None else f"potential energy {last.potential:.6f} eV, "
    pressure = "" if last.pressure is None else f", {last.pressure:.4f} GPa"
    console.print(f"step {summary.step}: {energy}{format_report(last)}{pressure}", highlight=False, soft_wrap=True)
    console.print(f"{summary.seconds:.1f} s, {summary.rebuilds} neighbour-list rebuilds", highlight=False, soft_wrap=True)
    if summary.converged is not None:
        console.print("[green]converged[/]" if summary.converged else "[bold red]not converged[/]: give more --steps")
