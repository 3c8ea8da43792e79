"""How the rows of a layout are reached and added to: the two questions in which layouts differ."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from alchemi_shardtensor.collectives import Brought, Travel, all_gather_rows, sum_over_ranks
from alchemi_shardtensor.routing import Routing
from alchemi_shardtensor.tensor import (
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
    Shard,
    ShardTensor,
    holds_ghosts,
)
from alchemi_spec import MissingHandler

Extreme = Literal["amax", "amin"]


class Target(NamedTuple):
    """Where values are added to, as one rank sees it.

    `local`: the index, by local ids. `n`: how many rows it counts; None: the accumulator's. `total`: buffers (n, *F) of all
    ranks -> their sum in the accumulator's rows. `extreme`: the same for the largest or smallest. `spread`: the
    accumulator's rows -> the rows that `local` counts.
    """

    rows: Rows
    n: int | None
    local: Tensor
    total: Callable[[Tensor], Tensor]
    extreme: Callable[[Tensor, Extreme], Tensor]
    spread: Callable[[Tensor], Tensor]

    def zeros(self, like: Tensor, dim: int) -> Tensor:
        """A buffer for what is added to `like` along `dim`.

        In float64 for per-system sums: a float32 sum over many atoms would depend on how they are shared out.
        """
        shape = list(like.shape)
        shape[dim] = shape[dim] if self.n is None else self.n
        wide = self.n is None and like.is_floating_point()
        return torch.zeros(
            shape, dtype=torch.promote_types(like.dtype, torch.float64) if wide else like.dtype, device=like.device
        )


@dataclass(frozen=True)
class Storage:
    """A layout's answers.

    `padded`: per-atom tensors hold [owned | ghost] rows. `reads`: rows that an index reaches beyond them are brought.
    `folds`: what is added to rows beyond the owned ones is sent to their owners. `global_ids`: indices that point at atoms
    hold global ids. `replicated`: every rank holds all rows and all edges. `collective`: what brings the rows; None: as the
    routing was made. `all_positions`: every rank holds those of all atoms, and the model lists the edges.
    """

    padded: bool = False
    reads: bool = True
    folds: bool = True
    global_ids: bool = False
    replicated: bool = False
    collective: Literal["auto", "exchange", "all_gather"] | None = None
    all_positions: bool = False

    def prepared(self, routing: Routing) -> Routing:
        """The routing as this layout uses it. Every rank must call it."""
        return routing if self.collective is None else routing.by(self.collective)

    @property
    def whole(self) -> bool:
        """Some tensors have the rows of all atoms, or are indexed by them."""
        return self.global_ids or self.replicated

    @property
    def indexes_owned(self) -> bool:
        """Local ids below the number of rows are the rows themselves, so that arange(len(x)) names them."""
        return not self.padded and not self.global_ids

    @property
    def repeats_edges(self) -> bool:
        """Edges of ghosts are there, too, so that an edge is on several ranks."""
        return self.padded and not self.folds

    def n_rows(self, shard: Shard) -> int:
        """How many rows a per-atom tensor has."""
        return shard.n_owned + shard.n_ghost * self.padded

    def localized(self, shard: Shard, index: Tensor) -> tuple[Routing, Tensor]:
        """The routing of what `index` reads, and it by local ids. For global ids found once for each index, by all ranks."""
        if not self.global_ids:
            return shard.routing, index
        if shard.routing.owners is None:
            raise MissingHandler("global ids need to know who owns them: make the routing with owners=Owners.of(ids, comm).")
        version = 0 if index.is_inference() else index._version
        kept = index.__dict__.get("localized")  # with the object, of which all ranks have as many: ranks must not part
        if kept is None or kept[0] != version:
            kept = index.__dict__["localized"] = (version, *shard.routing.owners.route(index.as_subclass(Tensor)))
        return kept[1:]

    def reach(self, shard: Shard, x: Tensor, index: ShardTensor) -> tuple[Tensor, Tensor]:
        """The rows that `index` counts, and the index into them. This is the moment at which rows travel."""
        mark = x.tag if type(x) is ShardTensor else None
        rows = None if mark is None else mark.rows
        if self.replicated:
            return x, index
        if rows is LOST:
            raise MissingHandler(
                f"a tensor of shape {tuple(x.shape)} was read by atoms, but whose its rows are is not known: what made it may "
                f"mix or move rows.\nMake per-atom values row by row, or register a handler for it."
            )
        if self.holds_all(shard, x):
            return (x, index) if self.global_ids else (x.index_select(0, shard.ids), index)
        routing, local = self.localized(shard, index)
        if rows is PADDED:
            return x, local
        if not x.ndim or x.size(0) != self.n_rows(shard) or (mark is not None and mark.row_dim):
            raise MissingHandler(
                f"an index that points at atoms was used on a tensor of shape {tuple(x.shape)}, "
                f"whose dim 0 is not this rank's {self.n_rows(shard)} atoms.\n"
                f"Index per-atom tensors with it; tag other indices with what they point at, or leave them plain."
            )
        if not self.reads or routing.is_still or (index.tag.end is RECEIVER and not self.global_ids):
            return x, local
        return _padded(shard, routing, x.narrow(0, 0, shard.n_owned) if self.padded else x, x), local

    def holds_all(self, shard: Shard, x: Tensor) -> bool:
        """Whether x has the rows of all atoms: by its tag, or plain and as many, where the layout has such tensors."""
        if isinstance(x, ShardTensor):
            return x.tag.rows is GLOBAL
        if self.collective is None or "global" not in shard.seen or not x.ndim or shard.routing.owners is None:
            return False
        return len(x) == len(shard.routing.owners.rank)

    def systems(self, shard: Shard, index: ShardTensor) -> Target:
        """The target of a sum through an index that points at systems."""
        comm = shard.comm
        if self.replicated or index.tag.rows in REPLICATED:
            return Target(SYSTEM, None, index, _same, _alone, _same)
        if not shard.spec.per_system_reduce:
            return Target(PARTIAL, None, index, _same, _alone, _same)
        return Target(
            SYSTEM,
            None,
            index,
            lambda partial: sum_over_ranks(partial, comm),
            lambda mine, op: comm.all_reduce(mine, "max" if op == "amax" else "min"),
            _same,
        )

    def nodes(self, shard: Shard, out: Tensor, index: ShardTensor) -> Target | Rows:
        """The target of a sum through an index that points at atoms; or, where it is local, the rows of the result."""
        if self.replicated:
            return GLOBAL
        routing, local = self.localized(shard, index)
        if self.holds_all(shard, out):
            return _global_target(shard, routing, local)
        if not out.ndim or len(out) != self.n_rows(shard):
            raise MissingHandler(
                f"an accumulator {tuple(out.shape)} for an index that points at atoms must have this rank's "
                f"{self.n_rows(shard)} atoms along dim 0.\nMake it with x.shape[0] rows of a per-atom tensor x."
            )
        if not self.folds:
            return PADDED if self.padded else OWNED
        if not self.global_ids and index.tag.end is RECEIVER:
            return STALE if self.padded else OWNED
        n, rows = shard.n_owned, STALE if self.padded else OWNED

        def widened(owned: Tensor) -> Tensor:
            return torch.cat([owned, owned.new_zeros(shard.n_ghost, *owned.shape[1:])]) if self.padded else owned

        return Target(
            rows,
            n + routing.n_ghost,
            local,
            lambda both: widened(routing.folded(both)),
            lambda both, op: widened(_extreme_of_owned(routing, both, op)),
            lambda out: routing.padded(out[:n]),
        )


def brought(shard: Shard, rows: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
    """[owned | ghost] rows of these owned ones, in one message; until the first changes, gathers of it send nothing, either.

    Every rank must call it, also where it would change nothing.
    """
    both = shard.routing.padded_all(rows, *more)
    shard.seen["brought"] = (None, None) if rows.is_inference() else (_state(rows), both[0][len(rows) :])
    return both


def _state(rows: Tensor) -> tuple[Any, ...]:
    """What aliases that nothing has changed have in common: on all ranks or on none, also where there are no rows."""
    return rows.untyped_storage()._cdata, rows.storage_offset(), rows._version, rows.dtype, rows.shape[1:], rows.stride()


def _padded(shard: Shard, routing: Routing, owned: Tensor, x: Tensor) -> Tensor:
    """[owned | ghost] rows, kept with x while it is unchanged: a gather of what was gathered before sends nothing.

    A leaf that is differentiated is not kept: each graph that starts at it needs an exchange of its own. Nor is anything
    while a graph is recorded for recomputation, or of which `.data` was taken, whose changes are not counted.
    """
    state, ghosts = shard.seen.get("brought", (None, None))
    if state is not None and routing is shard.routing and not (routing.is_still or x.is_inference()) and state == _state(x):
        return torch.cat([owned, Brought.apply(owned, ghosts, routing)])  # type: ignore[no-untyped-call]
    if not isinstance(x, ShardTensor) or x.is_inference() or (x.requires_grad and x.is_leaf) or "data" in x.__dict__:
        return routing.padded(owned)
    if x.requires_grad and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return routing.padded(owned)
    graph = (torch.is_grad_enabled(), shard.seen.get("backwards")) if x.requires_grad else None
    key = routing, x._version, x.data_ptr(), graph
    kept = x.__dict__.get("padded")
    if kept is None or kept[0] != key:
        kept = x.__dict__["padded"] = (key, routing.padded(owned))
    return cast(Tensor, kept[1])


def _extreme_of_owned(routing: Routing, both: Tensor, op: Extreme) -> Tensor:
    """[owned | ghost] rows -> owned rows, each the extreme of its own and its ghosts' rows. Not differentiable."""
    mine = both[: routing.n_owned]
    if routing.is_still:
        return mine
    route = routing.comm, routing.recv_splits, routing.send_splits, True
    (home,) = Travel.apply(*route, both[routing.n_owned :])  # type: ignore[no-untyped-call]
    send = routing.send.view(-1, *[1] * (home.ndim - 1)).expand_as(home)
    return mine.scatter_reduce(0, send, home, op)


def _global_target(shard: Shard, routing: Routing, local: Tensor) -> Target:
    """Into all atoms' rows by global id: the owners add up, then each row is gathered by everyone."""
    owners, ids = shard.owners, shard.ids

    def everywhere(owned: Tensor) -> Tensor:
        return all_gather_rows(owned, owners.counts, owners.comm).index_select(0, owners.place)

    return Target(
        GLOBAL,
        shard.n_owned + routing.n_ghost,
        local,
        lambda both: everywhere(routing.folded(both)),
        lambda both, op: everywhere(_extreme_of_owned(routing, both, op)),
        lambda out: routing.padded(out.index_select(0, ids[: shard.n_owned])),
    )


def own(shard: Shard, x: Tensor) -> Tensor:
    """The rows of x that this rank owns: without its ghosts, if it holds any."""
    return x.narrow(x.row_dim, 0, shard.n_owned) if isinstance(x, ShardTensor) and holds_ghosts(x) else x


def _same(x: Tensor) -> Tensor:
    return x


def _alone(x: Tensor, op: Any) -> Tensor:
    return x
