"""The Lennard-Jones potential on a full neighbour list, in plain torch; on CUDA by the Triton kernel beside it.

A full list has both directions of each pair, so the edges of an atom hold the whole force on it.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class FullList(NamedTuple):
    """A full neighbour list: every edge of the first `n` points, both directions of each pair, sorted by receiver.

    `points` (n + ghosts, 3) Å; `sender` and `receiver` (E,); `shifts` (E, 3): whole-numbered S of the geometry
    r = x[sender] + S @ cell[batch[receiver]] - x[receiver]; `cell` (B, 3, 3) Å; `batch` (n,).
    """

    points: Tensor
    sender: Tensor
    receiver: Tensor
    shifts: Tensor
    cell: Tensor
    batch: Tensor
    n: int


class PairSums(NamedTuple):
    """For each receiver: half of its pairs' energies (n,), the force on it (n, 3), half of its pairs' virials (n, 3, 3).

    A virial is dE/dstrain: symmetric, positive under tension. It is None if it was not requested.
    """

    energies: Tensor
    forces: Tensor
    virials: Tensor | None


def lennard_jones(edges: FullList, *, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool = True) -> PairSums:
    """4 ε ((σ/r)^12 - (σ/r)^6), switched off between 0.9 cutoff and `cutoff` with continuous second derivative.

    `sigma` (Å) and `epsilon` (eV): one number each, on the points' device; `cutoff` in Å.

    Distance vectors are computed in the points' dtype and pairs in sigma's. Sums are in the wider of both, so forces add up to
    zero. An edge of `cutoff` or longer adds exactly zero. The result is not differentiable. On CUDA there is no host sync and
    no copy from the host, so a CUDA graph can capture the call.
    """
    edges = edges._replace(points=edges.points.detach())
    if not edges.points.is_cuda:
        return lennard_jones_in_torch(edges, sigma, epsilon, cutoff, virial)
    from alchemi_kernels import lennard_jones_triton  # noqa: PLC0415  torch on the CPU comes without Triton

    return lennard_jones_triton.lennard_jones(edges, sigma, epsilon, cutoff, virial)


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
