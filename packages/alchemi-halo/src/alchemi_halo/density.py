"""The density of atoms in a structure. A plan needs only this, not the atoms."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from alchemi_kernels.lattice_frames import MIN_HEIGHT, LatticeFrames
from alchemi_spec import InputError, InvalidCell

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

BIN = 3.0
"""Å. Thinner bins would resolve single layers of atoms."""
ATOMS_PER_BIN = 8
"""At least so many on average, so that bins are empty only in vacuum."""
MAX_BINS = 64
"""At most so many along one axis, unless `bins` is given."""


@dataclass(frozen=True, eq=False)
class Density:
    """Atoms per bin (nx, ny, nz) of a regular grid that spans `cell` (3, 3), rows in Å, periodic along `pbc` (3,).

    Along directions that are not periodic, the cell spans all atoms.
    """

    counts: Array = field(repr=False)
    cell: Array
    pbc: npt.NDArray[np.bool_]

    def __post_init__(self) -> None:
        for name, kind, shape in (("counts", float, None), ("cell", float, (3, 3)), ("pbc", bool, (3,))):
            value = np.array(getattr(self, name), dtype=kind)
            if value.shape != shape and (shape is not None or value.ndim != 3):
                raise InputError(f"{name} has the shape {value.shape}; give {shape or '(nx, ny, nz)'}.")
            object.__setattr__(self, name, value)
        if not np.isfinite(self.counts).all() or (self.counts < 0).any() or self.counts.sum() < 0.5:
            raise InputError("a density has finite numbers of atoms per bin, 0 or more, and at least 1 atom in all.")
        if not np.isfinite(self.cell).all() or self.volume < MIN_HEIGHT**3 or self.heights.min() < MIN_HEIGHT:
            raise InvalidCell(f"cell = {self.cell.tolist()} spans no volume. Give three vectors, also along open directions.")

    @classmethod
    def uniform(cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True)) -> "Density":
        """`n_atoms` spread evenly over `cell` (3, 3)."""
        return cls(np.full((1, 1, 1), float(n_atoms)), np.asarray(cell, dtype=float), np.asarray(pbc))

    @classmethod
    def slab(
        cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True), filled: float = 0.5
    ) -> "Density":
        """`n_atoms` in the lower part `filled` of `cell` (3, 3) along its third vector, with vacuum above."""
        if not 0 < filled <= 1:
            raise InputError(f"filled = {filled}: give the part of the cell that the slab fills, more than 0 and at most 1.")
        fraction = np.clip(filled * MAX_BINS - np.arange(MAX_BINS), 0, 1)
        return cls(n_atoms * (fraction / fraction.sum())[None, None], np.asarray(cell, dtype=float), np.asarray(pbc))

    @classmethod
    def cluster(cls, n_atoms: float, per_volume: float) -> "Density":
        """A sphere of `n_atoms` at `per_volume` atoms per Å^3, in a box around it that is not periodic."""
        if not 0 < per_volume < np.inf:
            raise InputError(f"per_volume = {per_volume}: give a finite number of atoms per Å^3, more than 0.")
        side = 2 * (3 * n_atoms / (4 * np.pi * per_volume)) ** (1 / 3)
        middle = (np.arange(MAX_BINS) + 0.5) * 2 / MAX_BINS - 1
        distance = np.sqrt(sum(np.meshgrid(middle**2, middle**2, middle**2)))
        fraction = np.clip((1 - distance) * MAX_BINS / 2 + 0.5, 0, 1)
        return cls(n_atoms * fraction / fraction.sum(), np.eye(3) * side, np.zeros(3, dtype=bool))

    @classmethod
    def step(cls, n_atoms: float, cell: npt.ArrayLike, pbc: npt.ArrayLike = (True, True, True), ratio: float = 10) -> "Density":
        """`n_atoms` in `cell` (3, 3). The lower half along its first vector holds `ratio` times as many as the upper half."""
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
        """The histogram of positions (N, 3) in Å, repeated `repeat` (3,) times. The repeated structure is never built.

        `bins` (3,) are per unit cell; by default they are 3 Å or more wide and hold 8 atoms on average. Along an axis where
        all repeats would need more than 64 bins, the density is averaged over that axis.
        """
        points, vectors = (torch.as_tensor(np.asarray(value, dtype=float)) for value in (positions, cell))
        periodic = np.asarray(pbc, dtype=bool)
        _check_structure(points, vectors, periodic, repeat)
        frames = LatticeFrames.of(vectors[None], torch.as_tensor(periodic)[None])
        inside = frames.wrapped(points, torch.zeros(len(points), dtype=torch.long)).numpy()
        low = np.where(periodic, 0.0, inside.min(0))
        extent = np.where(periodic, 1.0, np.maximum(inside.max(0) - low, 1.0))
        spans = frames.vectors[0].numpy() * extent[:, None]
        side = max(BIN, (ATOMS_PER_BIN * abs(np.linalg.det(spans)) / len(points)) ** (1 / 3))
        default = np.clip(frames.heights[0].numpy() * extent // side, 1, MAX_BINS).astype(int)
        counts = np.histogramdd((inside - low) / extent, bins=bins or default.tolist(), range=[(0, 1 + 1e-12)] * 3)[0]
        return cls(_repeated(counts, repeat), spans * np.asarray(repeat)[:, None], periodic)

    @property
    def n_atoms(self) -> int:
        """The number of atoms."""
        return round(float(self.counts.sum()))

    @property
    def volume(self) -> float:
        """The volume of the cell in Å^3."""
        return float(abs(np.linalg.det(self.cell)))

    @cached_property
    def heights(self) -> Array:
        """Distances (3,) in Å between opposite faces of the cell."""
        areas = np.linalg.norm(np.cross(self.cell[[1, 2, 0]], self.cell[[2, 0, 1]]), axis=1)
        return np.asarray(self.volume / np.where(areas > 0, areas, np.inf))

    @property
    def bins(self) -> Array:
        """Thicknesses (3,) of the bins in Å."""
        return self.heights / self.counts.shape

    @cached_property
    def pads(self) -> Ints:
        """Bins (3,) that the tables have before and after the cell along periodic axes: half a period."""
        return np.where(self.pbc, np.array(self.counts.shape) // 2 + 1, 0)

    @cached_property
    def below(self) -> Array:
        """The summed-area table of the atoms: atoms below each corner of the bins (nx + 1 + 2 pad, ...)."""
        return _summed(self.counts, self.pads)

    @cached_property
    def occupied(self) -> Array:
        """The summed-area table of the volume, in Å^3, of bins that hold atoms."""
        return _summed((self.counts > 0) * (self.volume / self.counts.size), self.pads)

    def corners(self, x: Array, axis: int) -> tuple[Ints, Array]:
        """Coordinates (...,) in Å -> rows (..., 2) of a table along `axis`, and their weights in linear interpolation."""
        n = self.below.shape[axis] - 1
        at = np.clip(x / self.bins[axis] + self.pads[axis], 0, n)
        below = np.minimum(at.astype(np.int64), n - 1)
        return np.stack([below, below + 1], -1), np.stack([below + 1 - at, at - below], -1)


def _check_structure(
    points: torch.Tensor, vectors: torch.Tensor, periodic: npt.NDArray[np.bool_], repeat: Sequence[int]
) -> None:
    """Refuse a structure that has no histogram, with an InputError."""
    if points.ndim != 2 or points.shape[1:] != (3,) or not len(points) or not points.isfinite().all():
        raise InputError(f"positions of shape {tuple(points.shape)}: give finite numbers (N, 3), with N of 1 or more.")
    if vectors.shape != (3, 3) or periodic.shape != (3,) or len(repeat) != 3:
        shapes = f"cell of shape {tuple(vectors.shape)}, pbc of shape {periodic.shape}"
        raise InputError(f"{shapes} and repeat = {tuple(repeat)}: give (3, 3), (3,) and three numbers.")
    if any(r < 1 or r != int(r) or (r > 1 and not p) for r, p in zip(repeat, periodic, strict=True)):
        raise InputError(
            f"repeat = {tuple(repeat)} with pbc = {periodic.tolist()}: give 1 or more, and 1 where it is not periodic."
        )


def _repeated(counts: Array, repeat: Sequence[int]) -> Array:
    """Repeat the bins (bx, by, bz) of a unit cell. Axes along which this gives too many bins get one bin."""
    for axis, times in enumerate(repeat):
        if times * counts.shape[axis] > max(MAX_BINS, counts.shape[axis]):
            counts = counts.sum(axis, keepdims=True) * times
        else:
            counts = np.concatenate([counts] * times, axis)
    return counts


def _summed(counts: npt.NDArray[np.floating], pads: Ints) -> Array:
    """The summed-area table: sums of all bins below each corner, continued by `pads` (3,) bins on either side.

    Crow, SIGGRAPH Computer Graphics 18 (1984) 207.
    """
    wide = np.pad(counts, [(int(p), int(p)) for p in pads], mode="wrap")
    for axis in range(3):
        wide = np.cumsum(wide, axis=axis)
    return np.pad(wide, [(1, 0)] * 3)
