"""Fractional coordinates for any cell: a frame has the lattice vectors where the system is periodic, unit vectors elsewhere."""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from alchemi_spec import InvalidCell

THINNEST = 1e-2
"""Å. A periodic direction thinner than this is a mistake, and would need millions of images."""


@dataclass(frozen=True)
class Frames:
    """One frame for each of B systems, in float64; made on the CPU.

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
        pbc = pbc.cpu()
        lattice = torch.where(pbc[..., None], cell.detach().double().cpu(), 0.0)
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

    def to(self, device: torch.device) -> "Frames":
        """The same frames on `device`."""
        return Frames(*(t.to(device) for t in astuple(self)))

    def wrapped(self, positions: Tensor, batch: Tensor) -> Tensor:
        """Positions (N, 3) in Å -> fractional coordinates (N, 3), in [0, 1] along periodic directions."""
        fractional = (positions.double()[:, :, None] * self.inverse[batch]).sum(1)
        return torch.where(self.periodic[batch], fractional - fractional.floor(), fractional)

    def bounds(self, fractional: Tensor, batch: Tensor) -> Tensor:
        """The lowest and highest coordinates (B, 2, 3) of atoms (N, 3); +inf and -inf for a system without any."""
        start = torch.full((len(self.vectors), 3), torch.inf, dtype=torch.float64, device=fractional.device)
        index = batch[:, None].expand_as(fractional)
        low = start.scatter_reduce(0, index, fractional, "amin")
        high = (-start).scatter_reduce(0, index, fractional, "amax")
        return torch.stack([low, high], dim=1)

    def within(self, reach: float, region: Tensor, low: Tensor, high: Tensor, system: Tensor) -> Tensor:
        """Which boxes (n,) from `low` to `high` (n, 3) of their `system` (n,), or images of them, may come within `reach` Å.

        Of `region` (n or 1, 2, 3). Conservative: tests the distance between parallel planes, which no distance between
        points is below. A point is a box from itself to itself.
        """
        periodic, heights = self.periodic[system], self.heights[system]
        gap = torch.full_like(low, torch.inf)
        for image in (0.0, 1.0, -1.0):
            outside = torch.maximum(region[:, 0] - high - image, low + image - region[:, 1]).clamp(min=0)
            gap = torch.minimum(gap, outside if image == 0 else torch.where(periodic, outside, torch.inf))
        return (gap * heights <= reach).all(-1)
