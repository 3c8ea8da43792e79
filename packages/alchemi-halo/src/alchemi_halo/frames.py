"""Fractional coordinates for any cell: a frame has the lattice vectors where the system is periodic, unit vectors elsewhere."""

from dataclasses import dataclass

import torch
from torch import Tensor

from alchemi_spec import InvalidCell

THINNEST = 1e-2
"""Å. A periodic direction thinner than this is a mistake, and would need millions of images."""


@dataclass(frozen=True)
class Frames:
    """One frame for each of B systems, in float64 on the CPU.

    `vectors` (B, 3, 3): rows span space; `inverse` (B, 3, 3); `heights` (B, 3): Å between the planes that bound the unit
    parallelepiped; `periodic` (B, 3).
    """

    vectors: Tensor
    inverse: Tensor
    heights: Tensor
    periodic: Tensor

    @classmethod
    def of(cls, cell: Tensor, pbc: Tensor) -> "Frames":
        """Frames of cells (B, 3, 3) in Å and their periodicity (B, 3). Vectors that are not periodic are ignored.

        Raises:
            InvalidCell: naming the system whose periodic vectors are not finite, zero, or dependent.

        """
        lattice = torch.where(pbc[..., None], cell.double(), 0.0)
        finite = lattice.isfinite().all(-1).all(-1)
        if not finite.all():
            raise InvalidCell(
                f"the cell of system {int(finite.logical_not().nonzero()[0])} has entries that are nan or infinite."
            )
        # right singular vectors beyond the rank are orthogonal to all lattice vectors and to each other
        complement = torch.linalg.svd(lattice).Vh
        place = torch.where(pbc, 0, pbc.sum(-1, keepdim=True) + (~pbc).cumsum(-1) - 1)
        fill = complement.gather(1, place[..., None].expand(-1, -1, 3))
        vectors = torch.where(pbc[..., None], lattice, fill)
        flat = torch.linalg.det(vectors).abs() < THINNEST**3
        inverse = torch.linalg.inv(torch.where(flat[:, None, None], torch.eye(3, dtype=torch.float64), vectors))
        heights = 1 / torch.linalg.vector_norm(inverse, dim=-2)
        bad = flat | (heights < THINNEST).any(-1)
        if bad.any():
            system = int(bad.nonzero()[0])
            raise InvalidCell(
                f"system {system} is periodic along vectors that do not span a cell: "
                f"cell = {cell[system].tolist()}, pbc = {pbc[system].tolist()}.\nGive it a cell, or set pbc to False there."
            )
        return cls(vectors, inverse, heights, pbc)

    def wrapped(self, positions: Tensor, batch: Tensor) -> Tensor:
        """Positions (N, 3) in Å -> fractional coordinates (N, 3), in [0, 1] along periodic directions."""
        fractional = torch.einsum("ni,nij->nj", positions.double(), self.inverse[batch])
        return torch.where(self.periodic[batch], fractional - fractional.floor(), fractional)

    def bounds(self, fractional: Tensor, batch: Tensor) -> Tensor:
        """The lowest and highest coordinates (B, 2, 3) of atoms (N, 3); +inf and -inf for a system without any."""
        start = torch.full((len(self.vectors), 3), torch.inf, dtype=torch.float64)
        index = batch[:, None].expand_as(fractional)
        low = start.scatter_reduce(0, index, fractional, "amin")
        high = (-start).scatter_reduce(0, index, fractional, "amax")
        return torch.stack([low, high], dim=1)

    def within(self, reach: float, bounds: Tensor, fractional: Tensor, batch: Tensor) -> Tensor:
        """Which atoms (N,), or images of them, may lie within `reach` Å of the region `bounds` (B, 2, 3) of their system.

        Conservative: tests the distance between parallel planes, which no distance between points is below.
        """
        low, high = bounds[batch].unbind(1)
        gap = torch.full_like(fractional, torch.inf)
        for image in (0.0, 1.0, -1.0):
            outside = torch.maximum(low - fractional - image, fractional + image - high).clamp(min=0)
            gap = torch.minimum(gap, outside if image == 0 else torch.where(self.periodic[batch], outside, torch.inf))
        return (gap * self.heights[batch] <= reach).all(-1)
