"""Reading ghost rows and adding to them: here it is decided whether ranks communicate, and nowhere else.

The decisions depend on the layout, on tags, on the routing and on version counters, which all ranks have alike; never on
values, sizes or addresses, which a rank may have for itself: a rank that skipped a collective would leave the others waiting.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.storage import GhostRows, LocalIds, Snapshot
from alchemi_shardtensor.tag import (
    GLOBAL,
    LOST,
    OWNED,
    PADDED,
    PARTIAL,
    RECEIVER,
    REPLICATED,
    STALE,
    SYSTEM,
    Rows,
    TaggedTensor,
)
from alchemi_shardtensor.transport import AllToAllRows, PrefetchedGhosts, Routing, all_gather_rows, sum_over_ranks
from alchemi_spec import MissingHandler

Extreme = Literal["amax", "amin"]


def must_exchange(shard: Shard, index: TaggedTensor) -> bool:
    """Whether rows that an index reads may be another rank's, and have to be fetched from their owners."""
    return shard.storage.reads and (shard.storage.global_ids or index.tag.end is not RECEIVER)


def must_reverse(shard: Shard, index: TaggedTensor) -> bool:
    """Whether what is added through an index may be another rank's, and has to be sent to its owner."""
    return shard.storage.reduces and (shard.storage.global_ids or index.tag.end is not RECEIVER)


def to_local_ids(shard: Shard, index: Tensor) -> tuple[Routing, Tensor]:
    """The routing of what `index` reads, and it by local ids. Every rank must call it.

    For global ids the routing is found once for each index, as long as it is unchanged.
    """
    if not shard.storage.global_ids:
        return shard.routing, index
    if shard.routing.owners is None:
        raise MissingHandler("global ids need to know who owns them: make the routing with owners=Owners.of(ids, comm).")
    version, known = 0 if index.is_inference() else index._version, shard.cache.of(index)
    if known.local_ids is None or known.local_ids.version != version:
        known.local_ids = LocalIds(version, *shard.routing.owners.route(index.as_subclass(Tensor)))
    return known.local_ids.routing, known.local_ids.ids


def resolve_gather(shard: Shard, x: Tensor, index: TaggedTensor) -> tuple[Tensor, Tensor]:
    """The rows that `index` reads of x, ghosts' fetched where they are needed, and the index that picks them."""
    storage = shard.storage
    mark = x.tag if isinstance(x, TaggedTensor) else None
    rows = None if mark is None else mark.rows
    if storage.replicated:
        return x, index
    if rows is LOST:
        raise MissingHandler(
            f"a tensor of shape {tuple(x.shape)} was read by atoms, but it is not known which atoms its rows are: what made it "
            f"may mix or move rows.\nMake per-atom values row by row, or register a handler for it."
        )
    if holds_all_rows(shard, x):
        return (x, index) if storage.global_ids else (x.index_select(0, shard.ids), index)
    routing, local = to_local_ids(shard, index)
    if rows is PADDED:
        return x, local
    if not x.ndim or x.size(0) != shard.n_rows or (mark is not None and mark.row_dim):
        raise MissingHandler(
            f"an index that points at atoms was used on a tensor of shape {tuple(x.shape)}, "
            f"whose dim 0 is not this rank's {shard.n_rows} atoms.\n"
            f"Index per-atom tensors with it; tag other indices with what they point at, or leave them plain."
        )
    if routing.no_exchange or not must_exchange(shard, index):
        return x, local
    return _with_ghosts(shard, routing, x.narrow(0, 0, shard.n_owned) if storage.padded else x, x), local


def holds_all_rows(shard: Shard, x: Tensor) -> bool:
    """Whether x has the rows of all atoms: by its tag, or plain and as many, where the layout has such tensors."""
    if isinstance(x, TaggedTensor):
        return x.tag.rows is GLOBAL
    owners = shard.routing.owners
    if shard.storage.collective is None or not shard.cache.has_global_rows or not x.ndim or owners is None:
        return False
    as_many = len(x) == len(owners.rank)
    if max(owners.counts) < len(owners.rank):
        return as_many
    # a rank that owns all atoms cannot tell its own rows from all ranks': they are all ranks' if each has as many
    return bool(shard.comm.all_reduce(torch.tensor(as_many), "min"))


def prefetch_ghosts(shard: Shard, rows: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """[owned | ghost] rows of these owned ones, in one message. Until the first is changed, gathers of it send nothing.

    Every rank must call it, also where it would change nothing.
    """
    both = shard.routing.with_ghosts_all(rows, *more)
    shard.cache.prefetched = None if rows.is_inference() else (Snapshot(rows), both[0][len(rows) :])
    return both


def keep_ghosts(shard: Shard, rows: Tensor, both: Tensor) -> None:
    """Let gathers of these tagged owned rows, which take no part in derivatives, read `both` [owned | ghost] until a change."""
    shard.cache.of(rows).with_ghosts = GhostRows(Snapshot(rows), shard.routing, None, both)


def drop_ghosts(shard: Shard, rows: Tensor) -> None:
    """Forget the ghosts of these rows and those prefetched: a replayed CUDA graph changes rows, which no version counts."""
    shard.cache.of(rows).with_ghosts = None
    shard.cache.prefetched = None


def _with_ghosts(shard: Shard, routing: Routing, owned: Tensor, x: Tensor) -> Tensor:
    """[owned | ghost] rows, kept while x is unchanged: a gather of what was gathered before sends nothing."""
    prefetched = shard.cache.prefetched
    if prefetched is not None and routing is shard.routing and not x.is_inference() and prefetched[0].matches(x):
        return torch.cat([owned, PrefetchedGhosts.apply(owned, prefetched[1], routing)])  # type: ignore[no-untyped-call]
    if not _may_keep(shard, x):
        return routing.with_ghosts(owned)
    graph = (torch.is_grad_enabled(), shard.cache.backward_passes) if x.requires_grad else None
    known = shard.cache.of(x)
    kept = known.with_ghosts
    if kept is None or kept.routing is not routing or kept.graph != graph or not kept.source.matches(x):
        kept = known.with_ghosts = GhostRows(Snapshot(x), routing, graph, routing.with_ghosts(owned))
    return kept.rows


def _may_keep(shard: Shard, x: Tensor) -> bool:
    """Whether a gather may be reused by the next one.

    Not that of a leaf that is differentiated: each graph that starts at it needs an exchange of its own. Nor while a graph is
    recorded for recomputation, nor where `.data` was taken, whose changes torch does not count.
    """
    if not isinstance(x, TaggedTensor) or x.is_inference() or (x.requires_grad and x.is_leaf):
        return False
    if shard.cache.known(x).untracked:
        return False
    return not (x.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None)


class ScatterTarget(NamedTuple):
    """Where values are added to, as one rank sees it.

    `local`: the index, by local ids. `n`: how many rows it counts; None: the accumulator's. `sum`: buffers (n, *F) of all
    ranks -> their sum in the accumulator's rows. `extreme`: the same for the largest or smallest. `broadcast_back`: the
    accumulator's rows -> the rows that `local` counts.
    """

    rows: Rows
    n: int | None
    local: Tensor
    sum: Callable[[Tensor], Tensor]
    extreme: Callable[[Tensor, Extreme], Tensor]
    broadcast_back: Callable[[Tensor], Tensor]

    def zeros(self, like: Tensor, dim: int) -> Tensor:
        """A buffer for what is added to `like` along `dim`.

        In float64 for per-system sums: a float32 sum over many atoms would depend on which rank has which atoms.
        """
        shape = list(like.shape)
        shape[dim] = shape[dim] if self.n is None else self.n
        wide = self.n is None and like.is_floating_point()
        return torch.zeros(
            shape, dtype=torch.promote_types(like.dtype, torch.float64) if wide else like.dtype, device=like.device
        )


def system_target(shard: Shard, index: TaggedTensor) -> ScatterTarget:
    """The target of a sum through an index that points at systems."""
    comm = shard.comm
    if shard.storage.replicated or index.tag.rows in REPLICATED:
        return ScatterTarget(SYSTEM, None, index, _same, _first, _same)
    if not shard.spec.per_system_reduce:
        return ScatterTarget(PARTIAL, None, index, _same, _first, _same)
    return ScatterTarget(
        SYSTEM,
        None,
        index,
        lambda partial: sum_over_ranks(partial, comm),
        lambda mine, op: comm.all_reduce(mine, "max" if op == "amax" else "min"),
        _same,
    )


def node_target(shard: Shard, out: Tensor, index: TaggedTensor) -> ScatterTarget | Rows:
    """The target of a sum through an index that points at atoms; or, where it is local, the rows of the result."""
    storage = shard.storage
    if storage.replicated:
        return GLOBAL
    routing, local = to_local_ids(shard, index)
    if holds_all_rows(shard, out):
        return _global_target(shard, routing, local)
    if not out.ndim or len(out) != shard.n_rows:
        raise MissingHandler(
            f"an accumulator {tuple(out.shape)} for an index that points at atoms must have this rank's "
            f"{shard.n_rows} atoms along dim 0.\nMake it with x.shape[0] rows of a per-atom tensor x."
        )
    if not must_reverse(shard, index):
        return OWNED if not storage.padded else STALE if storage.reduces else PADDED
    return _owners_target(shard, routing, local)


def _owners_target(shard: Shard, routing: Routing, local: Tensor) -> ScatterTarget:
    """Into this rank's rows: what is added to ghosts is sent to their owners, and ghosts are stale afterwards."""
    n, padded = shard.n_owned, shard.storage.padded

    def pad_ghost_zeros(owned: Tensor) -> Tensor:
        return torch.cat([owned, owned.new_zeros(shard.n_ghost, *owned.shape[1:])]) if padded else owned

    return ScatterTarget(
        STALE if padded else OWNED,
        n + routing.n_ghost,
        local,
        lambda both: pad_ghost_zeros(routing.reduce_ghosts(both)),
        lambda both, op: pad_ghost_zeros(_extreme_of_owned(routing, both, op)),
        lambda out: routing.with_ghosts(out[:n]),
    )


def _global_target(shard: Shard, routing: Routing, local: Tensor) -> ScatterTarget:
    """Into all atoms' rows by global id: the owners add up, then all rows are gathered on every rank."""
    owners, ids = shard.owners, shard.ids

    def gather(owned: Tensor) -> Tensor:
        return all_gather_rows(owned, owners.counts, owners.comm).index_select(0, owners.gather_row)

    return ScatterTarget(
        GLOBAL,
        shard.n_owned + routing.n_ghost,
        local,
        lambda both: gather(routing.reduce_ghosts(both)),
        lambda both, op: gather(_extreme_of_owned(routing, both, op)),
        lambda out: routing.with_ghosts(out.index_select(0, ids[: shard.n_owned])),
    )


def _extreme_of_owned(routing: Routing, both: Tensor, op: Extreme) -> Tensor:
    """[owned | ghost] rows -> owned rows, each the extreme of its own and its ghosts' rows. Not differentiable."""
    mine = both[: routing.n_owned]
    if routing.no_exchange:
        return mine
    route = routing.comm, routing.recv_splits, routing.send_splits, True
    (theirs,) = AllToAllRows.apply(*route, both[routing.n_owned :])  # type: ignore[no-untyped-call]
    send = routing.send.view(-1, *[1] * (theirs.ndim - 1)).expand_as(theirs)
    return mine.scatter_reduce(0, send, theirs, op)


def _same(x: Tensor) -> Tensor:
    return x


def _first(x: Tensor, _: Any) -> Tensor:
    return x
