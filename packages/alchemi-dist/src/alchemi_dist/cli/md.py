"""The command line: `alchemi md FILE`."""

from rich.console import Console

from alchemi_dist.cli.launch import Launch
from alchemi_dist.cli.options import command
from alchemi_dist.cli.progress import run_and_show
from alchemi_dynamics.run import molecular_dynamics
from alchemi_dynamics.settings import MDSettings


@command
def md_command(settings: MDSettings, launch: Launch, console: Console) -> None:
    """Run molecular dynamics of a structure.

    --restart appends to the trajectory and log, and removes frames written after the checkpoint.
    """
    run_and_show(settings.ensemble, molecular_dynamics, settings, launch, console)
