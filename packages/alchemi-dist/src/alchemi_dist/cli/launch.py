"""What the commands share: how ranks are started, how errors are shown, and where JSON goes."""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from pydantic import Field
from rich.console import Console
from rich.markup import escape

from alchemi_domain.registry import module_of
from alchemi_domain.settings import BaseSettings, FilePath, ModelSettings, Option
from alchemi_shardtensor import RankPool, comm_from_environment
from alchemi_spec import AlchemiError


class Launch(BaseSettings):
    """Where a command runs, and where it writes JSON."""

    ranks: Annotated[
        int | None, Option("How many processes to start. Leave it out under torchrun, mpiexec or srun."), Field(ge=1)
    ] = None
    device: Annotated[
        Literal["cpu", "cuda"], Option("Device to compute on. Each rank uses its own GPU if there are enough GPUs.")
    ] = "cpu"
    json_path: Annotated[FilePath | None, Option("Write the results as JSON. Use - for standard output.", flag="--json")] = None


def on_ranks(launch: Launch, function: Callable[..., Iterator[Any]], settings: ModelSettings) -> Iterator[Any]:
    """Yield what `function(comm, settings)` yields on rank 0. Ranks are the launcher's, or are started here."""
    sys.path.insert(0, os.getcwd())  # for module:factory
    comm = comm_from_environment(launch.device)
    if comm.group is not None:
        if launch.ranks not in (None, comm.size):
            raise ValueError(f"--ranks {launch.ranks} under a launcher that started {comm.size} ranks: leave --ranks out.")
        yield from (item for item in function(comm, settings) if comm.rank == 0)
        del comm
        gc.collect()  # a process group that is held by a cycle until the interpreter ends may abort it
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    elif launch.ranks in (None, 1):
        yield from function(comm, settings)
    else:
        with RankPool(launch.ranks, launch.device, preload=[function.__module__, module_of(settings.model)]) as pool:
            yield from pool.stream(function, settings)


@contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """Show an error that a user can correct as one message, and exit with 2."""
    try:
        yield
    except (AlchemiError, ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def console_for(json_path: Path | None) -> Console:
    """A console on standard output, or on standard error if JSON goes to standard output."""
    return Console(stderr=str(json_path) == "-")


def write_json(json_path: Path | None, value: Any) -> None:
    """Write to a file, to standard output for `-`, or nowhere for None."""
    if json_path is None:
        return
    text = json.dumps(value, indent=2) + "\n"
    sys.stdout.write(text) if str(json_path) == "-" else json_path.write_text(text, encoding="utf-8")
