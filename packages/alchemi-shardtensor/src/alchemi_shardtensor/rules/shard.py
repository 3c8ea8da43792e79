"""The partition of a run, as the tensors of one rank see it, and the tensors that are tagged with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from alchemi_shardtensor.storage import ShardCache, Storage, TraceEvent
from alchemi_shardtensor.tag import (
    EDGE,
    GLOBAL,
    NODES,
    PADDED,
    SYSTEM,
    Ends,
    PointsAt,
    Rows,
    TaggedTensor,
    has_ghost_rows,
    tag_in_place,
)
from alchemi_shardtensor.transport import Comm, Owners, Routing
from alchemi_spec import DistributionSpec, SpecError


class Dispatcher(Protocol):
    """What takes the operations on a shard's tensors: a `HandlerTable`."""

    storage: Storage
    tensor_type: type[TaggedTensor]

    def dispatch(
        self, op: Callable[..., Any], shard: "Shard", sources: list[TaggedTensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operation on tensors of which `sources` are the tagged ones."""


@dataclass(frozen=True, eq=False)
class Shard:
    """The partition of a run, as the tensors of one rank see it. Two shards never meet in one operation.

    `cache`: all that changes in it.
    """

    spec: DistributionSpec
    routing: Routing
    n_systems: int
    table: Dispatcher
    cache: ShardCache = field(default_factory=ShardCache, repr=False)
    tensor_type: type[TaggedTensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensor_type", self.table.tensor_type)
        self.cache.tracked = self.comm.traffic.tracked

    @property
    def storage(self) -> Storage:
        """How this layout's rows are reached."""
        return self.table.storage

    @property
    def owners(self) -> Owners:
        """Who owns which global id.

        Raises:
            SpecError: where the routing was made without.

        """
        if self.routing.owners is None:
            raise SpecError("tensors of all atoms need to know who owns them: make the routing with owners=Owners.of(...).")
        return self.routing.owners

    @property
    def ids(self) -> Tensor:
        """The global ids (n_owned + n_ghost,) of the rows that local indices count. Every rank must ask the first time."""
        if self.cache.ids is None:
            self.cache.ids = self.routing.with_ghosts(self.owners.ids)
        return self.cache.ids

    @property
    def comm(self) -> Comm:
        """The ranks that hold the other parts."""
        return self.routing.comm

    @property
    def n_owned(self) -> int:
        """How many atoms this rank owns."""
        return self.routing.n_owned

    @property
    def n_ghost(self) -> int:
        """How many remote atoms this rank reads."""
        return self.routing.n_ghost

    @property
    def n_rows(self) -> int:
        """How many rows a per-atom tensor has in this layout."""
        return self.n_owned + self.n_ghost * self.storage.padded

    @property
    def rows_of_edges(self) -> Rows:
        """What the rows of per-edge tensors are: this rank's edges, or in a replicated layout all edges."""
        return SYSTEM if self.storage.replicated else EDGE


def tag(t: Tensor, shard: Shard, rows: Rows | None = None, points_at: PointsAt | None = None, end: Ends = None) -> TaggedTensor:
    """`t` as a ShardTensor that shares its storage; `t` itself stays plain.

    Where `end` has one for each row, t is an edge_index (2, E), and its rows are the edges, along dim 1.
    """
    if rows is GLOBAL:
        shard.cache.has_global_rows = True
    row_dim = 0
    if isinstance(end, tuple) and rows is None:
        rows, row_dim = shard.rows_of_edges, 1
    return tag_in_place(t.as_subclass(shard.tensor_type), shard, rows, points_at, end, row_dim)


def tag_all_rows(ids: Tensor, shard: Shard) -> TaggedTensor:
    """The ids (n_owned + n_ghost,) of all rows that edges count, in their order: what they pick are the rows themselves."""
    nodes = tag(ids, shard, PADDED, NODES)
    shard.cache.of(nodes).names_all_rows = True
    return nodes


def owned_rows(shard: Shard, x: Tensor) -> Tensor:
    """The rows of x that this rank owns: without its ghosts, if it holds any."""
    return x.narrow(x.row_dim, 0, shard.n_owned) if isinstance(x, TaggedTensor) and has_ghost_rows(x) else x


@contextmanager
def trace(shard: Shard) -> Iterator[list[TraceEvent]]:
    """List what fires in this shard while it is open: every operation on its tensors, in order."""
    before, shard.cache.events = shard.cache.events, []
    try:
        yield shard.cache.events
    finally:
        shard.cache.events = before
