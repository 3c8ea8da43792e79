"""Atoms per volume, in place of atoms: what a plan needs to know of a structure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from alchemi_kernels.frames import THINNEST, Frames
from alchemi_spec import InputError, InvalidCell

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BIN = 3.0
"""Å. Thinner bins would resolve single layers of atoms."""
ATOMS_PER_BIN = 8
"""On average at least, so that bins are empty only where there is vacuum."""
MOST_BINS = 64
"""Along one axis, unless `bins` says otherwise."""


@dataclass(frozen=True, eq=False)
class Density:
    """Atoms per bin (nx, ny, nz) of a regular grid that spans `cell` (3, 3), rows in Å, periodic along `pbc` (3,).

    Along directions that are not periodic, the cell is a box that holds all atoms.
    """

    counts: Array = field(repr=False)
    cell: Array
    pbc: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        for name, kind, shape in (("counts", float, None), ("cell", float, (3, 3)), ("pbc", bool, (3,))):
            value = np.array(getattr(self, name), dtype=kind)
            if value.shape != shape and (shape is not None or value.ndim != 3):
                raise InputError(f"{name} has the shape {value.shape}; it takes {shape or '(nx, ny, nz)'}.")
            object.__setattr__(self, name, value)
        if not np.isfinite(self.counts).all() or (self.counts < 0).any() or self.counts.sum() < 0.5:
            raise InputError("a density is made of finite numbers of atoms, none below 0, 1 atom at least in all.")
        if not np.isfinite(self.cell).all() or self.volume < THINNEST**3 or self.heights.min() < THINNEST:
            raise InvalidCell(f"cell = {self.cell.tolist()} spans no volume. Give three vectors, open directions too.")

    @classmethod
    def uniform(cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True)) -> "Density":
        """`n_atoms` spread evenly over `cell` (3, 3)."""
        return cls(np.full((1, 1, 1), float(n_atoms)), np.asarray(cell, dtype=float), np.asarray(pbc))

    @classmethod
    def slab(
        cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True), filled: float = 0.5
    ) -> "Density":
        """`n_atoms` in the lower part `filled` of `cell` (3, 3) along its third vector, vacuum above."""
        if not 0 < filled <= 1:
            raise InputError(f"filled = {filled}: the part of the cell that the slab fills is over 0 and at most 1.")
        share = np.clip(filled * MOST_BINS - np.arange(MOST_BINS), 0, 1)
        return cls(n_atoms * (share / share.sum())[None, None], np.asarray(cell, dtype=float), np.asarray(pbc))

    @classmethod
    def cluster(cls, n_atoms: float, per_volume: float) -> "Density":
        """A ball of `n_atoms` at `per_volume` atoms per Å^3, in a box that touches it, periodic nowhere."""
        if not 0 < per_volume < np.inf:
            raise InputError(f"per_volume = {per_volume}: atoms per Å^3 are more than 0.")
        side = 2 * (3 * n_atoms / (4 * np.pi * per_volume)) ** (1 / 3)
        middle = (np.arange(MOST_BINS) + 0.5) * 2 / MOST_BINS - 1
        distance = np.sqrt(sum(np.meshgrid(middle**2, middle**2, middle**2)))
        share = np.clip((1 - distance) * MOST_BINS / 2 + 0.5, 0, 1)
        return cls(n_atoms * share / share.sum(), np.eye(3) * side, np.zeros(3, dtype=bool))

    @classmethod
    def step(cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True), ratio: float = 10) -> "Density":
        """`n_atoms` of which the lower half of `cell` (3, 3) along its first vector holds `ratio` times the upper half's."""
        halves = n_atoms * np.array([ratio, 1.0]) / (ratio + 1)
        return cls(halves[:, None, None], np.asarray(cell, dtype=float), np.asarray(pbc))

    @classmethod
    def of(
        cls,
        positions: npt.ArrayLike,
        cell: npt.ArrayLike,
        pbc: npt.ArrayLike,
        repeat: Sequence[int] = (1, 1, 1),
        bins: Sequence[int] | None = None,
    ) -> "Density":
        """The histogram of positions (N, 3) in Å, `repeat` (3,) times along the periodic vectors, never built.

        `bins` (3,) are per unit cell; by default of 3 Å or more, with 8 atoms on average. Where more than 64 bins would be
        needed along an axis for all repeats, the density is averaged over them.
        """
        points, vectors = (torch.as_tensor(np.asarray(value, dtype=float)) for value in (positions, cell))
        periodic = np.asarray(pbc, dtype=bool)
        _check_structure(points, vectors, periodic, repeat)
        frames = Frames.of(vectors[None], torch.as_tensor(periodic)[None])
        inside = frames.wrapped(points, torch.zeros(len(points), dtype=torch.long)).numpy()
        low = np.where(periodic, 0.0, inside.min(0))
        extent = np.where(periodic, 1.0, np.maximum(inside.max(0) - low, 1.0))
        spans = frames.vectors[0].numpy() * extent[:, None]
        side = max(BIN, (ATOMS_PER_BIN * abs(np.linalg.det(spans)) / len(points)) ** (1 / 3))
        default = np.clip(frames.heights[0].numpy() * extent // side, 1, MOST_BINS).astype(int)
        counts = np.histogramdd((inside - low) / extent, bins=bins or default.tolist(), range=[(0, 1 + 1e-12)] * 3)[0]
        return cls(_repeated(counts, repeat), spans * np.asarray(repeat)[:, None], periodic)

    @property
    def n_atoms(self) -> int:
        """How many atoms there are."""
        return round(float(self.counts.sum()))

    @property
    def volume(self) -> float:
        """Of the cell, Å^3."""
        return float(abs(np.linalg.det(self.cell)))

    @cached_property
    def heights(self) -> Array:
        """Distances (3,) between the planes that bound the cell, Å."""
        areas = np.linalg.norm(np.cross(self.cell[[1, 2, 0]], self.cell[[2, 0, 1]]), axis=1)
        return np.asarray(self.volume / np.where(areas > 0, areas, np.inf))

    @property
    def bins(self) -> Array:
        """Thicknesses (3,) of the bins, Å."""
        return self.heights / self.counts.shape

    @cached_property
    def pads(self) -> Ints:
        """Bins (3,) by which the table goes on, before and after the cell: half a period."""
        return np.where(self.pbc, np.array(self.counts.shape) // 2 + 1, 0)

    @cached_property
    def below(self) -> Array:
        """Atoms below each corner of the bins: sums (nx + 1 + 2 pad, ...)."""
        return _summed(self.counts, self.pads)

    @cached_property
    def occupied(self) -> Array:
        """Å^3 of bins with atoms in them below each corner, as `below`."""
        return _summed((self.counts > 0) * (self.volume / self.counts.size), self.pads)

    def corners(self, x: Array, axis: int) -> tuple[Ints, Array]:
        """Coordinates (...,) in Å -> rows (..., 2) of the table along `axis`, and their weights in linear interpolation."""
        n = self.below.shape[axis] - 1
        at = np.clip(x / self.bins[axis] + self.pads[axis], 0, n)
        below = np.minimum(at.astype(np.int64), n - 1)
        return np.stack([below, below + 1], -1), np.stack([below + 1 - at, at - below], -1)


def _check_structure(
    points: torch.Tensor, vectors: torch.Tensor, periodic: npt.NDArray[np.bool_], repeat: Sequence[int]
) -> None:
    """Refuse a structure that has no histogram."""
    if points.ndim != 2 or points.shape[1:] != (3,) or not len(points) or not points.isfinite().all():
        raise InputError(f"positions of shape {tuple(points.shape)}: they take (N, 3) finite numbers, N of 1 or more.")
    if vectors.shape != (3, 3) or periodic.shape != (3,) or len(repeat) != 3:
        shapes = f"cell of shape {tuple(vectors.shape)}, pbc of shape {periodic.shape}"
        raise InputError(f"{shapes} and repeat = {tuple(repeat)}: they take (3, 3), (3,) and three numbers.")
    if any(r < 1 or r != int(r) or (r > 1 and not p) for r, p in zip(repeat, periodic, strict=True)):
        raise InputError(f"repeat = {tuple(repeat)} with pbc = {periodic.tolist()}: 1 or more, and 1 where it is not periodic.")


def _repeated(counts: Array, repeat: Sequence[int]) -> Array:
    """A unit cell's bins (bx, by, bz), repeated; summed along axes where that gives more bins than are of use."""
    for axis, times in enumerate(repeat):
        if times * counts.shape[axis] > max(MOST_BINS, counts.shape[axis]):
            counts = counts.sum(axis, keepdims=True) * times
        else:
            counts = np.concatenate([counts] * times, axis)
    return counts


def _summed(counts: npt.NDArray[np.floating], pads: Ints) -> Array:
    """Sums of all bins below each corner, periodic for `pads` (3,) bins on either side.

    Summed-area table: Crow, SIGGRAPH Computer Graphics 18 (1984) 207.
    """
    wide = np.pad(counts, [(int(p), int(p)) for p in pads], mode="wrap")
    for axis in range(3):
        wide = np.cumsum(wide, axis=axis)
    return np.pad(wide, [(1, 0)] * 3)
