"""Pair potentials on a full list: what each atom gets from its own edges, so that nothing is sent back to any other."""

from typing import NamedTuple

import torch
from torch import Tensor


class FullList(NamedTuple):
    """Every edge of the first `n` points, both directions of each pair, sorted by receiver.

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
    """Of each receiver: its half of its pairs' energies (n,), the force on it (n, 3), its half of their virials (n, 3, 3).

    A virial is dE/dstrain: symmetric, positive under tension. None where it was not asked for.
    """

    energies: Tensor
    forces: Tensor
    virials: Tensor | None


def lennard_jones(edges: FullList, *, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool = True) -> PairSums:
    """4 ε ((σ/r)^12 - (σ/r)^6), switched off between 0.9 cutoff and `cutoff` with continuous second derivative.

    `sigma` (Å) and `epsilon` (eV): one number each, on the points' device; `cutoff` in Å.

    Vectors are formed in the points' dtype, pairs computed in sigma's, and summed in the wider of both, so that forces add up
    to zero. An edge of `cutoff` or longer adds exactly nothing. Not differentiable. On CUDA it neither waits for the device
    nor copies to it, and may be captured.
    """
    edges = edges._replace(points=edges.points.detach())
    if not edges.points.is_cuda:
        return lennard_jones_in_torch(edges, sigma, epsilon, cutoff, virial)
    from alchemi_kernels import fused  # noqa: PLC0415  Triton is only where torch brings it

    return fused.lennard_jones(edges, sigma, epsilon, cutoff, virial)


def lennard_jones_in_torch(edges: FullList, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool) -> PairSums:
    """As `lennard_jones`, on any device and of edges in any order; a dozen tensors of the edges' size."""
    vectors = _vectors(edges).to(sigma.dtype)
    r = torch.linalg.vector_norm(vectors, dim=1)
    far = r >= cutoff  # not of nan, which is to be seen
    r, vectors = torch.where(far, cutoff, r), torch.where(far[:, None], 0, vectors)
    energy, slope = lennard_jones_pair(r, sigma, epsilon, cutoff)
    energy = torch.where(far, 0, energy)  # at the cutoff the switch is zero to round-off only
    force = (slope / r)[:, None] * vectors
    wide = torch.promote_types(edges.points.dtype, sigma.dtype)
    return _summed(edges.receiver, edges.n, energy.to(wide), force.to(wide), vectors.to(wide), virial)


def lennard_jones_pair(r: Tensor, sigma: Tensor, epsilon: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """The pair's energy (E,) at distances r (E,) up to the cutoff, and its derivative (E,)."""
    x = (10 * r / cutoff - 9).clamp(0, 1)
    switch, slope_of_switch = 1 - x**3 * (10 - 15 * x + 6 * x**2), -300 / cutoff * (x * (1 - x)) ** 2
    power6 = (sigma / r) ** 6
    bare, slope = 4 * epsilon * (power6**2 - power6), -24 * epsilon * (2 * power6**2 - power6) / r
    return bare * switch, slope * switch + bare * slope_of_switch


def _vectors(edges: FullList) -> Tensor:
    """From receivers to senders (E, 3)."""
    points, sender, receiver, shifts, cell, batch, _ = edges
    cells = cell.to(points.dtype)[batch[receiver]]
    return points[sender] - points[receiver] + (shifts.to(points.dtype)[:, :, None] * cells).sum(1)


def _summed(receiver: Tensor, n: int, energy: Tensor, force: Tensor, vectors: Tensor, virial: bool) -> PairSums:
    """Edges' energies (E,), forces (E, 3) and, of these and the vectors (E, 3), virials, added up at each receiver."""

    def at_receivers(values: Tensor) -> Tensor:
        return values.new_zeros(n, *values.shape[1:]).index_add_(0, receiver, values)

    virials = at_receivers(force[:, :, None] * vectors[:, None, :]) / 2 if virial else None
    return PairSums(at_receivers(energy) / 2, at_receivers(force), virials)
