"""StaticBuffers: what a captured step reads and writes. The tensors keep their sizes and addresses between rebuilds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from math import ceil
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from alchemi_domain.atom_buffers import AtomBuffers, Padding
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.edge_lists import cutoffs, lengths
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import (
    BOTH,
    EDGE,
    NODES,
    OWNED,
    PADDED,
    Routing,
    Shard,
    ShardTensor,
    drop_ghosts,
    keep_ghosts,
    plain,
    prefetch_ghosts,
    tag,
    tag_all_rows,
)
from alchemi_spec import OutputKind

SPARE_ROWS = 32
"""Rows to spare besides a margin: small counts change by as many."""
INSIDE, OUTSIDE = 0.9, 2.0
"""How long padding edges are, in cutoffs. They are beyond the cutoff if the model ignores such edges."""


@dataclass(frozen=True)
class Capacity:
    """How much fits: owned rows, rows sent to each peer, ghosts of each peer, and edges of each list.

    `listed`: edges within the cutoff and the skin. `passed`: edges that the model is passed, of lists that are trimmed.
    """

    owned: int
    send: tuple[int, ...]
    receive: tuple[int, ...]
    listed: Mapping[str, int]
    passed: Mapping[str, int]

    @classmethod
    def needed(cls, data: Mapping[str, Tensor], passed: Mapping[str, int]) -> "Capacity":
        """What `data` takes, with one padding row, if the model is `passed` so many edges of each trimmed list."""
        routing, start = routing_of(data), "edge_index"
        listed = {name.removeprefix(start): value.shape[1] for name, value in data.items() if name.startswith(start)}
        return cls(routing.n_owned + 1, routing.send_splits, routing.recv_splits, listed, passed)

    def with_margin(self, margin: float) -> "Capacity":
        """Larger by the fraction `margin` and a few rows. Both peers compute the same number for rows sent between them."""
        few = SPARE_ROWS * (margin > 0)
        owned = ceil(self.owned * (1 + margin)) + few
        growth = owned / self.owned  # edges grow with atoms
        peers = [tuple(ceil(n * (1 + 2 * margin)) + few * (n > 0) for n in rows) for rows in (self.send, self.receive)]
        edges = [{k: ceil(n * growth) + 4 * few for k, n in lists.items()} for lists in (self.listed, self.passed)]
        return Capacity(owned, peers[0], peers[1], edges[0], edges[1])

    def maximum(self, other: "Capacity") -> "Capacity":
        """The smallest capacity that holds both."""
        return Capacity(*(_larger(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))

    def __str__(self) -> str:
        edges = ", ".join(f"{self.passed.get(name, n)} of {n} edges{name}" for name, n in self.listed.items())
        return f"{self.owned} owned rows, {sum(self.receive)} ghosts, {edges}"


def _larger(a: Any, b: Any) -> Any:
    if isinstance(a, Mapping):
        return {name: max(a[name], b[name]) for name in a}
    return tuple(map(max, a, b)) if isinstance(a, tuple) else max(a, b)


def routing_of(data: Mapping[str, Tensor]) -> Routing:
    """The routing of prepared data."""
    shard: Shard = cast(ShardTensor, data["positions"]).shard
    return shard.routing


class StaticBuffers:
    """Atom buffers at a capacity, with routing, ghosts and edges of fixed size. Padding changes no value and no gradient.

    `atoms`: the rows, padding atoms included. A padding atom's row fills each message up; edges from a padding atom to its own
    image fill each list up. `data`: what the model is passed; its tensors of owned rows and of systems are those of `atoms`.
    Only `fill` writes what a step reads, but for what moves; see `AtomBuffers`.
    """

    def __init__(self, model: DistributedModel, capacity: Capacity, data: Mapping[str, Tensor], batch: ShardedBatch) -> None:
        """Allocate for the fields of `batch` and what was prepared of it, `data`; `fill` copies them in."""
        self.model, self.capacity, device = model, capacity, batch.comm.device
        self.atoms = AtomBuffers.padded(batch, capacity.owned, _padding(model, len(batch.cell)))
        self.shard = self._make_shard(cast(ShardTensor, data["positions"]).shard)
        self.data = self._make_data(data)
        self.is_real = torch.zeros(capacity.owned, dtype=torch.bool, device=device)
        self.spare_edges = torch.zeros((), dtype=torch.float64, device=device)
        self.systems = self._with_ghost_rows(self.atoms.all_rows.batch)
        self._ghosts = {name: self._with_ghost_rows(value) for name, value in self._constant_fields().items()}
        self._padding_edges = {name: self._empty_edges(n) for name, n in capacity.passed.items()}

    @property
    def routing(self) -> Routing:
        """Who sends which rows, padding included."""
        return self.shard.routing

    @property
    def _n_rows(self) -> int:
        """Owned and ghost rows."""
        return self.capacity.owned + self.routing.n_ghost

    def _make_shard(self, before: Shard) -> Shard:
        routing = replace(
            before.routing,
            n_owned=self.capacity.owned,
            send=before.routing.send.new_zeros(sum(self.capacity.send)),
            send_splits=self.capacity.send,
            recv_splits=self.capacity.receive,
            no_ghosts=False,  # a later list may have ghosts
        )
        return Shard(before.spec, routing, before.n_systems + 1, before.table)

    def _make_data(self, prepared: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors for all that was `prepared`, with the same tags."""
        rows = self.atoms.all_rows
        data: dict[str, Tensor] = {"cell": rows.cell, "pbc": rows.pbc, **rows.per_system}
        owned = {"positions": rows.positions, "atomic_numbers": rows.atomic_numbers, "batch": rows.batch, **rows.per_atom}
        for name, value in owned.items():
            like = cast(ShardTensor, prepared[name])
            held = value if like.rows is OWNED else self._with_ghost_rows(plain(like))
            data[name] = tag(held, self.shard, like.rows, like.points_at, like.end)
        data["nodes"] = tag_all_rows(torch.arange(self._n_rows, device=rows.ids.device), self.shard)
        for name, n in self.capacity.listed.items():
            self._set_edges(data, name, *self._empty_edges(n))
        return data

    def _with_ghost_rows(self, owned: Tensor) -> Tensor:
        """Empty [owned | ghost] rows."""
        return owned.new_zeros(self._n_rows, *owned.shape[1:])

    def _empty_edges(self, n: int) -> tuple[Tensor, Tensor]:
        rows = self.atoms.all_rows
        return rows.ids.new_zeros(2, n), rows.positions.new_zeros(n, 3)

    def _set_edges(self, data: dict[str, Tensor], name: str, edge_index: Tensor, shifts: Tensor) -> None:
        data[f"edge_index{name}"] = tag(edge_index, self.shard, None, NODES, BOTH)
        data[f"edge_shifts{name}"] = tag(shifts, self.shard, EDGE)

    def _constant_fields(self) -> dict[str, Tensor]:
        """The model's fields of owned rows that do not change in a step. The model may read them of ghosts."""
        owned = {name: value for name, value in self.data.items() if getattr(value, "rows", None) is OWNED}
        return {name: value for name, value in owned.items() if name != "positions"}

    @torch.no_grad()
    def fill(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> None:
        """Copy in `batch` and what was prepared of it, `data`. Every rank must call it."""
        self.atoms.fill(batch)
        self.is_real.copy_(torch.arange(self.capacity.owned, device=self.is_real.device) < self.atoms.n_real)
        rows = self._fill_routing(routing_of(data))
        padding = cast(Padding, self.atoms.padding)
        for name, value in data.items():
            if getattr(value, "rows", None) is PADDED and name != "nodes":
                plain(self.data[name]).fill_(padding.value(name))[rows] = plain(value)
        for name in self.capacity.listed:
            self._fill_edges(name, rows, *_edges(data, name))
        self._fill_ghosts()
        self.spare_edges.fill_(torch.inf)

    def _fill_routing(self, routing: Routing) -> Tensor:
        """Fill in what is sent -> the rows here (n_owned + n_ghost,) of the [owned | ghost] rows of `routing`."""
        parts = routing.send.split(list(routing.send_splits))
        filled = [
            F.pad(p, (0, n - len(p)), value=self.capacity.owned - 1) for p, n in zip(parts, self.capacity.send, strict=True)
        ]
        self.routing.send.copy_(torch.cat(filled))
        starts = accumulate(self.capacity.receive, initial=self.capacity.owned)
        ghosts = [torch.arange(at, at + n) for at, n in zip(starts, routing.recv_splits, strict=False)]
        return torch.cat([torch.arange(routing.n_owned), *ghosts]).to(routing.send.device)

    def _fill_edges(self, name: str, rows: Tensor, edge_index: Tensor, shifts: Tensor) -> None:
        n, (index, shift) = edge_index.shape[1], _edges(self.data, name)
        index[:, :n], shift[:n] = rows[edge_index], shifts
        self._fill_padding_edges(index[:, n:], shift[n:])
        if name in self._padding_edges:
            self._fill_padding_edges(*self._padding_edges[name])

    def _fill_padding_edges(self, edge_index: Tensor, shifts: Tensor) -> None:
        """Edges from padding atoms to their own images: about as many for each, sorted by receiver."""
        n, n_real = edge_index.shape[1], self.atoms.n_real
        padding_atoms = self.capacity.owned - n_real
        edge_index.copy_(n_real + torch.arange(n, device=edge_index.device) * padding_atoms // max(n, 1))
        shifts.zero_()[:, 0] = 1

    def _fill_ghosts(self) -> None:
        """Fetch the ghosts' rows of all constant fields in one message, and keep them where a gather looks for them."""
        constant = self._constant_fields()
        owned = [self.atoms.all_rows.batch, *map(plain, constant.values())]
        ghosts = [t[:0] for t in owned] if self.routing.no_exchange else self.routing.exchange_all(*owned)
        for both, mine, more in zip([self.systems, *self._ghosts.values()], owned, ghosts, strict=True):
            both.copy_(torch.cat([mine, more]))
        for name, value in constant.items():
            keep_ghosts(self.shard, value, self._ghosts[name])

    @property
    def trims_edges(self) -> bool:
        """Each step passes the model a new, trimmed list."""
        return bool(self._padding_edges)

    def drop_ghosts(self) -> None:
        """Drop the ghost rows that were fetched at other positions. A graph's replay moves atoms without raising a version."""
        drop_ghosts(self.shard, self.data["positions"])

    def trim_edges(self) -> Mapping[str, Tensor]:
        """`data`, but with only those edges that are within the model's cutoff now. No host synchronisation."""
        if not self.trims_edges:
            return self.data
        points, data = plain(self.data["positions"]), dict(self.data)
        points = points if self.shard.storage.padded else prefetch_ghosts(self.shard, points)[0]
        for name, cutoff in cutoffs(self.model.model).items():
            edge_index, shifts = _edges(self.data, name)
            within = lengths(edge_index, shifts, points, self.systems, self.atoms.all_rows.cell) <= cutoff
            within &= self.systems[edge_index[1]] < self.shard.n_systems - 1
            self._set_edges(data, name, *self._select_edges(within, edge_index, shifts, *self._padding_edges[name]))
        return data

    def _select_edges(
        self, within: Tensor, edge_index: Tensor, shifts: Tensor, padding_index: Tensor, padding_shifts: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The edges that are `within` the cutoff, in their order, then padding edges. `spare_edges` keeps its minimum."""
        count, capacity = within.cumsum(0), padding_index.shape[1]
        self.spare_edges.copy_(torch.minimum(self.spare_edges, (capacity - count[-1]).double()))
        slots = torch.arange(1, capacity + 1, device=within.device)
        source = torch.searchsorted(count, slots).clamp(max=len(within) - 1)
        taken = slots <= count[-1]
        index = torch.where(taken, edge_index[:, source], padding_index)
        return index, torch.where(taken[:, None], shifts[source], padding_shifts)

    def mask_padding(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Outputs with zeros in padding atoms' rows, and without the padding system's row."""

        def zeroed(rows: Tensor) -> Tensor:
            return torch.where(self.is_real.view(-1, *[1] * (rows.ndim - 1)), rows, 0)

        return self._by_kind(results, zeroed, lambda rows: rows[:-1])

    def real_rows(self, results: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of masked outputs, without padding atoms' rows."""
        return self._by_kind(results, lambda rows: rows[: self.atoms.n_real].clone(), torch.clone)

    def _by_kind(
        self, results: Mapping[str, Tensor], of_atoms: Callable[[Tensor], Tensor], of_systems: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        kinds = self.model.spec.output_kinds
        return {name: (of_atoms if kinds[name] is OutputKind.PER_NODE else of_systems)(v) for name, v in results.items()}

    @property
    def tensors(self) -> list[Tensor]:
        """All that a step reads and `fill` or an integrator writes: the inputs of a compiled step."""
        held = [self.routing.send, self.is_real, self.spare_edges, self.systems, self.atoms.all_rows.positions]
        padding_edges = [t for pair in self._padding_edges.values() for t in pair]
        return [*held, *map(plain, self.data.values()), *self._ghosts.values(), *padding_edges]


def _padding(model: DistributedModel, n_systems: int) -> Padding:
    known = model.contract.elements
    length = (OUTSIDE if model.spec.ignores_longer_edges else INSIDE) * max(cutoffs(model.model).values())
    return Padding(n_systems, length, min(known) if known else 1)


def _edges(data: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    return plain(data[f"edge_index{name}"]), plain(data[f"edge_shifts{name}"])
