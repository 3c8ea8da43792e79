"""Plan a partition from a density alone: how many atoms each rank would own and read. No atoms are held in memory.

Lengths along an axis are distances between lattice planes in Å. Measured so, every cell is a rectangular box. For a sheared
cell the volumes at edges and corners are corrected by Steiner's formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from alchemi_halo.density import Array, Density, Ints
from alchemi_halo.processor_grid import grid_shapes
from alchemi_kernels.lattice_frames import MIN_HEIGHT
from alchemi_spec import InputError

CELLS_PER_REACH = 40
"""Cells along the reach in the integrals over edges and corners."""
GAUSS_POINTS, GAUSS_WEIGHTS = (0.5 * (x + (0, 1)[k == 0]) for k, x in enumerate(np.polynomial.legendre.leggauss(12)))
"""Gauss-Legendre quadrature of 12 points on [0, 1]."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A planned partition of `n_atoms` over `n_ranks`.

    `reach`: how far a rank reads, in Å: the cutoff plus the skin, times the depth of the ghosts if that is more than 1.
    Per rank: `owned`, its atoms; `ghosts`, the remote atoms that it reads; `neighbours`, the ranks whose regions lie within
    reach, to each of which it sends one message per exchange; `boxes` (n_ranks, 2, 3), the lowest and highest fractional
    coordinates of its region.
    """

    n_atoms: int
    n_ranks: int
    reach: float
    owned: Array = field(repr=False)
    ghosts: Array = field(repr=False)
    neighbours: Ints = field(repr=False)
    boxes: Array = field(repr=False)

    @property
    def imbalance(self) -> float:
        """The largest number of atoms of a rank over the mean."""
        return float(self.owned.max() / self.owned.mean())

    @property
    def ghost_ratio(self) -> float:
        """The number of ghosts of all ranks over the number of atoms."""
        return float(self.ghosts.sum() / self.owned.sum())

    def bytes(self, layers: int, width: int | Sequence[int], itemsize: int, position_itemsize: int = 8) -> Array:
        """Bytes of each rank's ghosts (n_ranks,) in a step with forces: received in the forward, sent in the backward pass.

        `width`: numbers of `itemsize` bytes per atom and layer, or a list with one width for each layer. The forward pass
        receives positions once, and features once per layer. The backward pass sends the gradients of both, except those of
        the first layer's features, which do not depend on positions.
        """
        widths = [width] * layers if isinstance(width, int) else list(width)
        if len(widths) != layers or min([layers, *widths, itemsize, position_itemsize]) < 0:
            raise InputError(f"layers = {layers} with width = {width}: give one width, or one for each layer, all 0 or more.")
        return np.asarray(self.ghosts * (2 * 3 * position_itemsize + itemsize * (sum(widths) + sum(widths[1:]))))

    def messages(self, layers: int) -> Ints:
        """Messages of each rank (n_ranks,) in a step with forces: one per neighbour for each exchange and each reverse."""
        return np.asarray(self.neighbours * (1 + layers + 1 + max(layers - 1, 0)))


def plan(density: Density, n_ranks: int, reach: float, *, method: str = "bisection") -> Plan:
    """Plan the partition of `density` over `n_ranks`, for ghosts within `reach` Å.

    `method`: as in `HaloStrategy`. "bisection" divides boxes across their longest extent by number of atoms; "grid" makes
    px * py * pz = n_ranks equal boxes with the smallest surface. Ghosts are expected values for atoms at random positions.

    Raises:
        InputError: if `n_ranks`, `reach` or `method` has no meaning.

    """
    if n_ranks < 1 or n_ranks != int(n_ranks):
        raise InputError(f"n_ranks = {n_ranks}: give a whole number of ranks, 1 or more.")
    if not (np.isfinite(reach) and reach >= 0):
        raise InputError(f"reach = {reach}: give a finite length in Å, 0 or more.")
    if method not in METHODS:
        raise InputError(f"method = {method!r}: use one of {', '.join(map(repr, METHODS))}.")
    boxes, owned = METHODS[method](density, int(n_ranks))
    region = _occupied_boxes(density, boxes)
    holds = owned >= 0.5
    ghosts = np.where(holds, _ghosts(density, region, owned, reach), 0.0)
    neighbours = _neighbours(density, region, holds, reach)
    return Plan(density.n_atoms, int(n_ranks), float(reach), owned, ghosts, neighbours, boxes / density.heights)


def _bisection(density: Density, n_ranks: int) -> tuple[Array, Array]:
    """Boxes (n_ranks, 2, 3) in Å and owned atoms (n_ranks,). All boxes of a level are divided at once.

    Among real atoms chance decides which of two equal extents is the longer: extents of N atoms vary by 1/sqrt(N). The plan
    adds random numbers of this size, the same each time. Berger and Bokhari, IEEE Trans. Comput. C-36 (1987) 570.
    """
    ends = np.arange(n_ranks + 1) * density.n_atoms // n_ranks
    boxes, first, chance = np.stack([np.zeros(3), density.heights])[None], np.array([0, n_ranks]), np.random.default_rng(0)
    while len(boxes) < n_ranks:
        parts = np.diff(first)
        split = parts > 1
        middle = first[:-1] + parts // 2
        held = np.maximum(np.diff(ends[first]), 1)
        axes = (_extents(density, boxes) * (1 + 0.5 * chance.random((len(boxes), 3)) / np.sqrt(held)[:, None])).argmax(1)[split]
        planes = _planes(density, boxes[split], axes, ((ends[middle] - ends[first[:-1]]) / held)[split])
        below = (np.arange(len(boxes)) + np.cumsum(split) - split)[split]
        boxes = np.repeat(boxes, 1 + split, axis=0)
        boxes[below, 1, axes] = boxes[below + 1, 0, axes] = planes
        first = np.sort(np.concatenate([first, middle[split]]))
    return boxes, np.diff(ends).astype(float)


def _planes(density: Density, boxes: Array, axes: Ints, below: Array) -> Array:
    """Where in Å (P,) a plane across each box's axis (P,) has the fraction `below` (P,) of the box's atoms below it."""
    planes = np.empty(len(boxes))
    for axis in range(3):
        rows = axes == axis
        profile, inside = _profile(density, boxes[rows], axis)
        target = inside[:, 0] + below[rows] * np.diff(inside)[:, 0]
        position = _position_of(density, profile, target, axis) * density.bins[axis]
        planes[rows] = np.clip(position, boxes[rows, 0, axis], boxes[rows, 1, axis])
    return planes


def _grid(density: Density, n_ranks: int) -> tuple[Array, Array]:
    """Boxes (n_ranks, 2, 3) of equal widths in Å and their atoms (n_ranks,). The last axis varies fastest."""
    surfaces = {shape: (np.array(shape) / density.heights).sum() for shape in grid_shapes(n_ranks)}  # over the volume
    shape = min(surfaces, key=lambda shape: round(float(surfaces[shape]), 12))
    at = np.array(list(product(*map(range, shape))), dtype=float)
    boxes = np.stack([at, at + 1], 1) / np.array(shape) * density.heights
    return boxes, _sums_between(density.below, density, boxes.transpose(0, 2, 1))[:, 0, 0, 0].clip(0)


METHODS = {"bisection": _bisection, "grid": _grid}


def _profile(density: Density, boxes: Array, axis: int) -> tuple[Array, Array]:
    """Atoms in each box's column along `axis`: below each grid line (P, n + 1), and below the two ends of the box (P, 2)."""
    table = np.moveaxis(density.below, axis, 0)
    a, b = (k for k in range(3) if k != axis)
    (i, u), (j, v) = (density.corners(boxes[..., k], k) for k in (a, b))
    sign = np.array([-1.0, 1.0])[:, None]
    u, v = (u * sign).reshape(-1, 4), (v * sign).reshape(-1, 4)
    below = np.einsum("npij,pi,pj->pn", table[:, i.reshape(-1, 4)[:, :, None], j.reshape(-1, 4)[:, None]], u, v)
    k, w = density.corners(boxes[..., axis], axis)
    return below, (np.take_along_axis(below, k.reshape(-1, 4), 1).reshape(-1, 2, 2) * w).sum(-1)


def _position_of(density: Density, below: Array, target: Array, axis: int) -> Array:
    """The coordinate along `axis`, in bins (P,), where the rising profile `below` (P, n + 1) reaches `target` (P,)."""
    i = np.clip((below <= target[:, None]).sum(1) - 1, 0, below.shape[1] - 2)
    start, end = np.take_along_axis(below, np.stack([i, i + 1], 1), 1).T
    part = np.clip((target - start) / np.where(end > start, end - start, np.inf), 0, 1)
    return np.asarray(i + part - density.pads[axis])


def _extents(density: Density, boxes: Array) -> Array:
    """Distances (P, 3) in Å along each axis between the first and last atom of each box: half an atom lies beyond either."""
    out = np.empty((len(boxes), 3))
    for axis in range(3):
        below, inside = _profile(density, boxes, axis)
        margin = np.minimum(0.5, np.diff(inside)[:, 0].clip(0) / 4)
        first, last = (_position_of(density, below, inside[:, k] + sign * margin, axis) for k, sign in ((0, 1), (1, -1)))
        out[:, axis] = (last - first) * density.bins[axis]
    return out


def _occupied_boxes(density: Density, boxes: Array) -> Array:
    """The boxes (P, 2, 3) in Å without the empty bins along their sides."""
    out = boxes.copy()
    for axis in range(3):
        below, inside = _profile(density, boxes, axis)
        nothing = 1e-9 * np.diff(inside)[:, 0].clip(0) + 1e-12 * density.n_atoms
        first, last = (_position_of(density, below, inside[:, k] + sign * nothing, axis) for k, sign in ((0, 1), (1, -1)))
        ends = np.stack([np.floor(first), np.ceil(last)], 1) * density.bins[axis]
        out[:, :, axis] = np.clip(ends, boxes[:, :1, axis], boxes[:, 1:, axis])
    return out


def _sums_between(table: Array, density: Density, lines: Array) -> Array:
    """Sums (R, m, m, m) of a summed-area table between the coordinates `lines` (R, 3, m + 1) in Å along each axis.

    Along periodic axes coordinates may lie up to half a period outside the cell.
    """
    (i, u), (j, v), (k, w) = (density.corners(lines[:, axis], axis) for axis in range(3))
    x, y, z = (rows.reshape(len(rows), -1) for rows in (i, j, k))
    sums = table[x[:, :, None, None], y[:, None, :, None], z[:, None, None]].reshape(
        len(i), *(n for _ in range(3) for n in (lines.shape[2], 2))
    )
    sums = np.einsum("raxbycz,rax,rby,rcz->rabc", sums, u, v, w, optimize=True)
    for axis in (1, 2, 3):
        sums = np.diff(sums, axis=axis)
    return np.asarray(sums)


def _ghosts(density: Density, region: Array, owned: Array, reach: float) -> Array:
    """Ghosts (R,) of regions (R, 2, 3) in Å: the atoms of the 26 boxes around each, times the fraction of them that is read."""
    volume = _sums_between(density.occupied, density, region.transpose(0, 2, 1))[:, 0, 0, 0]
    per_volume = owned / np.maximum(volume, MIN_HEIGHT**3)
    low, high = region.transpose(1, 0, 2)
    reaches = np.maximum(reach - _reach_deficit(per_volume, reach), 1e-9)[:, None]
    half = (density.heights - (high - low)) / 2
    below = np.minimum(reaches, np.where(density.pbc, half, low))
    above = np.minimum(reaches, np.where(density.pbc, half, density.heights - high))
    atoms = _sums_between(density.below, density, np.stack([low - below, low, high, high + above], -1))
    sides = np.stack([below, np.zeros_like(below), above], -1) / reaches[..., None]
    read = _read_fractions(density, sides, *_edge_and_corner_factors(per_volume * reach**3))
    return np.asarray((atoms * read).sum((1, 2, 3)))


def _reach_deficit(per_volume: Array, reach: float) -> Array:
    """The length (R,) in Å by which a region reads less far than `reach` beyond a face, since its atoms lie inside it.

    An atom at height t over a face is read if the part of its sphere inside the region, a cap, holds an atom. For atoms at
    random the probability of that is 1 - exp(-per_volume * cap). This integrates the rest over t = reach * (1 - u^2).
    """
    dip = reach * GAUSS_POINTS**2
    cap = np.pi / 3 * dip**2 * (3 * reach - dip)
    return np.asarray((np.exp(-per_volume[:, None] * cap) * 2 * reach * GAUSS_POINTS * GAUSS_WEIGHTS).sum(-1))


def _edge_and_corner_factors(atoms_per_reach: Array) -> tuple[Array, Array]:
    """Factors (R,) for the volumes that are read at edges and at corners, over quarter cylinders and eighths of a sphere.

    The integral of `_reach_deficit` in two and three dimensions, as a function of density * reach^3 (R,). Less of a sphere
    lies in the region at an edge, so fewer atoms are read there.
    """
    middle = ((np.arange(CELLS_PER_REACH) + 0.5) / CELLS_PER_REACH) ** 2
    ball = (middle + middle[:, None] + middle[:, None, None] < 1) / CELLS_PER_REACH**3
    dips = np.pad(ball[::-1, ::-1, ::-1].cumsum(0).cumsum(1).cumsum(2)[::-1, ::-1, ::-1], [(0, 1)] * 3)
    rule = np.where(np.arange(CELLS_PER_REACH + 1) % CELLS_PER_REACH, 1.0, 0.5) / CELLS_PER_REACH
    levels, found = np.geomspace(1e-3, 1e6, 46), []
    for level in levels:
        face, edge, corner = (1 - np.exp(-level * dip) for dip in (4 * dips[:, 0, 0], 2 * dips[:, :, 0], dips))
        depth = face @ rule
        found.append((edge @ rule @ rule / (np.pi / 4 * depth**2), corner @ rule @ rule @ rule / (np.pi / 6 * depth**3)))
    at = np.log(np.clip(atoms_per_reach, levels[0], levels[-1]))
    edges, corners = np.minimum(np.array(found), 1).T
    return np.interp(at, np.log(levels), edges), np.interp(at, np.log(levels), corners)


def _read_fractions(density: Density, sides: Array, edge: Array, corner: Array) -> Array:
    """The fraction (R, 3, 3, 3) that is read of each box around a region.

    `sides` (R, 3, 3): the lengths of the boxes over the reach, below, inside (0) and above. Boxes at faces are read in full.
    At edges a quarter cylinder times `edge` (R,) is read, at corners an eighth of a sphere times `corner` (R,). Both end
    where a period or the box ends.
    """
    part = np.ones((len(sides), 3, 3, 3))
    shear = density.volume / density.heights.prod()
    along = np.linalg.norm(density.cell, axis=1) / density.heights
    for x, y, z in product(range(3), repeat=3):
        outside = [(axis, place) for axis, place in enumerate((x, y, z)) if place != 1]
        if len(outside) == 2:
            inside = 3 - sum(axis for axis, _ in outside)
            part[:, x, y, z] = _sheared(_part_in_disc(*_ascending(sides, outside)), np.pi / 4, along[inside] / shear * edge)
        elif len(outside) == 3:
            part[:, x, y, z] = _sheared(_part_in_ball(*_ascending(sides, outside)), np.pi / 6, corner / shear)
    part[:, 1, 1, 1] = 0
    return part


def _ascending(sides: Array, outside: list[tuple[int, int]]) -> Iterator[Array]:
    """The sides (R,) named by `outside` (axis, place), from `sides` (R, 3, 3), the shortest first."""
    yield from np.sort(np.stack([sides[:, axis, place] for axis, place in outside]), axis=0)


def _part_in_ball(short: Array, middle: Array, long: Array) -> Array:
    """The fraction (R,) of boxes, with a corner at the centre of a unit sphere, that lies in the sphere."""
    layers = zip(GAUSS_POINTS, GAUSS_WEIGHTS, strict=True)
    return np.asarray(sum(w * _part_in_disc(middle, long, short * z) for z, w in layers))


def _part_in_disc(short: Array, long: Array, height: Array | float = 0.0) -> Array:
    """The fraction (R,) of rectangles that lies in the section of a unit sphere at `height`."""
    rest = 1 - np.square(height)[..., None] - (short[:, None] * GAUSS_POINTS) ** 2
    area = np.minimum(long[:, None], np.sqrt(rest.clip(0))) @ GAUSS_WEIGHTS  # over the short side
    return np.asarray((area / np.maximum(long, 1e-12)).clip(0, 1))


def _sheared(part: Array, whole: float, factor: Array) -> Array:
    """Scale the fraction `part` of a right-angled box: `whole` becomes `whole` times `factor`, and 1 stays 1."""
    return np.asarray(1 - (1 - part) * (1 - whole * factor) / (1 - whole))


def _neighbours(density: Density, boxes: Array, holds: npt.NDArray[np.bool_], reach: float) -> Ints:
    """For each box (R, 2, 3) in Å that holds atoms, the number of other such boxes within `reach` (minimum image)."""
    low, high = boxes[holds].astype(np.float32).transpose(1, 2, 0)
    found = []
    for rows in np.array_split(np.arange(low.shape[1]), 1 + low.shape[1] // 256):
        square = np.zeros((len(rows), low.shape[1]), dtype=np.float32)
        for axis, period in enumerate(density.heights.astype(np.float32)):
            middle, half = (low[axis] + high[axis]) / 2, (high[axis] - low[axis]) / 2
            apart = np.abs(middle[rows, None] - middle)
            if density.pbc[axis]:
                np.minimum(apart, period - apart, out=apart)
            apart -= half[rows, None] + half
            square += np.square(apart.clip(0))
        found.append((square <= np.float32(reach + 1e-4) ** 2).sum(1) - 1)
    peers = np.zeros(len(boxes), dtype=np.int64)
    peers[holds] = np.concatenate(found)
    return peers
