"""The cache of a shard: all that it remembers between operations. Nothing is kept in attributes of tensors.

Entries decide whether ranks communicate, so each must be there on all ranks or on none. They are: an entry is made by an
operation that every rank runs, and is dropped when a tensor that every rank has is changed or freed. No entry is found by an
address alone: it holds what it is compared with, so that no other memory can have the address.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from alchemi_shardtensor.tag import Rows, Tag, plain


class TraceEvent(NamedTuple):
    """One line of a trace: an operation, the handler that took it (None: plain torch), and its result's rows."""

    op: str
    handler: str | None
    rows: Rows | None


class Snapshot:
    """A tensor as it is now: `matches(x)` while x is the same part of the same memory and was not written to."""

    def __init__(self, x: Tensor) -> None:
        self._alias = plain(x).detach()
        self._version = x._version

    def matches(self, x: Tensor) -> bool:
        """Whether x is what was there. The same on all ranks, also on one that has no rows."""
        alias = self._alias
        same_memory = (
            x.untyped_storage()._cdata == alias.untyped_storage()._cdata and x.storage_offset() == alias.storage_offset()
        )
        same_view = x.dtype == alias.dtype and x.shape == alias.shape and x.stride() == alias.stride()
        return same_memory and same_view and x._version == self._version


class GhostRows(NamedTuple):
    """The [owned | ghost] rows of a tensor, by which routing, and the backward passes that there had been (None: no graph)."""

    source: Snapshot
    routing: Any
    graph: Any
    rows: Tensor


class LocalIds(NamedTuple):
    """An index of global ids by local ids, and the routing of the rows that it reads; `version`: the index's."""

    version: int
    routing: Any
    ids: Tensor


class Counted(NamedTuple):
    """The index that counts were made of, with its tag; `version`: the counts'."""

    version: int
    ids: Tensor
    tag: Tag


@dataclass
class TensorCache:
    """What is known of one tagged tensor, as long as it lives.

    `with_ghosts`: its rows and its ghosts', as they were gathered last. `local_ids`: of an index of global ids. `ends`: of an
    edge_index, what is known of its rows. `counted`: of counts. `names_all_rows`: it names all rows, in their order.
    `untracked`: its `.data` was taken, whose changes torch does not count.
    """

    with_ghosts: GhostRows | None = None
    local_ids: LocalIds | None = None
    ends: "dict[int, TensorCache]" = field(default_factory=dict)
    counted: Counted | None = None
    names_all_rows: bool = False
    untracked: bool = False


@dataclass
class ShardCache:
    """What is known of a shard, and of its tensors.

    `ids` (n_owned + n_ghost,): global ids of the rows that local indices count. `counts`: how many atoms each rank owns.
    `systems` (n_owned + n_ghost,): each row's system. `prefetched`: ghost rows that were fetched before a gather reads
    them, and the rows they belong to. `has_global_rows`: some tensor holds all atoms. `backward_passes`: their number so
    far. `tracked`: how many collectives this rank had to repeat in backward passes when the shard was made. `events`: the
    operations on its tensors, while `trace` is open.
    """

    ids: Tensor | None = None
    counts: list[int] | None = None
    systems: Tensor | None = None
    prefetched: tuple[Snapshot, Tensor] | None = None
    has_global_rows: bool = False
    backward_passes: int = 0
    tracked: int = 0
    events: list[TraceEvent] | None = None
    tensors: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary, repr=False)

    def of(self, t: Tensor) -> TensorCache:
        """What is known of a tensor; an empty entry is made where there is none."""
        found = self.tensors.get(t)
        if found is None:
            found = self.tensors[t] = TensorCache()
        return found  # type: ignore[no-any-return]

    def known(self, t: Tensor) -> TensorCache:
        """What is known of a tensor, to read only."""
        return self.tensors.get(t, _NOTHING)  # type: ignore[no-any-return]


_NOTHING = TensorCache()
