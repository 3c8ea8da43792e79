"""Who owns which rows, who sends which rows to whom, and the exchange of rows. Frozen; made with the neighbour list."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from alchemi_shardtensor.transport.collectives import AllToAllRows, all_gather_rows, reduce_scatter_rows
from alchemi_shardtensor.transport.comm import Comm


@dataclass(frozen=True, eq=False)
class Owners:
    """Which rank owns each node, by global id, and as which of its rows; the same on every rank.

    `rank` (N,), `row` (N,), and how many nodes each rank owns.
    """

    comm: Comm
    rank: Tensor
    row: Tensor
    counts: tuple[int, ...]

    @classmethod
    def of(cls, ids: Tensor, comm: Comm) -> "Owners":
        """From the global ids (n_owned,) of this rank's rows. Every rank must call it.

        Raises:
            ValueError: on every rank, unless each of 0 ... N-1 is owned once.

        """
        counts = comm.all_gather(torch.tensor(len(ids))).tolist()
        gathered = all_gather_rows(ids, counts, comm)
        rows = torch.cat([torch.arange(n) for n in counts]).to(ids.device)
        ranks = torch.repeat_interleave(torch.arange(comm.size), torch.tensor(counts)).to(ids.device)
        order = torch.argsort(gathered)
        if not torch.equal(gathered[order], torch.arange(len(gathered), device=ids.device)):
            raise ValueError(
                f"each of the ids 0 ... {len(gathered) - 1} must be owned by one rank, once: {counts} rows are owned"
            )
        return cls(comm, ranks[order], rows[order], tuple(counts))

    @property
    def n_owned(self) -> int:
        """How many nodes this rank owns."""
        return self.counts[self.comm.rank]

    @property
    def ids(self) -> Tensor:
        """The global ids (n_owned,) of this rank's rows, in their order."""
        mine = (self.rank == self.comm.rank).nonzero().flatten()
        return mine[torch.argsort(self.row[mine])]

    @property
    def gather_row(self) -> Tensor:
        """The row of each node (N,) in the table of all ranks' rows, gathered in the order of ranks."""
        starts = torch.tensor([0, *self.counts[:-1]], device=self.rank.device).cumsum(0)
        return starts[self.rank] + self.row

    def route(self, index: Tensor) -> tuple["Routing", Tensor]:
        """The routing that fetches each remote row among `index` (global ids of any shape) once; and the local ids.

        Every rank must call it.

        Raises:
            IndexError: on every rank, where a value is no node's id.

        """
        n, comm = len(self.rank), self.comm
        with comm.agreement():
            if index.numel() and not (int(index.min()) >= 0 and int(index.max()) < n):
                raise IndexError(f"an index that points at {n} nodes has values from {int(index.min())} to {int(index.max())}")
        read = torch.zeros(n, dtype=torch.bool, device=index.device)
        read[index.flatten()] = True
        read &= self.rank != comm.rank
        remote = read.nonzero().flatten()
        remote = remote[torch.argsort(self.rank[remote], stable=True)]
        receive = torch.bincount(self.rank[remote], minlength=comm.size)
        every = comm.all_gather(receive).tolist()
        send = [row[comm.rank] for row in every]
        asked = comm.all_to_all(self.row[remote], receive.tolist(), send)
        local = self.row.clone()
        local[remote] = self.n_owned + torch.arange(len(remote), device=index.device)
        no_ghosts = not any(map(sum, every))
        return Routing(comm, self.n_owned, asked, tuple(send), tuple(receive.tolist()), self, no_ghosts), local[index]


@dataclass(frozen=True, eq=False)
class Routing:
    """Which owned rows each peer reads as ghosts.

    `send`: this rank's rows that others read, grouped by the rank they go to (`send_splits` of them to each); the same row
    may go to several. Ghosts arrive grouped by owner, `recv_splits` from each. `owners`: where global ids are used.
    `no_ghosts`: no rank reads rows of another. `gather_row`: each ghost's row in the all-gathered table, if an all-gather
    fetches them. `wire`: the widest floats in which rows of features are sent.
    """

    comm: Comm
    n_owned: int
    send: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    owners: Owners | None = None
    no_ghosts: bool = False
    gather_row: Tensor | None = None
    counts: tuple[int, ...] = ()
    """How many rows each rank owns, where they are gathered."""
    wire: torch.dtype | None = None
    shards: list[Any] = field(init=False, default_factory=list, repr=False)
    """The shards that were made with this routing: see `shard_of`."""

    @classmethod
    def without_ghosts(cls, n_owned: int, comm: Comm | None = None) -> "Routing":
        """A routing in which no rank reads rows of another."""
        comm = comm or Comm()
        nothing = (0,) * comm.size
        return cls(comm, n_owned, torch.empty(0, dtype=torch.long, device=comm.device), nothing, nothing, no_ghosts=True)

    @property
    def n_ghost(self) -> int:
        """How many remote rows this rank reads."""
        return sum(self.recv_splits)

    def to(self, device: torch.device) -> "Routing":
        """The same routing for rows on `device`."""
        return replace(
            self, send=self.send.to(device), gather_row=None if self.gather_row is None else self.gather_row.to(device)
        )

    def with_collective(self, collective: Literal["auto", "exchange", "all_gather"]) -> "Routing":
        """The same ghosts, fetched by this collective. `auto`: all rows are gathered where most are read somewhere.

        Every rank must call it. An all-gather sends each row once to all; an exchange sends it to each that reads it, after
        packing: where a rank reads more than three quarters of the others' rows, packing costs more than it saves.
        """
        counts = self.comm.all_gather(torch.tensor([self.n_owned, self.n_ghost])).tolist()
        total = sum(n for n, _ in counts)
        dense = any(ghosts > 0.75 * (total - n) for n, ghosts in counts)
        if self.comm.size == 1 or collective == "exchange" or (collective == "auto" and not dense):
            return replace(self, gather_row=None)
        before = sum(n for n, _ in counts[: self.comm.rank])
        mine = before + torch.arange(self.n_owned, device=self.send.device)
        return replace(self, gather_row=replace(self, gather_row=None).exchange(mine), counts=tuple(n for n, _ in counts))

    def exchange(self, owned: Tensor) -> Tensor:
        """Owned rows (n_owned, *F) -> ghost rows (n_ghost, *F). Adjoint: `reverse`. Every rank must call it."""
        return self.exchange_all(owned)[0]

    def exchange_all(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """`exchange` of several fields, of any dtypes, in one message."""
        _check_rows("exchange", "owned", self.n_owned, fields)
        if self.gather_row is not None:
            return tuple(self._gathered(owned) for owned in fields)
        sent = [self._narrowed(owned.index_select(0, self.send)) for owned in fields]
        got = AllToAllRows.apply(self.comm, self.send_splits, self.recv_splits, False, *sent)  # type: ignore[no-untyped-call]
        return tuple(ghosts.to(owned.dtype) for ghosts, owned in zip(got, fields, strict=True))

    def reverse(self, ghosts: Tensor) -> Tensor:
        """Ghost rows (n_ghost, *F) -> summed into owned rows (n_owned, *F). Adjoint: `exchange`. Every rank must call it."""
        return self.reverse_all(ghosts)[0]

    def reverse_all(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """`reverse` of several fields in one message."""
        _check_rows("reverse", "ghost", self.n_ghost, fields)
        if self.gather_row is not None:
            return tuple(self._scattered(ghosts) for ghosts in fields)
        sent = map(self._narrowed, fields)
        received = AllToAllRows.apply(self.comm, self.recv_splits, self.send_splits, True, *sent)  # type: ignore[no-untyped-call]
        return tuple(
            f.new_zeros(self.n_owned, *f.shape[1:]).index_add(0, self.send, r.to(f.dtype))
            for f, r in zip(fields, received, strict=True)
        )

    def _narrowed(self, rows: Tensor) -> Tensor:
        """Rows in the dtype they are sent in; rows of three numbers may be coordinates, whose digits are needed."""
        wide = self.wire is not None and rows.is_floating_point() and rows.itemsize > self.wire.itemsize
        return rows.to(self.wire) if wide and rows.shape[1:] != (3,) else rows

    def _gathered(self, owned: Tensor) -> Tensor:
        return all_gather_rows(owned, self.counts, self.comm).index_select(0, self.gather_row)  # type: ignore[arg-type]

    def _scattered(self, ghosts: Tensor) -> Tensor:
        table = ghosts.new_zeros(sum(self.counts), *ghosts.shape[1:]).index_add(0, self.gather_row, ghosts)  # type: ignore[arg-type]
        return reduce_scatter_rows(table, self.counts, self.comm)

    def with_ghosts(self, owned: Tensor) -> Tensor:
        """Owned rows (n_owned, *F) -> [owned | ghost] rows (n_owned + n_ghost, *F); alone, the owned rows are all."""
        return self.with_ghosts_all(owned)[0]

    def with_ghosts_all(self, *fields: Tensor) -> tuple[Tensor, ...]:
        """`padded` of several fields, in one message."""
        if self.no_exchange:
            return fields
        return tuple(torch.cat(both) for both in zip(fields, self.exchange_all(*fields), strict=True))

    def reduce_ghosts(self, both: Tensor) -> Tensor:
        """[owned | ghost] rows (n_owned + n_ghost, *F) -> owned rows (n_owned, *F): ghosts' rows are added by their owners."""
        return both if self.no_exchange else both[: self.n_owned] + self.reverse(both[self.n_owned :])

    @property
    def no_exchange(self) -> bool:
        """No rank reads rows of another, so nothing has to be sent."""
        return self.comm.size == 1 or self.no_ghosts


def _check_rows(verb: str, kind: str, n: int, fields: tuple[Tensor, ...]) -> None:
    for f in fields:
        if len(f) != n:
            raise ValueError(f"{verb} takes this rank's {n} {kind} rows, not {len(f)}")


class Edges(NamedTuple):
    """A rank's part of a graph: all edges of the nodes it owns, sorted by receiver, and the routing of its ghosts.

    `edge_index` (2, E): senders and receivers by local id. `shifts` (E, 3): whole-numbered S of the geometry
    x[sender] + S @ cell - x[receiver].
    """

    routing: Routing
    edge_index: Tensor
    shifts: Tensor

    @classmethod
    def of(cls, routing: Routing, edge_index: Tensor, shifts: Tensor) -> "Edges":
        """Edges from anywhere, in any order. Every rank must call it.

        Raises:
            ValueError: on every rank, for an edge that is listed twice or names a row that is not there.

        """
        with routing.comm.agreement():
            rows = torch.tensor([routing.n_owned + routing.n_ghost, routing.n_owned])
            edges = torch.cat([edge_index.T.to(shifts.dtype), shifts], dim=1)
            _, group, count = torch.unique(edges, dim=0, return_inverse=True, return_counts=True)
            faults = {
                f"names a row beyond {rows.tolist()}": ((edge_index < 0) | (edge_index >= rows[:, None])).any(0),
                "is listed twice, and would count twice": count[group] > 1,
            }
            for why, wrong in faults.items():
                if wrong.any():
                    i, j, *shift = edges[wrong][0].int().tolist()
                    raise ValueError(
                        f"rank {routing.comm.rank}'s edge from {i} to {j} with shift {shift} {why}.\n"
                        f"List every edge of an owned receiver once, by local ids."
                    )
        order = torch.argsort(edge_index[1], stable=True)
        return cls(routing, edge_index[:, order], shifts[order])
