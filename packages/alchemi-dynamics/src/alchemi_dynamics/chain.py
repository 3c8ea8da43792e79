"""Nosé-Hoover chains that act on the kinetic energy of atoms or of a cell."""

from collections.abc import Mapping

import torch
from torch import Tensor

from alchemi_dynamics.parameters import at_least_one, positive, restore


class Chain:
    """A chain of M thermostats for each of B systems (Martyna et al., Mol. Phys. 87 (1996) 1117, eqs. 29-37).

    `damping` τ in fs gives their masses: f kT τ^2 for the first, which acts on f degrees of freedom, kT τ^2 for the others.
    A time step is divided into `loops` equal steps of second order. Yoshida's fourth-order weights, one of which is negative,
    diverge where many atoms are far from the temperature (1e8 atoms at twice the temperature, 1e5 atoms at ten times).
    `positions` (M, B) have no unit; `rates` (M, B) are their velocities in 1/fs.
    """

    positions: Tensor
    rates: Tensor

    def __init__(self, name: str, damping: float, length: int, loops: int) -> None:
        self.damping = positive(name, damping, "fs", 100.0)
        self.length = at_least_one("chain", length)
        self.loops = at_least_one("loops", loops)

    def start(self, like: Tensor) -> None:
        """Start at rest, for as many systems as in `like` (B,)."""
        self.positions = like.new_zeros(self.length, len(like))
        self.rates = torch.zeros_like(self.positions)

    def advance(self, temperature_ratio: Tensor, freedom: Tensor | float, time: float) -> Tensor:
        """Advance by `time` fs and return the factor (B,) for the velocities.

        `temperature_ratio` (B,): T / T0, which is twice the kinetic energy over f kT0.
        """
        scale = torch.ones_like(temperature_ratio)
        for _ in range(self.loops):
            factor = self._substep(temperature_ratio, freedom, time / self.loops)
            temperature_ratio, scale = temperature_ratio * factor.square(), scale * factor
        return scale

    def _substep(self, temperature_ratio: Tensor, freedom: Tensor | float, time: float) -> Tensor:
        for j in reversed(range(self.length)):
            self._kick(j, temperature_ratio, freedom, time / 2)
        self.positions += time * self.rates
        factor = torch.exp(-time * self.rates[0])
        temperature_ratio = temperature_ratio * factor.square()
        for j in range(self.length):
            self._kick(j, temperature_ratio, freedom, time / 2)
        return factor

    def _kick(self, j: int, temperature_ratio: Tensor, freedom: Tensor | float, time: float) -> None:
        """Kick thermostat j by the one before it, and damp it by the one after it."""
        force = self._force(j, temperature_ratio, freedom)
        if j + 1 == self.length:
            self.rates[j] += time * force
        else:
            drag = torch.exp(-0.5 * time * self.rates[j + 1])
            self.rates[j] = (self.rates[j] * drag + time * force) * drag

    def _force(self, j: int, temperature_ratio: Tensor, freedom: Tensor | float) -> Tensor:
        """The acceleration (B,) of thermostat j, in 1/fs^2."""
        if j == 0:
            return (temperature_ratio - 1) / self.damping**2
        return self.rates[j - 1].square() * (freedom if j == 1 else 1.0) - 1 / self.damping**2

    def energy(self, freedom: Tensor | float, kT: Tensor) -> Tensor:
        """The energy (B,) eV of the thermostats."""
        stored = self.positions + 0.5 * (self.damping * self.rates).square()
        return kT * (freedom * stored[0] + stored[1:].sum(0))

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """Positions and rates, with `name` in their keys."""
        return {f"{name}_positions": self.positions.clone(), f"{name}_rates": self.rates.clone()}

    def load_state_dict(self, name: str, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        restore(self, {part: saved[f"{name}_{part}"] for part in ("positions", "rates")})
