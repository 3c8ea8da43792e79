"""The canonical ensemble by friction and noise."""

import math
from collections.abc import Mapping

from torch import Tensor

from alchemi_dynamics.noise import normal
from alchemi_dynamics.parameters import PerSystem, positive, restore
from alchemi_dynamics.state import AMU_A2_PER_FS2, BOLTZMANN, State


class Langevin:
    """BAOAB (Leimkuhler & Matthews, Appl. Math. Res. Express 2013, 34): `timestep` fs, `temperature` K, `friction` 1/fs.

    The noise is a function of seed, step and atom id, so the trajectory does not depend on the number of ranks. Friction and
    noise act on every atom separately, so the centre of mass moves and there are 3N degrees of freedom. A step has one
    reduction, for the heat. `temperature` is a number, or one for each system (B,).
    """

    outputs: tuple[str, ...] = ("energy", "forces")
    conserves_momentum = False
    heat: Tensor
    """(B,) eV that the thermostat has added since the start."""

    def __init__(self, timestep: float, temperature: float | Tensor, friction: float = 0.01, seed: int = 0) -> None:
        self.timestep = positive("timestep", timestep, "fs", 1.0)
        self.temperature = PerSystem("temperature", temperature, "K", above=0)
        self.friction = positive("friction", friction, "1/fs", 0.01)
        self.seed = seed

    def start(self, state: State) -> None:
        """Start with no heat exchanged."""
        self.heat = state.energy.new_zeros(len(state.cell))

    def first_half(self, state: State) -> None:
        """Half a kick (B), half a drift (A), friction and noise (O), half a drift (A)."""
        state.velocities += 0.5 * self.timestep * state.acceleration()
        state.positions += 0.5 * self.timestep * state.velocities
        self._exchange_heat(state)
        state.positions += 0.5 * self.timestep * state.velocities

    def second_half(self, state: State) -> None:
        """Half a kick (B)."""
        state.velocities += 0.5 * self.timestep * state.acceleration()

    def _exchange_heat(self, state: State) -> None:
        """Solve dv = -γ v dt + noise exactly over one step, and count the heat that it adds."""
        keep = math.exp(-self.friction * self.timestep)
        inertia = AMU_A2_PER_FS2 * state.masses
        spread = (BOLTZMANN * (1 - keep**2) * self.temperature.on(state)[state.batch] / inertia).sqrt()
        before = state.velocities.square().sum(-1)
        state.velocities.mul_(keep).add_(spread[:, None] * normal(self.seed, state.step, state.ids))
        self.heat += state.total(0.5 * inertia * (state.velocities.square().sum(-1) - before))

    def conserved(self, state: State) -> Tensor:
        """The total energy minus the heat from the thermostat (B,) eV. Its change is the error of a finite time step."""
        return state.energy + state.kinetic_energy() - self.heat

    def state_dict(self) -> dict[str, Tensor]:
        """The heat. The noise has no state."""
        return {"heat": self.heat.clone()}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on the state's device."""
        restore(self, saved)
