"""Graph partition: by index, or along a curve. Atoms never migrate, whatever they and the cell do."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from alchemi_graphpart.curve import along_curve
from alchemi_kernels import Frames, neighbours
from alchemi_shardtensor import Comm, Edges, Owners
from alchemi_spec import StrategyKind


@dataclass(frozen=True, eq=False)
class Blocks:
    """The rank that owns each atom (N,), by its id: for good."""

    rank: Tensor

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG002
        """The rank (n,) that owns each of the atoms `ids` (n,), wherever they are."""
        return self.rank.to(ids.device)[ids].long()


@dataclass(frozen=True)
class GraphPartitionStrategy:
    """Contiguous, balanced blocks of atoms: of the `index`, or along a Hilbert `curve` through each system's cell.

    Systems of a batch lie end to end, and ranks take equal stretches: none is empty while atoms last. Every rank knows all
    positions while it makes its lists (24 bytes an atom), and lists the edges of its own receivers alone.
    """

    order: Literal["curve", "index"] = "curve"
    kind = StrategyKind.GRAPH_PARTITION

    def partition(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        comm: Comm,
        weights: Tensor | None = None,
        ids: Tensor | None = None,
    ) -> Blocks:
        """Share out atoms (n, 3) Å so that every rank's have about the same sum of `weights` (n,), default 1 each.

        `ids` (n,): this rank's atoms among all, 0 ... N - 1; default, ranks' rows in the order of ranks. Every rank must
        call it.
        """
        weights = torch.ones_like(batch) if weights is None else weights
        points, systems, weights, *given = _everyone_s(comm, positions, batch, weights, *(() if ids is None else (ids,)))
        ids = given[0].long() if given else torch.arange(len(systems), device=batch.device)
        order = ids.argsort()
        if self.order == "curve":
            frames = Frames.of(cell, pbc).to(points.device)
            order = order[along_curve(points, systems, frames)[order].argsort(stable=True)]
        order = order[systems[order].argsort(stable=True)]
        rank = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        rank[ids[order]] = stretches(weights[order], comm.size).int()
        return Blocks(rank)

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms, and the routing of the remote atoms among their senders.

        For `depth` 2 all edges of those senders, too, and so on. `positions` (n_owned, 3) and `batch` (n_owned,) are this
        rank's, `cell` (B, 3, 3) and `pbc` (B, 3) all systems'. Every rank must call it, also one without atoms.
        """
        frames = Frames.of(cell, pbc)
        counts = comm.all_gather(torch.tensor(len(batch))).tolist()
        points, systems = _everyone_s(comm, positions, batch, counts=counts)
        first = sum(counts[: comm.rank])
        receives = torch.zeros(len(systems), dtype=torch.bool, device=systems.device)
        receives[first : first + len(batch)] = True
        for step in range(depth):
            receiver, sender, shifts = _edges(points, systems, receives, frames, cutoff)
            if step + 1 < depth:
                receives[sender] = True
        routing, local = _owners(counts, comm, systems.device).route(torch.stack([sender, receiver]))
        order = local[1].argsort(stable=True)
        return Edges(replace(routing, owners=None), local[:, order], shifts[order])


def by_index() -> GraphPartitionStrategy:
    """The strategy `graph-index`: blocks of the index."""
    return GraphPartitionStrategy("index")


def stretches(weights: Tensor, n_ranks: int) -> Tensor:
    """The rank (n,), ascending, of each of a row of weights (n,), of equal sums as far as no rank stays empty."""
    n, ranks = len(weights), torch.arange(n_ranks, device=weights.device)
    weights = torch.where(weights.sum() > 0, weights, 1.0)
    middle = weights.cumsum(0) - weights / 2
    wanted = (middle * (n_ranks / weights.sum().clamp(min=1e-300))).long().clamp(max=n_ranks - 1)
    ahead = (torch.searchsorted(wanted, ranks) - ranks).cummax(0).values  # each starts beyond where the last one did
    starts = ahead.clamp(max=max(n - n_ranks, 0)) + ranks
    return torch.searchsorted(starts, torch.arange(n, device=weights.device), right=True) - 1


def _everyone_s(
    comm: Comm, positions: Tensor, batch: Tensor, *more: Tensor, counts: list[int] | None = None
) -> tuple[Tensor, ...]:
    """All ranks' positions (N, 3), `batch` and more (N,), in the order of ranks, in one message: whole numbers fit float64."""
    mine = [positions.detach(), *(field[:, None] for field in (batch, *more))]
    everyone = comm.all_gather_rows(torch.cat([field.double() for field in mine], dim=1), counts)
    return everyone[:, :3], everyone[:, 3].long(), *everyone[:, 4:].unbind(1)


def _edges(points: Tensor, systems: Tensor, receives: Tensor, frames: Frames, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers, senders (E,) and shifts (E, 3) of the edges of those atoms that receive, among all."""
    found = [(receives.new_empty(0, dtype=torch.long),) * 2 + (points.new_empty(0, 3),)]
    for system in systems[receives].unique().tolist():
        rows = (systems == system).nonzero().flatten()
        mine = receives[rows].nonzero().flatten()
        i, j, shifts = neighbours(points[rows], mine, frames.vectors[system], frames.periodic[system], cutoff)
        found.append((rows[i], rows[j], shifts))
    receiver, sender, shifts = (torch.cat(parts) for parts in zip(*found, strict=True))
    return receiver, sender, shifts


def _owners(counts: list[int], comm: Comm, device: torch.device) -> Owners:
    """Of the rows of all ranks, in the order of ranks."""
    rank = torch.repeat_interleave(torch.arange(comm.size), torch.tensor(counts))
    row = torch.cat([torch.arange(n) for n in counts])
    return Owners(comm, rank.to(device), row.to(device), tuple(counts))
