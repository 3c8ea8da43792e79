"""The microcanonical ensemble."""

from collections.abc import Mapping

from torch import Tensor

from alchemi_dynamics.parameters import positive
from alchemi_dynamics.state import State


class NVE:
    """Velocity Verlet (Swope et al., J. Chem. Phys. 76 (1982) 637), `timestep` in fs. A step has no reduction."""

    outputs: tuple[str, ...] = ("energy", "forces")
    conserves_momentum = True

    def __init__(self, timestep: float) -> None:
        self.timestep = positive("timestep", timestep, "fs", 1.0)

    def start(self, state: State) -> None:
        """Nothing has to be prepared."""

    def first_half(self, state: State) -> None:
        """Half a kick, a drift."""
        state.velocities += 0.5 * self.timestep * state.acceleration()
        state.positions += self.timestep * state.velocities

    def second_half(self, state: State) -> None:
        """Half a kick."""
        state.velocities += 0.5 * self.timestep * state.acceleration()

    def conserved(self, state: State) -> Tensor:
        """The total energy (B,) eV."""
        return state.energy + state.kinetic_energy()

    def state_dict(self) -> dict[str, Tensor]:
        """No tensors: a step depends on the state alone."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Nothing has to be restored."""
