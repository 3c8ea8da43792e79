"""Scatters: adding to rows through an index. In-place forms write into the accumulator itself, and tag it."""

from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.rules.exchange import ScatterTarget, node_target, system_target
from alchemi_shardtensor.rules.extreme import extremes
from alchemi_shardtensor.rules.row_dims import index_of_rows
from alchemi_shardtensor.rules.rule import Rule, handles, indices, needs_index, points_at
from alchemi_shardtensor.rules.shard import Shard, owned_rows
from alchemi_shardtensor.tag import (
    EDGE,
    LOST,
    NODES,
    OWNED,
    PADDED,
    PARTIAL,
    RECEIVER,
    REPLICATED,
    SHARDED,
    STALE,
    SYSTEM,
    SYSTEMS,
    Rows,
    TaggedTensor,
    has_ghost_rows,
    tag_in_place,
)
from alchemi_spec import MissingHandler

_IN_PLACE = (Tensor.scatter_add_, Tensor.index_add_, Tensor.scatter_reduce_, Tensor.index_reduce_)
_FORMS: dict[Any, Any] = {
    getattr(space, op.__name__[:-1]): op for op in (*_IN_PLACE, Tensor.index_put_) for space in (Tensor, torch)
}
"""Each out-of-place form is its in-place form on a copy."""
_BY_INDEX = (Tensor.index_add_, Tensor.index_reduce_)


def to_systems(shard: Shard, op: Any, input: Tensor, dim: int, index: TaggedTensor, src: Tensor, **how: Any) -> Tensor:
    """Per-atom values (N, *F) -> added to per-system sums (B, *F), the same on every rank.

    `spec.per_system_reduce=False`: this rank's part of them.
    """
    if op not in _BY_INDEX and dim % max(input.ndim, 1) != index.row_dim:  # the systems are along another dim than the atoms
        return tag_in_place(op(input, dim, index, src, **how), shard, index.rows, row_dim=index.row_dim)
    target = system_target(shard, index)
    if target.rows is PARTIAL and shard.comm.rank > 0:
        input.zero_()  # what was there before counts once
    target, src = _without_ghosts(shard, op, target, index, src, dim)
    return _added(shard, target, op, input, dim, src, **how)


def _without_ghosts(
    shard: Shard, op: Any, target: ScatterTarget, index: TaggedTensor, src: Tensor, dim: int
) -> tuple[ScatterTarget, Tensor]:
    """Leave out ghosts' rows, which count on the ranks that own them."""
    if not shard.storage.padded:
        return target, src
    if has_ghost_rows(index):
        return target._replace(local=owned_rows(shard, index)), src.narrow(dim, 0, shard.n_owned)
    if index.rows is OWNED or (index.rows is EDGE and not shard.storage.repeats_edges):
        return target, src
    raise MissingHandler(
        f"{op.__name__} of {index.rows} rows in a padded layout: which of them count twice, on ghosts, is not known.\n"
        f"Add per-atom rows, all of them: multiply by a mask of zeros and ones instead of selecting, and sum edges per atom."
    )


def to_nodes(shard: Shard, op: Any, input: Tensor, dim: int, index: TaggedTensor, src: Tensor, **how: Any) -> Tensor:
    """Edge values (E, *F) -> added to per-atom rows (N, *F). Local where every edge of the receivers is here."""
    if dim % max(input.ndim, 1):
        raise MissingHandler(
            f"{op.__name__} along dim {dim} of an accumulator {tuple(input.shape)} with an index that points at atoms.\n"
            f"Only dim 0 is spread over ranks: scatter along dim 0."
        )
    target = node_target(shard, input, index)
    if isinstance(target, Rows):
        _known(op, src)
        return tag_in_place(op(input, dim, index, src, **how), shard, target)
    return _added(shard, target, op, input, dim, src, **how)


def _added(
    shard: Shard,
    target: ScatterTarget,
    op: Any,
    input: Tensor,
    dim: int,
    src: Tensor,
    reduce: str = "sum",
    include_self: bool = True,
    **how: Any,
) -> Tensor:
    """Reduce over ranks what each adds, and that into the accumulator."""
    _known(op, src)
    if reduce == "sum" and include_self:
        how |= {"reduce": "sum"} if op is Tensor.scatter_reduce_ else {}
        buffer = target.zeros(input, dim)
        partial = op(buffer, dim, target.local, src.to(buffer.dtype) if target.n is None else src, **how)
        return tag_in_place(input.add_(target.sum(partial).to(input.dtype)), shard, target.rows)
    index = _as_scatter(op, dim, target.local, src)
    if reduce in ("amax", "amin"):
        result = extremes(target, input, dim, index, src, reduce, include_self)  # type: ignore[arg-type]
    elif reduce in ("sum", "mean"):
        result = _means(target, input, dim, index, src, reduce, include_self)
    else:
        raise MissingHandler(
            f"{op.__name__} with reduce={reduce!r} over rows that several ranks add to.\n"
            f"Sums, means, amax and amin are combined over ranks; or register a handler for this form."
        )
    return tag_in_place(input.copy_(result), shard, target.rows)


def _known(op: Any, src: Any) -> None:
    if isinstance(src, TaggedTensor) and src.tag.rows is LOST:
        raise MissingHandler(
            f"{op.__name__} of values {tuple(src.shape)}, but it is not known which atoms or edges they belong to: what made "
            f"them may mix or move rows.\nMake per-atom and per-edge values row by row, or register a handler for it."
        )


def _means(
    target: ScatterTarget, input: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, include_self: bool
) -> Tensor:
    """The sum, or mean, over what is added and (`include_self`) what was there; where nothing is added, what was there."""
    buffer = target.zeros(input, dim)
    src = src.to(buffer.dtype)
    total = target.sum(buffer.scatter_add(dim, index, src))
    count = target.sum(buffer.scatter_add(dim, index, torch.ones_like(src)))
    if include_self:
        total, count = total + input, count + 1
    by = count.clamp(min=1) if reduce == "mean" else torch.ones_like(count)
    mean = total / by if input.is_floating_point() else torch.div(total, by, rounding_mode="floor")
    return torch.where(count > 0, mean, input.to(mean.dtype)).to(input.dtype)


def _as_scatter(op: Any, dim: int, index: Tensor, src: Tensor) -> Tensor:
    """The index (n,) of an index_ operation as a scatter's, which has the shape of src."""
    if op not in _BY_INDEX:
        return index
    return index.view([-1 if d == dim % src.ndim else 1 for d in range(src.ndim)]).expand_as(src)


@needs_index
def _accumulates(shard: Shard, named: dict[str, Any]) -> bool:
    index = named.get("index")
    heads = [i for i in indices(index) if getattr(i, "points_at", None)]
    return bool(named.get("accumulate")) and len(heads) == 1 and isinstance(index, (tuple, list)) and index[0] is heads[0]


@handles(Tensor.index_put_, when=_accumulates)
def accumulate(shard: Shard, op: Any, input: Tensor, index: Any, src: Tensor, accumulate: bool = True) -> Tensor:
    """Values (E, *F) -> added to rows of dim 0, per-atom or per-system; further indices select among features."""
    first, *rest = index
    systems = first.points_at is SYSTEMS
    target = system_target(shard, first) if systems else node_target(shard, input, first)
    _known(op, src)
    if isinstance(target, Rows):
        return tag_in_place(input.index_put_((first, *rest), src, accumulate=True), shard, target)
    if systems:
        target, src = _without_ghosts(shard, op, target, first, src, 0)
        rest = [owned_rows(shard, r) for r in rest]
    buffer = target.zeros(input, 0)
    partial = buffer.index_put_((target.local, *rest), src.to(buffer.dtype), accumulate=True)
    return tag_in_place(input.add_(target.sum(partial).to(input.dtype)), shard, target.rows)


def _both_forms(handler: Any, when: Any, ops: Any = _IN_PLACE) -> list[Rule]:
    def on_a_copy(shard: Shard, op: Any, input: Tensor, **named: Any) -> Any:
        copy = input.clone()
        if isinstance(input, TaggedTensor):
            tag_in_place(copy, shard, input.rows, row_dim=input.row_dim)
        return handler(shard, _FORMS[op], copy, **named)

    on_a_copy.__name__ = handler.__name__
    return [handles(*ops, when=when)(handler), handles(*(f for f, op in _FORMS.items() if op in ops), when=when)(on_a_copy)]


_WRITES = (
    *(Tensor.__setitem__, Tensor.index_put_, Tensor.index_put, torch.index_put, Tensor.scatter_, Tensor.scatter, torch.scatter),
    *(Tensor.index_copy_, Tensor.index_copy, torch.index_copy, Tensor.index_fill_, Tensor.index_fill, torch.index_fill),
)


@needs_index
def _reaches_others(shard: Shard, named: dict[str, Any]) -> bool:
    local = not shard.storage.global_ids
    return any(getattr(i, "points_at", None) and not (local and i.end is RECEIVER) for i in indices(named.get("index")))


@handles(*_WRITES, when=_reaches_others)
def refuse_writes(shard: Shard, op: Any, **named: Any) -> Tensor:
    """Refuse writes through an index that names other ranks' rows: they would stay on this rank."""
    raise MissingHandler(
        f"{op.__name__} through an index that points at other ranks' rows, or at systems that they have atoms of.\n"
        f"Add with index_add_ or scatter_add_, whose sums are combined over ranks, or register a handler for this form."
    )


@handles(Tensor.__setitem__, when=lambda shard, named: not isinstance(named["input"], TaggedTensor))
def write_into_plain(shard: Shard, op: Any, input: Tensor, index: Any, src: Any) -> None:
    """Tag a plain tensor that is filled from this rank's rows: it then depends on them, on which is not known."""
    input[index] = src
    held = [t.tag.rows for t in (src, *indices(index)) if isinstance(t, TaggedTensor)]
    tag_in_place(input, shard, SYSTEM if all(rows in REPLICATED for rows in held) else LOST)


def _writes_unknown_rows(shard: Shard, named: dict[str, Any]) -> bool:
    """Whether rows are written by numbers, which name other atoms on each rank; or one rank's values into replicated rows."""
    x, src = named["input"], named.get("src")
    if not isinstance(x, TaggedTensor) or x.tag.rows not in (*SHARDED, *REPLICATED) or x.tag.rows is LOST:
        return False
    if x.tag.rows in REPLICATED:
        return isinstance(src, TaggedTensor) and (src.tag.rows in SHARDED or src.tag.rows is PARTIAL)
    row = index_of_rows(x, named["index"])
    known = isinstance(row, TaggedTensor) and row.tag.rows not in (None, LOST)
    return not (known or row == slice(None) or (isinstance(row, Tensor) and row.dtype == torch.bool))


@handles(Tensor.__setitem__, when=_writes_unknown_rows)
def refuse_unknown_rows(shard: Shard, op: Any, input: TaggedTensor, index: Any, src: Any) -> None:
    """Refuse writes such as `h[0] = 0`, which would change the first row of each rank."""
    raise MissingHandler(
        f"a write into some of {input.rows} rows, {tuple(input.shape)}, by numbers or slices, or of one rank's values into "
        f"what all have alike, would be another write on each rank.\n"
        f"Write by a mask of per-atom values, or by row numbers made of one."
    )


@handles(Tensor.__setitem__, when=lambda shard, named: getattr(named["input"], "rows", None) is PADDED)
def write_into_padded(shard: Shard, op: Any, input: TaggedTensor, index: Any, src: Any) -> None:
    """Write, and mark the ghosts as stale: the copies of owned rows on other ranks do not change."""
    input[index] = src
    tag_in_place(input, shard, STALE, input.points_at, input.end, input.row_dim)


RULES: list[Rule] = [
    *_both_forms(accumulate.handler, _accumulates, (Tensor.index_put_,)),
    refuse_writes,
    refuse_unknown_rows,
    write_into_plain,
    write_into_padded,
    *_both_forms(to_systems, points_at(SYSTEMS)),
    *_both_forms(to_nodes, points_at(NODES)),
]
