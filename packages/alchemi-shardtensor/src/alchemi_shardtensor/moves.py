"""Where each operation puts the rows of one of its arguments; None where no dim of the result enumerates them."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.arguments import bind
from alchemi_shardtensor.contract import einsummed, linear, multiplied, tensordotted
from alchemi_shardtensor.tag import TaggedTensor

_ALONG = tuple("sort argsort topk softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin normalize".split())
"""Operations along one dim."""


def _unsqueezed(s: TaggedTensor, x: Any, dim: int = 0) -> int:
    return s.row_dim + (dim % (s.ndim + 1) <= s.row_dim)


def _swapped(s: TaggedTensor, x: Tensor, dim0: int, dim1: int) -> int:
    a, b = dim0 % s.ndim, dim1 % s.ndim
    return b if s.row_dim == a else a if s.row_dim == b else s.row_dim


def _moved(s: TaggedTensor, x: Tensor, source: Any, destination: Any) -> int:
    order = torch.empty([1] * s.row_dim + [2] + [1] * (s.ndim - s.row_dim - 1)).movedim(source, destination)
    return order.shape.index(2)


def _permuted(s: TaggedTensor, x: Tensor, *order: Any, dims: Any = None) -> int:
    given = dims if dims is not None else order[0] if isinstance(order[0], (tuple, list)) else order
    return [d % s.ndim for d in given].index(s.row_dim)


def _transposed(s: TaggedTensor, x: Tensor) -> int:
    return s.ndim - 1 - s.row_dim


def _last_two(s: TaggedTensor, x: Tensor) -> int:
    return _swapped(s, x, -1, -2)


def _prepended(s: TaggedTensor, x: Tensor, *sizes: Any, **_: Any) -> int:
    shape = sizes[0] if sizes and isinstance(sizes[0], (tuple, list)) else sizes
    return s.row_dim + max(len(shape) - s.ndim, 0)


def _selected(s: TaggedTensor, x: Tensor, dim: int, index: Any) -> int | None:
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim - (d < s.row_dim)


def _along(name: str) -> Callable[..., int | None]:
    """Operations along one dim that leave every other as it is."""

    def place(s: TaggedTensor, *args: Any, **kwargs: Any) -> int | None:
        dim = bind(name, args, kwargs).get("dim")
        return s.row_dim if isinstance(dim, int) and dim % s.ndim != s.row_dim else None

    return place


def _beyond(trailing: int) -> Callable[..., int | None]:
    """Operations on the last dims, for each of what stands before them."""
    return lambda s, *_, **__: s.row_dim if s.row_dim < s.ndim - trailing else None


def _first(s: TaggedTensor, input: Tensor, *_: Any, **__: Any) -> int | None:
    return 0 if s is input and s.row_dim == 0 else None


def _not_along(s: TaggedTensor, input: Tensor, dim: int, *_: Any, **__: Any) -> int | None:
    return s.row_dim if dim % input.ndim != s.row_dim else None


def _flipped(s: TaggedTensor, input: Tensor, *given: Any, dims: Any = None) -> int | None:
    return _rolled(s, input, None, given[0] if given and isinstance(given[0], (tuple, list)) else given or dims)


def _rolled(s: TaggedTensor, input: Tensor, shifts: Any, dims: Any = None) -> int | None:
    listed = [dims] if isinstance(dims, int) else dims
    return None if not listed or any(d % s.ndim == s.row_dim for d in listed) else s.row_dim


def _unflattened(s: TaggedTensor, x: Tensor, dim: int, sizes: Any) -> int | None:
    d = dim % s.ndim
    return None if d == s.row_dim else s.row_dim + (len(sizes) - 1) * (d < s.row_dim)


def _split(s: TaggedTensor, x: Tensor, *args: Any, dim: int = 0, **_: Any) -> int | None:
    d = args[1] if len(args) > 1 else dim
    return None if d % s.ndim == s.row_dim else s.row_dim


def _padded_last(s: TaggedTensor, input: Tensor, pad: Any, *_: Any, **__: Any) -> int | None:
    return s.row_dim if s.row_dim < s.ndim - len(pad) // 2 else None


def _crossed(s: TaggedTensor, a: Tensor, b: Tensor, dim: int | None = -1, **_: Any) -> int | None:
    return s.row_dim if a.ndim == b.ndim and dim is not None and dim % s.ndim != s.row_dim else None


def _layer_normed(s: TaggedTensor, input: Tensor, normalized_shape: Any, *_: Any, **__: Any) -> int | None:
    return s.row_dim if s is input and s.row_dim < s.ndim - len(normalized_shape) else None


def _index_selected(s: TaggedTensor, input: Tensor, dim: int, index: Tensor) -> int | None:
    return dim % input.ndim if s is index else s.row_dim if dim % input.ndim != s.row_dim else None


def _flattened(s: TaggedTensor, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> int:
    start, end = start_dim % s.ndim, end_dim % s.ndim
    return s.row_dim if s.row_dim <= start else start if s.row_dim <= end else s.row_dim - (end - start)


def _viewed(s: TaggedTensor, x: Tensor, *sizes: Any, **named: Any) -> int | None:
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


def _concatenated(s: TaggedTensor, tensors: Any, dim: int = 0) -> int | None:
    mixed = dim % s.ndim == s.row_dim and any(getattr(t, "rows", None) is not s.rows for t in tensors)
    return None if mixed else s.row_dim


def _squeezed(s: TaggedTensor, x: Tensor, dim: Any = None) -> int | None:
    dims = range(s.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    gone = {d % s.ndim for d in dims if s.shape[d] == 1}
    return None if s.row_dim in gone else s.row_dim - sum(d < s.row_dim for d in gone)


def _repeated(s: TaggedTensor, x: Tensor, repeats: Any, dim: int | None = None, **_: Any) -> int | None:
    return s.row_dim if dim is not None or s.ndim == 1 else None


def indexed(s: TaggedTensor, x: Tensor, index: Any) -> int | None:
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


def row_part(x: TaggedTensor, index: Any) -> Any:
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


MOVES: dict[str, Callable[..., int | None]] = {
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
    "flip": _flipped,
    "roll": _rolled,
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
