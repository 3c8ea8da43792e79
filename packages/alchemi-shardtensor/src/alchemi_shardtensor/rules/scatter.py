"""Adding into other rows. In place stays in place: the accumulator itself holds the result and its tag."""

from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.routing import sum_over_ranks
from alchemi_shardtensor.table import Rule, handles, indices, points_at
from alchemi_shardtensor.tensor import LOST, NODES, OWNED, RECEIVER, SYSTEM, SYSTEMS, Shard, ShardTensor, tag_in_place
from alchemi_spec import MissingHandler

_IN_PLACE = (Tensor.scatter_add_, Tensor.index_add_, Tensor.scatter_reduce_)
_FORMS: dict[Any, Any] = {
    Tensor.scatter_add: Tensor.scatter_add_,
    torch.scatter_add: Tensor.scatter_add_,
    Tensor.index_add: Tensor.index_add_,
    torch.index_add: Tensor.index_add_,
    Tensor.scatter_reduce: Tensor.scatter_reduce_,
    torch.scatter_reduce: Tensor.scatter_reduce_,
}
"""Each out-of-place form is its in-place form on a copy."""


def per_system(shard: Shard, op: Any, input: Tensor, dim: int, index: Tensor, src: Tensor, **how: Any) -> Tensor:
    """Per-atom values (N, *F) -> added to per-system sums (B, *F), the same on every rank.

    Added up in float64: a float32 sum over many atoms would depend on how they are shared out.
    """
    _only_sums(op, **how)
    wide = torch.promote_types(input.dtype, torch.float64) if input.is_floating_point() else input.dtype
    partial = op(torch.zeros_like(input, dtype=wide), dim, index, src.to(wide), **how)
    return input.add_(sum_over_ranks(partial, shard.comm).to(input.dtype))


def to_receivers(shard: Shard, op: Any, input: Tensor, dim: int, index: Tensor, src: Tensor, **how: Any) -> Tensor:
    """Edge values (E, *F) -> added to owned rows (n_owned, *F). Local: every edge of an owned receiver is here."""
    _only_rows(shard, op, input, dim)
    return op(input, dim, index, src, **how)  # type: ignore[no-any-return]


def to_either_end(shard: Shard, op: Any, input: Tensor, dim: int, index: Tensor, src: Tensor, **how: Any) -> Tensor:
    """Edge values (E, *F) -> added to owned rows (n_owned, *F), the ghosts' share by their owners."""
    _only_rows(shard, op, input, dim)
    _only_sums(op, **how)
    both = op(input.new_zeros(shard.n_owned + shard.n_ghost, *input.shape[1:]), dim, index, src, **how)
    return input.add_(shard.routing.folded(both))


def _only_sums(op: Any, reduce: str = "sum", include_self: bool = True, **_: Any) -> None:
    if reduce != "sum" or not include_self:
        raise MissingHandler(
            f"{op.__name__} with reduce={reduce!r}, include_self={include_self} over rows that several ranks share.\n"
            f"Sums are combined over ranks; reduce to receivers (edge_index[1]), or register a handler for this form."
        )


def _only_rows(shard: Shard, op: Any, input: Tensor, dim: int) -> None:
    if dim % max(input.ndim, 1) or input.shape[0] != shard.n_owned:
        raise MissingHandler(
            f"{op.__name__} along dim {dim} of an accumulator {tuple(input.shape)} with an index that points at atoms; "
            f"its dim 0 must be this rank's {shard.n_owned} atoms.\n"
            f"Make it with x.shape[0] rows of a per-atom tensor x, and scatter along dim 0."
        )


def _both_forms(handler: Any, when: Any, rows: Any) -> list[Rule]:
    def on_a_copy(shard: Shard, op: Any, input: Tensor, **named: Any) -> Any:
        return handler(shard, _FORMS[op], input.clone(), **named)

    return [handles(*_IN_PLACE, when=when, rows=rows)(handler), handles(*_FORMS, when=when, rows=rows)(on_a_copy)]


_WRITES = (
    *(Tensor.__setitem__, Tensor.index_put_, Tensor.index_put, torch.index_put, Tensor.scatter_, Tensor.scatter, torch.scatter),
    *(Tensor.index_copy_, Tensor.index_copy, torch.index_copy, Tensor.index_fill_, Tensor.index_fill, torch.index_fill),
    *(Tensor.index_reduce_, Tensor.index_reduce, torch.index_reduce),
)


def _reaches_others(shard: Shard, named: dict[str, Any]) -> bool:
    return any(getattr(i, "points_at", None) and i.end is not RECEIVER for i in indices(named.get("index")))


@handles(*_WRITES, when=_reaches_others)
def refuse_writes(shard: Shard, op: Any, **named: Any) -> Tensor:
    """A write through an index that reaches other ranks' rows would stay on this rank."""
    raise MissingHandler(
        f"{op.__name__} through an index that points at other ranks' rows, or at systems that they have atoms of.\n"
        f"Add with index_add_ or scatter_add_, whose sums are combined over ranks, or register a handler for this form."
    )


@handles(Tensor.__setitem__, when=lambda shard, named: not isinstance(named["input"], ShardTensor))
def write_into_plain(shard: Shard, op: Any, input: Tensor, index: Any, src: Any) -> None:
    """A plain tensor that is filled from a share is a share, too; of which rows is not known."""
    input[index] = src
    tag_in_place(input, shard, LOST)


@handles(Tensor.bincount, torch.bincount, when=lambda shard, named: getattr(named["input"], "points_at", None) is SYSTEMS)
def count_per_system(shard: Shard, op: Any, input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Of batch (N,): how many atoms each system has (B,), on all ranks together."""
    counts = torch.bincount(input, weights, max(minlength, shard.n_systems))
    return tag_in_place(sum_over_ranks(counts, shard.comm), shard, SYSTEM)


RULES: list[Rule] = [
    refuse_writes,
    write_into_plain,
    count_per_system,
    *_both_forms(per_system, points_at(SYSTEMS), SYSTEM),
    *_both_forms(to_receivers, points_at(NODES, RECEIVER), OWNED),
    *_both_forms(to_either_end, points_at(NODES), OWNED),
]
