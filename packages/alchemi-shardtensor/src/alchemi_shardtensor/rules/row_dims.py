"""Row dim rules: which dim of an operation's result enumerates the rows of one of its arguments.

In `row_dim_after_*(s, *arguments)`, `s` is the argument whose rows are followed, a second time among the arguments. The
answer is None where no dim of the result enumerates them. A call form that a function does not accept counts as None.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.rules.arguments import Signature
from alchemi_shardtensor.tag import TaggedTensor


def row_dim_after_broadcast(s: TaggedTensor, tensors: Sequence[Tensor], result: Tensor) -> int | None:
    """Broadcasting aligns the last dims of `tensors`."""
    r = s.row_dim
    widest = max((t.ndim for t in tensors), default=0)
    aligned = r + result.ndim - s.ndim if widest == result.ndim else r
    fits = 0 <= aligned < result.ndim and result.shape[aligned] == s.shape[r]
    return aligned if fits else None


def row_dim_after_reduction(s: TaggedTensor, named: dict[str, Any]) -> int | None:
    """The dims `named["dim"]` are reduced, all where there is none."""
    dim = named.get("dim")
    if type(dim) is int:
        gone = dim % s.ndim
        return None if gone == s.row_dim else s.row_dim if named.get("keepdim") else s.row_dim - (gone < s.row_dim)
    dims = {d % s.ndim for d in (dim if isinstance(dim, (tuple, list)) else range(s.ndim) if dim is None else (dim,))}
    if s.row_dim in dims:
        return None
    return s.row_dim if named.get("keepdim") else s.row_dim - sum(d < s.row_dim for d in dims)


def no_row_dim(*_: Any, **__: Any) -> None:
    """No dim of the result enumerates the rows."""


def same_row_dim(s: TaggedTensor, *_: Any, **__: Any) -> int:
    """Rows keep their dim."""
    return s.row_dim


def first_dim(*_: Any, **__: Any) -> int:
    """Rows are along dim 0, wherever they were."""
    return 0


def row_dim_unless_along(signature: Signature) -> Callable[..., int | None]:
    """Make the rule of an operation along one dim, which mixes rows only if that is theirs."""

    def row_dim(s: TaggedTensor, *args: Any, **kwargs: Any) -> int | None:
        dim = signature.bind(args, kwargs).get("dim")
        return s.row_dim if isinstance(dim, int) and dim % s.ndim != s.row_dim else None

    return row_dim


def row_dim_before_last(n: int) -> Callable[..., int | None]:
    """Make the rule of an operation on the last n dims, for each index of the dims before them."""
    return lambda s, *_, **__: s.row_dim if s.row_dim < s.ndim - n else None


def row_dim_of_first_argument(s: TaggedTensor, input: Tensor, *_: Any, **__: Any) -> int | None:
    """Dim 0 of the first argument is dim 0 of the result; of other dims nothing is known."""
    return 0 if s is input and s.row_dim == 0 else None


def row_dim_unless_dim(s: TaggedTensor, input: Tensor, dim: int, *_: Any, **__: Any) -> int | None:
    """The operation selects, or writes, along `dim`."""
    return s.row_dim if dim % input.ndim != s.row_dim else None


def row_dim_after_unsqueeze(s: TaggedTensor, x: Any, dim: int = 0) -> int:
    """A new dim is put in; stack does so with each tensor."""
    return s.row_dim + (dim % (s.ndim + 1) <= s.row_dim)


def row_dim_after_squeeze(s: TaggedTensor, x: Tensor, dim: Any = None) -> int | None:
    """Dims of length one go."""
    dims = range(s.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    gone = {d % s.ndim for d in dims if s.shape[d] == 1}
    return None if s.row_dim in gone else s.row_dim - sum(d < s.row_dim for d in gone)


def row_dim_after_transpose(s: TaggedTensor, x: Tensor, dim0: int, dim1: int) -> int:
    """Two dims are swapped."""
    a, b = dim0 % s.ndim, dim1 % s.ndim
    return b if s.row_dim == a else a if s.row_dim == b else s.row_dim


def row_dim_after_matrix_transpose(s: TaggedTensor, x: Tensor) -> int:
    """The last two dims are swapped."""
    return row_dim_after_transpose(s, x, -1, -2)


def row_dim_after_reversing_dims(s: TaggedTensor, x: Tensor) -> int:
    """All dims are reversed."""
    return s.ndim - 1 - s.row_dim


def row_dim_after_movedim(s: TaggedTensor, x: Tensor, source: Any, destination: Any) -> int:
    """A tensor with length two along the row dim alone shows where torch moves it."""
    order = torch.empty([1] * s.row_dim + [2] + [1] * (s.ndim - s.row_dim - 1)).movedim(source, destination)
    return order.shape.index(2)


def row_dim_after_permute(s: TaggedTensor, x: Tensor, *order: Any, dims: Any = None) -> int:
    """Dims come in the given order."""
    given = dims if dims is not None else order[0] if isinstance(order[0], (tuple, list)) else order
    return [d % s.ndim for d in given].index(s.row_dim)


def row_dim_after_expand(s: TaggedTensor, x: Tensor, *sizes: Any, **_: Any) -> int:
    """New dims are put in front."""
    shape = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    return s.row_dim + max(len(shape) - s.ndim, 0)


def row_dim_after_expand_as(s: TaggedTensor, x: Tensor, like: Tensor) -> int:
    """New dims are put in front, up to those of `like`."""
    return s.row_dim + like.ndim - s.ndim


def row_dim_after_flatten(s: TaggedTensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> int:
    """The dims from start_dim to end_dim become one."""
    start, end = start_dim % s.ndim, end_dim % s.ndim
    return s.row_dim if s.row_dim <= start else start if s.row_dim <= end else s.row_dim - (end - start)


def row_dim_after_unflatten(s: TaggedTensor, x: Tensor, dim: int, sizes: Any) -> int | None:
    """One dim becomes several."""
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim + (len(sizes) - 1) * (d < s.row_dim)


def row_dim_after_view(s: TaggedTensor, x: Tensor, *sizes: Any, **named: Any) -> int | None:
    """Rows keep their dim while the dims before it are unchanged; they may be merged with the dims after it."""
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


def row_dim_after_view_as(s: TaggedTensor, x: Tensor, like: Tensor) -> int | None:
    """A view with the shape of `like`."""
    return row_dim_after_view(s, x, like.shape)


def row_dim_after_select(s: TaggedTensor, x: Tensor, dim: int, index: Any) -> int | None:
    """One dim goes."""
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim - (d < s.row_dim)


def row_dim_after_unbind(s: TaggedTensor, x: Tensor, dim: int = 0) -> int | None:
    """One dim goes, in each of the tensors."""
    return row_dim_after_select(s, x, dim, 0)


def row_dim_after_index_select(s: TaggedTensor, input: Tensor, dim: int, index: Tensor) -> int | None:
    """Rows of the index are along `dim`."""
    return dim % input.ndim if s is index else s.row_dim if dim % input.ndim != s.row_dim else None


def row_dim_after_embedding(s: TaggedTensor, index: Tensor, weight: Tensor, *_: Any, **__: Any) -> int | None:
    """Rows of the index keep their dim."""
    return s.row_dim if s is index else None


def row_dim_after_repeat_interleave(s: TaggedTensor, x: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> int | None:
    """Without a dim, the result is flat."""
    return s.row_dim if dim is not None or s.ndim == 1 else None


def row_dim_after_split(s: TaggedTensor, x: Tensor, *args: Any, dim: int = 0, **_: Any) -> int | None:
    """Parts along another dim than that of the rows have all rows."""
    d = args[1] if len(args) > 1 else dim
    return None if d % s.ndim == s.row_dim else s.row_dim


def row_dim_after_cat(s: TaggedTensor, tensors: Any, dim: int = 0) -> int | None:
    """Along the dim of the rows, all tensors must have rows of one kind."""
    mixed = dim % s.ndim == s.row_dim and any(getattr(t, "rows", None) is not s.rows for t in tensors)
    return None if mixed else s.row_dim


def row_dim_after_hstack(s: TaggedTensor, tensors: Any) -> int | None:
    """Tensors are joined along dim 1, vectors along dim 0."""
    return row_dim_after_cat(s, tensors, min(s.ndim - 1, 1))


def row_dim_after_flip(s: TaggedTensor, input: Tensor, *given: Any, dims: Any = None) -> int | None:
    """Other dims than that of the rows may be reversed."""
    return row_dim_after_roll(s, input, None, given[0] if given and isinstance(given[0], (tuple, list)) else given or dims)


def row_dim_after_roll(s: TaggedTensor, input: Tensor, shifts: Any, dims: Any = None) -> int | None:
    """Without dims, all elements move; other dims than that of the rows may."""
    listed = [dims] if isinstance(dims, int) else dims
    return None if not listed or any(d % s.ndim == s.row_dim for d in listed) else s.row_dim


def row_dim_after_diff(s: TaggedTensor, x: Tensor, n: int = 1, dim: int = -1, **_: Any) -> int | None:
    """Differences are taken along `dim`."""
    return s.row_dim if dim % s.ndim != s.row_dim else None


def row_dim_after_pad(s: TaggedTensor, input: Tensor, pad: Any, *_: Any, **__: Any) -> int | None:
    """The last dims are padded, two numbers a dim."""
    return s.row_dim if s.row_dim < s.ndim - len(pad) // 2 else None


def row_dim_after_cross(s: TaggedTensor, a: Tensor, b: Tensor, dim: int | None = -1, **_: Any) -> int | None:
    """Vectors are along `dim`."""
    return s.row_dim if a.ndim == b.ndim and dim is not None and dim % s.ndim != s.row_dim else None


def row_dim_after_layer_norm(s: TaggedTensor, input: Tensor, normalized_shape: Any, *_: Any, **__: Any) -> int | None:
    """The last dims are normalised, those of normalized_shape."""
    return s.row_dim if s is input and s.row_dim < s.ndim - len(normalized_shape) else None


def row_dim_after_indexing(s: TaggedTensor, x: Tensor, index: Any) -> int | None:
    """Which dim of x[index] enumerates the rows of `s`, which is x itself or one of the indices.

    The tensors and lists of an index become one block of dims where the first of them stands, or in front of all if a
    slice is between them. A mask, or a slice of all, leaves x its rows; other parts select some of them, which differ
    from rank to rank.
    """
    if type(index) is tuple and s is x and s.row_dim == 0 and all(type(p) in _BASIC for p in index) and index[:1] == _ALL:
        return 0
    parts = _without_ellipsis(x, index)
    if any(isinstance(p, bool) for p in parts):
        return None
    block_ndim = max((_ndim(p) for p in parts if _is_advanced(p)), default=0)
    out = dim = 0  # dims of the result and of x so far
    block: int | None = None
    last = row = inside = None
    for number, p in enumerate(parts):
        width = p.ndim if _is_mask(p) else p is not None
        if _is_advanced(p):
            block = out if block is None else block if last == number - 1 else 0
            last = number
            if s is p:
                inside = block_ndim - _ndim(p) + s.row_dim
            elif s is x and _is_mask(p) and dim <= s.row_dim < dim + width:
                inside = 0
        elif s is x and p == slice(None) and dim == s.row_dim:
            row = out
        out += p is None or isinstance(p, slice)
        dim += width
    if row is not None:
        return row + (block_ndim if block is not None and block <= row else 0)
    return None if inside is None or block is None else block + inside


def index_of_rows(x: TaggedTensor, index: Any) -> Any:
    """Return the part of an index that selects among x's rows; a slice of all where there is none."""
    dim = 0
    for p in _without_ellipsis(x, index):
        width = p.ndim if _is_mask(p) else p is not None and not isinstance(p, bool)
        if width and dim <= x.row_dim < dim + width:
            return p
        dim += width
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
