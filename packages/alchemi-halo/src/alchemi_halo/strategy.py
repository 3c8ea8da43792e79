"""Halo: partition by space. Owners by recursive bisection, ghosts by distance to the reader's region."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor
from vesin import NeighborList

from alchemi_halo.frames import Frames
from alchemi_shardtensor import Comm, Edges, Routing

SLACK = 1e-6
"""Å added to the reach of an offer, against round-off; what no edge reads is not kept."""


class HaloStrategy:
    """Spatial decomposition. Tensors are on the CPU; positions are used as they are and never wrapped for the model."""

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, n_ranks: int) -> Tensor:
        """The rank (N,) that owns each atom: recursive bisection of each system's wrapped coordinates, by number of atoms.

        Berger and Bokhari, IEEE Trans. Comput. C-36 (1987) 570. Which rank gets a system's first part rotates from
        system to system, so that the remainders of many small systems spread out.
        """
        frames = Frames.of(cell, pbc)
        scaled = frames.wrapped(positions, batch) * frames.heights[batch]
        owner = torch.empty(len(positions), dtype=torch.long)
        for system in range(len(cell)):
            rows = (batch == system).nonzero().flatten()
            for part, members in enumerate(_bisect(scaled, rows, n_ranks)):
                owner[members] = (part + system) % n_ranks
        return owner

    def connect(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms, and the routing of the remote atoms among their senders.

        For `depth` 2 all edges of those senders, too, and so on: what so many layers need that exchange nothing.
        `positions` (n_owned, 3) and `batch` (n_owned,) are this rank's, `cell` (B, 3, 3) and `pbc` (B, 3) all systems'.
        Every rank must call it, also one without atoms.
        """
        frames, n = Frames.of(cell, pbc), len(positions)
        inside = frames.wrapped(positions, batch)
        regions = comm.all_gather(frames.bounds(inside, batch))
        offers = [
            frames.within(depth * cutoff + SLACK, regions[rank], inside, batch).nonzero().flatten()
            if rank != comm.rank
            else torch.empty(0, dtype=torch.long)
            for rank in range(comm.size)
        ]
        offered, send = torch.cat(offers), [len(rows) for rows in offers]
        receive = comm.all_to_all(torch.tensor(send), [1] * comm.size, [1] * comm.size).tolist()
        rows = torch.cat([positions.double(), batch[:, None].double()], dim=1)
        candidates = comm.all_to_all(rows[offered], send, receive)

        points = torch.cat([rows, candidates])
        sender, receiver, shifts = _pairs(points[:, :3], points[:, 3].long(), n, frames, cutoff, depth)
        read = torch.zeros(len(candidates), dtype=torch.bool)
        read[sender[sender >= n] - n] = True
        wanted = comm.all_to_all(read, receive, send)
        local = torch.cat([torch.arange(n), n - 1 + read.long().cumsum(0)])
        routing = Routing(comm, n, offered[wanted], _counts(wanted, send), _counts(read, receive))
        return Edges(routing, torch.stack([local[sender], local[receiver]]), shifts)


def _bisect(scaled: Tensor, rows: Tensor, parts: int) -> list[Tensor]:
    """Rows in `parts` groups of equal size, cut across the longest extent again and again."""
    if parts == 1:
        return [rows]
    left = parts // 2
    if len(rows):
        extent = scaled[rows].amax(0) - scaled[rows].amin(0)
        rows = rows[torch.argsort(scaled[rows, extent.argmax()], stable=True)]
    cut = round(len(rows) * left / parts)
    return _bisect(scaled, rows[:cut], left) + _bisect(scaled, rows[cut:], parts - left)


def _pairs(
    points: Tensor, batch: Tensor, n_owned: int, frames: Frames, cutoff: float, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Senders (E,), receivers (E,) and shifts (E, 3) of the pairs within `cutoff`, sorted by receiver.

    Receivers are owned, or send to an owned one over fewer than `depth` edges.
    """
    search = NeighborList(cutoff=cutoff, full_list=True, sorted=True, n_threads=torch.get_num_threads())
    found = []
    for system in batch[:n_owned].unique().tolist():
        rows = (batch == system).nonzero().flatten()
        box, periodic = frames.vectors[system].numpy(), frames.periodic[system].numpy()
        i, j, shift = map(torch.from_numpy, search.compute(points[rows].numpy(), box, periodic, "ijS"))
        i, j, receives = i.long(), j.long(), rows < n_owned
        for _ in range(depth - 1):
            receives[j[receives[i]]] = True
        kept = receives[i]
        found.append((rows[j[kept]], rows[i[kept]], shift[kept].double()))
    if not found:
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long), torch.empty(0, 3, dtype=torch.float64)
    sender, receiver, shifts = (torch.cat(parts) for parts in zip(*found, strict=True))
    order = torch.argsort(receiver, stable=True)
    return sender[order], receiver[order], shifts[order]


def _counts(mask: Tensor, splits: list[int]) -> tuple[int, ...]:
    """How many of each part of `mask` are set."""
    total = [0, *mask.long().cumsum(0).tolist()]
    ends = [0, *accumulate(splits)]
    return tuple(total[b] - total[a] for a, b in pairwise(ends))
