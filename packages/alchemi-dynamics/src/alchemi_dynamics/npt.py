"""The isothermal-isobaric ensemble: a thermostat, and a barostat that changes the volume or the whole cell."""

from collections.abc import Mapping

import torch
from torch import Tensor

from alchemi_domain.derivatives import rows_times
from alchemi_dynamics.chain import Chain
from alchemi_dynamics.matrices import exponential_and_mean, isotropic, on_diagonal, symmetric, trace
from alchemi_dynamics.parameters import PerSystem, one_of, positive, require_volume, restore
from alchemi_dynamics.state import BOLTZMANN, State


class NPT:
    """Martyna, Tobias & Klein (J. Chem. Phys. 101 (1994) 4177), split as in Mol. Phys. 87 (1996) 1117 and ASE's MTKNPT.

    `timestep`, `damping` (about 100 time steps) and `pressure_damping` (about 1000) in fs, `temperature` in K, `pressure` in
    eV/Å^3, compression positive; the last two are numbers or one for each system (B,). `shape`: which parts of the
    cell the barostat may change, "isotropic" (the volume) or "full" (all lengths and angles). The cell's strain rate `rate`
    (B, 3, 3) in 1/fs is symmetric, so the cell never rotates: 6 degrees of freedom (1 if isotropic), each with a mass
    (f + 3) kT τ^2 / 3. A step has two reductions, one for the kinetic tensor in each half.
    """

    outputs: tuple[str, ...] = ("energy", "forces", "stress")
    conserves_momentum = True
    rate: Tensor

    def __init__(
        self,
        timestep: float,
        temperature: float | Tensor,
        pressure: float | Tensor = 0.0,
        damping: float = 100.0,
        pressure_damping: float = 1000.0,
        shape: str = "isotropic",
        chain: int = 3,
        loops: int = 1,
    ) -> None:
        one_of("shape", shape, ("isotropic", "full"))
        self.timestep = positive("timestep", timestep, "fs", 1.0)
        self.temperature = PerSystem("temperature", temperature, "K", above=0)
        self.pressure = PerSystem("pressure", pressure, "eV/Å^3")
        self.thermostat = Chain("damping", damping, chain, loops)
        self.barostat = Chain("pressure_damping", pressure_damping, chain, loops)
        self.allowed, self.cell_freedom = (isotropic, 1.0) if shape == "isotropic" else (symmetric, 6.0)

    def start(self, state: State) -> None:
        """Start with the cell and all thermostats at rest."""
        require_volume(state, "NPT")
        self.rate = torch.zeros_like(state.cell)
        self.thermostat.start(state.freedom)
        self.barostat.start(state.freedom)

    def first_half(self, state: State) -> None:
        """Half a step of the thermostats, half a kick of the cell and of the atoms, a drift of both."""
        kinetic = state.kinetic_tensor()
        self._thermostat_cell(state)
        scale = self._thermostat_atoms(state, kinetic)
        self._kick_cell(state, kinetic * scale.square()[:, None, None])
        self._kick_atoms(state)
        self._drift(state)

    def second_half(self, state: State) -> None:
        """The same in reverse order, without the drift."""
        self._kick_atoms(state)
        kinetic = state.kinetic_tensor()
        self._kick_cell(state, kinetic)
        self._thermostat_atoms(state, kinetic)
        self._thermostat_cell(state)

    def _thermostat_cell(self, state: State) -> None:
        temperature_ratio = self._cell_kinetic(state) * 2 / (self.cell_freedom * self._kT(state))
        self.rate *= self.barostat.advance(temperature_ratio, self.cell_freedom, 0.5 * self.timestep)[:, None, None]

    def _thermostat_atoms(self, state: State, kinetic: Tensor) -> Tensor:
        temperature_ratio = trace(kinetic) / (state.freedom * self._kT(state))
        scale = self.thermostat.advance(temperature_ratio, state.freedom, 0.5 * self.timestep)
        state.velocities *= scale[state.batch, None]
        return scale

    def _kick_cell(self, state: State, kinetic: Tensor) -> None:
        """Kick the cell by the internal minus the external pressure, and by the kinetic term of MTK's equations."""
        assert state.stress is not None
        inside = kinetic - state.volume()[:, None, None] * state.stress
        outside = self.pressure.on(state) * state.volume() - trace(kinetic) / state.freedom
        force = self.allowed(inside) - on_diagonal(outside)
        self.rate += 0.5 * self.timestep * force / self._mass(state)[:, None, None]

    def _kick_atoms(self, state: State) -> None:
        """Solve dv/dt = a - v (rate + tr(rate)/f) exactly, at a constant rate of the cell."""
        friction = self.rate + on_diagonal(trace(self.rate) / state.freedom)
        decay, mean = exponential_and_mean(-0.5 * self.timestep * friction)
        kick = rows_times(0.5 * self.timestep * state.acceleration(), mean[state.batch])
        state.velocities.copy_(rows_times(state.velocities, decay[state.batch]) + kick)

    def _drift(self, state: State) -> None:
        """Solve dx/dt = v + x rate exactly, at a constant rate of the cell, and strain the cell likewise."""
        growth, mean = exponential_and_mean(self.timestep * self.rate)
        step = rows_times(self.timestep * state.velocities, mean[state.batch])
        state.positions.copy_(rows_times(state.positions, growth[state.batch]) + step)
        state.cell.copy_(state.cell @ growth)

    def _kT(self, state: State) -> Tensor:  # noqa: N802
        return BOLTZMANN * self.temperature.on(state)

    def _mass(self, state: State) -> Tensor:
        """The mass (B,) of each degree of freedom of the cell, in eV fs^2."""
        return (state.freedom + 3) / 3 * self._kT(state) * self.barostat.damping**2

    def _cell_kinetic(self, state: State) -> Tensor:
        """The kinetic energy (B,) of the cell, in eV."""
        return 0.5 * self._mass(state) * self.rate.square().sum((-2, -1))

    def conserved(self, state: State) -> Tensor:
        """Enthalpy, kinetic energy of atoms and cell, and energy of both chains (B,) eV."""
        enthalpy = state.energy + self.pressure.on(state) * state.volume()
        stored = self.thermostat.energy(state.freedom, self._kT(state)) + self.barostat.energy(
            self.cell_freedom, self._kT(state)
        )
        return enthalpy + state.kinetic_energy() + self._cell_kinetic(state) + stored

    def state_dict(self) -> dict[str, Tensor]:
        """The strain rate and both chains."""
        chains = self.thermostat.state_dict("thermostat") | self.barostat.state_dict("barostat")
        return {"rate": self.rate.clone(), **chains}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on the state's device."""
        restore(self, {"rate": saved["rate"]})
        self.thermostat.load_state_dict("thermostat", saved)
        self.barostat.load_state_dict("barostat", saved)
