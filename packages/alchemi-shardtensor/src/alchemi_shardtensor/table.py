"""The handler table of a partition: which operation is taken by which handler, the first that fits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from alchemi_shardtensor.arguments import base, bind
from alchemi_shardtensor.carry import carried_row_by_row, carry
from alchemi_shardtensor.tensor import End, PointsAt, Rows, Shard, ShardTensor, tag_in_place

Op = Callable[..., Any]
Predicate = Callable[[Shard, dict[str, Any]], bool]


class Rule(NamedTuple):
    """One line of a table: a handler, when it applies, and its result's rows (None: the handler has tagged it itself)."""

    ops: tuple[Op, ...]
    when: Predicate
    handler: Callable[..., Any]
    rows: Rows | None


def handles(*ops: Op, when: Predicate, rows: Rows | None = None) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of a handler `(shard, op, **arguments)`, which sees plain tensors under the op's documented names."""
    return lambda handler: Rule(ops, when, handler, rows)


class HandlerTable:
    """Rules in order; the first whose predicate holds takes the operation. A value: `table + [rule]` is another table."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Index the rules by operation, keeping their order."""
        self.rules = tuple(rules)
        self._of: dict[Op, tuple[str, list[Rule]]] = {}
        for rule in self.rules:
            for op in rule.ops:
                self._of.setdefault(op, (base(op.__name__), []))[1].append(rule)

    def __add__(self, rules: Sequence[Rule]) -> "HandlerTable":
        """A table in which `rules` are asked first."""
        return HandlerTable((*rules, *self.rules))

    def dispatch(self, op: Op, shard: Shard, sources: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `op` by its rule, or plainly, and put the tag back on what comes out."""
        ruled = self._of.get(op)
        if ruled is not None:
            name, rules = ruled
            named = bind(name, args, kwargs)
            for rule in rules:
                if rule.when(shard, named):
                    result = rule.handler(shard, op, **named)
                    return result if rule.rows is None else tag_in_place(result, shard, rule.rows)
        result = op(*args, **kwargs)
        if ruled is None and carried_row_by_row(op, result, sources):
            return result
        return carry(op, result, shard, sources, args, kwargs)


def points_at(target: PointsAt, end: End | None = None) -> Predicate:
    """The index points at `target` (and all of it at this `end` of the edges)."""

    def when(shard: Shard, named: dict[str, Any]) -> bool:
        index = named.get("index")
        found = (index,) if type(index) is ShardTensor else [i for i in indices(index) if type(i) is ShardTensor]
        found = [i for i in found if i.tag.points_at is target]
        return bool(found) and (end is None or all(i.tag.end is end for i in found))

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
