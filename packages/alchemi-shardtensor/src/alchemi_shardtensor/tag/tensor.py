"""The tag of a tensor, and the tensor that carries one."""

import copy
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, SupportsIndex

from torch import Tensor

from alchemi_shardtensor.tag.rows import PADDED, STALE, Ends, PointsAt, Rows


class Tag(NamedTuple):
    """What is known of a tensor beside its values: what dim `row_dim` enumerates, and what its values index.

    `end`: which end of the edges a node index names: one for all its values, a tuple of one for each row, or None where
    unknown, which is right too, but costs an exchange. Equal tags are one object: make them with `make_tag`.
    """

    rows: Rows | None
    points_at: PointsAt | None
    end: Ends
    row_dim: int


@cache
def make_tag(rows: Rows | None = None, points_at: PointsAt | None = None, end: Ends = None, row_dim: int = 0) -> Tag:
    """The tag with these values: the same object for the same values."""
    return Tag(rows, points_at, end, row_dim)


class TaggedTensor(Tensor):
    """A tensor with a `tag`, and the `shard` (the partition) that its rows belong to. The storage is the plain tensor's.

    What operations do with the tag is the business of its subclass `ShardTensor`.
    """

    tag: Tag
    shard: Any

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the values: a shard belongs to one process."""
        return copy.deepcopy(self.detach().as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the values: a shard belongs to one process."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


def tag_in_place(
    t: Tensor,
    shard: Any,
    rows: Rows | None = None,
    points_at: PointsAt | None = None,
    end: Ends = None,
    row_dim: int = 0,
) -> TaggedTensor:
    """Tag the very object, so that an in-place operation whose result is dropped leaves a tagged accumulator."""
    return attach(t, shard, make_tag(rows, points_at, end, row_dim))


def attach(t: Tensor, shard: Any, tag: Tag) -> TaggedTensor:
    """Give the very object this tag."""
    if type(t) is not shard.tensor_type:
        t.__class__ = shard.tensor_type
    t.shard = shard  # type: ignore[attr-defined]
    t.tag = tag  # type: ignore[attr-defined]
    return t  # type: ignore[return-value]


def plain(t: Tensor) -> Tensor:
    """The same tensor without its tag; differentiable, shares storage."""
    return t.as_subclass(Tensor) if isinstance(t, TaggedTensor) else t


def has_ghost_rows(t: TaggedTensor) -> bool:
    """Whether its rows are this rank's atoms, then its ghosts."""
    return t.tag.rows is PADDED or t.tag.rows is STALE


def find_tagged(args: Iterable[Any], found: list[TaggedTensor]) -> None:
    """Append the tagged tensors among `args`, also within lists, to `found`."""
    for a in args:
        if isinstance(a, TaggedTensor):
            found.append(a)
        elif type(a) is tuple or type(a) is list:
            find_tagged(a, found)
