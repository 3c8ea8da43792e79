"""Reductions over rows that are split over ranks: the global result, or an error that names the fix."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from alchemi_shardtensor.rules.rule import Rule, handles
from alchemi_shardtensor.rules.shard import Shard, owned_rows
from alchemi_shardtensor.tag import EDGE, LOST, SHARDED, SYSTEM, TaggedTensor, tag_in_place
from alchemi_shardtensor.transport import sum_over_ranks
from alchemi_spec import MissingHandler

_NAMES = (
    "amax amin max min argmax argmin prod std var std_mean var_mean norm median mode nanmean nansum logsumexp aminmax "
    "count_nonzero cumsum cumprod logcumsumexp cummax cummin msort sort argsort topk softmax log_softmax"
).split()


def _both(*names: str) -> tuple[Any, ...]:
    return tuple(getattr(space, n) for n in names for space in (Tensor, torch) if hasattr(space, n))


_REFUSED = _both(*_NAMES)
_REFUSED += (torch.linalg.norm, torch.linalg.vector_norm, F.softmax, F.log_softmax, F.softmin, F.normalize)
_REFUSED += (Tensor.cumsum_, Tensor.cumprod_)


def over_rows(shard: Shard, named: dict[str, Any]) -> bool:
    """Whether the reduction runs over rows that are split over ranks."""
    x = named.get("input")
    if not isinstance(x, TaggedTensor) or x.tag.rows not in SHARDED or x.tag.points_at is not None or "other" in named:
        return False
    dim = named.get("dim")
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return not dims or any(d is None or (isinstance(d, int) and d % max(x.ndim, 1) == x.tag.row_dim) for d in dims)


def reduces(*ops: Any, when: Any = over_rows, rows: Any = SYSTEM) -> Callable[[Callable[..., Any]], Rule]:
    """`handles`, but refuses rows that are not known, and edges that several ranks hold."""

    def decorate(handler: Callable[..., Any]) -> Rule:
        @functools.wraps(handler)
        def checked(shard: Shard, op: Any, input: TaggedTensor, *rest: Any, **how: Any) -> Any:
            if input.rows is LOST or (input.rows is EDGE and shard.storage.repeats_edges):
                return refuse.handler(shard, op, input)
            return handler(shard, op, input, *rest, **how)

        return handles(*ops, when=when, rows=rows)(checked)

    return decorate


def _dims(x: Tensor, dim: Any) -> tuple[int, ...]:
    listed = dim if isinstance(dim, (tuple, list)) else () if dim is None else (dim,)
    return tuple(d % x.ndim for d in listed) or tuple(range(x.ndim))


@reduces(*_both("sum"))
def sum_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the sum over the atoms or edges of all ranks."""
    return sum_over_ranks(torch.sum(owned_rows(shard, input), _dims(input, dim), keepdim, **rest), shard.comm)


@reduces(*_both("mean"))
def mean_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the mean over the atoms or edges of all ranks."""
    wide = torch.promote_types(rest.get("dtype") or input.dtype, torch.float32)
    total = sum_over_rows.handler(shard, op, input, dim, keepdim, dtype=wide)
    mean: Tensor = total / _count(shard, input, dim)
    return mean.to(rest.get("dtype") or input.dtype)


def _count(shard: Shard, input: TaggedTensor, dim: Any) -> Tensor:
    """How many elements are reduced to one, on all ranks together; a float64 scalar."""
    mine = owned_rows(shard, input)
    n = torch.Size([mine.shape[d] for d in _dims(input, dim)]).numel()
    return shard.comm.all_reduce(torch.tensor([n], device=input.device, dtype=torch.float64))[0]


@reduces(*_both("var", "std"))
def variance_over_rows(
    shard: Shard,
    op: Any,
    input: TaggedTensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    correction: float | None = None,
) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the variance, or its root, over the atoms or edges of all ranks."""
    mine, dims = owned_rows(shard, input), _dims(input, dim)
    count = _count(shard, input, dim)
    mean = sum_over_ranks(mine.sum(dims, keepdim=True), shard.comm) / count
    squares = sum_over_ranks(((mine - mean) ** 2).sum(dims, keepdim), shard.comm)
    variance = (squares / (count - (int(unbiased) if correction is None else correction))).to(input.dtype)
    return variance.sqrt() if op.__name__ == "std" else variance


def _is_norm_of_powers(shard: Shard, named: dict[str, Any]) -> bool:
    order = named.get("ord", named.get("p"))
    powers = order in (None, "fro") or (isinstance(order, (int, float)) and 0 < order < float("inf"))
    return powers and over_rows(shard, named)


@reduces(*_both("norm"), torch.linalg.vector_norm, when=_is_norm_of_powers)
def norm_over_rows(
    shard: Shard,
    op: Any,
    input: TaggedTensor,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    p: Any = None,
    dtype: Any = None,
    **_: Any,
) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the norm over the atoms or edges of all ranks."""
    order = next((o for o in (ord, p) if o not in (None, "fro")), 2)
    mine = owned_rows(shard, input) if dtype is None else owned_rows(shard, input).to(dtype)
    powers = sum_over_ranks((mine.abs() ** order).sum(_dims(input, dim), keepdim), shard.comm)
    is_zero = powers == 0  # where the root has no slope
    return (powers + is_zero) ** (1 / order) * ~is_zero


@reduces(*_both("amax", "amin"))
def extreme_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the largest or smallest over all ranks; the gradient in equal parts to all that attain it."""
    mine, dims = owned_rows(shard, input), _dims(input, dim)
    best = _best(shard, op.__name__, mine, dims)
    if not mine.requires_grad:
        return best if keepdim else best.squeeze(dims)
    holds = mine == best
    count = sum_over_ranks(holds.to(best.dtype).sum(dims, keepdim=True), shard.comm)
    mean = sum_over_ranks(mine.masked_fill(~holds, 0).sum(dims, keepdim=True), shard.comm) / count.clamp(min=1)
    result = best + torch.where(best.isfinite(), mean - mean.detach(), 0)
    return result if keepdim else result.squeeze(dims)


def _best(shard: Shard, name: str, mine: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The extreme over all ranks' rows, with dims kept and no gradient; a rank without rows does not count."""
    limits = torch.finfo(mine.dtype) if mine.is_floating_point() else torch.iinfo(mine.dtype)
    worst = limits.min if name == "amax" else limits.max
    shape = [1 if d in dims else n for d, n in enumerate(mine.shape)]
    found = getattr(torch, name)(mine.detach(), dims, keepdim=True) if mine.numel() else mine.new_full(shape, worst)
    return shard.comm.all_reduce(found, "max" if name == "amax" else "min")


@reduces(*_both("max", "min"), when=lambda shard, named: named.get("dim") is None and over_rows(shard, named))
def extreme_of_all(shard: Shard, op: Any, input: TaggedTensor) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the largest or smallest element of all ranks."""
    return extreme_over_rows.handler(shard, getattr(torch, f"a{op.__name__}"), input)  # type: ignore[no-any-return]


@reduces(*_both("logsumexp"))
def logsumexp_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    """(n_owned, *F) or (E, *F) -> log of the sum of exponentials over the atoms or edges of all ranks."""
    mine, dims = owned_rows(shard, input), _dims(input, dim)
    best = _best(shard, "amax", mine, dims)
    result = best + sum_over_ranks((mine - best).exp().sum(dims, keepdim=True), shard.comm).log()
    return result if keepdim else result.squeeze(dims)


@reduces(*_both("softmax", "log_softmax"), F.softmax, F.log_softmax, rows=None)
def softmax_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: int, dtype: Any = None, **_: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> each row's exponential over the sum of all ranks' exponentials; or its logarithm."""
    x = input if dtype is None else tag_in_place(input.to(dtype), shard, input.rows, row_dim=input.row_dim)
    result = x - logsumexp_over_rows.handler(shard, op, x, dim, keepdim=True)
    return tag_in_place(result if "log" in op.__name__ else result.exp(), shard, input.rows, row_dim=input.row_dim)


@reduces(*_both("count_nonzero"))
def count_over_rows(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None) -> Tensor:
    """(n_owned, *F) or (E, *F) -> how many are not zero on all ranks."""
    return shard.comm.all_reduce(torch.count_nonzero(owned_rows(shard, input), _dims(input, dim)))


@reduces(*_both("any", "all"))
def truth_over_rows(shard: Shard, op: Any, input: TaggedTensor, **how: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> whether any, or all, of the rows of all ranks are true."""
    mine = op(owned_rows(shard, input), **how)
    return shard.comm.all_reduce(mine.to(torch.uint8), "max" if op.__name__ == "any" else "min").bool()


@handles(*_REFUSED, when=over_rows)
def refuse(shard: Shard, op: Any, input: TaggedTensor, dim: Any = None, **rest: Any) -> Tensor:
    """Refuse a reduction that has no global form."""
    kind = "edges" if input.rows is EDGE else "rows" if input.rows is LOST else "atoms"
    raise MissingHandler(
        f"{op.__name__} over this rank's {kind}, {tuple(input.shape)} with the {kind} along dim {input.row_dim}, would be one "
        f"over a slice.\nReduce through the batch index, or register: @handles(torch.{op.__name__}, when=rows_are(...))."
    )


def _mixes(shard: Shard, named: dict[str, Any]) -> bool:
    x = named["input"]
    if not isinstance(x, TaggedTensor) or x.tag.rows not in SHARDED:
        return False
    return x.tag.row_dim >= x.ndim - 2 if "key" in named else bool(named.get("training"))


@handles(F.batch_norm, F.scaled_dot_product_attention, when=_mixes)
def refuse_mixing(shard: Shard, op: Any, **named: Any) -> Tensor:
    """Refuse statistics over, and attention among, rows that are split over ranks."""
    raise MissingHandler(
        f"{op.__name__} mixes rows that are split over ranks: it would see this rank's only.\n"
        f"Normalise over features (layer_norm), attend along edges, or register a handler for this form."
    )


RULES: list[Rule] = [
    refuse_mixing,
    sum_over_rows,
    mean_over_rows,
    variance_over_rows,
    norm_over_rows,
    extreme_over_rows,
    extreme_of_all,
    logsumexp_over_rows,
    softmax_over_rows,
    count_over_rows,
    truth_over_rows,
    refuse,
]
