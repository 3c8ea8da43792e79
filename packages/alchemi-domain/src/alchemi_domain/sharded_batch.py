"""Structures shared out over ranks: a `ShardedBatch`, of which each rank holds its atoms."""

import hashlib
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from alchemi_domain.batch import Batch, check_positions
from alchemi_domain.reading import read_rows, without_atoms
from alchemi_domain.registry import Partition, find_strategy
from alchemi_shardtensor import Comm, DomainConfig, packed_all_to_all
from alchemi_spec import InputError

UNEVEN = 1.1
"""Space is cut anew when a rank has this much more than the heaviest had when it was last."""


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batch shared out over ranks: this rank's atoms, and every structure's cell, on the ranks' device.

    `positions` (n_owned, 3), `atomic_numbers` and `batch` (n_owned,) and `ids` (n_owned,), the rows of the whole batch
    that they are; `cell` (B, 3, 3) and `pbc` (B, 3) of all structures; `n_atoms` of the whole batch; further fields
    `per_atom` (n_owned, *F) and `per_system` (B, *F), which reach the model, and `carried` (n_owned, *F), such as
    velocities, which go with the atoms and do not; `carried["weight"]`, if it is there, is what is balanced. `partition`: who
    owns which part of space, None before it is cut; `heaviest`: the largest rank's load when it was.
    """

    config: DomainConfig
    positions: Tensor
    atomic_numbers: Tensor
    batch: Tensor
    ids: Tensor
    cell: Tensor
    pbc: Tensor
    n_atoms: int
    per_atom: Mapping[str, Tensor] = field(default_factory=dict)
    per_system: Mapping[str, Tensor] = field(default_factory=dict)
    carried: Mapping[str, Tensor] = field(default_factory=dict)
    partition: Partition | None = None
    heaviest: float = 0.0

    @classmethod
    def share(
        cls, batch: Batch | None, config: DomainConfig | None = None, carried: Mapping[str, Tensor] | None = None
    ) -> "ShardedBatch":
        """Share out rank 0's `batch` and `carried`; what other ranks pass is ignored, may be None. Every rank must call it.

        Raises:
            NonFinitePosition: on every rank, for a coordinate that is nan, infinite or beyond 1e8 Å.
            InvalidCell: on every rank, for periodic vectors that do not span a cell.

        """
        config = config or DomainConfig()
        comm = config.comm
        with comm.agreement():
            if comm.rank == 0 and batch is None:
                raise InputError("rank 0 shares the batch out: it must pass one, not None.")
        rows = (batch, dict(carried or {})) if comm.rank == 0 and batch is not None else None
        systems = comm.broadcast_object(None if rows is None else without_atoms(rows))
        whole, carried = rows or systems
        return cls.from_owned(whole, torch.arange(len(whole.positions)), config, carried)

    @classmethod
    @torch.inference_mode(False)
    def from_owned(
        cls, rows: Batch, ids: Tensor, config: DomainConfig | None = None, carried: Mapping[str, Tensor] | None = None
    ) -> "ShardedBatch":
        """Share out anew what each rank has: some `rows` of a batch, all its systems, and the rows' `ids` (n,) in the whole.

        The rows may lie anywhere and in any order; no rank needs those of another. Every rank must call it.

        Raises:
            NonFinitePosition, InvalidCell: on every rank.
            InputError: on every rank, unless each of the ids 0 ... n_atoms - 1 is on one rank, once, with a row of each field,
                and all ranks have the same systems and fields.

        """
        config = config or DomainConfig()
        comm, device, carried = config.comm, config.comm.device, carried or {}
        with comm.agreement():
            find_strategy(config.strategy)
            for name, value in {"positions": rows.positions, **carried}.items():
                if len(value) != len(ids):
                    raise InputError(f"{name} of shape {tuple(value.shape)} must have a row for each of the {len(ids)} ids.")
            check_positions(rows.positions, ids)
        _check_same(rows, carried, comm)
        ids = ids.long()
        _check_ids(ids, comm)
        return cls(
            config,
            rows.positions.to(device),
            rows.atomic_numbers.to(device),
            rows.batch.to(device),
            ids.to(device),
            rows.cell.to(device, copy=True),  # which dynamics change in place
            rows.pbc.to(device, copy=True),
            int(comm.all_reduce(torch.tensor(len(ids)))),
            _on(device, rows.per_atom),
            _on(device, rows.per_system),
            _on(device, carried),
        ).balanced()

    @classmethod
    def from_file(cls, path: str | Path, config: DomainConfig | None = None, index: int = -1) -> "ShardedBatch":
        """One frame of a file, read once. Every rank must call it.

        An extxyz file's lines are dealt out as they are read and each rank parses its own, so that no rank holds all of any
        field; other files are read by rank 0 with ASE. What it has of momenta and masses becomes
        `carried["velocities"]` (n_owned, 3) Å/fs and `carried["masses"]` (n_owned,) amu.

        Raises:
            InputError: on every rank, where there is no such frame, or the file cannot be read.

        """
        config = config or DomainConfig()
        rows, ids, carried = read_rows(path, index, config.comm)
        return cls.from_owned(rows, ids, config, carried)

    @property
    def comm(self) -> Comm:
        """The ranks that hold the shares."""
        return self.config.comm

    def carrying(self, **fields: Tensor) -> "ShardedBatch":
        """The same atoms, with these per-atom fields (n_owned, *F) carried along, too."""
        return replace(self, carried={**self.carried, **fields})

    def balanced(self, weights: Tensor | None = None) -> "ShardedBatch":
        """Space cut anew, for an equal sum of `weights` (n_owned,) on each rank, and each atom with its owner.

        Weights are costs, such as a rank's measured step time over its number of atoms; they are carried along from then on.
        """
        batch = self if weights is None else self.carrying(weight=weights.to(self.positions))
        weights, strategy = batch.carried.get("weight"), find_strategy(self.config.strategy)
        partition = strategy.partition(self.positions, self.batch, self.cell, self.pbc, self.comm, weights, ids=self.ids)
        moved = replace(batch, partition=partition).migrated()
        return replace(moved, heaviest=moved._largest_load())

    def _largest_load(self) -> float:
        weights = self.carried.get("weight")
        load = torch.tensor(float(len(self.ids)), dtype=torch.float64) if weights is None else weights.double().sum()
        return self.comm.all_reduce(load, "max").item()

    def migrated(self) -> "ShardedBatch":
        """Each atom with the rank that owns the part of space it is in now, in one packed exchange, in the order of ids."""
        owner = self.partition.owners(self.positions, self.batch, self.cell, self.pbc, self.ids)  # type: ignore[union-attr]
        send = torch.bincount(owner, minlength=self.comm.size).cpu()
        ones = [1] * self.comm.size
        receive = self.comm.all_to_all(send, ones, ones)
        order = torch.argsort(owner, stable=True)
        fields = (self.positions, self.atomic_numbers, self.batch, self.ids, *self.per_atom.values(), *self.carried.values())
        moved = packed_all_to_all(self.comm, [f.detach()[order] for f in fields], send.tolist(), receive.tolist())
        order = torch.argsort(moved[3])
        positions, numbers, batch, ids, *rest = (f[order] for f in moved)
        more = iter(rest)
        per_atom, carried = ({name: next(more) for name in level} for level in (self.per_atom, self.carried))
        return replace(
            self, positions=positions, atomic_numbers=numbers, batch=batch, ids=ids, per_atom=per_atom, carried=carried
        )

    def settled(self) -> "ShardedBatch":
        """`migrated`, and `balanced` again where a rank has come to own much more than others."""
        moved = self.migrated()
        atom = self.heaviest * self.comm.size / max(self.n_atoms, 1)
        return moved.balanced() if moved._largest_load() > max(UNEVEN * self.heaviest, self.heaviest + atom) else moved

    def gather(self, rows: Tensor, dst: int | None = None) -> Tensor:
        """Values of this rank's atoms (n_owned, *F) -> of all atoms (n_atoms, *F), in the batch's order.

        On every rank; or on rank `dst` alone, others having none of them (0, *F). Every rank must call it.
        """
        comm, ids = self.comm, self.ids.to(rows.device)
        everyone = range(comm.size) if dst is None else [dst]
        counts = comm.all_gather(torch.tensor(len(ids))).tolist()
        send = [len(ids) if rank in everyone else 0 for rank in range(comm.size)]
        receive = counts if comm.rank in everyone else [0] * comm.size
        fields = [f.repeat(len(everyone), *[1] * (f.ndim - 1)) for f in (rows, ids)]
        values, places = packed_all_to_all(comm, fields, send, receive)
        return torch.empty_like(values).index_copy_(0, places, values)

    def in_order(self, *rows: Tensor, unit: int = 1) -> tuple[int, list[Tensor]]:
        """Values of this rank's atoms (n_owned, *F) -> those of the atoms `first`, `first` + 1, ... and `first`.

        The whole batch in stretches of ids, one for each rank, as a file has it: no rank holds all. They are as equal as whole
        chunks of `unit` atoms can be. Every rank must call it.
        """
        comm, chunks = self.comm, -(-self.n_atoms // unit)
        ends = [min(self.n_atoms, rank * chunks // comm.size * unit) for rank in range(comm.size + 1)]
        starts = torch.tensor(ends, device=self.ids.device)
        order = torch.argsort(self.ids)
        ids = self.ids[order]
        send = torch.searchsorted(ids, starts).diff().cpu()
        receive = comm.all_to_all(send, [1] * comm.size, [1] * comm.size)
        got = packed_all_to_all(comm, [ids, *(r.detach()[order] for r in rows)], send.tolist(), receive.tolist())
        order = torch.argsort(got[0])
        return ends[comm.rank], [g[order] for g in got[1:]]

    def why_no_stress(self) -> list[str | None]:
        """For each structure, why it has no stress, or None if it has one."""
        return self._no_stress

    @cached_property
    def without_stress(self) -> Tensor:
        """Which structures (B,) have no stress, on the ranks' device."""
        return torch.tensor([why is not None for why in self._no_stress], device=self.comm.device)

    @cached_property
    def _no_stress(self) -> list[str | None]:
        volumes = torch.linalg.det(self.cell.double()).abs().tolist()
        return [
            "it is not periodic" if not periodic else "its cell has no volume" if volume < 1e-6 else None
            for periodic, volume in zip(self.pbc.any(-1).tolist(), volumes, strict=True)
        ]


def _on(device: torch.device, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In one order on every rank."""
    return {name: fields[name].to(device, copy=True) for name in sorted(fields)}


def _check_same(rows: Batch, carried: Mapping[str, Tensor], comm: Comm) -> None:
    """Refuse systems or kinds of fields that are not the same on every rank."""
    per_system = {"cell": rows.cell, "pbc": rows.pbc, **rows.per_system}
    per_atom = {"positions": rows.positions, "atomic_numbers": rows.atomic_numbers, **rows.per_atom, **carried}
    mine = {name: hashlib.sha256(pickle.dumps(value.tolist())).hexdigest() for name, value in per_system.items()}
    mine |= {name: f"{value.dtype}, (n, {tuple(value.shape[1:])})" for name, value in per_atom.items()}
    first, *others = comm.gather_objects(mine)
    for rank, other in enumerate(others, 1):
        differing = [name for name in sorted({*first, *other}) if other.get(name) != first.get(name)]
        if differing:
            raise InputError(
                f"rank {rank} has other {', '.join(differing)} than rank 0: all ranks give the same systems and fields."
            )


def _check_ids(ids: Tensor, comm: Comm) -> None:
    """Refuse ids that are not 0 ... n - 1, each once: each is counted by the rank whose stretch it falls into."""
    n = int(comm.all_reduce(torch.tensor(len(ids))))
    bad = bool(((ids < 0) | (ids >= n)).any())
    starts = torch.tensor([rank * n // comm.size for rank in range(comm.size + 1)])
    mine = ids.cpu().sort().values.clamp(0, max(n - 1, 0))
    send = torch.searchsorted(mine, starts).diff()
    got = comm.all_to_all(mine, send.tolist(), comm.all_to_all(send, [1] * comm.size, [1] * comm.size).tolist())
    first, last = starts[comm.rank : comm.rank + 2].tolist()
    bad |= not torch.equal(got.sort().values, torch.arange(first, last))
    with comm.agreement():
        if bad:
            raise InputError(f"each of the ids 0 ... {n - 1} must be on one rank, once: the rows of {n} atoms were given.")
