"""Initial velocities."""

import torch
from torch import Tensor

from alchemi_dynamics.noise import normal
from alchemi_dynamics.parameters import PerSystem
from alchemi_dynamics.state import AMU_A2_PER_FS2, BOLTZMANN, State

STREAM = 1
"""Stream of `normal` for initial velocities. Integrators use stream 0."""


def maxwell_boltzmann(ids: Tensor, masses: Tensor, batch: Tensor, temperature: Tensor, seed: int) -> Tensor:
    """Draw velocities (n, 3) Å/fs of atoms `ids` (n,) with masses (n,) amu, at their systems' temperatures (B,) K.

    An atom's velocity depends on seed, id, mass and temperature only, not on the rank or the order.
    """
    spread = BOLTZMANN * temperature[batch] / (AMU_A2_PER_FS2 * masses)
    return spread.sqrt()[:, None] * normal(seed, 0, ids, stream=STREAM)


def thermalize(state: State, temperature: float | Tensor, seed: int, exact: bool = True) -> None:
    """Draw velocities at `temperature` K with zero total momentum. `exact`: scale them to exactly that temperature."""
    kelvin = PerSystem("temperature", temperature, "K", above=0).on(state)
    state.velocities.copy_(maxwell_boltzmann(state.ids, state.masses, state.batch, kelvin, seed))
    remove_drift(state)
    if exact:
        rescale(state, kelvin)


def remove_drift(state: State) -> None:
    """Set the total momentum of every system to zero."""
    weights = torch.cat([torch.ones_like(state.velocities[:, :1]), state.velocities], 1)
    sums = state.total(state.masses[:, None] * weights)
    state.velocities -= (sums[:, 1:] / sums[:, :1])[state.batch]


def rescale(state: State, temperature: Tensor) -> None:
    """Scale velocities to `temperature` (B,) K. A system at rest stays at rest."""
    now = state.temperature()
    factor = torch.where(now > 0, temperature / now, 0.0).sqrt()
    state.velocities *= factor[state.batch, None]
