"""Graph partition: by index, or along a curve. Atoms never migrate, however they and the cell move."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from alchemi_graphpart.hilbert_curve import hilbert_index
from alchemi_kernels import LatticeFrames, neighbour_list
from alchemi_shardtensor import Comm, Edges, Owners
from alchemi_spec import StrategyKind


@dataclass(frozen=True, eq=False)
class BlockOwners:
    """`rank` (N,): the rank that owns each atom, by its id. It never changes."""

    rank: Tensor

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG002
        """The rank (n,) that owns each of the atoms `ids` (n,), whatever their positions."""
        return self.rank.to(ids.device)[ids].long()


@dataclass(frozen=True)
class GraphPartitionStrategy:
    """Each rank owns a block of consecutive atoms, and all blocks are equal.

    `order`: atoms in the order of their index, or along a Hilbert curve through the cell. The systems of a batch are put one
    after the other. No rank is empty if there are as many atoms as ranks. While a rank builds its neighbour list it holds the
    positions of all atoms (24 bytes an atom), but it lists only the edges of its own receivers.
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
        *,
        ids: Tensor | None = None,
    ) -> BlockOwners:
        """Divide atoms (n, 3) Å so that every rank has about the same sum of `weights` (n,), default 1 each.

        `ids` (n,): the global ids of this rank's atoms, which are 0 ... N - 1 over all ranks. By default atoms are numbered
        in the order of ranks. Every rank must call it, with any part of the atoms.
        """
        weights = torch.ones_like(batch) if weights is None else weights
        points, systems, weights, *given = _all_gather_atoms(comm, positions, batch, weights, *(() if ids is None else (ids,)))
        ids = given[0].long() if given else torch.arange(len(systems), device=batch.device)
        order = ids.argsort()
        if self.order == "curve":
            frames = LatticeFrames.of(cell, pbc).to(points.device)
            order = order[hilbert_index(points, systems, frames)[order].argsort(stable=True)]
        order = order[systems[order].argsort(stable=True)]
        rank = torch.empty(len(ids), dtype=torch.int32, device=ids.device)
        rank[ids[order]] = balanced_blocks(weights[order], comm.size).int()
        return BlockOwners(rank)

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms, and the routing of the remote atoms among their senders.

        With `depth` 2 the list also has all edges of these senders, and so on. `positions` (n_owned, 3) and `batch` (n_owned,)
        are this rank's, `cell` (B, 3, 3) and `pbc` (B, 3) all systems'. Every rank must call it, also a rank without atoms.
        """
        frames = LatticeFrames.of(cell, pbc)
        counts = comm.all_gather(torch.tensor(len(batch))).tolist()
        points, systems = _all_gather_atoms(comm, positions, batch, counts=counts)
        first = sum(counts[: comm.rank])
        receives = torch.zeros(len(systems), dtype=torch.bool, device=systems.device)
        receives[first : first + len(batch)] = True
        for step in range(depth):
            receiver, sender, shifts = _edges(points, systems, receives, frames, cutoff)
            if step + 1 < depth:
                receives[sender] = True
        routing, local = _owners_in_order(counts, comm, systems.device).route(torch.stack([sender, receiver]))
        order = local[1].argsort(stable=True)
        return Edges(replace(routing, owners=None), local[:, order], shifts[order])


def by_index() -> GraphPartitionStrategy:
    """The strategy `graph-index`: blocks of atoms in the order of their index."""
    return GraphPartitionStrategy("index")


def balanced_blocks(weights: Tensor, n_ranks: int) -> Tensor:
    """The rank (n,) of each of a row of atoms with `weights` (n,): ascending ranks, with equal sums of weights.

    No rank is empty if there are as many atoms as ranks, even if the sums are then less equal.
    """
    n, ranks = len(weights), torch.arange(n_ranks, device=weights.device)
    weights = torch.where(weights.sum() > 0, weights, 1.0)
    middle = weights.cumsum(0) - weights / 2
    wanted = (middle * (n_ranks / weights.sum().clamp(min=1e-300))).long().clamp(max=n_ranks - 1)
    ahead = (torch.searchsorted(wanted, ranks) - ranks).cummax(0).values  # each block starts after the start of the one before
    starts = ahead.clamp(max=max(n - n_ranks, 0)) + ranks
    return torch.searchsorted(starts, torch.arange(n, device=weights.device), right=True) - 1


def _all_gather_atoms(
    comm: Comm, positions: Tensor, batch: Tensor, *more: Tensor, counts: list[int] | None = None
) -> tuple[Tensor, ...]:
    """The positions (N, 3), `batch` and `more` (N,) of all ranks, in the order of ranks.

    They are gathered in one message in float64, which holds whole numbers exactly.
    """
    fields = [positions.detach(), *(field[:, None] for field in (batch, *more))]
    rows = comm.all_gather_rows(torch.cat([field.double() for field in fields], dim=1), counts)
    return rows[:, :3], rows[:, 3].long(), *rows[:, 4:].unbind(1)


def _edges(
    points: Tensor, systems: Tensor, receives: Tensor, frames: LatticeFrames, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers (E,), senders (E,) and shifts (E, 3) of all edges of the atoms whose `receives` (N,) is set."""
    found = [(receives.new_empty(0, dtype=torch.long),) * 2 + (points.new_empty(0, 3),)]
    for system in systems[receives].unique().tolist():
        rows = (systems == system).nonzero().flatten()
        mine = receives[rows].nonzero().flatten()
        i, j, shifts = neighbour_list(points[rows], mine, frames.vectors[system], frames.periodic[system], cutoff)
        found.append((rows[i], rows[j], shifts))
    receiver, sender, shifts = (torch.cat(parts) for parts in zip(*found, strict=True))
    return receiver, sender, shifts


def _owners_in_order(counts: list[int], comm: Comm, device: torch.device) -> Owners:
    """The owners of atoms that are numbered in the order of ranks; `counts`: how many each rank owns."""
    rank = torch.repeat_interleave(torch.arange(comm.size), torch.tensor(counts))
    row = torch.cat([torch.arange(n) for n in counts])
    return Owners(comm, rank.to(device), row.to(device), tuple(counts))
