"""The command line: `alchemi relax FILE`."""

import typer
from rich.console import Console

from alchemi_dist.cli.launch import Launch
from alchemi_dist.cli.options import command
from alchemi_dist.cli.progress import run_and_show
from alchemi_dynamics.run import relaxation
from alchemi_dynamics.settings import RelaxSettings


@command
def relax_command(settings: RelaxSettings, launch: Launch, console: Console) -> None:
    """Relax a structure to the nearest energy minimum by FIRE. Exit with 1 if it is not reached in --steps."""
    summary = run_and_show("relaxation", relaxation, settings, launch, console)
    if summary is not None and not summary.converged:
        raise typer.Exit(1)
