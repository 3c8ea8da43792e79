"""A regular grid of ranks in fractional coordinates, so that it moves with the cell."""

from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from torch import Tensor

from alchemi_halo.bounds import bounds_over_ranks
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import Comm

Shape = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class ProcessorGrid:
    """`shape` (B, 3) equal parts of each system, from `low` (B, 3) on, each `width` (B, 3) wide, in fractional coordinates."""

    shape: Tensor
    low: Tensor
    width: Tensor

    @classmethod
    def of(
        cls, fractional: Tensor, batch: Tensor, frames: LatticeFrames, comm: Comm, n_ranks: int, shape: Shape | None
    ) -> "ProcessorGrid":
        """A grid of `shape`, or of the shape whose parts have the smallest surface. Every rank must call it.

        It spans the cell along periodic directions and the bounds of the atoms along the others.

        Raises:
            ValueError: if the parts of `shape` are not as many as the ranks.

        """
        if shape is not None and prod(shape) != n_ranks:
            raise ValueError(
                f"a processor grid of {shape} has {prod(shape)} parts, but there are {n_ranks} ranks.\n"
                f"Give a shape whose product is the number of ranks, or none."
            )
        low, high = bounds_over_ranks(fractional, batch, len(frames.vectors), comm).unbind(1)
        low = torch.where(frames.periodic, 0.0, low)
        extent = torch.where(frames.periodic, 1.0, (high - low).clamp(min=1e-6))
        shapes = torch.tensor([shape] if shape is not None else grid_shapes(n_ranks))
        sides = (extent * frames.heights)[:, None] / shapes
        surface = sides[..., [1, 2, 0]] * sides[..., [2, 0, 1]]
        best = shapes[surface.sum(-1).argmin(-1)]
        return cls(best, low, extent / best)

    def owners(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        ids: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """The rank (n,) in whose part each atom (n, 3) Å is. `ids` are not used.

        The first part of system b is rank b's, so that the systems of a batch start on different ranks.
        """
        inside = LatticeFrames.of(cell, pbc).to(positions.device).wrapped(positions, batch)
        shape, low, width = (t.to(positions.device)[batch] for t in (self.shape, self.low, self.width))
        x, y, z = ((inside - low) / width).floor().long().clamp(min=0).minimum(shape - 1).unbind(-1)
        return ((x * shape[:, 1] + y) * shape[:, 2] + z + batch) % shape.prod(-1)


def grid_shapes(n_ranks: int) -> list[Shape]:
    """All shapes of a grid with `n_ranks` parts."""
    divisors = [d for d in range(1, n_ranks + 1) if n_ranks % d == 0]
    return [(a, b, n_ranks // (a * b)) for a, b in product(divisors, divisors) if n_ranks % (a * b) == 0]
