"""The canonical ensemble by a deterministic thermostat."""

from collections.abc import Mapping

from torch import Tensor

from alchemi_dynamics.chain import Chain
from alchemi_dynamics.parameters import PerSystem, positive
from alchemi_dynamics.state import BOLTZMANN, State


class NoseHooverChain:
    """Nosé-Hoover chains (Martyna, Tuckerman, Tobias, Klein, Mol. Phys. 87 (1996) 1117), split as ASE's NoseHooverChainNVT.

    `timestep` and `damping` (about 100 time steps) in fs, `temperature` in K, a number or one for each system (B,). It acts on
    the `freedom` of the state. Momentum stays zero where it was zero. Two reductions in a step, one for each half's kinetic
    energy.
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
        """The thermostats are at rest."""
        self.chain.start(state.freedom)

    def first_half(self, state: State) -> None:
        """The thermostat's half, half a kick, a drift."""
        self._thermostat(state)
        state.velocities += 0.5 * self.timestep * state.acceleration()
        state.positions += self.timestep * state.velocities

    def second_half(self, state: State) -> None:
        """Half a kick, the thermostat's half."""
        state.velocities += 0.5 * self.timestep * state.acceleration()
        self._thermostat(state)

    def _thermostat(self, state: State) -> None:
        warmth = state.temperature() / self.temperature.on(state)
        state.velocities *= self.chain.advance(warmth, state.freedom, 0.5 * self.timestep)[state.batch, None]

    def conserved(self, state: State) -> Tensor:
        """The total energy and what the thermostats hold (B,) eV."""
        held = self.chain.energy(state.freedom, BOLTZMANN * self.temperature.on(state))
        return state.energy + state.kinetic_energy() + held

    def state_dict(self) -> dict[str, Tensor]:
        """The thermostats."""
        return self.chain.state_dict("thermostat")

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave, on the state's device."""
        self.chain.load_state_dict("thermostat", saved)
