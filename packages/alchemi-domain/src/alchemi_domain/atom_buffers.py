"""AtomBuffers: the one owner of this rank's atoms. Batches, model data and integrators' states are views of it."""

from dataclasses import dataclass, replace

import torch

from alchemi_domain.sharded_batch import ShardedBatch


@dataclass(frozen=True)
class Padding:
    """What padding rows hold: `system`, the number of their own system, its cubic cell's edge (Å), and an element."""

    system: int
    cell_length: float
    atomic_number: int

    def value(self, name: str) -> float:
        """What a padding row holds in this field. An infinite mass keeps a padding atom where it is."""
        return {"batch": self.system, "atomic_numbers": self.atomic_number, "masses": torch.inf}.get(name, 0)


class AtomBuffers:
    """The one owner of a rank's rows and of all systems: every tensor of atoms that move is one of these, or a view of it.

    There are `capacity` rows. The first `n_real` are this rank's atoms. The others are padding atoms: they form one extra
    system, the last, with its own cell, so no sum mixes them with real atoms. Without padding `capacity` is `n_real`, and there
    is no extra system. The tensors are read through three batches:

    - `all_rows`: every row and every system. The model is evaluated on it.
    - `real`: this rank's atoms and the real systems. Users, hooks and writers see it as `domain.batch`.
    - `moving`: every row and the real systems. Integrators step it; its `batch` names the last real system for padding atoms.

    Only two may write. Whoever moves the atoms changes positions, velocities, masses and cells in place, between evaluations:
    an integrator through its `State`, or a loop of your own through `domain.batch`. `Domain` writes every field at a
    neighbour-list rebuild: without padding it makes new buffers, with padding it fills the same tensors, which keep their
    addresses, so that CUDA graphs stay valid.
    """

    n_real: int
    real: ShardedBatch

    def __init__(self, all_rows: ShardedBatch, padding: Padding | None = None) -> None:
        """Own the tensors of `all_rows`, whose last system is the padding system if there is `padding`."""
        self.all_rows, self.padding = all_rows, padding
        self._n_systems = len(all_rows.cell) - (padding is not None)
        self.moving = replace(all_rows, batch=all_rows.batch.clone()).with_system_fields(lambda value: value[: self._n_systems])
        self._view_real(all_rows, self.capacity)

    @classmethod
    def padded(cls, batch: ShardedBatch, capacity: int, padding: Padding) -> "AtomBuffers":
        """Empty buffers of `capacity` rows for the systems and fields of `batch`; `fill` copies it in."""
        rows = batch.with_row_fields(lambda _, value: value.new_zeros(capacity, *value.shape[1:]))
        return cls(rows.with_system_fields(lambda value: value.new_zeros(len(value) + 1, *value.shape[1:])), padding)

    @property
    def capacity(self) -> int:
        """How many rows there are."""
        return len(self.all_rows.ids)

    @torch.no_grad()
    def fill(self, batch: ShardedBatch) -> None:
        """Copy `batch` into the first rows and systems of padded buffers, and fill what is left with padding."""
        assert self.padding is not None
        n, rows = len(batch.ids), self.all_rows
        for (name, into), (_, value) in zip(rows.row_fields(), batch.row_fields(), strict=True):
            into[:n] = value
            into[n:] = self.padding.value(name)
        self._fill_systems(batch)
        torch.clamp(rows.batch, max=self._n_systems - 1, out=self.moving.batch)
        self._view_real(batch, n)

    def _fill_systems(self, batch: ShardedBatch) -> None:
        """The padding system's fields are the last system's, but it has its own cell and, without periodicity, no stress."""
        assert self.padding is not None
        rows = self.all_rows
        fields = {"cell": batch.cell, "pbc": batch.pbc, **batch.per_system}
        for into, value in zip((rows.cell, rows.pbc, *rows.per_system.values()), fields.values(), strict=True):
            into.copy_(torch.cat([value, value[-1:]]))
        rows.pbc[-1] = False
        rows.cell[-1].zero_().fill_diagonal_(self.padding.cell_length)

    def _view_real(self, batch: ShardedBatch, n_real: int) -> None:
        """View the first `n_real` rows as `batch`, with its partition."""
        rows = self.all_rows.with_row_fields(lambda _, value: value[:n_real])
        rows = rows.with_system_fields(lambda value: value[: self._n_systems])
        self.n_real, self.real = n_real, replace(rows, partition=batch.partition, heaviest=batch.heaviest)
