"""The handler table of a partition: which operation is taken by which handler, the first that fits."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from alchemi_shardtensor.dispatch.tensor import ShardTensor
from alchemi_shardtensor.rules.operations import Binder, binder, rule_of
from alchemi_shardtensor.rules.propagation import propagate_from_one, propagate_pointwise, propagate_tag, tag_base
from alchemi_shardtensor.rules.rule import Op, Rule
from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.storage import Storage, TraceEvent
from alchemi_shardtensor.tag import LOST, TaggedTensor, make_tag, tag_in_place
from alchemi_spec import MissingHandler

Ruled = tuple[Binder, list[Rule], bool]


class HandlerTable:
    """Rules in order; the first whose predicate holds takes the operation. A value: `table + [rule]` is another table.

    `storage`: how the layout that it serves reaches rows.
    """

    tensor_type: type[TaggedTensor] = ShardTensor

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

    def dispatch(self, op: Op, shard: Shard, sources: list[TaggedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `op` by its rule, or plainly, and put the tag back on what comes out."""
        if kwargs and kwargs.get("out") is not None:
            return self._into(op, shard, sources, args, dict(kwargs))
        several = len(sources) > 1
        if several and any(s.shard is not shard for s in sources):
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
                    return result if shard.cache.events is None else _traced(shard.cache.events, op, rule.handler, result)
        result, known = op(*args, **kwargs), rule_of(op)
        if known.name == "data":  # an alias whose changes are not counted
            shard.cache.of(sources[0]).untracked = True
        if several:
            tagged = known.pointwise and propagate_pointwise(result, sources)
        else:
            tagged = propagate_from_one(known, result, sources[0], args, kwargs, named)
        if not tagged:
            result = propagate_tag(op, result, shard, sources, args, kwargs)
            if known.writes:
                tag_base(args[0])
        return result if shard.cache.events is None else _traced(shard.cache.events, op, None, result)

    def _into(self, op: Op, shard: Shard, sources: list[TaggedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`out=`: the result, copied there with its tag."""
        out = kwargs.pop("out")
        rest = [s for s in sources if s is not out or any(a is out for a in args)]
        if not isinstance(out, Tensor):
            raise MissingHandler(f"{op.__name__} with several `out` tensors: take what it returns instead.")
        result = self.dispatch(op, shard, rest, args, kwargs) if rest else op(*args, **kwargs)
        out.copy_(result)
        found = result.tag if isinstance(result, TaggedTensor) else make_tag(LOST if isinstance(out, TaggedTensor) else None)
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


def _traced(events: list[TraceEvent], op: Op, handler: Op | None, result: Any) -> Any:
    name = getattr(op, "__name__", type(op).__name__)
    events.append(TraceEvent(name, handler and handler.__name__, getattr(result, "rows", None)))
    return result
