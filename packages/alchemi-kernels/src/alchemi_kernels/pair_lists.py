"""What pair potentials read and return: a full neighbour list, and sums over each atom's edges."""

from typing import NamedTuple

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
