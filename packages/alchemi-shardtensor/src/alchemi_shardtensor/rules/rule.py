"""A rule: which operations a handler takes, and when."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.tag import End, PointsAt, Rows, TaggedTensor

Op = Callable[..., Any]
Predicate = Callable[[Shard, dict[str, Any]], bool]


class Rule(NamedTuple):
    """One line of a table: a handler, when it applies, and its result's rows (None: the handler has tagged it itself).

    An operator of torch.ops may be given by its name, `namespace::name` for all overloads or `namespace::name.overload`.
    """

    ops: tuple[Op | str, ...]
    when: Predicate
    handler: Callable[..., Any]
    rows: Rows | None


def handles(*ops: Op | str, when: Predicate, rows: Rows | None = None) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of a handler `(shard, op, **arguments)`, which sees plain tensors under the op's documented names."""
    return lambda handler: Rule(ops, when, handler, rows)


def points_at(target: PointsAt, end: End | None = None) -> Predicate:
    """The index points at `target` (and all of it at this `end` of the edges)."""

    def when(shard: Shard, named: dict[str, Any]) -> bool:
        index = named.get("index")
        found = (index,) if isinstance(index, TaggedTensor) else [i for i in indices(index) if isinstance(i, TaggedTensor)]
        found = [i for i in found if i.tag.points_at is target]
        return bool(found) and (end is None or all(i.tag.end is end for i in found))

    return needs_index(when)


def needs_index(when: Predicate) -> Predicate:
    """Mark a predicate that holds only where some tensor points at something, so that it is not asked elsewhere."""
    when.needs_index = True  # type: ignore[attr-defined]
    return when


def rows_are(*rows: Rows) -> Predicate:
    """The first argument's rows are of one of these kinds."""
    return lambda shard, named: getattr(named["input"], "rows", None) in rows


def indices(index: Any) -> Iterator[Any]:
    """The tensors of an indexing expression."""
    if isinstance(index, Tensor):
        yield index
    elif isinstance(index, (tuple, list)):
        for part in index:
            yield from indices(part)
