"""The canonical ensemble by a deterministic thermostat."""

from collections.abc import Mapping

from torch import Tensor

from alchemi_dynamics.chain import Chain
from alchemi_dynamics.parameters import PerSystem, positive
from alchemi_dynamics.state import BOLTZMANN, State


class NoseHooverChain:
    """Nosé-Hoover chains (Martyna, Tuckerman, Tobias, Klein, Mol. Phys. 87 (1996) 1117), split as ASE's NoseHooverChainNVT.

    `timestep` and `damping` (about 100 time steps) in fs, `temperature` in K, a number or one for each system (B,). It acts on
    the `freedom` of the state. A total momentum of zero stays zero. A step has two reductions, one for the kinetic energy in
    each half.
    """

    outputs: tuple[str, ...] = ("energy", "forces")
    conserves_momentum = True

    def __init__(
        self, timestep: float, temperature: float | Tensor, damping: float = 100.0, chain: int = 3, loops: int = 1
    ) -> None:
        self.timestep = positive("timestep", timestep, "fs", 1.0)
        self.temperature = PerSystem("temperature", temperature, "K", above=0)
        self.chain = Chain("damping", damping, chain, loops)

    def start(self, state: State) -> None:
        """Start with the thermostats at rest."""
        self.chain.start(state.freedom)

    def first_half(self, state: State) -> None:
        """Half a step of the thermostat, half a kick, a drift."""
        self._thermostat(state)
        state.velocities += 0.5 * self.timestep * state.acceleration()
        state.positions += self.timestep * state.velocities

    def second_half(self, state: State) -> None:
        """Half a kick, half a step of the thermostat."""
        state.velocities += 0.5 * self.timestep * state.acceleration()
        self._thermostat(state)

    def _thermostat(self, state: State) -> None:
        temperature_ratio = state.temperature() / self.temperature.on(state)
        state.velocities *= self.chain.advance(temperature_ratio, state.freedom, 0.5 * self.timestep)[state.batch, None]

    def conserved(self, state: State) -> Tensor:
        """The total energy, that of the thermostats included (B,) eV."""
        stored = self.chain.energy(state.freedom, BOLTZMANN * self.temperature.on(state))
        return state.energy + state.kinetic_energy() + stored

    def state_dict(self) -> dict[str, Tensor]:
        """Positions and rates of the thermostats."""
        return self.chain.state_dict("thermostat")

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on the state's device."""
        self.chain.load_state_dict("thermostat", saved)
