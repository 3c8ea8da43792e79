"""The handler table of a partition: which operation is taken by which handler, the first that fits."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from alchemi_shardtensor.operations import Binder, binder, rule_of
from alchemi_shardtensor.propagation import propagate_from_one, propagate_pointwise, propagate_tag, tag_base
from alchemi_shardtensor.storage import Storage
from alchemi_shardtensor.tensor import LOST, End, Fired, PointsAt, Rows, Shard, ShardTensor, tag_in_place
from alchemi_spec import MissingHandler

Op = Callable[..., Any]
Ruled = tuple[Binder, list["Rule"], bool]
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


class HandlerTable:
    """Rules in order; the first whose predicate holds takes the operation. A value: `table + [rule]` is another table.

    `storage`: how the layout that it serves reaches rows.
    """

    def __init__(self, rules: Sequence[Rule], storage: Storage | None = None) -> None:
        """Index the rules by operation, keeping their order."""
        self.rules, self.storage = tuple(rules), storage or Storage()
        self._of: dict[Op, Ruled | None] = {}
        self._named: dict[str, list[Rule]] = {}
        for rule in self.rules:
            for op in rule.ops:
                if isinstance(op, str):
                    self._named.setdefault(op, []).append(rule)
                else:
                    self._of[op] = self._ruled(op, [*self._rules_of(op), rule])

    def _rules_of(self, op: Op) -> list[Rule]:
        ruled = self._of.get(op)
        return [] if ruled is None else ruled[1]

    @staticmethod
    def _ruled(op: Op, rules: list[Rule]) -> Ruled:
        """The rules of an operation, how to name its arguments, and whether none can fire without an index that points."""
        return binder(op), rules, all(getattr(rule.when, "needs_index", False) for rule in rules)

    def __add__(self, rules: Sequence[Rule]) -> "HandlerTable":
        """A table in which `rules` are asked first."""
        return HandlerTable((*rules, *self.rules), self.storage)

    def dispatch(self, op: Op, shard: Shard, sources: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `op` by its rule, or plainly, and put the tag back on what comes out."""
        if kwargs and kwargs.get("out") is not None:
            return self._into(op, shard, sources, args, dict(kwargs))
        several = len(sources) > 1
        if several and any(s.tag.shard is not shard for s in sources):
            raise MissingHandler(
                f"{op.__name__} of tensors of two partitions: their rows are not the same atoms.\n"
                f"Wrap both with the same spec, meta and n_systems, or take the tag off with plain(x)."
            )
        ruled = self._of.get(op)
        if ruled is None and isinstance(op, _OPERATORS):
            ruled = self._by_name(op)
        named = None
        if ruled is not None and (not ruled[2] or any(s.tag.points_at is not None for s in sources)):
            bound, rules, _ = ruled
            named = bound(args, kwargs)
            for rule in rules:
                if rule.when(shard, named):
                    result = rule.handler(shard, op, **named)
                    result = result if rule.rows is None else tag_in_place(result, shard, rule.rows)
                    if rule_of(op).writes:
                        tag_base(args[0])
                    return result if shard.fired is None else _traced(shard.fired, op, rule.handler, result)
        result, known = op(*args, **kwargs), rule_of(op)
        if known.name == "data":  # an alias whose changes are not counted
            sources[0].__dict__["data"] = True
        if several:
            tagged = known.pointwise and propagate_pointwise(result, sources)
        else:
            tagged = propagate_from_one(known, result, sources[0], args, kwargs, named)
        if not tagged:
            result = propagate_tag(op, result, shard, sources, args, kwargs)
            if known.writes:
                tag_base(args[0])
        return result if shard.fired is None else _traced(shard.fired, op, None, result)

    def _into(self, op: Op, shard: Shard, sources: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`out=`: the result, copied there with its tag."""
        out = kwargs.pop("out")
        rest = [s for s in sources if s is not out or any(a is out for a in args)]
        if not isinstance(out, Tensor):
            raise MissingHandler(f"{op.__name__} with several `out` tensors: take what it returns instead.")
        result = self.dispatch(op, shard, rest, args, kwargs) if rest else op(*args, **kwargs)
        out.copy_(result)
        found = result.tag if isinstance(result, ShardTensor) else shard.tag(LOST if isinstance(out, ShardTensor) else None)
        tag_in_place(out, shard, found.rows, found.points_at, found.end, found.row_dim)
        tag_base(out)
        return out

    def _by_name(self, op: OpOverload[..., Any] | OpOverloadPacket[..., Any]) -> Ruled | None:
        """The rules of an operator that was registered after the table was made; one overload's before those of all."""
        if op not in self._of:
            names = [op.name(), op.name().partition(".")[0]] if isinstance(op, OpOverload) else [op._qualified_op_name]
            found = [rule for name in dict.fromkeys(names) for rule in self._named.get(name, [])]
            self._of[op] = self._ruled(op, found) if found else None
        return self._of[op]


_OPERATORS = (OpOverload, OpOverloadPacket)


def _traced(fired: list[Fired], op: Op, handler: Op | None, result: Any) -> Any:
    name = getattr(op, "__name__", type(op).__name__)
    fired.append(Fired(name, handler and handler.__name__, getattr(result, "rows", None)))
    return result


def points_at(target: PointsAt, end: End | None = None) -> Predicate:
    """The index points at `target` (and all of it at this `end` of the edges)."""

    def when(shard: Shard, named: dict[str, Any]) -> bool:
        index = named.get("index")
        found = (index,) if type(index) is ShardTensor else [i for i in indices(index) if type(i) is ShardTensor]
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
