"""What an ensemble is: two halves of a step around the forces, in place, with no host synchronisation."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from alchemi_dynamics.state import State


class Integrator(Protocol):
    """One step of an ensemble. The loop calls `first_half`, evaluates forces at the new positions, calls `second_half`.

    Both change the state in place (positions, velocities, cell), read global quantities through `state.total` only, so that
    every rank decides alike, and neither waits for the device. Systems of a batch are independent of each other.
    """

    outputs: tuple[str, ...]
    """What it needs of the model: energy and forces, and stress where the cell moves."""
    conserves_momentum: bool
    """Whether the centre of mass keeps still, and so holds no kinetic energy."""

    def start(self, state: State) -> None:
        """Once, with forces known, before the first step (not after a restart)."""

    def first_half(self, state: State) -> None:
        """From forces at the old positions to the new positions."""

    def second_half(self, state: State) -> None:
        """With forces at the new positions, to velocities at the same time as these. `state.step` counts the step by now."""

    def conserved(self, state: State) -> Tensor:
        """The quantity (B,) eV that exact integration keeps: its drift measures the time step."""

    def state_dict(self) -> dict[str, Tensor]:
        """Everything beside the state that the next step depends on, the same on every rank: for checkpoints."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave; in place, where there is something already."""
