"""How a model is distributed: the choices that a user makes, beside what the model declares."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from alchemi_shardtensor.transport.comm import Comm
from alchemi_spec import SpecError

Mode = Literal["auto", "capture", "inductor", "off"]
MODES = get_args(Mode)


@dataclass(frozen=True)
class DomainConfig:
    """The ranks to use, the strategy that distributes the atoms over them, and how steps are run.

    `comm`: the ranks; default a world of one. `strategy`: the name of an entry point in `alchemi.strategies`, or such an
    object, as `HaloStrategy(method="grid", shape=(2, 2, 1))`.

    `compile`: `capture` runs the steps of a domain on tensors of fixed size, on CUDA in CUDA graphs; `inductor` compiles
    them first; `off` is eager; `auto` is the model's choice, by default `capture` on CUDA and `off` on the CPU.

    `wire`: a narrower type of floats in which exchanges send features, `torch.float32` or `torch.bfloat16`. Off by default.
    Rows of three numbers, which may be coordinates, are sent as they are. SevenNet-0's forces change by 5e-4 in bfloat16.
    """

    comm: Comm = field(default_factory=Comm)
    strategy: str | Any = "halo"
    compile: Mode = "auto"
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the mode and the dtype.

        Raises:
            SpecError: listing the modes, or the dtypes.

        """
        if self.compile not in MODES:
            raise SpecError(f"compile={self.compile!r} is no way to make steps: use one of {', '.join(map(repr, MODES))}.")
        if self.wire is not None and not self.wire.is_floating_point:
            raise SpecError(f"wire={self.wire} is no type of floats: use torch.float32 or torch.bfloat16, or None.")
