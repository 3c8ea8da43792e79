"""Velocities to begin with, and the degrees of freedom that they have."""

import torch
from torch import Tensor

from alchemi_dynamics.noise import normal
from alchemi_dynamics.parameters import PerSystem
from alchemi_dynamics.state import AMU_A2_PER_FS2, BOLTZMANN, State

STREAM = 1
"""Of the noise; that of the integrators is 0."""


def maxwell_boltzmann(ids: Tensor, masses: Tensor, batch: Tensor, temperature: Tensor, seed: int) -> Tensor:
    """Velocities (n, 3) Å/fs of atoms `ids` (n,) with masses (n,) amu at their systems' temperatures (B,) K.

    An atom's velocity depends on seed, id, mass and temperature only, not on the rank or the order.
    """
    spread = BOLTZMANN * temperature[batch] / (AMU_A2_PER_FS2 * masses)
    return spread.sqrt()[:, None] * normal(seed, 0, ids, stream=STREAM)


def thermalize(state: State, temperature: float | Tensor, seed: int, exact: bool = True) -> None:
    """Draw velocities at `temperature` K, at rest as a whole, and if `exact` with just that kinetic energy."""
    kelvin = PerSystem("temperature", temperature, "K", above=0).on(state)
    state.velocities.copy_(maxwell_boltzmann(state.ids, state.masses, state.batch, kelvin, seed))
    remove_drift(state)
    if exact:
        rescale(state, kelvin)


def remove_drift(state: State) -> None:
    """Bring every system's centre of mass to rest."""
    weights = torch.cat([torch.ones_like(state.velocities[:, :1]), state.velocities], 1)
    sums = state.total(state.masses[:, None] * weights)
    state.velocities -= (sums[:, 1:] / sums[:, :1])[state.batch]


def rescale(state: State, temperature: Tensor) -> None:
    """To `temperature` (B,) K; a system at rest stays at rest."""
    now = state.temperature()
    factor = torch.where(now > 0, temperature / now, 0.0).sqrt()
    state.velocities *= factor[state.batch, None]
