"""Fractional coordinates for any cell.

A lattice frame has the cell vectors along periodic directions, and unit vectors normal to them along the others.
"""

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from alchemi_spec import InvalidCell

MIN_HEIGHT = 1e-2
"""Å. A cell thinner than this along a periodic direction is refused: it would need millions of images."""


@dataclass(frozen=True)
class LatticeFrames:
    """One frame for each of B systems, in float64. `of` makes them on the CPU.

    `vectors` (B, 3, 3): three rows that span space, Å. `inverse` (B, 3, 3): their inverse. `heights` (B, 3): distances in Å
    between opposite faces of the cell. `periodic` (B, 3): along which vectors the system is periodic.
    """

    vectors: Tensor
    inverse: Tensor
    heights: Tensor
    periodic: Tensor

    @classmethod
    def of(cls, cell: Tensor, pbc: Tensor) -> "LatticeFrames":
        """The frames of cells (B, 3, 3) in Å with periodicity `pbc` (B, 3). Cell vectors that are not periodic are ignored.

        Raises:
            InvalidCell: if periodic vectors are not finite, zero, or linearly dependent. The message names the system.

        """
        pbc = pbc.cpu()
        lattice = torch.where(pbc[..., None], cell.detach().double().cpu(), 0.0)
        finite = lattice.isfinite().all(-1).all(-1)
        if not finite.all():
            raise InvalidCell(
                f"the cell of system {int(finite.logical_not().nonzero()[0])} has entries that are nan or infinite."
            )
        # right singular vectors beyond the rank of the lattice are normal to all lattice vectors and to each other
        complement = torch.linalg.svd(lattice).Vh
        row = torch.where(pbc, 0, pbc.sum(-1, keepdim=True) + (~pbc).cumsum(-1) - 1)
        fill = complement.gather(1, row[..., None].expand(-1, -1, 3))
        vectors = torch.where(pbc[..., None], lattice, fill)
        flat = torch.linalg.det(vectors).abs() < MIN_HEIGHT**3
        inverse = torch.linalg.inv(torch.where(flat[:, None, None], torch.eye(3, dtype=torch.float64), vectors))
        heights = 1 / torch.linalg.vector_norm(inverse, dim=-2)
        bad = flat | (heights < MIN_HEIGHT).any(-1)
        if bad.any():
            system = int(bad.nonzero()[0])
            raise InvalidCell(
                f"system {system} is periodic along vectors that do not span a cell: "
                f"cell = {cell[system].tolist()}, pbc = {pbc[system].tolist()}.\n"
                f"Give it a cell with a volume, or set pbc to False along these vectors."
            )
        return cls(vectors, inverse, heights, pbc)

    def to(self, device: torch.device) -> "LatticeFrames":
        """The same frames on `device`."""
        return LatticeFrames(*(t.to(device) for t in astuple(self)))

    def wrapped(self, positions: Tensor, batch: Tensor) -> Tensor:
        """Positions (N, 3) in Å -> fractional coordinates (N, 3), in [0, 1] along periodic directions."""
        fractional = (positions.double()[:, :, None] * self.inverse[batch]).sum(1)
        return torch.where(self.periodic[batch], fractional - fractional.floor(), fractional)

    def bounds(self, fractional: Tensor, batch: Tensor) -> Tensor:
        """The lowest and highest coordinates (B, 2, 3) of each system's atoms (N, 3); +inf and -inf if it has none."""
        start = torch.full((len(self.vectors), 3), torch.inf, dtype=torch.float64, device=fractional.device)
        index = batch[:, None].expand_as(fractional)
        low = start.scatter_reduce(0, index, fractional, "amin")
        high = (-start).scatter_reduce(0, index, fractional, "amax")
        return torch.stack([low, high], dim=1)

    def within(self, distance: float, region: Tensor, low: Tensor, high: Tensor, system: Tensor) -> Tensor:
        """Whether boxes (n,), or their periodic images, may lie within `distance` Å of `region`. Returns booleans (n,).

        A box goes from `low` to `high` (n, 3) in its `system` (n,); a point is a box from itself to itself. `region`
        (n or 1, 2, 3). All are fractional coordinates. The test compares distances between lattice planes, which are never
        more than the distance between points, so it accepts too many boxes and never too few.
        """
        periodic, heights = self.periodic[system], self.heights[system]
        gap = torch.full_like(low, torch.inf)
        for image in (0.0, 1.0, -1.0):
            outside = torch.maximum(region[:, 0] - high - image, low + image - region[:, 1]).clamp(min=0)
            gap = torch.minimum(gap, outside if image == 0 else torch.where(periodic, outside, torch.inf))
        return (gap * heights <= distance).all(-1)
