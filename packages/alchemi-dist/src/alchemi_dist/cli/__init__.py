"""The command line: `alchemi evaluate|md|relax|plan FILE`."""

import typer

from alchemi_dist.cli.evaluate import evaluate_command
from alchemi_dist.cli.md import md_command
from alchemi_dist.cli.plan import plan_command
from alchemi_dist.cli.relax import relax_command

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("evaluate")(evaluate_command)
app.command("md")(md_command)
app.command("relax")(relax_command)
app.command("plan")(plan_command)


@app.callback()
def main() -> None:
    """Machine-learned interatomic potentials on many GPUs."""
