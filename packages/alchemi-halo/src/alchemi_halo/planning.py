"""A partition on paper: who would own and read how much, from a density alone, with no atom in memory.

Lengths along an axis are distances between lattice planes in Å. In them every cell is a rectangular box; what a sheared one
has less of at its edges and corners is Steiner's formula.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import numpy.typing as npt

from alchemi_halo.density import Array, Density, Ints
from alchemi_kernels.frames import THINNEST
from alchemi_spec import InputError

FINE = 40
"""Cells along the reach in integrals over edges and corners."""
NODES, WEIGHTS = (0.5 * (x + (0, 1)[k == 0]) for k, x in enumerate(np.polynomial.legendre.leggauss(12)))
"""Gauss-Legendre quadrature of 12 points on [0, 1]."""


@dataclass(frozen=True, eq=False)
class Plan:
    """A partition of `n_atoms` over `n_ranks`; `reach` in Å is the cutoff with the skin (times the depth, if more than 1).

    Per rank: `owned` atoms, `ghosts` (rows that it reads, one per atom), `neighbours` (ranks whose regions lie within reach:
    its messages per exchange), `boxes` (n_ranks, 2, 3), the lowest and highest fractional coordinates of its region.
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
        """The most atoms of a rank over the mean."""
        return float(self.owned.max() / self.owned.mean())

    @property
    def ghost_ratio(self) -> float:
        """Ghosts of all ranks over atoms."""
        return float(self.ghosts.sum() / self.owned.sum())

    def bytes(self, layers: int, width: int | Sequence[int], itemsize: int, position_itemsize: int = 8) -> Array:
        """What crosses for each rank's ghosts in a step with forces (n_ranks,): received on the way in, sent home after it.

        `width` numbers of `itemsize` bytes per atom and layer, or one width for each layer. In: positions once, features
        once a layer. Home: the gradients of both, but of the first layer's features, which no position changes.
        """
        widths = [width] * layers if isinstance(width, int) else list(width)
        if len(widths) != layers or min([layers, *widths, itemsize, position_itemsize]) < 0:
            raise InputError(f"layers = {layers} with width = {width}: give one width, or one for each layer, none below 0.")
        return np.asarray(self.ghosts * (2 * 3 * position_itemsize + itemsize * (sum(widths) + sum(widths[1:]))))

    def messages(self, layers: int) -> Ints:
        """Messages in a step with forces (n_ranks,): each exchange and each reverse is one per neighbour."""
        return np.asarray(self.neighbours * (1 + layers + 1 + max(layers - 1, 0)))


def plan(density: Density, n_ranks: int, reach: float, *, cut: str = "bisection") -> Plan:
    """The partition of `density` over `n_ranks` for ghosts within `reach` Å, on paper.

    `cut`: "bisection", across the longest extent again and again by number of atoms, as HaloStrategy does; or "grid", equal
    widths, px * py * pz = n_ranks with the smallest surface. Ghosts are expected values for atoms placed at random.
    """
    if n_ranks < 1 or n_ranks != int(n_ranks):
        raise InputError(f"n_ranks = {n_ranks}: a partition has a whole number of ranks, 1 or more.")
    if not (np.isfinite(reach) and reach >= 0):
        raise InputError(f"reach = {reach}: it is a finite length in Å, 0 or more.")
    if cut not in CUTS:
        raise InputError(f"cut = {cut!r} is none of {', '.join(map(repr, CUTS))}.")
    boxes, owned = CUTS[cut](density, int(n_ranks))
    region = _region(density, boxes)
    holds = owned >= 0.5
    ghosts = np.where(holds, _ghosts(density, region, owned, reach), 0.0)
    neighbours = _neighbours(density, region, holds, reach)
    return Plan(density.n_atoms, int(n_ranks), float(reach), owned, ghosts, neighbours, boxes / density.heights)


def _bisection(density: Density, n_ranks: int) -> tuple[Array, Array]:
    """Boxes (n_ranks, 2, 3) in Å and owned atoms (n_ranks,), all boxes of a level at once.

    Of equal extents chance decides which is cut, as it does among atoms: extents of N atoms are uncertain by 1/sqrt(N).
    Berger and Bokhari, IEEE Trans. Comput. C-36 (1987) 570.
    """
    ends = np.arange(n_ranks + 1) * density.n_atoms // n_ranks
    boxes, first, chance = np.stack([np.zeros(3), density.heights])[None], np.array([0, n_ranks]), np.random.default_rng(0)
    while len(boxes) < n_ranks:
        parts = np.diff(first)
        split = parts > 1
        middle = first[:-1] + parts // 2
        held = np.maximum(np.diff(ends[first]), 1)
        axes = (_extents(density, boxes) * (1 + 0.5 * chance.random((len(boxes), 3)) / np.sqrt(held)[:, None])).argmax(1)[split]
        cuts = _cuts(density, boxes[split], axes, ((ends[middle] - ends[first[:-1]]) / held)[split])
        below = (np.arange(len(boxes)) + np.cumsum(split) - split)[split]
        boxes = np.repeat(boxes, 1 + split, axis=0)
        boxes[below, 1, axes] = boxes[below + 1, 0, axes] = cuts
        first = np.sort(np.concatenate([first, middle[split]]))
    return boxes, np.diff(ends).astype(float)


def _cuts(density: Density, boxes: Array, axes: Ints, share: Array) -> Array:
    """Where in Å (P,) each box is cut across its axis (P,), so that `share` (P,) of its atoms lie below."""
    cuts = np.empty(len(boxes))
    for axis in range(3):
        rows = axes == axis
        below, inside = _profile(density, boxes[rows], axis)
        target = inside[:, 0] + share[rows] * np.diff(inside)[:, 0]
        place = _reached(density, below, target, axis) * density.bins[axis]
        cuts[rows] = np.clip(place, boxes[rows, 0, axis], boxes[rows, 1, axis])
    return cuts


def _grid(density: Density, n_ranks: int) -> tuple[Array, Array]:
    """Boxes (n_ranks, 2, 3) of equal widths in Å and the atoms in them (n_ranks,), the last axis fastest."""
    shapes = [(a, b, n_ranks // (a * b)) for a in _divisors(n_ranks) for b in _divisors(n_ranks // a)]
    shape = min(shapes, key=lambda parts: round(float((np.array(parts) / density.heights).sum()), 12))  # surface over volume
    at = np.array(list(product(*map(range, shape))), dtype=float)
    boxes = np.stack([at, at + 1], 1) / np.array(shape) * density.heights
    return boxes, _within(density.below, density, boxes.transpose(0, 2, 1))[:, 0, 0, 0].clip(0)


CUTS = {"bisection": _bisection, "grid": _grid}


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _profile(density: Density, boxes: Array, axis: int) -> tuple[Array, Array]:
    """Atoms of each box's column along `axis`, below each line of the grid (P, n + 1), and below the box's two ends (P, 2)."""
    table = np.moveaxis(density.below, axis, 0)
    a, b = (k for k in range(3) if k != axis)
    (i, u), (j, v) = (density.corners(boxes[..., k], k) for k in (a, b))
    sign = np.array([-1.0, 1.0])[:, None]
    u, v = (u * sign).reshape(-1, 4), (v * sign).reshape(-1, 4)
    below = np.einsum("npij,pi,pj->pn", table[:, i.reshape(-1, 4)[:, :, None], j.reshape(-1, 4)[:, None]], u, v)
    k, w = density.corners(boxes[..., axis], axis)
    return below, (np.take_along_axis(below, k.reshape(-1, 4), 1).reshape(-1, 2, 2) * w).sum(-1)


def _reached(density: Density, below: Array, target: Array, axis: int) -> Array:
    """Where along `axis`, in bins (P,), the rising profile (P, n + 1) reaches `target` (P,)."""
    i = np.clip((below <= target[:, None]).sum(1) - 1, 0, below.shape[1] - 2)
    start, end = np.take_along_axis(below, np.stack([i, i + 1], 1), 1).T
    part = np.clip((target - start) / np.where(end > start, end - start, np.inf), 0, 1)
    return np.asarray(i + part - density.pads[axis])


def _extents(density: Density, boxes: Array) -> Array:
    """How far apart the first and the last atom of each box lie along each axis (P, 3), Å: half an atom is beyond either."""
    out = np.empty((len(boxes), 3))
    for axis in range(3):
        below, inside = _profile(density, boxes, axis)
        margin = np.minimum(0.5, np.diff(inside)[:, 0].clip(0) / 4)
        first, last = (_reached(density, below, inside[:, k] + sign * margin, axis) for k, sign in ((0, 1), (1, -1)))
        out[:, axis] = (last - first) * density.bins[axis]
    return out


def _region(density: Density, boxes: Array) -> Array:
    """Boxes (P, 2, 3) in Å without the empty bins along their sides."""
    out = boxes.copy()
    for axis in range(3):
        below, inside = _profile(density, boxes, axis)
        nothing = 1e-9 * np.diff(inside)[:, 0].clip(0) + 1e-12 * density.n_atoms
        first, last = (_reached(density, below, inside[:, k] + sign * nothing, axis) for k, sign in ((0, 1), (1, -1)))
        ends = np.stack([np.floor(first), np.ceil(last)], 1) * density.bins[axis]
        out[:, :, axis] = np.clip(ends, boxes[:, :1, axis], boxes[:, 1:, axis])
    return out


def _within(table: Array, density: Density, lines: Array) -> Array:
    """What a table sums up (R, m, m, m) between coordinates (R, 3, m + 1) in Å along each axis.

    Where the cell is periodic they go from half a period below it to as far above.
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
    """Ghosts (R,) of regions (R, 2, 3) in Å: atoms of the 26 boxes around each, weighted by how many of them are read."""
    volume = _within(density.occupied, density, region.transpose(0, 2, 1))[:, 0, 0, 0]
    per_volume = owned / np.maximum(volume, THINNEST**3)
    low, high = region.transpose(1, 0, 2)
    reaches = np.maximum(reach - _gap(per_volume, reach), 1e-9)[:, None]
    half = (density.heights - (high - low)) / 2
    below = np.minimum(reaches, np.where(density.pbc, half, low))
    above = np.minimum(reaches, np.where(density.pbc, half, density.heights - high))
    atoms = _within(density.below, density, np.stack([low - below, low, high, high + above], -1))
    sides = np.stack([below, np.zeros_like(below), above], -1) / reaches[..., None]
    return np.asarray((atoms * _round(density, sides, *_thinned(per_volume * reach**3))).sum((1, 2, 3)))


def _gap(per_volume: Array, reach: float) -> Array:
    """By how much less than `reach` the atoms of regions reach beyond a face (R,), Å: they lie inside it, not on it.

    An atom at height t over a face is read if the cap of its ball that dips into the region holds an atom: with the chance
    1 - exp(-per_volume * cap) for atoms at random. The integral of the rest over t, with t = reach * (1 - u^2).
    """
    dip = reach * NODES**2
    cap = np.pi / 3 * dip**2 * (3 * reach - dip)
    return np.asarray((np.exp(-per_volume[:, None] * cap) * 2 * reach * NODES * WEIGHTS).sum(-1))


def _thinned(crowding: Array) -> tuple[Array, Array]:
    """How much less an edge and a corner reach (R,) than quarter cylinders and eighths of a ball of the faces' reach.

    The same integral as `_gap` in two and three dimensions, by density * reach^3 (R,): less of a ball dips into an edge.
    """
    middle = ((np.arange(FINE) + 0.5) / FINE) ** 2
    ball = (middle + middle[:, None] + middle[:, None, None] < 1) / FINE**3
    dips = np.pad(ball[::-1, ::-1, ::-1].cumsum(0).cumsum(1).cumsum(2)[::-1, ::-1, ::-1], [(0, 1)] * 3)
    rule = np.where(np.arange(FINE + 1) % FINE, 1.0, 0.5) / FINE
    levels, found = np.geomspace(1e-3, 1e6, 46), []
    for level in levels:
        face, edge, corner = (1 - np.exp(-level * dip) for dip in (4 * dips[:, 0, 0], 2 * dips[:, :, 0], dips))
        depth = face @ rule
        found.append((edge @ rule @ rule / (np.pi / 4 * depth**2), corner @ rule @ rule @ rule / (np.pi / 6 * depth**3)))
    at = np.log(np.clip(crowding, levels[0], levels[-1]))
    edges, corners = np.minimum(np.array(found), 1).T
    return np.interp(at, np.log(levels), edges), np.interp(at, np.log(levels), corners)


def _round(density: Density, sides: Array, edge: Array, corner: Array) -> Array:
    """How much (R, 3, 3, 3) of each box around a region is read; `sides` (R, 3, 3) over the reach: below, 0, above.

    Faces in full, edges as quarter cylinders times `edge` (R,), corners as eighths of a ball times `corner` (R,), each cut
    off where a period or the box ends.
    """
    part = np.ones((len(sides), 3, 3, 3))
    shear = density.volume / density.heights.prod()
    along = np.linalg.norm(density.cell, axis=1) / density.heights
    for x, y, z in product(range(3), repeat=3):
        outside = [(axis, place) for axis, place in enumerate((x, y, z)) if place != 1]
        if len(outside) == 2:
            inside = 3 - sum(axis for axis, _ in outside)
            part[:, x, y, z] = _sheared(_disc(*_ascending(sides, outside)), np.pi / 4, along[inside] / shear * edge)
        elif len(outside) == 3:
            part[:, x, y, z] = _sheared(_ball(*_ascending(sides, outside)), np.pi / 6, corner / shear)
    part[:, 1, 1, 1] = 0
    return part


def _ascending(sides: Array, outside: list[tuple[int, int]]) -> Iterator[Array]:
    """Those of the sides (R, 3, 3) that `outside` (axis, place) names, each (R,), the shortest first."""
    yield from np.sort(np.stack([sides[:, axis, place] for axis, place in outside]), axis=0)


def _ball(short: Array, middle: Array, long: Array) -> Array:
    """How much of boxes (R,) from the centre of a unit ball lies in it."""
    return np.asarray(sum(w * _disc(middle, long, short * z) for z, w in zip(NODES, WEIGHTS, strict=True)))


def _disc(short: Array, long: Array, height: Array | float = 0.0) -> Array:
    """How much of rectangles (R,) lies in the circle that a unit ball cuts from the plane at `height`."""
    rest = 1 - np.square(height)[..., None] - (short[:, None] * NODES) ** 2
    return np.asarray(((np.minimum(long[:, None], np.sqrt(rest.clip(0))) @ WEIGHTS) / np.maximum(long, 1e-12)).clip(0, 1))


def _sheared(part: Array, whole: float, factor: Array) -> Array:
    """`part` of a right-angled box, scaled: to `whole` times `factor` where nothing is cut off, to 1 where all but that is."""
    return np.asarray(1 - (1 - part) * (1 - whole * factor) / (1 - whole))


def _neighbours(density: Density, boxes: Array, holds: npt.NDArray[np.bool_], reach: float) -> Ints:
    """For each box (R, 2, 3) in Å that holds atoms, how many others within `reach` do, under the minimum image."""
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
