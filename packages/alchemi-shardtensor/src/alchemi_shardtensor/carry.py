"""How tags are carried by the operations that no handler takes: plain torch, and dim 0 is still what it was, or it is not."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.tensor import EDGE, OWNED, PADDED, SYSTEM, Ends, Rows, Shard, ShardTensor, tag_in_place

SHARE = (OWNED, PADDED, EDGE)
"""Rows of which each rank holds its share only."""
_ONE_ROW_PER_INDEX = frozenset({"__getitem__", "index_select", "embedding", "one_hot"})
_SAME_PLACES = frozenset({"to", "contiguous", "clone", "long", "int", "detach", "cuda", "cpu", "requires_grad_"})


def carry(
    op: Callable[..., Any],
    result: Any,
    shard: Shard,
    sources: list[ShardTensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Tag what an unhandled operation returned: rows where dim 0 is still a source's, a target where it still indexes."""
    if type(result) in (tuple, list):
        return type(result)(carry(op, r, shard, sources, args, kwargs) for r in result)
    if not isinstance(result, Tensor):
        return result
    name = getattr(op, "__name__", "")  # a scripted module's method has none; its results are tagged by their rows
    if name == "__get__":
        name = op.__self__.__name__  # type: ignore[attr-defined]
    in_place = name.endswith("_") and not name.endswith("__")
    if not in_place and any(result is a for a in args):
        return result
    rows = _rows(name, result, sources, args, kwargs)
    countable = not result.is_floating_point() and result.dtype != torch.bool
    found = [s for s in sources if s.points_at] if countable else []
    if found:
        return tag_in_place(result, shard, rows, found[0].points_at, _end(name, found))
    return result if rows is None else tag_in_place(result, shard, rows)


def _end(name: str, found: list[ShardTensor]) -> Ends:
    """Indices of one end keep it in any shape; an edge_index keeps its two where its rows stay in their places."""
    end = found[0].end
    if any(s.end != end for s in found) or (isinstance(end, tuple) and name not in _SAME_PLACES):
        return None
    return end


def _rows(name: str, result: Tensor, sources: list[ShardTensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows | None:
    shares = [s for s in sources if s.rows in SHARE and s.ndim]
    if not shares:
        return SYSTEM if any(s.rows is SYSTEM for s in sources) else None
    if not result.ndim or (name in _MOVES and _MOVES[name](*args, **kwargs)):
        return None
    width = 0 if name in _ONE_ROW_PER_INDEX else min(result.ndim, max(t.ndim for t in _tensors((*args, *kwargs.values()))))
    return next((s.rows for s in shares if s.ndim >= width and s.shape[0] == result.shape[0]), None)


def _tensors(args: Any) -> Iterator[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (tuple, list)):
            yield from _tensors(a)


def _swaps_first(x: Tensor, dim0: int, dim1: int) -> bool:
    return 0 in (dim0 % x.ndim, dim1 % x.ndim)


def _prepends(x: Tensor, *sizes: Any, **_: Any) -> bool:
    shape = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    return len(shape) > x.ndim


def _permutes(x: Tensor, *dims: Any, **named: Any) -> bool:
    order = named.get("dims", dims[0] if dims and isinstance(dims[0], (tuple, list)) else dims)
    return bool(order[0] % x.ndim)


def _einsum_moves(equation: str, *operands: Any) -> bool:
    inputs, _, output = equation.replace(" ", "").partition("->")
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    firsts = {t[0] for t, x in zip(inputs.split(","), listed, strict=True) if getattr(x, "rows", None) in SHARE}
    return firsts != {output[:1]}


def _new_first(x: Any, dim: int = 0) -> bool:
    return dim in (0, -1 - (x if isinstance(x, Tensor) else x[0]).ndim)


_MOVES: dict[str, Callable[..., bool]] = {
    "unsqueeze": _new_first,
    "unsqueeze_": _new_first,
    "stack": _new_first,
    "transpose": _swaps_first,
    "transpose_": _swaps_first,
    "swapaxes": _swaps_first,
    "swapdims": _swaps_first,
    "movedim": _swaps_first,
    "moveaxis": _swaps_first,
    "permute": _permutes,
    "expand": _prepends,
    "broadcast_to": _prepends,
    "repeat": _prepends,
    "tile": _prepends,
    "einsum": _einsum_moves,
    "__getitem__": lambda x, i: i is None or (isinstance(i, tuple) and bool(i) and i[0] is None),
    "t": lambda x: True,
    "T": lambda x: True,
    "H": lambda x: True,
    "mT": lambda x: x.ndim == 2,
    "mH": lambda x: x.ndim == 2,
    "adjoint": lambda x: x.ndim == 2,
}
"""Whether dim 0 of the result is not dim 0 of the argument any more, though it may have the same length."""
