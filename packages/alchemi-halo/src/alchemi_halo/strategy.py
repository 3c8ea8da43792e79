"""Halo: partition by space. Owners by recursive bisection or a grid, ghosts by distance to the reader's region."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from alchemi_halo.cuts import Cuts, Grid
from alchemi_kernels import Frames, neighbours
from alchemi_shardtensor import Comm, Edges, Routing, packed_all_to_all
from alchemi_spec import StrategyKind

SLACK = 1e-6
"""Å added to the reach of an offer, against round-off; what no edge reads is not kept."""


@dataclass(frozen=True)
class HaloStrategy:
    """Spatial decomposition, from each rank's own atoms alone, on the device that they are on.

    `cuts`: recursive bisection, balanced for any distribution of atoms, or a regular grid of ranks, of `shape` or of the
    smallest surface. Positions are used as they are and never wrapped for the model.
    """

    cuts: Literal["bisection", "grid"] = "bisection"
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
        n_ranks: int | None = None,
        ids: Tensor | None = None,  # noqa: ARG002
    ) -> Cuts | Grid:
        """Share out space so that every rank's atoms (n, 3) Å have about the same sum of `weights` (n,), default 1 each.

        Weights are costs, such as a rank's measured step time over its number of atoms. `n_ranks`: for other ranks than these,
        on paper. `ids` are not needed. Every rank must call it.
        """
        n_ranks = comm.size if n_ranks is None else n_ranks
        frames = Frames.of(cell, pbc)
        inside = frames.to(positions.device).wrapped(positions, batch)
        if self.cuts == "grid":
            return Grid.of(inside, batch, frames, comm, n_ranks, self.shape)
        return Cuts.of(inside, batch, frames, comm, n_ranks, weights)

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms, and the routing of the remote atoms among their senders.

        For `depth` 2 all edges of those senders, too, and so on: what so many layers need that exchange nothing.
        `positions` (n_owned, 3) and `batch` (n_owned,) are this rank's, `cell` (B, 3, 3) and `pbc` (B, 3) all systems'.
        Every rank must call it, also one without atoms. Bounds of regions are shared; atoms go only to peers within reach.
        """
        lattices, n = Frames.of(cell, pbc), len(positions)
        frames = lattices.to(positions.device)
        inside = frames.wrapped(positions, batch)
        mine = frames.bounds(inside, batch)
        offers = _offers(inside, batch, frames, mine, depth * cutoff + SLACK, comm)
        offered, send = torch.cat(offers), [len(rows) for rows in offers]
        receive = comm.all_to_all(torch.tensor(send), [1] * comm.size, [1] * comm.size).tolist()
        fields = positions.double(), batch
        more = packed_all_to_all(comm, [field[offered] for field in fields], send, receive)
        points, systems = (torch.cat(both) for both in zip(fields, more, strict=True))

        sender, receiver, shifts = _pairs(points, systems, n, lattices, cutoff, depth)
        read = torch.zeros(len(points), dtype=torch.bool, device=points.device)
        read[sender] = True
        read = read[n:]
        wanted = comm.all_to_all(read, receive, send)
        local = torch.cat([torch.arange(n, device=read.device), n - 1 + read.long().cumsum(0)])
        routing = Routing(comm, n, offered[wanted], _counts(wanted, send), _counts(read, receive))
        return Edges(routing, torch.stack([local[sender], local[receiver]]), shifts)


def grid() -> HaloStrategy:
    """The strategy `halo-grid`: a regular grid of ranks."""
    return HaloStrategy(cuts="grid")


def _offers(inside: Tensor, batch: Tensor, frames: Frames, mine: Tensor, reach: float, comm: Comm) -> list[Tensor]:
    """For each rank the rows of mine that may lie within `reach` Å of its region; only regions near mine are looked at."""
    present = mine[:, 0, 0].isfinite().nonzero().flatten()
    regions = torch.cat([present[:, None].double(), mine[present].flatten(1)], dim=1)
    counts = comm.all_gather(torch.tensor(len(regions))).tolist()
    regions = comm.all_gather_rows(regions, counts)
    system, box = regions[:, 0].long(), regions[:, 1:].view(-1, 2, 3)
    own = mine[system]
    near = frames.within(reach, box, own[:, 0], own[:, 1], system) & own[:, 0, 0].isfinite()
    owner = torch.repeat_interleave(torch.arange(comm.size), torch.tensor(counts)).tolist()
    offers = [torch.zeros(0, dtype=torch.long, device=inside.device)] * comm.size
    for k in near.nonzero().flatten().tolist():
        if owner[k] != comm.rank:
            rows = (batch == system[k]).nonzero().flatten()
            close = frames.within(reach, box[k : k + 1], inside[rows], inside[rows], batch[rows])
            offers[owner[k]] = torch.cat([offers[owner[k]], rows[close]])
    return offers


def _pairs(
    points: Tensor, batch: Tensor, n_owned: int, lattices: Frames, cutoff: float, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Senders (E,), receivers (E,) and shifts (E, 3) of the pairs within `cutoff`, sorted by receiver.

    Receivers are owned, or send to an owned one over fewer than `depth` edges. `lattices` are on the host.
    """
    found = []
    for system in batch[:n_owned].unique().tolist():
        rows = (batch == system).nonzero().flatten()
        near, new = points[rows], rows < n_owned
        receives = new
        for _ in range(depth):
            vectors, periodic = lattices.vectors[system], lattices.periodic[system]
            i, j, shifts = neighbours(near, new.nonzero().flatten(), vectors, periodic, cutoff)
            new = torch.zeros_like(receives).index_fill_(0, j, True) & ~receives
            receives = receives | new
            found.append((j, i, shifts) if len(rows) == len(points) else (rows[j], rows[i], shifts))
    if len(found) == 1:  # one search is in order
        return found[0]
    none = batch.new_empty(0, dtype=torch.long)
    sender, receiver, shifts = (torch.cat(parts) for parts in zip((none, none, points.new_empty(0, 3)), *found, strict=True))
    receiver, order = receiver.sort(stable=True)
    return sender[order], receiver, shifts[order]


def _counts(mask: Tensor, splits: list[int]) -> tuple[int, ...]:
    """How many of each part of `mask` are set."""
    total = [0, *mask.long().cumsum(0).tolist()]
    ends = [0, *accumulate(splits)]
    return tuple(total[b] - total[a] for a, b in pairwise(ends))
