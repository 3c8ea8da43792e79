"""The largest or smallest of what several ranks hold, with torch's gradient: equal parts to all that attain it."""

import torch
from torch import Tensor

from alchemi_shardtensor.rules.exchange import Extreme, ScatterTarget


def extremes(
    target: ScatterTarget, input: Tensor, dim: int, index: Tensor, src: Tensor, op: Extreme, include_self: bool
) -> Tensor:
    """The extreme of what `index` adds to each row and (`include_self`) what was there; where nothing is added, the latter.

    The value is found without a graph; adding a mean over all that attain it, less itself, gives it the gradient.
    """
    zeros = target.zeros(input, dim).to(input.dtype)
    found = torch.full_like(zeros, _worst(input.dtype, op)).scatter_reduce(dim, index, src.detach(), op)
    best = target.extreme(found, op)
    before = input.detach()
    if include_self:
        best = torch.maximum(best, before) if op == "amax" else torch.minimum(best, before)
    holds = src == target.broadcast_back(best).gather(dim, index)

    def total(values: Tensor) -> Tensor:
        return target.sum(zeros.scatter_add(dim, index, values))

    count = total(holds.to(input.dtype))
    here = (before == best) if include_self else (count == 0)
    best = torch.where(count == 0, before, best) if not include_self else best
    if not (src.requires_grad or input.requires_grad):
        return best
    mean = (total(src.masked_fill(~holds, 0)) + input.masked_fill(~here, 0)) / (count + here).clamp(min=1)
    return best + torch.where(best.isfinite(), mean - mean.detach(), 0)


def _worst(dtype: torch.dtype, op: Extreme) -> float:
    if dtype.is_floating_point:
        return float("-inf") if op == "amax" else float("inf")
    return torch.iinfo(dtype).min if op == "amax" else torch.iinfo(dtype).max
