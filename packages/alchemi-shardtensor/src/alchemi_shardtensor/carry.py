"""How tags are carried by the operations that no handler takes: plain torch, and where the rows are in its result."""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from alchemi_shardtensor.arguments import base, bind
from alchemi_shardtensor.contract import CONTRACTIONS, contracts_rows
from alchemi_shardtensor.moves import MOVES
from alchemi_shardtensor.pointwise import POINTWISE
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
    Rows,
    TaggedTensor,
    attach,
    make_tag,
    tag_in_place,
)
from alchemi_shardtensor.transport import sum_over_ranks
from alchemi_spec import MissingHandler

_REDUCTIONS = frozenset(
    "sum mean nansum nanmean prod any all amax amin max min argmax argmin aminmax std var std_mean var_mean norm "
    "linalg_vector_norm linalg_norm logsumexp median nanmedian mode count_nonzero".split()
)
"""Operations that take dimensions away."""
_VALUES_MOVE = frozenset(
    "__getitem__ __iter__ select narrow index_select gather take_along_dim masked_select view reshape flatten unflatten "
    "expand expand_as broadcast_to unsqueeze squeeze transpose swapaxes swapdims movedim moveaxis permute t T mT "
    "to type long int cpu cuda contiguous clone detach repeat repeat_interleave tile cat stack concat split chunk unbind "
    "flip roll sort unique unique_consecutive where copy".split()
)
"""Operations whose integer results are still values of their integer arguments, so that an index still points."""
_SAME_PLACES = frozenset({"to", "contiguous", "clone", "long", "int", "detach", "cuda", "cpu"})
_FIRST_ONLY = frozenset({"to", "type_as", "view_as", "reshape_as", "expand_as"})
"""What other arguments lend is a type or a shape."""


class Plan(NamedTuple):
    """What is known of an operation by its name: without the underscore of an in-place form, "" for a scripted module."""

    name: str
    in_place: bool
    pointwise: bool
    reduces: bool
    writes: bool
    moves: Callable[..., int | None] | None


@functools.lru_cache(maxsize=4096)
def plan_of(op: Any) -> Plan:
    """The plan of an operation."""
    full = "" if isinstance(op, torch.ScriptMethod) else getattr(op, "__name__", "")
    full = full if full != "__get__" else op.__self__.__name__
    name = base(full)
    writes = name is not full or name == "__setitem__"
    return Plan(name, name is not full, name in POINTWISE, name in _REDUCTIONS, writes, MOVES.get(name))


def carried_alone(
    plan: Plan, result: Any, source: TaggedTensor, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any] | None
) -> bool:
    """The short way for an operation on one tensor whose rows are known; False where it takes the long one.

    `named`: the arguments by their names, where somebody has asked for them already.
    """
    mark = source.tag
    rows = mark.rows
    if type(result) is not Tensor or plan.in_place or mark.points_at is not None or not args:
        return False
    if args[0] is not source:
        return False
    if rows is SYSTEM and plan.pointwise:
        dim = mark.row_dim
    elif rows is OWNED or rows is EDGE:
        others = (*args[1:], *kwargs.values()) if kwargs else args[1:]
        if plan.pointwise and not any(isinstance(a, _HOLDERS) and a is not source for a in others):
            found: int | None = mark.row_dim
        elif plan.reduces and named is not None and not any(isinstance(a, Tensor) for a in others):
            found = _reduced(source, named)
        else:
            found = _row_dim(plan, result, source, args, kwargs)
        if found is None or not 0 <= found < result.ndim:
            return False
        dim = found
    else:
        return False
    attach(result, source.shard, mark if dim == mark.row_dim else make_tag(rows, row_dim=dim))
    return True


_HOLDERS = (Tensor, tuple, list)


def carried_row_by_row(result: Any, sources: list[TaggedTensor]) -> bool:
    """The short way for a pointwise operation on tensors with one tag, each row of the result made of the same of theirs."""
    first = sources[0]
    mark, d, ndim = first.tag, first.tag.row_dim, first.ndim
    if type(result) is not Tensor or mark.points_at is not None or mark.rows in (LOST, PARTIAL) or result.ndim != ndim:
        return False
    n = first.size(d) if ndim else 0
    for s in sources:
        if s is not first and (s.tag is not mark or s.ndim != ndim or (mark.rows is not SYSTEM and s.size(d) != n)):
            return False
    if mark.rows is not SYSTEM and (not ndim or result.size(d) != n):
        return False
    attach(result, first.shard, mark)
    return True


def carry(
    op: Callable[..., Any],
    result: Any,
    shard: Shard,
    sources: list[TaggedTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Tag what an unhandled operation returned: its rows, where they are, and what it still points at."""
    if isinstance(result, (tuple, list)):
        parts = [carry(op, part, shard, sources, args, kwargs) for part in result]
        if type(result) not in (tuple, list):  # values and positions: only the values can point at anything
            parts[1:] = [_point_no_more(part) for part in parts[1:]]
        return type(result)(parts)
    if not isinstance(result, Tensor):
        return result
    plan = plan_of(op)
    name = plan.name
    if name.startswith("new_"):
        return result
    if (not name or isinstance(op, (OpOverload, OpOverloadPacket))) and any(s.tag.points_at for s in sources):
        raise MissingHandler(
            f"{op} was handed an index that points at other rows: what it gathers or adds inside cannot be seen.\n"
            f"Use a module before it was scripted, or a MethodAdapter; say with an OpAdapter what an operator needs."
        )
    if name == "expand_as" and getattr(args[0], "rows", None) not in SHARDED and isinstance(args[1], TaggedTensor):
        return tag_in_place(result, shard, args[1].rows, row_dim=args[1].row_dim)
    if not plan.in_place:  # an argument that comes back is the caller's owned_rows
        for a in args:
            if a is result:
                return result
    if name in _FIRST_ONLY:
        sources = [s for s in sources if s is args[0]]
    target = end = None
    found = [s for s in sources if s.tag.points_at is not None]
    if found and name in _VALUES_MOVE and not result.is_floating_point() and result.dtype != torch.bool:
        target, end = found[0].tag.points_at, _end(name, found)
    if any(s.tag.rows is PARTIAL for s in sources):
        return tag_in_place(result, shard, PARTIAL if _is_linear(name, args) and result.is_floating_point() else LOST)
    shares = [s for s in sources if s.tag.rows in SHARDED]
    if not shares:
        rows = _replicated(result, sources)
        return tag_in_place(result, shard, rows, target, end) if rows or target else result
    if name == "__getitem__" and len(shares) > 1:  # x[arange(n), heads]: the rows are those of the index that has a tag
        shares = [s for s in shares if s is not args[0]]
    kinds = {s.tag.rows for s in shares}
    kind = STALE if kinds == _FRESH_AND_STALE else shares[0].tag.rows
    if (len(kinds) > 1 and kind is not STALE) or kind is LOST:  # what is lost stays lost, whatever it meets
        return tag_in_place(result, shard, LOST, target, end)
    places = {_row_dim(plan, result, s, args, kwargs) for s in shares}
    if len(places - {None}) > 1:
        raise MissingHandler(
            f"{name} pairs all rows of this rank with all of {', '.join(str(tuple(s.shape)) for s in shares)}.\n"
            f"Pair atoms by edges, or register a handler for this form."
        )
    dim = places.pop() if len(places) == 1 and not (plan.in_place and name in _RESHAPES) else None
    dim = dim if dim is not None and 0 <= dim < result.ndim else None
    if dim is None and name in CONTRACTIONS:
        if contracts_rows(name, args, kwargs):
            return tag_in_place(sum_over_ranks(result, shard.comm), shard, SYSTEM)
        raise MissingHandler(
            f"{name} contracts over this rank's rows only: {', '.join(str(tuple(s.shape)) for s in shares)}.\n"
            f"Multiply row-wise and reduce through the batch index, or register a handler for this form."
        )
    if (
        dim is not None
        and kind in _FRESH_AND_STALE
        and (result.shape[dim] != shard.n_owned + shard.n_ghost or _numbers_rows(name, args))
    ):
        dim = None  # some of the rows: which of them are ghosts is not known
    if (
        found
        and name in ("cat", "concat", "stack")
        and not shard.storage.indexes_owned
        and len(found) < len(list(_tensors(args)))
    ):
        raise MissingHandler(
            f"{name} of an index that points at atoms and one that does not, or is not known to: in this layout atoms are not "
            f"counted from 0 to the number of rows.\nTag both, or use layout='owned'."
        )
    return tag_in_place(result, shard, LOST if dim is None else kind, target, end, dim or 0)


_FRESH_AND_STALE = {PADDED, STALE}
_RESHAPES = frozenset("unsqueeze squeeze transpose t swapaxes swapdims movedim moveaxis".split())
"""Operations of which the in-place form changes the argument's shape."""


def _numbers_rows(name: str, args: tuple[Any, ...]) -> bool:
    """The values of the result are numbers of this rank's rows."""
    return name in ("nonzero", "argwhere") or (name == "where" and len(args) == 1)


def tag_base(view: Any) -> None:
    """After a write through a view: what it is a view of has changed with it."""
    base = view._base if isinstance(view, Tensor) else None
    if base is None or not isinstance(view, TaggedTensor) or view.tag.rows in REPLICATED:
        return
    shard, rows = view.shard, view.tag.rows
    alike = (
        view.ndim and base.ndim and view.tag.row_dim == 0 and view.size(0) == base.size(0) and view.stride(0) == base.stride(0)
    )
    if not isinstance(base, TaggedTensor) or base.tag.rows in (SYSTEM, GLOBAL, None):
        tag_in_place(base, shard, rows if alike else LOST)
    elif base.tag.rows is PADDED or rows is LOST:
        tag_in_place(base, shard, STALE if rows is not LOST else LOST, row_dim=base.tag.row_dim)


_LINEAR = frozenset(
    "sum neg view reshape flatten squeeze unsqueeze select __getitem__ T mT transpose permute clone detach contiguous "
    "stack cat zeros_like to double float add sub mul div __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__ "
    "grad data".split()
)
"""Operations of which the sum over ranks is the operation on the sum, if a factor is a number."""


def _is_linear(name: str, args: tuple[Any, ...]) -> bool:
    others = args[1:] if name in ("__getitem__", "select") else args
    parts = [getattr(a, "rows", None) is PARTIAL for a in _tensors(others)]
    scaled = "mul" in name or "div" in name
    shifted = ("add" in name or "sub" in name) and len(parts) < 2
    return name in _LINEAR and all(parts) and not shifted and (not scaled or len(parts) == 1)


def _replicated(result: Tensor, sources: list[TaggedTensor]) -> Rows | None:
    """Made of what every rank has alike: still all atoms where it has as many rows as they."""
    kept = (s.tag.rows is GLOBAL and result.ndim and s.ndim and len(result) == len(s) for s in sources)
    return GLOBAL if any(kept) else SYSTEM if any(s.tag.rows in REPLICATED for s in sources) else None


def _point_no_more(part: Any) -> Any:
    return tag_in_place(part, part.shard, part.rows, row_dim=part.row_dim) if isinstance(part, TaggedTensor) else part


def _end(name: str, found: list[TaggedTensor]) -> Ends:
    """Indices of one end keep it in any shape; an edge_index keeps its two where its rows stay in their places."""
    end = found[0].end
    if any(s.end != end for s in found) or (isinstance(end, tuple) and name not in _SAME_PLACES):
        return None
    return end


def _row_dim(plan: Plan, result: Tensor, source: TaggedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    """Which dim of the result enumerates the source's rows, or None if none does."""
    if _numbers_rows(plan.name, args):
        return 0
    if plan.moves is not None:
        try:
            return plan.moves(source, *args, **kwargs)
        except (TypeError, KeyError, ValueError, IndexError):  # a call form that is not listed
            return None
    name = plan.name
    given = (*args, *(value for key, value in kwargs.items() if key != "out")) if kwargs else args
    tensors = list(_tensors(given))
    if plan.reduces and len(tensors) == 1:  # torch.max(x, y) is elementwise
        return _reduced(source, bind(name, args, kwargs))
    if name and not plan.pointwise and name not in ("max", "min"):
        return None
    r = source.row_dim  # pointwise; or a scripted module, which is taken to keep its rows
    widest = max((t.ndim for t in tensors), default=0)
    aligned = r + result.ndim - source.ndim if widest == result.ndim else r  # broadcasting aligns the last dims
    fits = 0 <= aligned < result.ndim and result.shape[aligned] == source.shape[r]
    return aligned if fits else None


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from _tensors(a)


def _reduced(s: TaggedTensor, named: dict[str, Any]) -> int | None:
    """The rows after a reduction over other dims."""
    dim = named.get("dim")
    if type(dim) is int:
        gone = dim % s.ndim
        return None if gone == s.row_dim else s.row_dim if named.get("keepdim") else s.row_dim - (gone < s.row_dim)
    dims = {d % s.ndim for d in (dim if isinstance(dim, (tuple, list)) else range(s.ndim) if dim is None else (dim,))}
    if s.row_dim in dims:
        return None
    return s.row_dim if named.get("keepdim") else s.row_dim - sum(d < s.row_dim for d in dims)
