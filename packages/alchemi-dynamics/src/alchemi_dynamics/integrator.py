"""The Integrator protocol: one step of an ensemble in two halves, in place and with no host synchronisation."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from alchemi_dynamics.state import State


class Integrator(Protocol):
    """One step of an ensemble. The loop calls `first_half`, evaluates forces at the new positions, and calls `second_half`.

    Both halves change the state's positions, velocities and cell in place. They read global quantities only through
    `state.total` and `state.largest`, so that every rank decides alike, and they do not wait for the device. Systems of a
    batch are independent of each other.
    """

    outputs: tuple[str, ...]
    """What the model has to compute: energy and forces, and stress if the cell moves."""
    conserves_momentum: bool
    """Whether the centre of mass stays at rest, so that it holds no kinetic energy."""

    @property
    def timestep(self) -> float | None:
        """The length of a step in fs. None: not a fixed time step, as in a relaxation."""
        ...

    def start(self, state: State) -> None:
        """Prepare for the first step, when forces are known. It is not called after a restart."""

    def first_half(self, state: State) -> None:
        """Go from the forces at the old positions to the new positions."""

    def second_half(self, state: State) -> None:
        """Go on with the forces at the new positions, to the velocities at the same time. `state.step` counts this step."""

    def conserved(self, state: State) -> Tensor:
        """The quantity (B,) eV that exact integration conserves. Its drift measures the error of the time step."""

    def state_dict(self) -> dict[str, Tensor]:
        """All that the next step depends on besides the state, the same on every rank. Checkpoints save it."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, into the same tensors if they exist already."""
