"""Tag propagation: plain torch runs an operation that no handler takes, and its result is tagged here.

What is known of each operation stands in its row of the table `OPS`; nothing here asks for a name.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.rules.op_rules import OpRule
from alchemi_shardtensor.rules.operations import rule_of
from alchemi_shardtensor.rules.row_dims import row_dim_after_broadcast, row_dim_after_reduction
from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.tag import (
    EDGE,
    GLOBAL,
    LOST,
    OWNED,
    PADDED,
    PARTIAL,
    REPLICATED,
    SHARDED,
    STALE,
    SYSTEM,
    Ends,
    PointsAt,
    Rows,
    TaggedTensor,
    attach,
    make_tag,
    tag_in_place,
)
from alchemi_shardtensor.transport import sum_over_ranks
from alchemi_spec import MissingHandler

Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_WITH_GHOSTS = (PADDED, STALE)
_MAY_HOLD_TENSORS = (Tensor, tuple, list)
_OTHER_CALL_FORM = (TypeError, KeyError, ValueError, IndexError)
"""What a function of the table raises for a call form that it does not accept."""


def propagate_from_one(
    rule: OpRule, result: Any, source: TaggedTensor, args: Args, kwargs: Kwargs, named: dict[str, Any] | None
) -> bool:
    """The short path for an operation on one tensor whose rows are known; False where `propagate_tag` is needed.

    `named`: the arguments by their names, if they have been named already.
    """
    mark = source.tag
    if type(result) is not Tensor or rule.in_place or mark.points_at is not None or not args or args[0] is not source:
        return False
    rows = mark.rows
    if rows is OWNED or rows is EDGE:
        row_dim = _row_dim_from_one(rule, result, source, args, kwargs, named)
        if row_dim is None or not 0 <= row_dim < result.ndim:
            return False
    elif rows is SYSTEM and rule.pointwise:
        row_dim = mark.row_dim
    else:
        return False
    _tag_like(result, source, row_dim)
    return True


def _row_dim_from_one(
    rule: OpRule, result: Tensor, source: TaggedTensor, args: Args, kwargs: Kwargs, named: dict[str, Any] | None
) -> int | None:
    if rule.row_dim is None:
        others = (*args[1:], *kwargs.values()) if kwargs else args[1:]
        if rule.pointwise and not (others and any(isinstance(a, _MAY_HOLD_TENSORS) and a is not source for a in others)):
            return source.tag.row_dim
        if rule.reduces and named is not None and not any(isinstance(a, Tensor) for a in others):
            return row_dim_after_reduction(source, named)
    return _row_dim(rule, result, source, args, kwargs)


def propagate_pointwise(result: Any, sources: list[TaggedTensor]) -> bool:
    """The short path for a pointwise operation on tensors with one tag and as many rows; False for any other."""
    first = sources[0]
    mark, ndim = first.tag, first.ndim
    rows, d = mark.rows, mark.row_dim
    if type(result) is not Tensor or mark.points_at is not None or rows is LOST or rows is PARTIAL or result.ndim != ndim:
        return False
    n = first.size(d) if ndim else 0
    for s in sources:
        if s is not first and (s.tag is not mark or s.ndim != ndim or (rows is not SYSTEM and s.size(d) != n)):
            return False
    if rows is not SYSTEM and (not ndim or result.size(d) != n):
        return False
    _tag_like(result, first, d)
    return True


def _tag_like(result: Tensor, source: TaggedTensor, row_dim: int) -> None:
    """Tag a plain result as `source`, which is no index, with its rows along `row_dim`."""
    mark = source.tag
    attach(result, source.shard, mark if row_dim == mark.row_dim else make_tag(mark.rows, row_dim=row_dim))


def propagate_tag(
    op: Callable[..., Any], result: Any, shard: Shard, sources: list[TaggedTensor], args: Args, kwargs: Kwargs
) -> Any:
    """Tag what an unhandled operation on `sources` returned: what its rows are, along which dim, and what it points at.

    Raises:
        MissingHandler: where the result would be wrong, or would be one on this rank's rows only.

    """
    if isinstance(result, (tuple, list)):
        return _propagate_to_each(op, result, shard, sources, args, kwargs)
    rule = rule_of(op)
    if not isinstance(result, Tensor) or rule.creates:
        return result
    if rule.opaque:
        _refuse_hidden_index(op, sources)
    if not rule.in_place:
        for a in args:
            if a is result:  # it is the caller's own
                return result
    if rule.second_lends_rows and getattr(args[0], "rows", None) not in SHARDED and isinstance(args[1], TaggedTensor):
        return tag_in_place(result, shard, args[1].rows, row_dim=args[1].row_dim)
    if rule.first_argument_only:
        sources = [s for s in sources if s is args[0]]
    if PARTIAL in [s.tag.rows for s in sources]:
        return tag_in_place(result, shard, PARTIAL if _is_linear(rule, args) and result.is_floating_point() else LOST)
    return _propagate_rows(rule, result, shard, sources, args, kwargs)


def _propagate_to_each(
    op: Callable[..., Any], result: Any, shard: Shard, sources: list[TaggedTensor], args: Args, kwargs: Kwargs
) -> Any:
    """Tag each part of a result. Of values and indices, as max and sort return them, only the values can point."""
    parts = [propagate_tag(op, part, shard, sources, args, kwargs) for part in result]
    if type(result) not in (tuple, list):
        parts[1:] = [_without_index(part) for part in parts[1:]]
    return type(result)(parts)


def _without_index(part: Any) -> Any:
    return tag_in_place(part, part.shard, part.rows, row_dim=part.row_dim) if isinstance(part, TaggedTensor) else part


def _refuse_hidden_index(op: Callable[..., Any], sources: list[TaggedTensor]) -> None:
    if any(s.tag.points_at for s in sources):
        raise MissingHandler(
            f"{op} was handed an index that points at other rows: what it gathers or adds inside cannot be seen.\n"
            f"Use a module before it was scripted, or a MethodAdapter; say with an OpAdapter what an operator needs."
        )


def _propagate_rows(
    rule: OpRule, result: Tensor, shard: Shard, sources: list[TaggedTensor], args: Args, kwargs: Kwargs
) -> Tensor:
    """Tag what is made of this rank's rows, or only of what is the same on every rank."""
    points_at, end = _index_tag(rule, result, sources)
    local = [s for s in sources if s.tag.rows in SHARDED]
    if not local:
        rows = _replicated_rows(result, sources)
        return tag_in_place(result, shard, rows, points_at, end) if rows or points_at else result
    if rule.indexes and len(local) > 1:  # x[arange(n), heads] has the rows of the index that is tagged
        local = [s for s in local if s is not args[0]]
    rows = _common_rows(local)
    if rows is LOST:
        return tag_in_place(result, shard, LOST, points_at, end)
    row_dim = _common_row_dim(rule, result, local, args, kwargs)
    if row_dim is None and rule.contracts_rows is not None:
        return _sum_contracted_rows(rule, result, shard, local, args, kwargs)
    if rule.joins and not shard.storage.indexes_owned:
        _refuse_mixed_index(rule, sources, args)
    if row_dim is None or (rows in _WITH_GHOSTS and _selects_rows(rule, result.shape[row_dim], shard, args)):
        return tag_in_place(result, shard, LOST, points_at, end)
    return tag_in_place(result, shard, rows, points_at, end, row_dim)


def _replicated_rows(result: Tensor, sources: list[TaggedTensor]) -> Rows | None:
    """Return the rows of what is the same on every rank: all atoms if the result has as many rows as they, else SYSTEM."""
    kept = (s.tag.rows is GLOBAL and result.ndim and s.ndim and len(result) == len(s) for s in sources)
    return GLOBAL if any(kept) else SYSTEM if any(s.tag.rows in REPLICATED for s in sources) else None


def _common_rows(local: list[TaggedTensor]) -> Rows | None:
    """Return what the rows of these tensors are: LOST if they are of several kinds, or if some are lost already."""
    rows = local[0].tag.rows
    others = [s.tag.rows for s in local if s.tag.rows is not rows]
    if not others:
        return rows
    return STALE if {rows, *others} == {PADDED, STALE} else LOST


def _common_row_dim(rule: OpRule, result: Tensor, local: list[TaggedTensor], args: Args, kwargs: Kwargs) -> int | None:
    """Which dim of the result enumerates the rows of all of these, or None."""
    found = {_row_dim(rule, result, s, args, kwargs) for s in local}
    if len(found - {None}) > 1:
        raise MissingHandler(
            f"{rule.name} pairs all rows of this rank with all of {', '.join(str(tuple(s.shape)) for s in local)}.\n"
            f"Pair atoms by edges, or register a handler for this form."
        )
    row_dim = found.pop()
    if found or row_dim is None or (rule.in_place and rule.in_place_reshapes):  # some have no row dim in the result
        return None
    return row_dim if 0 <= row_dim < result.ndim else None


def _row_dim(rule: OpRule, result: Tensor, source: TaggedTensor, args: Args, kwargs: Kwargs) -> int | None:
    """Which dim of the result enumerates the source's rows, or None."""
    if rule.row_dim is not None:
        try:
            return rule.row_dim(source, *args, **kwargs)
        except _OTHER_CALL_FORM:
            return None
    if _numbers_rows(rule, args):
        return 0
    given = (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args
    tensors = list(_tensors(given))
    if rule.reduces and len(tensors) == 1:  # torch.max(x, y) is elementwise
        return row_dim_after_reduction(source, rule.arguments.bind(args, kwargs))
    return row_dim_after_broadcast(source, tensors, result) if rule.broadcasts else None


def _numbers_rows(rule: OpRule, args: Args) -> bool:
    """The values of the result are numbers of this rank's rows."""
    return rule.numbers_rows and (not rule.pointwise or len(args) == 1)


def _selects_rows(rule: OpRule, n: int, shard: Shard, args: Args) -> bool:
    """The n rows of the result are a selection of [owned | ghost] rows, of which the number of ghosts is not known."""
    return n != shard.n_owned + shard.n_ghost or _numbers_rows(rule, args)


def _sum_contracted_rows(
    rule: OpRule, result: Tensor, shard: Shard, local: list[TaggedTensor], args: Args, kwargs: Kwargs
) -> Tensor:
    """Add up over ranks what a contraction has summed over this rank's rows."""
    try:
        whole = rule.contracts_rows is not None and rule.contracts_rows(*args, **kwargs)
    except _OTHER_CALL_FORM:
        whole = False
    if whole:
        return tag_in_place(sum_over_ranks(result, shard.comm), shard, SYSTEM)
    raise MissingHandler(
        f"{rule.name} contracts over this rank's rows only: {', '.join(str(tuple(s.shape)) for s in local)}.\n"
        f"Multiply row-wise and reduce through the batch index, or register a handler for this form."
    )


def _refuse_mixed_index(rule: OpRule, sources: list[TaggedTensor], args: Args) -> None:
    if 0 < sum(s.tag.points_at is not None for s in sources) < len(list(_tensors(args))):
        raise MissingHandler(
            f"{rule.name} of an index that points at atoms and one that does not, or is not known to: in this layout atoms are "
            f"not counted from 0 to the number of rows.\nTag both, or use layout='owned'."
        )


def _index_tag(rule: OpRule, result: Tensor, sources: list[TaggedTensor]) -> tuple[PointsAt | None, Ends]:
    """What the values of the result point at, and which end of the edges they name."""
    found = [s.tag for s in sources if s.tag.points_at is not None]
    if not found or not rule.keeps_index or result.is_floating_point() or result.dtype == torch.bool:
        return None, None
    end = found[0].end
    if any(tag.end != end for tag in found) or (isinstance(end, tuple) and not rule.keeps_end):
        end = None
    return found[0].points_at, end


def _is_linear(rule: OpRule, args: Args) -> bool:
    """The result's sum over ranks is the same operation on the sums."""
    tensors = list(_tensors(args[1:] if rule.indexes else args))
    return len(tensors) in rule.linear and all(getattr(t, "rows", None) is PARTIAL for t in tensors)


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from _tensors(a)


def tag_base(view: Any) -> None:
    """After a write through a view, tag the tensor that it is a view of, which has changed with it."""
    base = view._base if isinstance(view, Tensor) else None
    if base is None or not isinstance(view, TaggedTensor) or view.rows in REPLICATED:
        return
    same_rows = (
        view.ndim and base.ndim and view.row_dim == 0 and view.size(0) == base.size(0) and view.stride(0) == base.stride(0)
    )
    if not isinstance(base, TaggedTensor) or base.rows in (SYSTEM, GLOBAL, None):
        tag_in_place(base, view.shard, view.rows if same_rows else LOST)
    elif base.rows is PADDED or view.rows is LOST:
        tag_in_place(base, view.shard, STALE if view.rows is not LOST else LOST, row_dim=base.row_dim)
