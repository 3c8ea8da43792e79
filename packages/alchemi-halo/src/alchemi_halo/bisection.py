"""Recursive bisection of space by planes in fractional coordinates, so that the planes move with the cell."""

import heapq
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from alchemi_halo.bounds import bounds_over_ranks
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import Comm

TILT = 1e-4
"""The slope of partition planes. Tilted planes divide a lattice plane, whose atoms all have one coordinate."""
BINS = 256
"""Bins of the histogram in which the position of a plane is searched. Each pass narrows the search down to one bin."""
PASSES = 8
"""At most this many passes."""
TOLERANCE = 1e-3
"""The search for a plane ends when the load below it is right to this part of a rank's load."""
MAX_IMBALANCE = 1.15
"""Systems stay whole if no rank then has more than this times the mean load."""
QUANTA = 1024
"""Weights are rounded to 1/QUANTA of their mean. Sums of whole numbers are the same on every rank, in any order."""

Parts = list[tuple[int, int]]
"""The ranks that a part of a system is for, in order, each with its load."""


@dataclass(frozen=True, eq=False)
class RecursiveBisection:
    """A tree of partition planes for each system; the root of system b is node b.

    Node k is either a plane at the coordinate `position`[k] along `axis`[k], with the nodes `child`[k] below it and
    `child`[k] + 1 above it. Or it is a leaf, the part of rank `rank`[k] >= 0. `depth`: the number of levels of planes.
    """

    axis: Tensor
    position: Tensor
    child: Tensor
    rank: Tensor
    depth: int

    @classmethod
    def of(
        cls,
        fractional: Tensor,
        batch: Tensor,
        frames: LatticeFrames,
        comm: Comm,
        n_ranks: int,
        weights: Tensor | None = None,
    ) -> "RecursiveBisection":
        """Divide space so that every rank has about the same sum of `weights` (n,), or the same number of atoms.

        Every rank must call it with its own atoms; histograms are summed over ranks. The systems of a batch stay whole if
        that is balanced. Otherwise they are put one after the other and divided evenly, so that as few systems as possible
        are divided. Berger and Bokhari, IEEE Trans. Comput. C-36 (1987) 570.
        """
        load = _integer_loads(weights, len(batch), fractional.device, comm)
        systems = _parts(_sums(load, batch, len(frames.vectors), comm), n_ranks)
        tree = _Tree([_Node(system, parts) for system, parts in enumerate(systems)])
        node, tolerance = batch.clone(), TOLERANCE * sum(part for parts in systems for _, part in parts) / n_ranks
        while level := tree.split():
            level.place_planes(fractional, load, node, frames, comm, tolerance)
            node = tree.frozen().to(node.device).descend(fractional, node)
        return tree.frozen()

    def owners(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        ids: Tensor | None = None,  # noqa: ARG002
    ) -> Tensor:
        """The rank (n,) in whose part each atom (n, 3) Å is. `ids` are not used."""
        fractional = LatticeFrames.of(cell, pbc).to(positions.device).wrapped(positions, batch)
        tree, node = self.to(positions.device), batch
        for _ in range(self.depth):
            node = tree.descend(fractional, node)
        return tree.rank[node]

    def to(self, device: torch.device) -> "RecursiveBisection":
        """The same tree on `device`."""
        return replace(self, **{name: getattr(self, name).to(device) for name in ("axis", "position", "child", "rank")})

    def descend(self, fractional: Tensor, node: Tensor) -> Tensor:
        """From each atom's node (n,) to the child that it is in. An atom at a leaf stays there."""
        above = tilted_coordinate(fractional, self.axis[node]) >= self.position[node]
        return torch.where(self.rank[node] < 0, self.child[node] + above.long(), node)


def tilted_coordinate(fractional: Tensor, axis: Tensor) -> Tensor:
    """The coordinate (n,) along the normal of a plane across `axis` (n,), which is tilted a little towards the other two."""
    turned = (axis[:, None] + torch.arange(3, device=axis.device)) % 3
    slope = torch.tensor([1.0, TILT, TILT**2], dtype=fractional.dtype, device=axis.device)
    return (fractional.gather(1, turned) * slope).sum(-1)


@dataclass
class _Node:
    """A part of a system, and the ranks that it is for."""

    system: int
    parts: Parts
    axis: int = 0
    position: float = 0.0
    child: int = 0

    @property
    def rank(self) -> int:
        return self.parts[0][0] if len(self.parts) == 1 else -1


@dataclass
class _Tree:
    """The nodes so far. `split` adds a level."""

    nodes: list[_Node]
    n_split: int = 0
    depth: int = 0

    def split(self) -> "_Level | None":
        """Give each node of the last level that has several ranks two children, with half of its ranks each."""
        first, self.n_split = self.n_split, len(self.nodes)
        parents = [(k, node) for k, node in enumerate(self.nodes[first:], first) if node.rank < 0]
        for _, node in parents:
            node.child, half = len(self.nodes), len(node.parts) // 2
            self.nodes += [_Node(node.system, node.parts[:half]), _Node(node.system, node.parts[half:])]
        self.depth += bool(parents)
        return _Level(parents, self.nodes, len(self.nodes)) if parents else None

    def frozen(self) -> RecursiveBisection:
        axis, child, rank = torch.tensor([(n.axis, n.child, n.rank) for n in self.nodes]).unbind(1)
        position = torch.tensor([n.position for n in self.nodes], dtype=torch.float64)
        return RecursiveBisection(axis, position, child, rank, self.depth)


@dataclass
class _Level:
    """The nodes of one level that are divided. Their planes are searched together, so that one sum over ranks serves all."""

    parents: list[tuple[int, _Node]]
    nodes: list[_Node]
    n_nodes: int

    def place_planes(
        self, fractional: Tensor, load: Tensor, at_node: Tensor, frames: LatticeFrames, comm: Comm, tolerance: float
    ) -> None:
        """Put a plane across each node's longest axis, where the load below it is the load of the lower child's ranks."""
        number = torch.full((self.n_nodes,), -1, device=at_node.device)
        number[[k for k, _ in self.parents]] = torch.arange(len(self.parents), device=at_node.device)
        divided = number[at_node] >= 0
        node, inside, load = number[at_node][divided], fractional[divided], load[divided]
        bounds = bounds_over_ranks(inside, node, len(self.parents), comm)
        extent = (bounds[:, 1] - bounds[:, 0]) * frames.heights.cpu()[[n.system for _, n in self.parents]]
        axis = torch.where(extent.isfinite(), extent, 0.0).argmax(1)  # a part without atoms has no extent
        low, high = (tilted_coordinate(torch.where(b.isfinite(), b, 0.0), axis) for b in bounds.unbind(1))
        target = torch.tensor([sum(part for _, part in self.nodes[n.child].parts) for _, n in self.parents])
        coordinate = tilted_coordinate(inside, axis.to(node.device)[node])
        found = _search(coordinate, node, load, low, high, target, tolerance, comm)
        for (_, n), a, position in zip(self.parents, axis.tolist(), found, strict=True):
            n.axis, n.position = a, position


def _search(
    coordinate: Tensor, node: Tensor, load: Tensor, low: Tensor, high: Tensor, target: Tensor, tolerance: float, comm: Comm
) -> list[float]:
    """For each node the coordinate between `low` and `high` below which the load of its atoms is nearest to `target`."""
    low, high = low - 1e-12 * (1 + low.abs()), high + 1e-12 * (1 + high.abs())  # beyond the first and the last atom
    best, error = high.clone(), torch.full_like(high, torch.inf)
    below = torch.zeros_like(target)
    for _ in range(PASSES):
        width = (high - low) / BINS
        at = (coordinate - low.to(coordinate.device)[node]) / width.to(coordinate.device)[node]
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


def _integer_loads(weights: Tensor | None, n: int, device: torch.device, comm: Comm) -> Tensor:
    """Whole-numbered loads (n,): 1 each, or in proportion to `weights` (n,), which are positive."""
    if weights is None:
        return torch.ones(n, dtype=torch.long, device=device)
    total, count = comm.all_reduce(torch.stack([weights.double().sum().cpu(), torch.tensor(float(n), dtype=torch.float64)]))
    quanta: Tensor = weights.to(device, torch.float64) * (QUANTA * count / total).to(device)
    return quanta.round().long().clamp(min=1)


def _sums(load: Tensor, index: Tensor, n: int, comm: Comm) -> Tensor:
    """Sums (n,) of the loads with each `index`, over all ranks, on the host."""
    sums = torch.zeros(n, dtype=torch.long, device=load.device).index_add_(0, index, load)
    return comm.all_reduce(sums.cpu())


def _parts(loads: Tensor, n_ranks: int) -> list[Parts]:
    """For each system, the ranks that have a part of it, and the load of each part."""
    whole = _whole_systems(loads.tolist(), n_ranks)
    return whole if whole is not None else _divided_systems(loads.tolist(), n_ranks)


def _whole_systems(loads: list[int], n_ranks: int) -> list[Parts] | None:
    """Each system goes to the rank with the least load, the largest system first (Graham 1969). None if not balanced."""
    if len(loads) < n_ranks:
        return None
    queue, owner = [(0, rank) for rank in range(n_ranks)], [0] * len(loads)
    for system in sorted(range(len(loads)), key=lambda b: -loads[b]):
        total, owner[system] = heapq.heappop(queue)
        heapq.heappush(queue, (total + loads[system], owner[system]))
    if max(queue)[0] * n_ranks > MAX_IMBALANCE * sum(loads):
        return None
    return [[(rank, load)] for rank, load in zip(owner, loads, strict=True)]


def _divided_systems(loads: list[int], n_ranks: int) -> list[Parts]:
    """Systems one after the other, divided into equal parts for the ranks. A system without atoms goes to rank 0."""
    total, start, systems = max(sum(loads), 1), 0, []
    for load in loads:
        first, last = start * n_ranks // total, -(-(start + load) * n_ranks // total)
        ends = [min(max(rank * total // n_ranks, start), start + load) for rank in range(first, last + 1)]
        parts = [(first + i, b - a) for i, (a, b) in enumerate(pairwise(ends)) if b > a]
        systems.append(parts or [(0, 0)])
        start += load
    return systems
