"""A chain of thermostats on the kinetic energy of something, one chain for each system."""

from collections.abc import Mapping

import torch
from torch import Tensor

from alchemi_dynamics.parameters import at_least_one, positive, restore


class Chain:
    """M Nosé-Hoover thermostats in a row for each of B systems (Martyna et al., Mol. Phys. 87 (1996) 1117, eqs. 29-37).

    `damping` τ in fs gives their masses: f kT τ^2 for the first, which acts on f degrees of freedom, kT τ^2 for the others.
    `loops` equal steps, each of second order as the whole; the fourth-order weights of Yoshida, one of them negative, would
    blow up where many atoms are far from the temperature (1e8 atoms at twice of it; 1e5 at ten times).
    `positions` (M, B) are without a unit, `rates` (M, B) are their velocities in 1/fs.
    """

    positions: Tensor
    rates: Tensor

    def __init__(self, name: str, damping: float, length: int, loops: int) -> None:
        self.damping = positive(name, damping, "fs", 100.0)
        self.length = at_least_one("chain", length)
        self.loops = at_least_one("loops", loops)

    def start(self, like: Tensor) -> None:
        """At rest, for systems as in `like` (B,)."""
        self.positions = like.new_zeros(self.length, len(like))
        self.rates = torch.zeros_like(self.positions)

    def advance(self, warmth: Tensor, freedom: Tensor | float, time: float) -> Tensor:
        """Over `time` fs -> the factor (B,) for the velocities. `warmth` (B,): twice their kinetic energy over f kT."""
        scale = torch.ones_like(warmth)
        for _ in range(self.loops):
            factor = self._substep(warmth, freedom, time / self.loops)
            warmth, scale = warmth * factor.square(), scale * factor
        return scale

    def _substep(self, warmth: Tensor, freedom: Tensor | float, time: float) -> Tensor:
        for j in reversed(range(self.length)):
            self._kick(j, warmth, freedom, time / 2)
        self.positions += time * self.rates
        factor = torch.exp(-time * self.rates[0])
        warmth = warmth * factor.square()
        for j in range(self.length):
            self._kick(j, warmth, freedom, time / 2)
        return factor

    def _kick(self, j: int, warmth: Tensor, freedom: Tensor | float, time: float) -> None:
        """Thermostat j feels the one before it and is damped by the one after it."""
        force = self._force(j, warmth, freedom)
        if j + 1 == self.length:
            self.rates[j] += time * force
        else:
            drag = torch.exp(-0.5 * time * self.rates[j + 1])
            self.rates[j] = (self.rates[j] * drag + time * force) * drag

    def _force(self, j: int, warmth: Tensor, freedom: Tensor | float) -> Tensor:
        """(B,) 1/fs^2."""
        if j == 0:
            return (warmth - 1) / self.damping**2
        return self.rates[j - 1].square() * (freedom if j == 1 else 1.0) - 1 / self.damping**2

    def energy(self, freedom: Tensor | float, kT: Tensor) -> Tensor:
        """What it holds (B,) eV."""
        stored = self.positions + 0.5 * (self.damping * self.rates).square()
        return kT * (freedom * stored[0] + stored[1:].sum(0))

    def state_dict(self, name: str) -> dict[str, Tensor]:
        """Positions and rates, under `name`."""
        return {f"{name}_positions": self.positions.clone(), f"{name}_rates": self.rates.clone()}

    def load_state_dict(self, name: str, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave."""
        restore(self, {part: saved[f"{name}_{part}"] for part in ("positions", "rates")})
