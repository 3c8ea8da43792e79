"""The halo strategy: partition by space. Ghosts are the remote atoms within the cutoff of owned atoms."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from alchemi_halo.bisection import RecursiveBisection
from alchemi_halo.processor_grid import ProcessorGrid
from alchemi_kernels import LatticeFrames, neighbour_list
from alchemi_shardtensor import Comm, Edges, Routing, packed_all_to_all
from alchemi_spec import StrategyKind

ROUND_OFF = 1e-6
"""Å. Atoms are offered to other ranks up to this much beyond the cutoff, against round-off. Atoms that no edge reads are
dropped again."""


@dataclass(frozen=True)
class HaloStrategy:
    """Spatial decomposition: each rank owns the atoms of a region. A rank needs only its own atoms to find the regions.

    `method`: recursive bisection, which balances any distribution of atoms, or a regular grid of ranks. `shape`: the ranks
    of the grid along each cell vector; by default the shape with the smallest surface. Everything is computed on the
    device of the atoms. Positions are not wrapped for the model.
    """

    method: Literal["bisection", "grid"] = "bisection"
    shape: tuple[int, int, int] | None = None
    kind = StrategyKind.HALO

    def partition(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        comm: Comm,
        weights: Tensor | None = None,
        *,
        ids: Tensor | None = None,  # noqa: ARG002
        n_ranks: int | None = None,
    ) -> RecursiveBisection | ProcessorGrid:
        """Divide space so that the atoms (n, 3) Å of every rank have about the same sum of `weights` (n,), default 1 each.

        Weights are costs, for example the measured step time of a rank over its number of atoms; a grid does not use them.
        `ids` are not used. `n_ranks`: plan for this many ranks instead of those of `comm`. Every rank must call it, with any
        part of the atoms.
        """
        n_ranks = comm.size if n_ranks is None else n_ranks
        frames = LatticeFrames.of(cell, pbc)
        inside = frames.to(positions.device).wrapped(positions, batch)
        if self.method == "grid":
            return ProcessorGrid.of(inside, batch, frames, comm, n_ranks, self.shape)
        return RecursiveBisection.of(inside, batch, frames, comm, n_ranks, weights)

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms, and the routing of the remote atoms among their senders.

        With `depth` 2 the list also has all edges of these senders, and so on: as many layers then need no exchange.
        `positions` (n_owned, 3) and `batch` (n_owned,) are this rank's, `cell` (B, 3, 3) and `pbc` (B, 3) all systems'. Every
        rank must call it, also a rank without atoms. Ranks tell each other the bounds of their regions, and send atoms only
        to ranks whose regions are within the cutoff.
        """
        on_host, n = LatticeFrames.of(cell, pbc), len(positions)
        frames = on_host.to(positions.device)
        inside = frames.wrapped(positions, batch)
        offers = _offers(inside, batch, frames, depth * cutoff + ROUND_OFF, comm)
        offered, send = torch.cat(offers), [len(rows) for rows in offers]
        receive = comm.all_to_all(torch.tensor(send), [1] * comm.size, [1] * comm.size).tolist()
        fields = positions.double(), batch
        received = packed_all_to_all(comm, [field[offered] for field in fields], send, receive)
        points, systems = (torch.cat(both) for both in zip(fields, received, strict=True))

        sender, receiver, shifts = _pairs(points, systems, n, on_host, cutoff, depth)
        read = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        read[sender] = True
        read = read[n:]
        wanted = comm.all_to_all(read, receive, send)
        local = torch.cat([torch.arange(n, device=read.device), n - 1 + read.long().cumsum(0)])
        routing = Routing(comm, n, offered[wanted], _counts(wanted, send), _counts(read, receive))
        return Edges(routing, torch.stack([local[sender], local[receiver]]), shifts)


def grid() -> HaloStrategy:
    """The strategy `halo-grid`: a regular grid of ranks."""
    return HaloStrategy(method="grid")


def _offers(inside: Tensor, batch: Tensor, frames: LatticeFrames, distance: float, comm: Comm) -> list[Tensor]:
    """For each rank, the rows of this rank's atoms that may lie within `distance` Å of that rank's region."""
    mine = frames.bounds(inside, batch)
    present = mine[:, 0, 0].isfinite().nonzero().flatten()
    regions = torch.cat([present[:, None].double(), mine[present].flatten(1)], dim=1)
    counts = comm.all_gather(torch.tensor(len(regions))).tolist()
    regions = comm.all_gather_rows(regions, counts)
    system, box = regions[:, 0].long(), regions[:, 1:].view(-1, 2, 3)
    own = mine[system]
    near = frames.within(distance, box, own[:, 0], own[:, 1], system) & own[:, 0, 0].isfinite()
    owner = torch.repeat_interleave(torch.arange(comm.size), torch.tensor(counts)).tolist()
    offers = [torch.zeros(0, dtype=torch.long, device=inside.device)] * comm.size
    for k in near.nonzero().flatten().tolist():
        if owner[k] != comm.rank:
            rows = (batch == system[k]).nonzero().flatten()
            close = frames.within(distance, box[k : k + 1], inside[rows], inside[rows], batch[rows])
            offers[owner[k]] = torch.cat([offers[owner[k]], rows[close]])
    return offers


def _pairs(
    points: Tensor, batch: Tensor, n_owned: int, frames: LatticeFrames, cutoff: float, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Senders (E,), receivers (E,) and shifts (E, 3) of the pairs within `cutoff`, sorted by receiver.

    Receivers are owned atoms, and atoms from which fewer than `depth` edges lead to an owned one. `frames` are on the host.
    """
    found = []
    for system in batch[:n_owned].unique().tolist():
        rows = (batch == system).nonzero().flatten()
        near, new = points[rows], rows < n_owned
        receives = new
        for _ in range(depth):
            vectors, periodic = frames.vectors[system], frames.periodic[system]
            i, j, shifts = neighbour_list(near, new.nonzero().flatten(), vectors, periodic, cutoff)
            new = torch.zeros_like(receives).index_fill_(0, j, True) & ~receives
            receives = receives | new
            found.append((j, i, shifts) if len(rows) == len(points) else (rows[j], rows[i], shifts))
    if len(found) == 1:  # the result of one search is sorted
        return found[0]
    none = batch.new_empty(0, dtype=torch.long)
    sender, receiver, shifts = (torch.cat(parts) for parts in zip((none, none, points.new_empty(0, 3)), *found, strict=True))
    receiver, order = receiver.sort(stable=True)
    return sender[order], receiver, shifts[order]


def _counts(mask: Tensor, splits: list[int]) -> tuple[int, ...]:
    """How many rows of each part of `mask` are set; `splits` are the lengths of the parts."""
    total = [0, *mask.long().cumsum(0).tolist()]
    ends = [0, *accumulate(splits)]
    return tuple(total[b] - total[a] for a, b in pairwise(ends))
