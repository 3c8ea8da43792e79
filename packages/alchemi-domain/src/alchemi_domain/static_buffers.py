"""Room: the tensors that a captured step reads and writes. They keep their places and sizes while lists are made anew."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import ceil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.edge_lists import cutoffs, lengths
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import BOTH, EDGE, NODES, OWNED, PADDED, Routing, Shard, ShardTensor, brought, plain, tag, tag_all
from alchemi_spec import OutputKind

ROWS = ("positions", "atomic_numbers", "batch", "ids")
"""The batch's fields of which each atom has a row, beside `per_atom` and `carried`."""
FEW = 32
"""Rows to spare beside a margin, for small numbers that change by as many."""
INSIDE, OUTSIDE = 0.9, 2.0
"""How long dead edges are, in cutoffs: out of reach, where a model ignores what is."""


@dataclass(frozen=True)
class Capacity:
    """How many fit: owned rows, rows sent to and ghosts of each peer, edges listed and, if these are trimmed, edges shown."""

    owned: int
    send: tuple[int, ...]
    receive: tuple[int, ...]
    listed: Mapping[str, int]
    shown: Mapping[str, int]

    @classmethod
    def needed(cls, data: Mapping[str, Tensor], shown: Mapping[str, int]) -> "Capacity":
        """Just what `data` has, with one dead row, of which the model is to be `shown` so many edges."""
        routing, start = routing_of(data), "edge_index"
        listed = {name.removeprefix(start): value.shape[1] for name, value in data.items() if name.startswith(start)}
        return cls(routing.n_owned + 1, routing.send_splits, routing.recv_splits, listed, shown)

    def grown(self, margin: float) -> "Capacity":
        """With room to spare: `margin` of all, and a few. Peers find the same number for what goes from one to the other."""
        few = FEW * (margin > 0)
        owned = ceil(self.owned * (1 + margin)) + few
        per_atom = owned / self.owned  # as atoms come, their edges do
        peers = [tuple(ceil(n * (1 + 2 * margin)) + few * (n > 0) for n in rows) for rows in (self.send, self.receive)]
        edges = [{k: ceil(n * per_atom) + 4 * few for k, n in lists.items()} for lists in (self.listed, self.shown)]
        return Capacity(owned, peers[0], peers[1], edges[0], edges[1])

    def joined(self, other: "Capacity") -> "Capacity":
        """What holds both."""
        return Capacity(*(_larger(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def __str__(self) -> str:
        edges = ", ".join(f"{self.shown.get(name, n)} of {n} edges{name}" for name, n in self.listed.items())
        return f"{self.owned} owned rows, {sum(self.receive)} ghosts, {edges}"


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {name: max(a[name], b[name]) for name in a}
    return tuple(map(max, a, b)) if isinstance(a, tuple) else max(a, b)


def routing_of(data: Mapping[str, Tensor]) -> Routing:
    """Who sends what, for prepared data."""
    return cast(ShardTensor, data["positions"]).shard.routing


class Room:
    """One rank's tensors of fixed size. What is left over is dead: it changes neither values nor gradients.

    Owned rows beyond this rank's `n` atoms are dead atoms: of a system of their own, the last, in a box of its own, with
    infinite masses and no velocities. What is sent to fill a message up is a dead atom's, and edges that fill a list up go from
    a dead atom to its own image. `data`: what the model sees; `batch`: the batch's fields, dead rows and system included.
    """

    n: int

    def __init__(self, model: DistributedModel, capacity: Capacity, data: Mapping[str, Tensor], batch: ShardedBatch) -> None:
        """For what was prepared of `batch`; `fill` puts it in."""
        before, device = cast(ShardTensor, data["positions"]).shard, batch.comm.device
        self.model, self.capacity = model, capacity
        send = torch.zeros(sum(capacity.send), dtype=torch.long, device=device)
        self.routing = replace(
            before.routing,
            n_owned=capacity.owned,
            send=send,
            send_splits=capacity.send,
            recv_splits=capacity.receive,
            idle=False,  # something may be read later
        )
        self.shard = Shard(before.spec, self.routing, before.n_systems + 1, before.table)
        self.data = {name: self._seen(value) for name, value in data.items() if not name.startswith("edge_")}
        self.data["nodes"] = tag_all(torch.arange(self._n_both, device=device), self.shard)
        for name, n in capacity.listed.items():
            self._show(self.data, name, torch.zeros(2, n, dtype=torch.long, device=device), batch.positions.new_zeros(n, 3))
        self.batch = self._held(batch)
        self.alive = torch.zeros(capacity.owned, dtype=torch.bool, device=device)
        self.left = torch.zeros((), dtype=torch.float64, device=device)
        self.systems = self._both(self.batch.batch)
        self._ghosts = {name: self._both(value) for name, value in self._lasting().items()}
        self._dead = {
            name: (torch.zeros(2, n, dtype=torch.long, device=device), batch.positions.new_zeros(n, 3))
            for name, n in capacity.shown.items()
        }

    @property
    def _n_both(self) -> int:
        return self.capacity.owned + self.routing.n_ghost

    def _seen(self, value: Tensor) -> Tensor:
        """What the model is to see instead of a per-system or per-atom `value`, with its tag."""
        if not isinstance(value, ShardTensor):
            return value.new_zeros(self.shard.n_systems, *value.shape[1:])
        n = self._n_both if value.rows is PADDED else self.capacity.owned
        return tag(plain(value).new_zeros(n, *value.shape[1:]), self.shard, value.rows, value.points_at, value.end)

    def _show(self, data: dict[str, Tensor], name: str, edge_index: Tensor, shifts: Tensor) -> None:
        data[f"edge_index{name}"] = tag(edge_index, self.shard, None, NODES, BOTH)
        data[f"edge_shifts{name}"] = tag(shifts, self.shard, EDGE)

    def _edges(self, data: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        return plain(data[f"edge_index{name}"]), plain(data[f"edge_shifts{name}"])

    def _held(self, batch: ShardedBatch) -> ShardedBatch:
        """The batch's fields with dead rows: the model's very tensors where it sees owned rows."""

        def rows(value: Tensor) -> Tensor:
            return value.new_zeros(self.capacity.owned, *value.shape[1:])

        def seen(name: str, value: Tensor) -> Tensor:
            owned = name in self.data and cast(ShardTensor, self.data[name]).rows is OWNED
            return plain(self.data[name]) if owned else rows(value)

        held: dict[str, Any] = {name: seen(name, getattr(batch, name)) for name in ROWS}
        held["per_atom"] = {name: seen(name, value) for name, value in batch.per_atom.items()}
        held["carried"] = {name: rows(value) for name, value in batch.carried.items()}
        per_system = {name: self.data[name] for name in batch.per_system}
        return replace(batch, **held, per_system=per_system, cell=self.data["cell"], pbc=self.data["pbc"])

    def _both(self, owned: Tensor) -> Tensor:
        """Empty [owned | ghost] rows."""
        return plain(owned).new_zeros(self._n_both, *owned.shape[1:])

    def _lasting(self) -> dict[str, Tensor]:
        """What models see of owned atoms that steps do not change, and that they may read of ghosts."""
        owned = {name: value for name, value in self.data.items() if getattr(value, "rows", None) is OWNED}
        return {name: value for name, value in owned.items() if name != "positions"}

    @torch.no_grad()
    def fill(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> ShardedBatch:
        """Put in what was prepared anew of `batch`, and return it on the rows that are alive. Every rank must call it."""
        self.n = len(batch.ids)
        self.alive.copy_(torch.arange(self.capacity.owned, device=self.alive.device) < self.n)
        places = self._fill_routing(routing_of(data))
        for name in ROWS:
            self._fill_rows(name, getattr(self.batch, name), getattr(batch, name))
        for level in ("per_atom", "carried"):
            for name, value in getattr(batch, level).items():
                self._fill_rows(name, getattr(self.batch, level)[name], value)
        self._fill_systems({"cell": batch.cell, "pbc": batch.pbc, **batch.per_system})
        for name, value in data.items():
            if getattr(value, "rows", None) is PADDED and name != "nodes":
                plain(self.data[name]).fill_(self._dead_value(name))[places] = plain(value)
        for name in self.capacity.listed:
            self._fill_edges(name, places, *self._edges(data, name))
        self._fill_ghosts()
        self.left.fill_(torch.inf)
        return self.living(batch)

    def living(self, batch: ShardedBatch) -> ShardedBatch:
        """`batch` on those rows of this room that are alive."""
        rows: dict[str, Any] = {name: getattr(self.batch, name)[: self.n] for name in ROWS}
        rows |= {k: {n: v[: self.n] for n, v in getattr(self.batch, k).items()} for k in ("per_atom", "carried")}
        rows["per_system"] = {name: value[:-1] for name, value in self.batch.per_system.items()}
        return replace(batch, **rows, cell=self.batch.cell[:-1], pbc=self.batch.pbc[:-1])

    def _fill_routing(self, routing: Routing) -> Tensor:
        """What is sent; and where the [owned | ghost] rows of `routing` stand here."""
        parts = routing.send.split(list(routing.send_splits))
        filled = [
            F.pad(p, (0, n - len(p)), value=self.capacity.owned - 1) for p, n in zip(parts, self.capacity.send, strict=True)
        ]
        self.routing.send.copy_(torch.cat(filled))
        starts = accumulate(self.capacity.receive, initial=self.capacity.owned)
        ghosts = [torch.arange(at, at + n) for at, n in zip(starts, routing.recv_splits, strict=False)]
        return torch.cat([torch.arange(routing.n_owned), *ghosts]).to(routing.send.device)

    def _fill_rows(self, name: str, into: Tensor, value: Tensor) -> None:
        into[: self.n] = value
        into[self.n :] = self._dead_value(name)

    def _dead_value(self, name: str) -> float:
        known = self.model.contract.elements
        values = {"atomic_numbers": min(known) if known else 1, "batch": self.shard.n_systems - 1, "masses": torch.inf}
        return values.get(name, 0)

    def _fill_systems(self, values: Mapping[str, Tensor]) -> None:
        """The dead system's fields are the last one's, but for its box."""
        for name, value in values.items():
            self.data[name].copy_(torch.cat([value, value[-1:]]))
        self.data["pbc"][-1] = False  # so that it has no stress
        wide = OUTSIDE if self.model.spec.ignores_longer_edges else INSIDE
        self.data["cell"][-1].zero_().fill_diagonal_(wide * max(cutoffs(self.model.model).values()))

    def _fill_edges(self, name: str, places: Tensor, edge_index: Tensor, shifts: Tensor) -> None:
        n, (index, shift) = edge_index.shape[1], self._edges(self.data, name)
        index[:, :n], shift[:n] = places[edge_index], shifts
        self._bury(index[:, n:], shift[n:])
        if name in self._dead:
            self._bury(*self._dead[name])

    def _bury(self, edge_index: Tensor, shifts: Tensor) -> None:
        """Edges of dead atoms, to each about as many, in the order of receivers."""
        n, dead = edge_index.shape[1], self.capacity.owned - self.n
        edge_index.copy_(self.n + torch.arange(n, device=edge_index.device) * dead // max(n, 1))
        shifts.zero_()[:, 0] = 1

    def _fill_ghosts(self) -> None:
        """What of ghosts lasts, in one message, where reading it through an index looks for it."""
        lasting = self._lasting()
        owned = [self.batch.batch, *map(plain, lasting.values())]
        still = self.routing.is_still
        ghosts = [t[:0] for t in owned] if still else self.routing.exchange_all(*owned)
        for both, mine, more in zip([self.systems, *self._ghosts.values()], owned, ghosts, strict=True):
            both.copy_(torch.cat([mine, more]))
        for name, value in lasting.items():
            value.__dict__["padded"] = ((self.routing, value._version, value.data_ptr(), None), self._ghosts[name])

    @property
    def trims(self) -> bool:
        """The model is shown another list at each step."""
        return bool(self._dead)

    def forget(self) -> None:
        """What was read of ghosts at other positions: a replay changes them without a trace."""
        self.data["positions"].__dict__.pop("padded", None)
        self.shard.seen.pop("brought", None)

    def shown(self) -> Mapping[str, Tensor]:
        """What the model is to see: of the edges, those that are no longer than its cutoff now. No host synchronisation."""
        if not self.trims:
            return self.data
        points, data = plain(self.data["positions"]), dict(self.data)
        points = points if self.shard.storage.padded else brought(self.shard, points)[0]
        for name, cutoff in cutoffs(self.model.model).items():
            edge_index, shifts = self._edges(self.data, name)
            near = lengths(edge_index, shifts, points, self.systems, self.batch.cell) <= cutoff
            near &= self.systems[edge_index[1]] < self.shard.n_systems - 1
            self._show(data, name, *self._chosen(near, edge_index, shifts, *self._dead[name]))
        return data

    def _chosen(self, near: Tensor, edge_index: Tensor, shifts: Tensor, dead: Tensor, still: Tensor) -> tuple[Tensor, Tensor]:
        """The edges that are near, in their order, then dead ones. `left` remembers the least room that there has been."""
        count, room = near.cumsum(0), dead.shape[1]
        self.left.copy_(torch.minimum(self.left, (room - count[-1]).double()))
        slots = torch.arange(1, room + 1, device=near.device)
        place = torch.searchsorted(count, slots).clamp(max=len(near) - 1)
        taken = slots <= count[-1]
        return torch.where(taken, edge_index[:, place], dead), torch.where(taken[:, None], shifts[place], still)

    def whole(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs without the dead system's rows, and zero in dead atoms'."""

        def zeroed(rows: Tensor) -> Tensor:
            return torch.where(self.alive.view(-1, *[1] * (rows.ndim - 1)), rows, 0)

        return self._by_kind(results, zeroed, lambda rows: rows[:-1])

    def living_rows(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of whole outputs, of the atoms that are alive."""
        return self._by_kind(results, lambda rows: rows[: self.n].clone(), torch.clone)

    def _by_kind(
        self, results: Mapping[str, Tensor], of_atoms: Callable[[Tensor], Tensor], of_systems: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        kinds = self.model.spec.output_kinds
        return {name: (of_atoms if kinds[name] is OutputKind.PER_NODE else of_systems)(v) for name, v in results.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """What a step reads that is filled anew."""
        held = [self.routing.send, self.alive, self.left, self.systems, self.batch.positions]
        return [
            *held,
            *map(plain, self.data.values()),
            *self._ghosts.values(),
            *(t for pair in self._dead.values() for t in pair),
        ]
