"""What the commands share: options, and how their ranks are started."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from alchemi_domain.registry import module_of
from alchemi_shardtensor import RankPool, comm_from_environment
from alchemi_spec import AlchemiError


class Device(StrEnum):
    """Where the ranks compute."""

    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    """The type of the model's arithmetic."""

    float32 = "float32"
    float64 = "float64"


def on_ranks(
    ranks: int | None, device: Device, model: str, function: Callable[..., Iterator[Any]], *arguments: Any
) -> Iterator[Any]:
    """What `function(comm, *arguments)` yields on rank 0; ranks are torchrun's, mpiexec's, or are started here."""
    sys.path.insert(0, os.getcwd())  # for module:factory
    comm = comm_from_environment(device.value)
    if comm.group is not None:
        if ranks not in (None, comm.size):
            raise ValueError(f"--ranks {ranks} under a launcher that started {comm.size} ranks: leave --ranks out.")
        yield from (item for item in function(comm, *arguments) if comm.rank == 0)
        del comm
        gc.collect()  # a process group that is held by a cycle until the interpreter ends may abort it
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    elif ranks in (None, 1):
        yield from function(comm, *arguments)
    else:
        with RankPool(ranks, device.value, preload=[function.__module__, module_of(model)]) as pool:
            yield from pool.stream(function, *arguments)


@contextmanager
def one_line_errors(console: Console) -> Iterator[None]:
    """What a user can put right is one message, and exits with 2."""
    try:
        yield
    except (AlchemiError, ValueError, OSError) as error:
        console.print(f"[bold red]{type(error).__name__}[/]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
