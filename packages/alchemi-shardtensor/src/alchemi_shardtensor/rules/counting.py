"""Counts: how often an index names each row, which rows it names, and rows repeated by such counts."""

from math import inf, nan
from typing import Any, cast

import torch
from torch import Tensor

from alchemi_shardtensor.rules.rule import Rule, handles, needs_index
from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.storage import Counted
from alchemi_shardtensor.tag import (
    EDGE,
    LOST,
    NODES,
    RECEIVER,
    SHARDED,
    SYSTEM,
    SYSTEMS,
    PointsAt,
    TaggedTensor,
    attach,
    plain,
    tag_in_place,
)
from alchemi_spec import MissingHandler


def _points(target: PointsAt) -> Any:
    return needs_index(lambda shard, named: getattr(named["input"], "points_at", None) is target)


@handles(Tensor.bincount, torch.bincount, when=_points(SYSTEMS))
def count_per_system(
    shard: Shard, op: Any, input: TaggedTensor, weights: Tensor | None = None, minlength: int = 0
) -> TaggedTensor:
    """Of batch (N,): how many atoms each system has (B,), on all ranks together; or the sums of their weights."""
    return _counts(shard, input, weights, max(minlength, shard.n_systems))


@handles(Tensor.bincount, torch.bincount, when=_points(NODES))
def count_per_node(
    shard: Shard, op: Any, input: TaggedTensor, weights: Tensor | None = None, minlength: int = 0
) -> TaggedTensor:
    """Of receivers or senders (E,): how many edges each atom has there (N,), or the sums of their weights."""
    return _counts(shard, input, weights, shard.n_rows)


def _counts(shard: Shard, index: TaggedTensor, weights: Tensor | None, n: int) -> TaggedTensor:
    """A sum through the index, which remembers the index while it is unchanged."""
    each = torch.ones_like(index) if weights is None else weights.double()
    zeros = torch.zeros(n, dtype=each.dtype, device=index.device)
    counts: TaggedTensor = shard.table.dispatch(Tensor.index_add_, shard, [index], (zeros, 0, index, each), {})
    if weights is None and (index.points_at is SYSTEMS or (index.end is RECEIVER and not shard.storage.global_ids)):
        _remember(counts, index)
    return counts


def _remember(counts: TaggedTensor, index: TaggedTensor) -> None:
    """Remember the index of these counts. It ascends, so rows repeated by the counts are rows read by the index."""
    counts.shard.cache.of(counts).counted = Counted(counts._version, plain(index), index.tag)


def _counted(counts: TaggedTensor) -> TaggedTensor | None:
    """The index that was counted, if these are counts and unchanged."""
    found = counts.shard.cache.known(counts).counted
    if found is None or found.version != counts._version:
        return None
    return attach(found.ids.as_subclass(TaggedTensor), counts.shard, found.tag)


def _by_counts(name: str) -> Any:
    def when(shard: Shard, named: dict[str, Any]) -> bool:
        counts = named.get(name)
        return isinstance(counts, TaggedTensor) and _counted(counts) is not None

    return when


@handles(Tensor.repeat_interleave, torch.repeat_interleave, when=_by_counts("repeats"))
def repeat_by_counts(shard: Shard, op: Any, input: Tensor, repeats: TaggedTensor, dim: int | None = None, **_: Any) -> Any:
    """Per-system values (B, *F) by bincount(batch) -> (N, *F); per-atom values by bincount(receiver) -> (E, *F).

    Since batches and receivers ascend, that is what the index reads.
    """
    if dim not in (None, 0, -input.ndim) or (dim is None and input.ndim > 1):
        raise MissingHandler(f"repeat_interleave by counts along dim {dim} of {tuple(input.shape)}: repeat along dim 0.")
    index = cast(TaggedTensor, _counted(repeats))
    return shard.table.dispatch(Tensor.__getitem__, shard, [index], (input, index), {})


_SEGMENTS = {"sum": ("sum", 0.0), "mean": ("mean", nan), "max": ("amax", -inf), "min": ("amin", inf), "prod": ("prod", 1.0)}
"""What a scatter calls the reductions of segments, and what an empty segment holds."""


@handles(torch.segment_reduce, when=_by_counts("lengths"))
def reduce_segments(
    shard: Shard, op: Any, input: Tensor, reduce: str, *, lengths: TaggedTensor, dim: int = 0, initial: Any = None, **_: Any
) -> Any:
    """Segments as long as the counts: edges (E, *F) by bincount(receiver) -> (N, *F); atoms by bincount(batch) -> (B, *F)."""
    if dim:
        raise MissingHandler(f"segment_reduce by counts along axis {dim}: reduce along axis 0.")
    name, empty = _SEGMENTS[reduce]
    index = cast(TaggedTensor, _counted(lengths))
    out = input.new_full((len(lengths), *input.shape[1:]), empty if initial is None else initial)
    wide = tag_in_place(index.view(-1, *[1] * (input.ndim - 1)).expand_as(input), shard, index.rows, index.points_at, index.end)
    how = {"include_self": initial is not None}
    return shard.table.dispatch(Tensor.scatter_reduce, shard, [wide], (out, 0, wide, input, name), how)


@handles(Tensor.unique, torch.unique, when=_points(SYSTEMS))
def systems_present(
    shard: Shard,
    op: Any,
    input: TaggedTensor,
    sorted: bool = True,
    return_inverse: bool = False,
    return_counts: bool = False,
    dim: int | None = None,
) -> Any:
    """Of batch (N,): the systems that have atoms on any rank (B',), each atom's number among them (N,), their counts (B',)."""
    counts = plain(count_per_system.handler(shard, op, input))
    present = (counts > 0).nonzero().flatten()
    position = tag_in_place(((counts > 0).long().cumsum(0) - 1)[input], shard, input.rows, SYSTEMS, row_dim=input.row_dim)
    found: list[Tensor] = [tag_in_place(present, shard, SYSTEM, SYSTEMS)]
    if return_inverse:
        found.append(position)
    if return_counts:
        found.append(tag_in_place(counts[present], shard, SYSTEM))
        _remember(cast(TaggedTensor, found[-1]), position)
    return tuple(found) if len(found) > 1 else found[0]


@handles(Tensor.unique, torch.unique, Tensor.unique_consecutive, torch.unique_consecutive, when=_points(NODES))
def nodes_named(shard: Shard, op: Any, input: TaggedTensor, **how: Any) -> Any:
    """Of an index (E,): the atoms that it names on this rank; each edge's position among them, for use on this rank only."""
    found = op(input, **how)
    values, *rest = found if isinstance(found, tuple) else (found,)
    end = input.end if not isinstance(input.end, tuple) else None
    tagged: list[Tensor] = [tag_in_place(values, shard, LOST, NODES, end)]
    if how.get("return_inverse"):
        tagged.append(tag_in_place(rest.pop(0), shard, input.rows if input.rows in SHARDED else EDGE, row_dim=input.row_dim))
    tagged += [tag_in_place(r, shard, LOST) for r in rest]
    return tuple(tagged) if len(tagged) > 1 else tagged[0]


RULES: list[Rule] = [count_per_system, count_per_node, repeat_by_counts, reduce_segments, systems_present, nodes_named]
