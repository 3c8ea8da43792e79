"""ShardedBatch: structures divided among ranks. Each rank holds its own atoms."""

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alchemi_domain.batch import Batch, check_positions
from alchemi_domain.reading import read_rows, without_atoms
from alchemi_domain.registry import find_strategy
from alchemi_shardtensor import Comm, DomainConfig, Partition, packed_all_to_all
from alchemi_spec import InputError

UNEVEN = 1.1
"""Atoms are divided anew when a rank's load is this much above the largest load right after the last division."""
ROW_FIELDS = ("positions", "atomic_numbers", "batch", "ids")
"""The batch's own fields with one row per atom, besides `per_atom` and `extra_fields`."""


@dataclass(frozen=True, eq=False)
class ShardedBatch:
    """A batch divided among ranks: this rank's atoms, and the cells of all structures, on the rank's device.

    `positions` (n_owned, 3) Å, `atomic_numbers` (n_owned,), `batch` (n_owned,) each atom's structure, and `ids` (n_owned,) its
    row in the whole batch, which has `n_atoms`; `cell` (B, 3, 3) Å and `pbc` (B, 3) of all structures. `per_atom`
    (n_owned, *F) and `per_system` (B, *F) are further fields that the model is passed. `extra_fields` (n_owned, *F), such as
    velocities, migrate with the atoms, but the model is not passed them; `extra_fields["weight"]`, if there is one, is each
    atom's cost. `partition`: which rank owns which atom, None before the first division; `heaviest`: the largest load of a
    rank right after it. In a `Domain` a batch is a view of its `AtomBuffers`, which own the tensors.
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
    extra_fields: Mapping[str, Tensor] = field(default_factory=dict)
    partition: Partition | None = None
    heaviest: float = 0.0

    @classmethod
    def scatter(
        cls, batch: Batch | None, config: DomainConfig | None = None, extra_fields: Mapping[str, Tensor] | None = None
    ) -> "ShardedBatch":
        """Divide rank 0's `batch` and `extra_fields` among the ranks. Other ranks may pass None. Every rank must call it.

        Raises:
            NonFinitePosition: on every rank, for a coordinate that is nan, infinite or beyond 1e8 Å.
            InvalidCell: on every rank, for periodic vectors that do not span a cell.

        """
        config = config or DomainConfig()
        comm = config.comm
        with comm.agreement():
            if comm.rank == 0 and batch is None:
                raise InputError("rank 0 scatters the batch: it must pass one, not None.")
        rows = (batch, dict(extra_fields or {})) if comm.rank == 0 and batch is not None else None
        systems = comm.broadcast_object(None if rows is None else without_atoms(rows))
        whole, extra_fields = rows or systems
        return cls.from_owned(whole, torch.arange(len(whole.positions)), config, extra_fields)

    @classmethod
    @torch.inference_mode(False)
    def from_owned(
        cls, rows: Batch, ids: Tensor, config: DomainConfig | None = None, extra_fields: Mapping[str, Tensor] | None = None
    ) -> "ShardedBatch":
        """Divide anew what each rank has: some `rows` of a batch with all its systems, and the rows' `ids` (n,) in the whole.

        A rank may have any rows, in any order; none needs those of another. Every rank must call it.

        Raises:
            NonFinitePosition, InvalidCell: on every rank.
            InputError: on every rank, unless each of the ids 0 ... n_atoms - 1 is on one rank, once, with a row of each field,
                and all ranks have the same systems and fields.

        """
        config = config or DomainConfig()
        comm, device, extra_fields = config.comm, config.comm.device, extra_fields or {}
        with comm.agreement():
            find_strategy(config.strategy)
            for name, value in {"positions": rows.positions, **extra_fields}.items():
                if len(value) != len(ids):
                    raise InputError(f"{name} of shape {tuple(value.shape)} must have a row for each of the {len(ids)} ids.")
            check_positions(rows.positions, ids)
        _check_same(rows, extra_fields, comm)
        ids = ids.long()
        _check_ids(ids, comm)
        return cls(
            config,
            rows.positions.to(device),
            rows.atomic_numbers.to(device),
            rows.batch.to(device),
            ids.to(device),
            rows.cell.to(device, copy=True),  # dynamics change it in place
            rows.pbc.to(device, copy=True),
            int(comm.all_reduce(torch.tensor(len(ids)))),
            _on(device, rows.per_atom),
            _on(device, rows.per_system),
            _on(device, extra_fields),
        ).repartition()

    @classmethod
    def from_file(cls, path: str | Path, config: DomainConfig | None = None, index: int = -1) -> "ShardedBatch":
        """Read one frame of a file, once. Every rank must call it.

        Rank 0 reads an extxyz file and sends each rank its part of the lines, which that rank parses: no rank holds the whole
        of a field. Rank 0 reads other formats with ASE. Momenta and masses in the file become
        `extra_fields["velocities"]` (n_owned, 3) Å/fs and `extra_fields["masses"]` (n_owned,) amu.

        Raises:
            InputError: on every rank, if there is no such frame or the file cannot be read.

        """
        config = config or DomainConfig()
        rows, ids, extra_fields = read_rows(path, index, config.comm)
        return cls.from_owned(rows, ids, config, extra_fields)

    @property
    def comm(self) -> Comm:
        """The ranks among which the batch is divided."""
        return self.config.comm

    def row_fields(self) -> Iterator[tuple[str, Tensor]]:
        """The name and tensor of every field with one row per atom, always in the same order."""
        yield from ((name, getattr(self, name)) for name in ROW_FIELDS)
        yield from self.per_atom.items()
        yield from self.extra_fields.items()

    def with_row_fields(self, change: Callable[[str, Tensor], Tensor]) -> "ShardedBatch":
        """The batch with `change(name, tensor)` in place of every field of `row_fields`, in their order."""
        own: dict[str, Any] = {name: change(name, getattr(self, name)) for name in ROW_FIELDS}
        per_atom = {name: change(name, value) for name, value in self.per_atom.items()}
        extra_fields = {name: change(name, value) for name, value in self.extra_fields.items()}
        return replace(self, **own, per_atom=per_atom, extra_fields=extra_fields)

    def with_system_fields(self, change: Callable[[Tensor], Tensor]) -> "ShardedBatch":
        """The batch with `change(tensor)` in place of the cells, pbc and every field of `per_system`."""
        per_system = {name: change(value) for name, value in self.per_system.items()}
        return replace(self, cell=change(self.cell), pbc=change(self.pbc), per_system=per_system)

    def with_extra_fields(self, **fields: Tensor) -> "ShardedBatch":
        """The same atoms with these extra fields (n_owned, *F) as well."""
        return replace(self, extra_fields={**self.extra_fields, **fields})

    def repartition(self, weights: Tensor | None = None) -> "ShardedBatch":
        """Divide the atoms anew, for an equal sum of `weights` (n_owned,) on each rank, and move each to its owner.

        A weight is an atom's cost, such as its rank's measured step time over the rank's number of atoms. Weights become an
        extra field and so are used from then on. Every rank must call it.
        """
        batch = self if weights is None else self.with_extra_fields(weight=weights.to(self.positions))
        weights, strategy = batch.extra_fields.get("weight"), find_strategy(self.config.strategy)
        partition = strategy.partition(self.positions, self.batch, self.cell, self.pbc, self.comm, weights, ids=self.ids)
        moved = replace(batch, partition=partition).migrate()
        return replace(moved, heaviest=moved._largest_load())

    def _largest_load(self) -> float:
        weights = self.extra_fields.get("weight")
        load = torch.tensor(float(len(self.ids)), dtype=torch.float64) if weights is None else weights.double().sum()
        return self.comm.all_reduce(load, "max").item()

    def migrate(self) -> "ShardedBatch":
        """Move each atom to the rank that owns it by the partition, in one packed exchange; rows are sorted by id afterwards.

        Every rank must call it.
        """
        owner = self.partition.owners(self.positions, self.batch, self.cell, self.pbc, self.ids)  # type: ignore[union-attr]
        send = torch.bincount(owner, minlength=self.comm.size).cpu()
        ones = [1] * self.comm.size
        receive = self.comm.all_to_all(send, ones, ones)
        order = torch.argsort(owner, stable=True)
        fields = [field.detach()[order] for _, field in self.row_fields()]
        moved = packed_all_to_all(self.comm, fields, send.tolist(), receive.tolist())
        order = torch.argsort(moved[ROW_FIELDS.index("ids")])
        rows = iter(moved)
        return self.with_row_fields(lambda *_: next(rows)[order])

    def migrate_or_repartition(self) -> "ShardedBatch":
        """`migrate`, and `repartition` as well if a rank has come to own much more than the others."""
        moved = self.migrate()
        atom = self.heaviest * self.comm.size / max(self.n_atoms, 1)
        return moved.repartition() if moved._largest_load() > max(UNEVEN * self.heaviest, self.heaviest + atom) else moved

    def gather(self, rows: Tensor, dst: int | None = None) -> Tensor:
        """Values of this rank's atoms (n_owned, *F) -> values of all atoms (n_atoms, *F), sorted by id.

        Every rank gets them, or only rank `dst`; the others then get none (0, *F). Every rank must call it.
        """
        comm, ids = self.comm, self.ids.to(rows.device)
        everyone = range(comm.size) if dst is None else [dst]
        counts = comm.all_gather(torch.tensor(len(ids))).tolist()
        send = [len(ids) if rank in everyone else 0 for rank in range(comm.size)]
        receive = counts if comm.rank in everyone else [0] * comm.size
        fields = [f.repeat(len(everyone), *[1] * (f.ndim - 1)) for f in (rows, ids)]
        values, places = packed_all_to_all(comm, fields, send, receive)
        return torch.empty_like(values).index_copy_(0, places, values)

    def to_global_order(self, *rows: Tensor, unit: int = 1) -> tuple[int, list[Tensor]]:
        """Values of this rank's atoms (n_owned, *F) -> `first`, and the values of the atoms with ids `first`, `first` + 1, ...

        Each rank gets one slice of the ids, as a file needs them; no rank gets all. The slices are as equal as whole chunks of
        `unit` atoms can be. Every rank must call it.
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
        """For each structure, the reason why it has no stress, or None if it has one."""
        return self._no_stress

    @cached_property
    def without_stress(self) -> Tensor:
        """True for the structures (B,) that have no stress, on the rank's device."""
        return torch.tensor([why is not None for why in self._no_stress], device=self.comm.device)

    @cached_property
    def _no_stress(self) -> list[str | None]:
        volumes = torch.linalg.det(self.cell.double()).abs().tolist()
        return [
            "it is not periodic" if not periodic else "its cell has no volume" if volume < 1e-6 else None
            for periodic, volume in zip(self.pbc.any(-1).tolist(), volumes, strict=True)
        ]


def _on(device: torch.device, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on `device`, sorted by name so that the order is equal on every rank."""
    return {name: fields[name].to(device, copy=True) for name in sorted(fields)}


def _check_same(rows: Batch, extra_fields: Mapping[str, Tensor], comm: Comm) -> None:
    """Raise an error if ranks differ in the systems, or in the names, dtypes or shapes of fields."""
    per_system = {"cell": rows.cell, "pbc": rows.pbc, **rows.per_system}
    per_atom = {"positions": rows.positions, "atomic_numbers": rows.atomic_numbers, **rows.per_atom, **extra_fields}
    mine = {name: hashlib.sha256(pickle.dumps(value.tolist())).hexdigest() for name, value in per_system.items()}
    mine |= {name: f"{value.dtype}, (n, {tuple(value.shape[1:])})" for name, value in per_atom.items()}
    first, *others = comm.gather_objects(mine)
    for rank, other in enumerate(others, 1):
        differing = [name for name in sorted({*first, *other}) if other.get(name) != first.get(name)]
        if differing:
            raise InputError(
                f"rank {rank} has other {', '.join(differing)} than rank 0. All ranks must pass the same systems and fields."
            )


def _check_ids(ids: Tensor, comm: Comm) -> None:
    """Raise an error unless the ids are 0 ... n - 1, each once. Each rank checks the slice of ids that it is sent."""
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
            raise InputError(f"each of the ids 0 ... {n - 1} must be on one rank, once: the rows of {n} atoms were passed.")
