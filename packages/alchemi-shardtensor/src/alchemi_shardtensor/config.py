"""How a model is to be spread: the choices that a user makes, apart from what the model declares."""

from dataclasses import dataclass, field
from typing import Any

from alchemi_shardtensor.comm import Comm


@dataclass(frozen=True)
class DomainConfig:
    """The ranks to use and the strategy that shares the atoms out among them.

    `comm`: the ranks; default a world of one. `strategy`: the name of an entry point in `alchemi.strategies`, or such an
    object, as `HaloStrategy(cuts="grid", shape=(2, 2, 1))`.
    """

    comm: Comm = field(default_factory=Comm)
    strategy: str | Any = "halo"
