"""Reductions over rows of which each rank holds a share: the global result, or a refusal that names the fix."""

from typing import Any

import torch
from alchemi_spec import MissingHandler
from torch import Tensor

from alchemi_shardtensor.carry import SHARE
from alchemi_shardtensor.routing import sum_over_ranks
from alchemi_shardtensor.table import Rule, handles
from alchemi_shardtensor.tensor import EDGE, OWNED, PADDED, SYSTEM, Shard, ShardTensor

_NAMES = [
    "amax",
    "amin",
    "max",
    "min",
    "argmax",
    "argmin",
    "prod",
    "std",
    "var",
    "std_mean",
    "var_mean",
    "norm",
    "median",
    "mode",
    "nanmean",
    "nansum",
    "logsumexp",
    "cumsum",
    "cumprod",
    "sort",
    "argsort",
    "topk",
    "softmax",
    "log_softmax",
]
_REFUSED = tuple(getattr(space, n) for n in _NAMES for space in (Tensor, torch) if hasattr(space, n))
_REFUSED += (torch.linalg.norm, torch.linalg.vector_norm, torch.nn.functional.softmax)


def over_rows(shard: Shard, named: dict[str, Any]) -> bool:
    """The reduction runs over dim 0 of a tensor of which each rank holds a share."""
    x, dim = named["input"], named.get("dim")
    if not isinstance(x, ShardTensor) or x.rows not in SHARE or x.points_at is not None:
        return False
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return not dims or any(d is None or (isinstance(d, int) and d % x.ndim == 0) for d in dims)


@handles(Tensor.sum, torch.sum, when=over_rows, rows=SYSTEM)
def sum_over_rows(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the sum over the atoms or edges of all ranks."""
    mine = input[: shard.n_owned] if input.rows is PADDED else input
    return sum_over_ranks(op(mine, dim=dim, keepdim=keepdim, **rest), shard.comm)


@handles(Tensor.mean, torch.mean, when=over_rows, rows=SYSTEM)
def mean_over_rows(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the mean over the atoms or edges of all ranks."""
    mine = input[: shard.n_owned] if input.rows is PADDED else input
    total = sum_over_ranks(torch.sum(mine, dim=dim, keepdim=keepdim, **rest), shard.comm)
    rows = shard.comm.all_reduce(torch.tensor([mine.shape[0]], device=mine.device, dtype=total.dtype))
    dims = range(mine.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    others = torch.Size([mine.shape[d] for d in dims if d % mine.ndim]).numel()
    return total / (rows[0] * others)


@handles(*_REFUSED, when=over_rows)
def refuse(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, **rest: Any) -> Tensor:
    """No result on a slice would be the whole's."""
    share = {OWNED: f"{shard.n_owned} atoms", EDGE: f"{len(input)} edges"}.get(input.rows, "rows")  # type: ignore[arg-type]
    raise MissingHandler(
        f"{op.__name__} over dim 0 of a tensor whose rows are this rank's {share} would be one over a slice.\n"
        f"Reduce through the batch index, or register: @handles(torch.{op.__name__}, when=rows_are({input.rows.name}))."  # type: ignore[union-attr]
    )


def _contracts_rows(shard: Shard, named: dict[str, Any]) -> bool:
    other = named["other"]
    return getattr(other, "rows", None) in SHARE and other.ndim <= 2


@handles(Tensor.matmul, torch.matmul, Tensor.mm, torch.mm, Tensor.__matmul__, Tensor.__rmatmul__, when=_contracts_rows)
def refuse_contraction(shard: Shard, op: Any, input: Tensor, other: ShardTensor) -> Tensor:
    """No contraction over a slice would be the whole's."""
    raise MissingHandler(
        f"{op.__name__} of {tuple(input.shape)} with {tuple(other.shape)} contracts over this rank's rows only.\n"
        f"Multiply row-wise and reduce through the batch index, or register a handler for this form."
    )


RULES: list[Rule] = [sum_over_rows, mean_over_rows, refuse, refuse_contraction]
