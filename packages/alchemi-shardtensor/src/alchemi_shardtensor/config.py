"""How a model is to be spread: the choices that a user makes, apart from what the model declares."""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from alchemi_shardtensor.comm import Comm


@dataclass(frozen=True)
class DomainConfig:
    """The ranks to use, the strategy that shares the atoms out among them, and how steps are run.

    `comm`: the ranks; default a world of one. `strategy`: the name of an entry point in `alchemi.strategies`, or such an
    object, as `HaloStrategy(cuts="grid", shape=(2, 2, 1))`.

    `compile`: `capture` makes the steps of a domain on tensors of fixed size, on CUDA in one graph; `inductor` compiles
    them first; `off` is eager; `auto` is what the model wants, by default `capture` on CUDA and `off` on the CPU.

    `wire`: a narrower type of floats to send features in, `torch.float32` or `torch.bfloat16`. Off by default: bfloat16 has 8
    bits, so forces change by about 1e-2 of themselves. Rows of three numbers, which may be coordinates, are sent as they are.
    """

    comm: Comm = field(default_factory=Comm)
    strategy: str | Any = "halo"
    compile: Literal["auto", "capture", "inductor", "off"] = "auto"
    wire: torch.dtype | None = None
