"""ShardTensor: a torch.Tensor that knows what its rows are and what its values point at."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from alchemi_shardtensor.comm import Comm
from alchemi_shardtensor.routing import Routing
from alchemi_spec import DistributionSpec

if TYPE_CHECKING:
    from alchemi_shardtensor.table import HandlerTable


class Rows(StrEnum):
    """What dim 0 of a tensor (or `row_dim`, where an operation has moved it) enumerates."""

    OWNED = "owned"
    """This rank's atoms."""
    PADDED = "padded"
    """This rank's atoms, then its ghosts."""
    EDGE = "edge"
    """The edges whose receivers this rank owns."""
    SYSTEM = "system"
    """The structures of the batch, or any other value that is the same on every rank."""
    LOST = "lost"
    """Made of this rank's share, but no dim enumerates it any more: not to be reduced."""


class PointsAt(StrEnum):
    """What the values of an integer tensor index."""

    NODES = "nodes"
    """Local atoms: below n_owned the owned ones, from there the ghosts."""
    SYSTEMS = "systems"
    """Structures of the batch."""


class End(StrEnum):
    """Which end of the edges an index names. Receivers are all owned; senders may be ghosts."""

    SENDER = "sender"
    RECEIVER = "receiver"


OWNED, PADDED, EDGE, SYSTEM, LOST = Rows
NODES, SYSTEMS = PointsAt
SENDER, RECEIVER = End
BOTH = (SENDER, RECEIVER)
"""The ends that the two rows of an edge_index (2, E) name."""


Ends = End | tuple[End, ...] | None


class Tag(NamedTuple):
    """What a ShardTensor knows beside its values: its shard, what dim `row_dim` enumerates, and what its values index.

    `end`: which end of the edges a node index names: one for all its values, a tuple of one for each row, or None where
    unknown, which is right too, but costs an exchange.
    """

    shard: "Shard"
    rows: Rows | None
    points_at: PointsAt | None
    end: Ends
    row_dim: int


@dataclass(frozen=True, eq=False)
class Shard:
    """The partition of this run, as the tensors of one rank see it. Two shards never meet in one operation."""

    spec: DistributionSpec
    routing: Routing
    n_systems: int
    table: "HandlerTable"
    seen: dict[Any, Any] = field(default_factory=dict)
    """What has been agreed over ranks for this shard, once."""
    tags: dict[Any, Tag] = field(default_factory=dict, repr=False)
    """One object for each tag, so that equal tags are identical."""

    @property
    def comm(self) -> Comm:
        """The ranks that hold the other shares."""
        return self.routing.comm

    @property
    def n_owned(self) -> int:
        """How many atoms this rank owns."""
        return self.routing.n_owned

    @property
    def n_ghost(self) -> int:
        """How many remote atoms this rank reads."""
        return self.routing.n_ghost

    def tag(self, rows: Rows | None, points_at: PointsAt | None = None, end: Ends = None, row_dim: int = 0) -> Tag:
        """The tag with these values."""
        key = rows, points_at, end, row_dim
        found = self.tags.get(key)
        if found is None:
            found = self.tags[key] = Tag(self, *key)
        return found


class ShardTensor(Tensor):
    """A tensor with a tag. The storage is the plain tensor's.

    An operation that no handler of the shard's table takes is plain torch's, with the tag carried on to where its rows are
    in the result.
    """

    tag: Tag

    @property
    def shard(self) -> Shard:
        """The partition that this is a part of."""
        return self.tag.shard

    @property
    def rows(self) -> Rows | None:
        """What dim `row_dim` enumerates."""
        return self.tag.rows

    @property
    def points_at(self) -> PointsAt | None:
        """What the values index."""
        return self.tag.points_at

    @property
    def end(self) -> Ends:
        """Which end of the edges the values name."""
        return self.tag.end

    @property
    def row_dim(self) -> int:
        """Which dim enumerates `rows`."""
        return self.tag.row_dim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch: the first handler of the shard's table whose predicate holds, else plain torch and `carry`."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SPEAK_OF_NO_ROWS:
                return func(*args)
            sources: list[ShardTensor] = []
            _collect(args, sources)
            if kwargs:
                _collect(kwargs.values(), sources)
            else:
                kwargs = {}
            if not sources:
                return func(*args, **kwargs)
            shard = sources[0].tag.shard
            return shard.table.dispatch(func, shard, sources, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the values: a shard belongs to one process."""
        return copy.deepcopy(self.detach().as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the values: a shard belongs to one process."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


_GETTERS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "layout",
    "is_cuda",
    "is_sparse",
)
_SPEAK_OF_NO_ROWS = frozenset(
    [*(getattr(Tensor, name).__get__ for name in _GETTERS), Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
)
"""Asked often, and answered with no tensor."""


def tag(t: Tensor, shard: Shard, rows: Rows | None = None, points_at: PointsAt | None = None, end: Ends = None) -> ShardTensor:
    """`t` as a ShardTensor that shares its storage; `t` itself stays plain."""
    return tag_in_place(t.as_subclass(ShardTensor), shard, rows, points_at, end)


def tag_in_place(
    t: Tensor,
    shard: Shard,
    rows: Rows | None = None,
    points_at: PointsAt | None = None,
    end: Ends = None,
    row_dim: int = 0,
) -> ShardTensor:
    """Tag the very object, so that an in-place operation whose result is dropped leaves a tagged accumulator."""
    if type(t) is not ShardTensor:
        t.__class__ = ShardTensor
    t.tag = shard.tag(rows, points_at, end, row_dim)  # type: ignore[attr-defined]
    return t  # type: ignore[return-value]


def plain(t: Tensor) -> Tensor:
    """The same tensor without its tag; differentiable, shares storage."""
    return t.as_subclass(Tensor) if isinstance(t, ShardTensor) else t


def _collect(args: Iterable[Any], found: list[ShardTensor]) -> None:
    for a in args:
        kind = type(a)
        if kind is ShardTensor:
            found.append(a)
        elif kind is tuple or kind is list:
            _collect(a, found)
