"""Lennard-Jones in plain torch, on any device."""

import torch
from torch import Tensor

from alchemi_kernels.pair_lists import FullList, PairSums


def lennard_jones_in_torch(edges: FullList, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool) -> PairSums:
    """`lennard_jones` on any device, with edges in any order. Makes a dozen tensors with one row per edge."""
    vectors = _distance_vectors(edges).to(sigma.dtype)
    r = torch.linalg.vector_norm(vectors, dim=1)
    far = r >= cutoff  # false for nan, which then shows in the results
    r, vectors = torch.where(far, cutoff, r), torch.where(far[:, None], 0, vectors)
    energy, slope = lennard_jones_pair(r, sigma, epsilon, cutoff)
    energy = torch.where(far, 0, energy)  # at the cutoff the switch is zero only to round-off
    force = (slope / r)[:, None] * vectors
    wide = torch.promote_types(edges.points.dtype, sigma.dtype)
    return _summed(edges.receiver, edges.n, energy.to(wide), force.to(wide), vectors.to(wide), virial)


def lennard_jones_pair(r: Tensor, sigma: Tensor, epsilon: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """Energies (E,) of pairs at distances r (E,) up to the cutoff, and their derivatives dE/dr (E,)."""
    x = (10 * r / cutoff - 9).clamp(0, 1)
    switch, slope_of_switch = 1 - x**3 * (10 - 15 * x + 6 * x**2), -300 / cutoff * (x * (1 - x)) ** 2
    power6 = (sigma / r) ** 6
    bare, slope = 4 * epsilon * (power6**2 - power6), -24 * epsilon * (2 * power6**2 - power6) / r
    return bare * switch, slope * switch + bare * slope_of_switch


def _distance_vectors(edges: FullList) -> Tensor:
    """Distance vectors (E, 3) from receivers to senders."""
    points, sender, receiver, shifts, cell, batch, _ = edges
    cells = cell.to(points.dtype)[batch[receiver]]
    return points[sender] - points[receiver] + (shifts.to(points.dtype)[:, :, None] * cells).sum(1)


def _summed(receiver: Tensor, n: int, energy: Tensor, force: Tensor, vectors: Tensor, virial: bool) -> PairSums:
    """Sum the edges' energies (E,), forces (E, 3) and virials (from forces and `vectors` (E, 3)) over each receiver's edges."""

    def at_receivers(values: Tensor) -> Tensor:
        return values.new_zeros(n, *values.shape[1:]).index_add_(0, receiver, values)

    virials = at_receivers(force[:, :, None] * vectors[:, None, :]) / 2 if virial else None
    return PairSums(at_receivers(energy) / 2, at_receivers(force), virials)
