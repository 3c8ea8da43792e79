"""Ranks without atoms: shapes with -1 that torch cannot resolve where there are no rows."""

from math import prod
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.rules.rule import Rule, handles
from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.tag import SHARDED, tag_in_place


def _is_ambiguous(shard: Shard, named: dict[str, Any]) -> bool:
    sizes = _sizes(named["shape"])
    return 0 in sizes and -1 in sizes and named["input"].rows in SHARDED


@handles(Tensor.view, Tensor.reshape, torch.reshape, when=_is_ambiguous)
def view_of_no_rows(shard: Shard, op: Any, input: Tensor, shape: Any) -> Tensor:
    """x.view(len(x), -1) of no rows (0, *F) -> (0, prod(F)): the size that -1 has where there are rows."""
    sizes = _sizes(shape)
    per_row = prod(max(n, 1) for n in input.shape)
    unknown = per_row // prod(max(n, 1) for n in sizes if n != -1)
    result = input.reshape([unknown if n == -1 else n for n in sizes])
    return tag_in_place(result, shard, input.rows if sizes[0] == 0 else None)  # type: ignore[attr-defined]


def _sizes(shape: Any) -> tuple[Any, ...]:
    return tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)


RULES: list[Rule] = [view_of_no_rows]
