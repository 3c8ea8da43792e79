"""Who owns which part of space: cuts through fractional coordinates, so that they move with the cell."""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod

import torch
from torch import Tensor

from alchemi_kernels import Frames
from alchemi_shardtensor import Comm

TILT = 1e-4
"""Cuts lean by this much, so that they divide a lattice plane, whose atoms all have one coordinate."""
BINS = 256
"""Of a histogram in which a cut is looked for; each pass narrows it down to one bin."""
PASSES = 8
CLOSE = 1e-3
"""A cut that misses its share by this part of a rank's load is not refined further."""
BALANCED = 1.15
"""Whole systems are dealt out if no rank then has more than this much of the mean."""
Shape = tuple[int, int, int]
QUANTA = 1024
"""Weights are counted in this part of their mean: whole numbers have one sum on every rank, in any order."""


@dataclass(frozen=True, eq=False)
class Grid:
    """`shape` (B, 3) equal parts of each system from `low` (B, 3), each `width` (B, 3) wide, in fractional coordinates."""

    shape: Tensor
    low: Tensor
    width: Tensor

    @classmethod
    def of(cls, fractional: Tensor, batch: Tensor, frames: Frames, comm: Comm, n_ranks: int, shape: Shape | None) -> "Grid":
        """Of `shape`, or of that with the smallest parts' surface; across the cell, or the atoms' bounds where it is open.

        Raises:
            ValueError: where `shape` is not of that many ranks.

        """
        if shape is not None and prod(shape) != n_ranks:
            raise ValueError(f"a grid of {shape} has {prod(shape)} parts, but there are {n_ranks} ranks: give it as many.")
        low, high = _bounds(fractional, batch, len(frames.vectors), comm).unbind(1)
        low = torch.where(frames.periodic, 0.0, low)
        extent = torch.where(frames.periodic, 1.0, (high - low).clamp(min=1e-6))
        shapes = torch.tensor([shape] if shape is not None else _factors(n_ranks))
        sides = (extent * frames.heights)[:, None] / shapes
        surface = sides[..., [1, 2, 0]] * sides[..., [2, 0, 1]]
        best = shapes[surface.sum(-1).argmin(-1)]
        return cls(best, low, extent / best)

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, *_ids: Tensor) -> Tensor:
        """The part that each atom is in; parts are counted from one rank further on for each system."""
        inside = Frames.of(cell, pbc).to(positions.device).wrapped(positions, batch)
        shape, low, width = (t.to(positions.device)[batch] for t in (self.shape, self.low, self.width))
        x, y, z = ((inside - low) / width).floor().long().clamp(min=0).minimum(shape - 1).unbind(-1)
        return ((x * shape[:, 1] + y) * shape[:, 2] + z + batch) % shape.prod(-1)


@dataclass(frozen=True, eq=False)
class Cuts:
    """A tree of cuts for each system. Node k is a cut at `at`[k] along `axis`[k], or, where `rank`[k] >= 0, that rank's part.

    Its two sides are the nodes `below`[k] and `below`[k] + 1; system b starts at node b.
    """

    axis: Tensor
    at: Tensor
    below: Tensor
    rank: Tensor
    depth: int

    @classmethod
    def of(
        cls, fractional: Tensor, batch: Tensor, frames: Frames, comm: Comm, n_ranks: int, weights: Tensor | None = None
    ) -> "Cuts":
        """Recursive bisection by weight (Berger and Bokhari, IEEE Trans. Comput. C-36 (1987) 570). Every rank must call it.

        No rank needs more than its own atoms: histograms are summed over ranks. The systems of a batch are dealt out whole
        where that is balanced; else they are laid end to end and ranks take equal stretches, so that a system is cut among
        as few as it needs.
        """
        load = _quantized(weights, len(batch), fractional.device, comm)
        shares = _shares(_sums(load, batch, len(frames.vectors), comm), n_ranks)
        tree = _Tree([_Node(system, part) for system, part in enumerate(shares)])
        at_node, tolerance = batch.clone(), CLOSE * sum(share for part in shares for _, share in part) / n_ranks
        while level := tree.grow():
            level.cut(fractional, load, at_node, frames, comm, tolerance)
            at_node = tree.frozen().to(at_node.device).down(fractional, at_node)
        return tree.frozen()

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, *_ids: Tensor) -> Tensor:
        """The part that each atom is in."""
        fractional = Frames.of(cell, pbc).to(positions.device).wrapped(positions, batch)
        tree, node = self.to(positions.device), batch
        for _ in range(self.depth):
            node = tree.down(fractional, node)
        return tree.rank[node]

    def to(self, device: torch.device) -> "Cuts":
        """The same tree on `device`."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("axis", "at", "below", "rank")})

    def down(self, fractional: Tensor, node: Tensor) -> Tensor:
        """From each atom's node (n,) to the one below; a part is where it ends."""
        beyond = leaning(fractional, self.axis[node]) >= self.at[node]
        return torch.where(self.rank[node] < 0, self.below[node] + beyond.long(), node)


def leaning(fractional: Tensor, axis: Tensor) -> Tensor:
    """The coordinate (n,) that a cut across `axis` (n,) divides: that axis', leaning a little towards the two others."""
    turned = (axis[:, None] + torch.arange(3, device=axis.device)) % 3
    slope = torch.tensor([1.0, TILT, TILT**2], dtype=fractional.dtype, device=axis.device)
    return (fractional.gather(1, turned) * slope).sum(-1)


@dataclass
class _Node:
    """A part of a system, for the ranks and their shares of the load that `parts` lists."""

    system: int
    parts: list[tuple[int, int]]
    axis: int = 0
    at: float = 0.0
    below: int = 0

    @property
    def rank(self) -> int:
        return self.parts[0][0] if len(self.parts) == 1 else -1


@dataclass
class _Tree:
    """The nodes so far; the last level is the one that grows."""

    nodes: list[_Node]
    grown: int = 0
    depth: int = 0

    def grow(self) -> "_Level | None":
        """Divide the ranks of the last level's nodes; their cuts are to be found."""
        first, self.grown = self.grown, len(self.nodes)
        open_ = [(k, node) for k, node in enumerate(self.nodes[first:], first) if node.rank < 0]
        for _, node in open_:
            node.below, half = len(self.nodes), len(node.parts) // 2
            self.nodes += [_Node(node.system, node.parts[:half]), _Node(node.system, node.parts[half:])]
        self.depth += bool(open_)
        return _Level(open_, self.nodes, len(self.nodes)) if open_ else None

    def frozen(self) -> Cuts:
        axis, below, rank = torch.tensor([(n.axis, n.below, n.rank) for n in self.nodes]).unbind(1)
        return Cuts(axis, torch.tensor([n.at for n in self.nodes], dtype=torch.float64), below, rank, self.depth)


@dataclass
class _Level:
    """Nodes that are cut together, so that one sum over ranks serves them all."""

    open_: list[tuple[int, _Node]]
    nodes: list[_Node]
    n_nodes: int

    def cut(self, fractional: Tensor, load: Tensor, at_node: Tensor, frames: Frames, comm: Comm, tolerance: float) -> None:
        """Set each node's axis, the longest, and the place where the load on its left is its left ranks' share."""
        place = torch.full((self.n_nodes,), -1, device=at_node.device)
        place[[k for k, _ in self.open_]] = torch.arange(len(self.open_), device=at_node.device)
        mine = place[at_node] >= 0
        node, inside, load = place[at_node][mine], fractional[mine], load[mine]
        bounds = _bounds(inside, node, len(self.open_), comm)
        extent = (bounds[:, 1] - bounds[:, 0]) * frames.heights.cpu()[[n.system for _, n in self.open_]]
        axis = torch.where(extent.isfinite(), extent, 0.0).argmax(1)  # a part without atoms has no extent
        low, high = (leaning(torch.where(b.isfinite(), b, 0.0), axis) for b in bounds.unbind(1))
        target = torch.tensor([sum(share for _, share in self.nodes[n.below].parts) for _, n in self.open_])
        key = leaning(inside, axis.to(node.device)[node])
        found = _search(key, node, load, low, high, target, tolerance, comm)
        for (_, n), a, at in zip(self.open_, axis.tolist(), found, strict=True):
            n.axis, n.at = a, at


def _search(
    key: Tensor, node: Tensor, load: Tensor, low: Tensor, high: Tensor, target: Tensor, tolerance: float, comm: Comm
) -> list[float]:
    """For each node the place below which the load of its atoms is nearest to `target`, between `low` and `high`."""
    low, high = low - 1e-12 * (1 + low.abs()), high + 1e-12 * (1 + high.abs())  # beyond the first and the last atom
    best, error = high.clone(), torch.full_like(high, torch.inf)
    below = torch.zeros_like(target)
    for _ in range(PASSES):
        width = (high - low) / BINS
        at = (key - low.to(key.device)[node]) / width.to(key.device)[node]
        inside = (at >= 0) & (at < BINS)
        slot = node[inside] * BINS + at[inside].long()
        counts = _sums(load[inside], slot, len(low) * BINS, comm).view(-1, BINS)
        reached = torch.cat([below[:, None], below[:, None] + counts.cumsum(1)], dim=1)
        gap = (reached - target[:, None]).abs().double()
        nearest = gap.argmin(1, keepdim=True)
        better = gap.gather(1, nearest)[:, 0] < error
        best = torch.where(better, low + width * nearest[:, 0], best)
        error = torch.where(better, gap.gather(1, nearest)[:, 0], error)
        if (error <= tolerance).all():
            break
        first = (reached <= target[:, None]).sum(1, keepdim=True).sub(1).clamp(0, BINS - 1)
        below, low = reached.gather(1, first)[:, 0], low + width * first[:, 0]
        high = low + width
    return [float(at) for at in best]


def _quantized(weights: Tensor | None, n: int, device: torch.device, comm: Comm) -> Tensor:
    """Whole-numbered loads (n,): equal ones, or in proportion to `weights` (n,), which are positive."""
    if weights is None:
        return torch.ones(n, dtype=torch.long, device=device)
    total, count = comm.all_reduce(torch.stack([weights.double().sum().cpu(), torch.tensor(float(n), dtype=torch.float64)]))
    quanta: Tensor = weights.to(device, torch.float64) * (QUANTA * count / total).to(device)
    return quanta.round().long().clamp(min=1)


def _sums(load: Tensor, index: Tensor, n: int, comm: Comm) -> Tensor:
    """The load of each of `n` places, over all ranks, on the host."""
    sums = torch.zeros(n, dtype=torch.long, device=load.device).index_add_(0, index, load)
    return comm.all_reduce(sums.cpu())


def _bounds(fractional: Tensor, index: Tensor, n: int, comm: Comm) -> Tensor:
    """The lowest and highest coordinates (n, 2, 3) of the atoms of each of `n` places, over all ranks, on the host."""
    start = torch.full((n, 3), -torch.inf, dtype=torch.float64, device=fractional.device)
    where = index[:, None].expand_as(fractional)
    ends = torch.stack([start.scatter_reduce(0, where, sign * fractional, "amax") for sign in (-1, 1)], dim=1)
    ends = comm.all_reduce(ends.cpu(), "max")
    return torch.stack([-ends[:, 0], ends[:, 1]], dim=1)


def _shares(loads: Tensor, n_ranks: int) -> list[list[tuple[int, int]]]:
    """For each system the ranks that have a part of it, and how much."""
    whole = _dealt(loads.tolist(), n_ranks)
    return whole if whole is not None else _stretches(loads.tolist(), n_ranks)


def _dealt(loads: list[int], n_ranks: int) -> list[list[tuple[int, int]]] | None:
    """Whole systems, the largest first to the rank with the least (Graham 1969); None unless that is balanced."""
    if len(loads) < n_ranks:
        return None
    queue, owner = [(0, rank) for rank in range(n_ranks)], [0] * len(loads)
    for system in sorted(range(len(loads)), key=lambda b: -loads[b]):
        total, owner[system] = heapq.heappop(queue)
        heapq.heappush(queue, (total + loads[system], owner[system]))
    if max(queue)[0] * n_ranks > BALANCED * sum(loads):
        return None
    return [[(rank, load)] for rank, load in zip(owner, loads, strict=True)]


def _stretches(loads: list[int], n_ranks: int) -> list[list[tuple[int, int]]]:
    """Systems end to end, of which each rank takes an equal stretch; one without atoms is rank 0's."""
    total, start, shares = max(sum(loads), 1), 0, []
    for load in loads:
        first, last = start * n_ranks // total, -(-(start + load) * n_ranks // total)
        ends = [min(max(rank * total // n_ranks, start), start + load) for rank in range(first, last + 1)]
        parts = [(first + i, b - a) for i, (a, b) in enumerate(pairwise(ends)) if b > a]
        shares.append(parts or [(0, 0)])
        start += load
    return shares


def _factors(n: int) -> list[tuple[int, int, int]]:
    """All ways to write n as a product of three."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    return [(a, b, n // (a * b)) for a, b in product(divisors, divisors) if n % (a * b) == 0]
