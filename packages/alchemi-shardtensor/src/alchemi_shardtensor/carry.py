"""How tags are carried by the operations that no handler takes: plain torch, and where the rows are in its result."""

import functools
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from alchemi_shardtensor.arguments import base, bind
from alchemi_shardtensor.collectives import sum_over_ranks
from alchemi_shardtensor.contract import CONTRACTIONS, contracts_rows, einsummed, linear, multiplied, tensordotted
from alchemi_shardtensor.pointwise import POINTWISE
from alchemi_shardtensor.tensor import (
    EDGE,
    GLOBAL,
    LOST,
    OWNED,
    PADDED,
    PARTIAL,
    REPLICATED,
    SHARE,
    STALE,
    SYSTEM,
    Ends,
    Rows,
    Shard,
    ShardTensor,
    tag_in_place,
)
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
_ALONG = tuple("sort argsort topk softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin normalize".split())
"""Operations along one dim."""
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
    return Plan(name, name is not full, name in POINTWISE, name in _REDUCTIONS, writes, _MOVES.get(name))


def carried_alone(
    plan: Plan, result: Any, source: ShardTensor, args: tuple[Any, ...], kwargs: dict[str, Any], named: dict[str, Any] | None
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
    result.__class__ = ShardTensor
    result.tag = mark if dim == mark.row_dim else mark.shard.tag(rows, row_dim=dim)  # type: ignore[attr-defined]
    return True


_HOLDERS = (Tensor, tuple, list)


def carried_row_by_row(result: Any, sources: list[ShardTensor]) -> bool:
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
    result.__class__ = ShardTensor
    result.tag = mark  # type: ignore[attr-defined]
    return True


def carry(
    op: Callable[..., Any],
    result: Any,
    shard: Shard,
    sources: list[ShardTensor],
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
    if name == "expand_as" and args[0].rows not in SHARE and isinstance(args[1], ShardTensor):
        return tag_in_place(result, shard, args[1].rows, row_dim=args[1].row_dim)
    if not plan.in_place:  # an argument that comes back is the caller's own
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
        return tag_in_place(result, shard, PARTIAL if _is_linear(name, args) else LOST)
    shares = [s for s in sources if s.tag.rows in SHARE]
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
            f"{name} pairs all rows of this rank with all: {', '.join(str(tuple(s.shape)) for s in shares)}, rows along two dims.\n"
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
    if base is None or not isinstance(view, ShardTensor) or view.tag.rows in REPLICATED:
        return
    shard, rows = view.tag.shard, view.tag.rows
    alike = (
        view.ndim and base.ndim and view.tag.row_dim == 0 and view.size(0) == base.size(0) and view.stride(0) == base.stride(0)
    )
    if not isinstance(base, ShardTensor) or base.tag.rows in (SYSTEM, GLOBAL, None):
        tag_in_place(base, shard, rows if alike else LOST)
    elif base.tag.rows is PADDED or rows is LOST:
        tag_in_place(base, shard, STALE if rows is not LOST else LOST, row_dim=base.tag.row_dim)


_LINEAR = frozenset(
    "sum neg view reshape flatten squeeze unsqueeze select __getitem__ T mT transpose permute clone detach contiguous "
    "double float add sub mul div __mul__ __rmul__ __truediv__ __add__ __radd__ __sub__ __neg__ grad data".split()
)
"""Operations of which the sum over ranks is the operation on the sum, if a factor is a number."""


def _is_linear(name: str, args: tuple[Any, ...]) -> bool:
    others = args[1:] if name in ("__getitem__", "select") else args
    parts = [getattr(a, "rows", None) is PARTIAL for a in _tensors(others)]
    scaled = "mul" in name or "div" in name
    shifted = ("add" in name or "sub" in name) and len(parts) < 2
    return name in _LINEAR and all(parts) and not shifted and (not scaled or len(parts) == 1)


def _replicated(result: Tensor, sources: list[ShardTensor]) -> Rows | None:
    """Made of what every rank has alike: still all atoms where it has as many rows as they."""
    kept = (s.tag.rows is GLOBAL and result.ndim and s.ndim and len(result) == len(s) for s in sources)
    return GLOBAL if any(kept) else SYSTEM if any(s.tag.rows in REPLICATED for s in sources) else None


def _point_no_more(part: Any) -> Any:
    return tag_in_place(part, part.shard, part.rows, row_dim=part.row_dim) if isinstance(part, ShardTensor) else part


def _end(name: str, found: list[ShardTensor]) -> Ends:
    """Indices of one end keep it in any shape; an edge_index keeps its two where its rows stay in their places."""
    end = found[0].end
    if any(s.end != end for s in found) or (isinstance(end, tuple) and name not in _SAME_PLACES):
        return None
    return end


def _row_dim(plan: Plan, result: Tensor, source: ShardTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
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


def _reduced(s: ShardTensor, named: dict[str, Any]) -> int | None:
    """The rows after a reduction over other dims."""
    dim = named.get("dim")
    if type(dim) is int:
        gone = dim % s.ndim
        return None if gone == s.row_dim else s.row_dim if named.get("keepdim") else s.row_dim - (gone < s.row_dim)
    dims = {d % s.ndim for d in (dim if isinstance(dim, (tuple, list)) else range(s.ndim) if dim is None else (dim,))}
    if s.row_dim in dims:
        return None
    return s.row_dim if named.get("keepdim") else s.row_dim - sum(d < s.row_dim for d in dims)


def _unsqueezed(s: ShardTensor, x: Any, dim: int = 0) -> int:
    return s.row_dim + (dim % (s.ndim + 1) <= s.row_dim)


def _swapped(s: ShardTensor, x: Tensor, dim0: int, dim1: int) -> int:
    a, b = dim0 % s.ndim, dim1 % s.ndim
    return b if s.row_dim == a else a if s.row_dim == b else s.row_dim


def _moved(s: ShardTensor, x: Tensor, source: Any, destination: Any) -> int:
    order = torch.empty([1] * s.row_dim + [2] + [1] * (s.ndim - s.row_dim - 1)).movedim(source, destination)
    return order.shape.index(2)


def _permuted(s: ShardTensor, x: Tensor, *order: Any, dims: Any = None) -> int:
    given = dims if dims is not None else order[0] if isinstance(order[0], (tuple, list)) else order
    return [d % s.ndim for d in given].index(s.row_dim)


def _transposed(s: ShardTensor, x: Tensor) -> int:
    return s.ndim - 1 - s.row_dim


def _last_two(s: ShardTensor, x: Tensor) -> int:
    return _swapped(s, x, -1, -2)


def _prepended(s: ShardTensor, x: Tensor, *sizes: Any, **_: Any) -> int:
    shape = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    return s.row_dim + max(len(shape) - s.ndim, 0)


def _selected(s: ShardTensor, x: Tensor, dim: int, index: Any) -> int | None:
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim - (d < s.row_dim)


def _along(name: str) -> Callable[..., int | None]:
    """Operations along one dim that leave every other as it is."""

    def place(s: ShardTensor, *args: Any, **kwargs: Any) -> int | None:
        dim = bind(name, args, kwargs).get("dim")
        return s.row_dim if isinstance(dim, int) and dim % s.ndim != s.row_dim else None

    return place


def _beyond(trailing: int) -> Callable[..., int | None]:
    """Operations on the last dims, for each of what stands before them."""
    return lambda s, *_, **__: s.row_dim if s.row_dim < s.ndim - trailing else None


def _first(s: ShardTensor, input: Tensor, *_: Any, **__: Any) -> int | None:
    return 0 if s is input and s.row_dim == 0 else None


def _not_along(s: ShardTensor, input: Tensor, dim: int, *_: Any, **__: Any) -> int | None:
    return s.row_dim if dim % input.ndim != s.row_dim else None


def _not_among(s: ShardTensor, input: Tensor, *given: Any, dims: Any = None, **_: Any) -> int | None:
    listed = dims if dims is not None else given[-1] if given and isinstance(given[-1], (tuple, list)) else given[-1:]
    listed = [listed] if isinstance(listed, int) else listed
    return None if not listed or any(d % s.ndim == s.row_dim for d in listed) else s.row_dim


def _unflattened(s: ShardTensor, x: Tensor, dim: int, sizes: Any) -> int | None:
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim + (len(sizes) - 1) * (d < s.row_dim)


def _split(s: ShardTensor, x: Tensor, *args: Any, dim: int = 0, **_: Any) -> int | None:
    d = args[1] if len(args) > 1 else dim
    return None if d % s.ndim == s.row_dim else s.row_dim


def _padded_last(s: ShardTensor, input: Tensor, pad: Any, *_: Any, **__: Any) -> int | None:
    return s.row_dim if s.row_dim < s.ndim - len(pad) // 2 else None


def _crossed(s: ShardTensor, a: Tensor, b: Tensor, dim: int | None = -1, **_: Any) -> int | None:
    return s.row_dim if a.ndim == b.ndim and dim is not None and dim % s.ndim != s.row_dim else None


def _layer_normed(s: ShardTensor, input: Tensor, normalized_shape: Any, *_: Any, **__: Any) -> int | None:
    return s.row_dim if s is input and s.row_dim < s.ndim - len(normalized_shape) else None


def _index_selected(s: ShardTensor, input: Tensor, dim: int, index: Tensor) -> int | None:
    return dim % input.ndim if s is index else s.row_dim if dim % input.ndim != s.row_dim else None


def _flattened(s: ShardTensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> int:
    start, end = start_dim % s.ndim, end_dim % s.ndim
    return s.row_dim if s.row_dim <= start else start if s.row_dim <= end else s.row_dim - (end - start)


def _viewed(s: ShardTensor, x: Tensor, *sizes: Any, **named: Any) -> int | None:
    """Rows stay where they are while what stands before them does; merged with what follows, each is still a share."""
    given = named.get("shape", named.get("size", sizes[0] if len(sizes) == 1 else sizes))
    if isinstance(given, torch.dtype):
        return s.row_dim
    shape = list(given) if isinstance(given, (tuple, list)) else [given]
    r = s.row_dim
    if -1 in shape[:r]:
        known = prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = s.numel() // known if known else s.shape[shape.index(-1)]
    if len(shape) <= r or shape[:r] != list(s.shape[:r]):
        return None
    of_one, wanted = prod(s.shape[r + 1 :]), prod(shape[r + 1 :])
    return r if shape[r] == s.shape[r] or (shape[r] == -1 and wanted > 0 and of_one % wanted == 0) else None


def _concatenated(s: ShardTensor, tensors: Any, dim: int = 0) -> int | None:
    mixed = dim % s.ndim == s.row_dim and any(getattr(t, "rows", None) is not s.rows for t in tensors)
    return None if mixed else s.row_dim


def _squeezed(s: ShardTensor, x: Tensor, dim: Any = None) -> int | None:
    dims = range(s.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    gone = {d % s.ndim for d in dims if s.shape[d] == 1}
    return None if s.row_dim in gone else s.row_dim - sum(d < s.row_dim for d in gone)


def _repeated(s: ShardTensor, x: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> int | None:
    return s.row_dim if dim is not None or s.ndim == 1 else None


def indexed(s: ShardTensor, x: Tensor, index: Any) -> int | None:
    """Which dim of x[index] enumerates the rows of `s`, which is x itself or one of the indices.

    The tensors and lists of an index become one block of dims where the first of them stands, or in front of all if a
    slice is between them. A mask, or a slice of all, leaves x its rows; other parts of them are this rank's choice.
    """
    if type(index) is tuple and s is x and s.row_dim == 0 and all(type(p) in _BASIC for p in index) and index[:1] == _ALL:
        return 0
    parts = _without_ellipsis(x, index)
    if any(isinstance(p, bool) for p in parts):
        return None
    block_ndim = max((_ndim(p) for p in parts if _is_advanced(p)), default=0)
    done = place = 0  # dims of the result and of x so far
    block: int | None = None
    last = row = inside = None
    for number, p in enumerate(parts):
        wide = p.ndim if _is_mask(p) else p is not None
        if _is_advanced(p):
            block = done if block is None else block if last == number - 1 else 0
            last = number
            if s is p:
                inside = block_ndim - _ndim(p) + s.row_dim
            elif s is x and _is_mask(p) and place <= s.row_dim < place + wide:
                inside = 0
        elif s is x and p == slice(None) and place == s.row_dim:
            row = done
        done += p is None or isinstance(p, slice)
        place += wide
    if row is not None:
        return row + (block_ndim if block is not None and block <= row else 0)
    return None if inside is None or block is None else block + inside


def row_part(x: ShardTensor, index: Any) -> Any:
    """The part of an index that selects among x's rows."""
    place = 0
    for p in _without_ellipsis(x, index):
        wide = p.ndim if _is_mask(p) else p is not None and not isinstance(p, bool)
        if wide and place <= x.row_dim < place + wide:
            return p
        place += wide
    return slice(None)


_BASIC = (slice, int)
_ALL = (slice(None),)


def _without_ellipsis(x: Tensor, index: Any) -> list[Any]:
    parts = list(index) if isinstance(index, tuple) else [index]
    used = sum(p.ndim if _is_mask(p) else p is not None and p is not Ellipsis for p in parts)
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    return [*parts[:at], *[slice(None)] * (x.ndim - used), *parts[at + 1 :]]


def _is_mask(p: Any) -> bool:
    return isinstance(p, Tensor) and p.dtype == torch.bool


def _is_advanced(p: Any) -> bool:
    return isinstance(p, (Tensor, list))


def _ndim(p: Any) -> int:
    return 1 if _is_mask(p) else torch.as_tensor(p).ndim


_MOVES: dict[str, Callable[..., int | None]] = {
    "unsqueeze": _unsqueezed,
    "stack": _unsqueezed,
    "transpose": _swapped,
    "swapaxes": _swapped,
    "swapdims": _swapped,
    "movedim": _moved,
    "moveaxis": _moved,
    "permute": _permuted,
    "t": _transposed,
    "T": _transposed,
    "H": _transposed,
    "mT": _last_two,
    "mH": _last_two,
    "adjoint": _last_two,
    "expand": _prepended,
    "expand_as": lambda s, x, like: s.row_dim + like.ndim - s.ndim,
    "view_as": lambda s, x, like: _viewed(s, x, like.shape),
    "reshape_as": lambda s, x, like: _viewed(s, x, like.shape),
    "broadcast_to": _prepended,
    "repeat": _prepended,
    "tile": _prepended,
    "select": _selected,
    "index_select": _index_selected,
    "embedding": lambda s, index, weight, *_, **__: s.row_dim if s is index else None,
    "layer_norm": _layer_normed,
    "rms_norm": _layer_normed,
    **{name: _along(name) for name in _ALONG},
    "to": lambda s, *_, **__: s.row_dim,
    "type_as": lambda s, *_, **__: s.row_dim,
    "one_hot": lambda s, *_, **__: s.row_dim,
    "flatten": _flattened,
    "view": _viewed,
    "reshape": _viewed,
    "cat": _concatenated,
    "concat": _concatenated,
    "split": _split,
    "chunk": _split,
    "tensor_split": _split,
    "hstack": lambda s, tensors: _concatenated(s, tensors, min(s.ndim - 1, 1)),
    "narrow": _not_along,
    "gather": _not_along,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_fill", "index_copy"), _not_along),
    "unflatten": _unflattened,
    "flip": _not_among,
    "roll": _not_among,
    "diff": lambda s, x, n=1, dim=-1, **_: s.row_dim if dim % s.ndim != s.row_dim else None,
    "pad": _padded_last,
    "cross": _crossed,
    "linalg_cross": _crossed,
    "addmm": lambda s, bias, a, b, **_: 0 if s is a and s is not b and s is not bias and s.row_dim == 0 else None,
    **dict.fromkeys(("group_norm", "batch_norm", "instance_norm", "conv1d", "conv2d", "bucketize", "view_as_real"), _first),
    "view_as_complex": _beyond(1),
    "scaled_dot_product_attention": _beyond(2),
    **dict.fromkeys("det inverse logdet slogdet triu tril pinverse matrix_exp".split(), _beyond(2)),
    **{
        f"linalg_{n}": _beyond(2)
        for n in "det inv pinv eigh eigvalsh svd svdvals qr cholesky matrix_exp slogdet solve matrix_norm".split()
    },
    "repeat_interleave": _repeated,
    "squeeze": _squeezed,
    "unbind": lambda s, x, dim=0: _selected(s, x, dim, 0),
    "masked_select": lambda s, *_, **__: 0,
    "einsum": einsummed,
    "linear": linear,
    "matmul": multiplied,
    "mm": multiplied,
    "bmm": multiplied,
    "tensordot": tensordotted,
    "mv": multiplied,
    "dot": multiplied,
    "__matmul__": multiplied,
    "__rmatmul__": lambda s, b, a: multiplied(s, a, b),
    **dict.fromkeys(("vdot", "inner", "outer", "bilinear", "cdist"), lambda *_: None),
    "__getitem__": indexed,
}
"""Where each operation puts the rows of one of its arguments."""
