"""Reductions over rows of which each rank holds a share: the global result, or a refusal that names the fix."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from alchemi_shardtensor.carry import SHARE
from alchemi_shardtensor.routing import sum_over_ranks
from alchemi_shardtensor.table import Rule, handles
from alchemi_shardtensor.tensor import EDGE, LOST, OWNED, PADDED, SYSTEM, Shard, ShardTensor
from alchemi_spec import MissingHandler

_NAMES = (
    "amax amin max min argmax argmin prod std var std_mean var_mean norm median mode nanmean nansum logsumexp aminmax "
    "count_nonzero cumsum cumprod logcumsumexp cummax cummin msort sort argsort topk softmax log_softmax"
).split()
_REFUSED = tuple(getattr(space, n) for n in _NAMES for space in (Tensor, torch) if hasattr(space, n))
_REFUSED += (torch.linalg.norm, torch.linalg.vector_norm, F.softmax, F.log_softmax, F.softmin, F.normalize)
_REFUSED += (Tensor.cumsum_, Tensor.cumprod_)


def over_rows(shard: Shard, named: dict[str, Any]) -> bool:
    """The reduction runs over dim 0 of a tensor of which each rank holds a share."""
    x, dim = named.get("input"), named.get("dim")
    if not isinstance(x, ShardTensor) or x.rows not in SHARE or x.points_at is not None or "other" in named:
        return False
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return not dims or any(d is None or (isinstance(d, int) and d % max(x.ndim, 1) == x.row_dim) for d in dims)


@handles(Tensor.sum, torch.sum, when=over_rows, rows=SYSTEM)
def sum_over_rows(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the sum over the atoms or edges of all ranks."""
    if input.rows is LOST:
        return refuse.handler(shard, op, input)  # type: ignore[no-any-return]
    mine = input.narrow(input.row_dim, 0, shard.n_owned) if input.rows is PADDED else input
    return sum_over_ranks(op(mine, dim=dim, keepdim=keepdim, **rest), shard.comm)


@handles(Tensor.mean, torch.mean, when=over_rows, rows=SYSTEM)
def mean_over_rows(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, keepdim: bool = False, **rest: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> the mean over the atoms or edges of all ranks."""
    wide = torch.promote_types(rest.get("dtype") or input.dtype, torch.float32)
    total = sum_over_rows.handler(shard, torch.sum, input, dim, keepdim, dtype=wide)
    n_rows = shard.n_owned if input.rows is PADDED else input.shape[input.row_dim]
    everyone = shard.comm.all_reduce(torch.tensor([n_rows], device=input.device, dtype=torch.float64))[0]
    dims = range(input.ndim) if dim is None or dim == () else dim if isinstance(dim, (tuple, list)) else (dim,)
    others = torch.Size([input.shape[d] for d in dims if d % input.ndim != input.row_dim]).numel()
    mean: Tensor = total / (everyone * others)
    return mean.to(rest.get("dtype") or input.dtype)


@handles(*_REFUSED, when=over_rows)
def refuse(shard: Shard, op: Any, input: ShardTensor, dim: Any = None, **rest: Any) -> Tensor:
    """No result on a slice would be the whole's."""
    kind = {OWNED: "atoms", EDGE: "edges"}.get(input.rows, "rows")  # type: ignore[arg-type]
    raise MissingHandler(
        f"{op.__name__} over this rank's {kind}, {tuple(input.shape)} with the {kind} along dim {input.row_dim}, would be one "
        f"over a slice.\nReduce through the batch index, or register: @handles(torch.{op.__name__}, when=rows_are(...))."
    )


@handles(Tensor.any, torch.any, Tensor.all, torch.all, when=over_rows, rows=SYSTEM)
def truth_over_rows(shard: Shard, op: Any, input: ShardTensor, **how: Any) -> Tensor:
    """(n_owned, *F) or (E, *F) -> whether any, or all, of the rows of all ranks are true."""
    mine = op(input, **how)
    reduce = dist.ReduceOp.MAX if op.__name__ == "any" else dist.ReduceOp.MIN
    return shard.comm.all_reduce(mine.to(torch.uint8), reduce).bool()


@handles(F.batch_norm, F.scaled_dot_product_attention, when=lambda shard, named: "key" in named or named.get("training", False))
def refuse_mixing(shard: Shard, op: Any, **named: Any) -> Tensor:
    """Statistics over, or attention among, the rows of a share would be of the share only."""
    raise MissingHandler(
        f"{op.__name__} mixes rows of which this rank has a share.\n"
        f"Normalise over features (layer_norm), attend along edges, or register a handler for this form."
    )


RULES: list[Rule] = [refuse_mixing, sum_over_rows, mean_over_rows, truth_over_rows, refuse]
