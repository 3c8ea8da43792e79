"""ShardTensor: a torch.Tensor that knows what its rows are and what its values point at."""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor

from alchemi_shardtensor.comm import Comm
from alchemi_shardtensor.config import DomainConfig
from alchemi_shardtensor.layouts import find_layout
from alchemi_shardtensor.routing import Owners, Routing
from alchemi_spec import DistributionSpec, SpecError

if TYPE_CHECKING:
    from alchemi_shardtensor.storage import Storage
    from alchemi_shardtensor.table import HandlerTable


class Rows(StrEnum):
    """What dim 0 of a tensor (or `row_dim`, where an operation has moved it) enumerates."""

    OWNED = "owned"
    """This rank's atoms."""
    PADDED = "padded"
    """This rank's atoms, then its ghosts, which are what their owners have."""
    STALE = "stale"
    """This rank's atoms, then its ghosts, which are not what their owners have: refreshed where they are read."""
    GLOBAL = "global"
    """All atoms by global id, the same on every rank."""
    EDGE = "edge"
    """The edges whose receivers this rank owns."""
    SYSTEM = "system"
    """The structures of the batch, or any other value that is the same on every rank."""
    PARTIAL = "partial"
    """This rank's part of a per-system sum: the whole is the sum over ranks."""
    LOST = "lost"
    """Made of this rank's share, but no dim enumerates it any more: not to be reduced."""


class PointsAt(StrEnum):
    """What the values of an integer tensor index."""

    NODES = "nodes"
    """Atoms: below n_owned the owned ones, from there the ghosts; in the sharded layout, all by global id."""
    SYSTEMS = "systems"
    """Structures of the batch."""


class End(StrEnum):
    """Which end of the edges an index names. Receivers are all owned; senders may be ghosts."""

    SENDER = "sender"
    RECEIVER = "receiver"


OWNED, PADDED, STALE, GLOBAL, EDGE, SYSTEM, PARTIAL, LOST = Rows
SHARE = (OWNED, PADDED, STALE, EDGE, LOST)
"""Rows of which each rank holds its share only."""
REPLICATED = (SYSTEM, GLOBAL)
"""Rows that every rank holds alike."""
NODES, SYSTEMS = PointsAt
SENDER, RECEIVER = End
BOTH = (SENDER, RECEIVER)
"""The ends that the two rows of an edge_index (2, E) name."""


Ends = End | tuple[End, ...] | None


class Tag(NamedTuple):
    """What a ShardTensor knows beside its values: its shard, what dim `row_dim` enumerates, and what its values index.

    `end`: which end of the edges a node index names: one for all its values, a tuple of one for each row, or None where
    unknown, which is right too, but costs an exchange.
    """

    shard: "Shard"
    rows: Rows | None
    points_at: PointsAt | None
    end: Ends
    row_dim: int


class Fired(NamedTuple):
    """One line of a trace: an operation, the handler that took it (None: plain torch), and its result's rows."""

    op: str
    handler: str | None
    rows: Rows | None


@dataclass(frozen=True, eq=False)
class Shard:
    """The partition of this run, as the tensors of one rank see it. Two shards never meet in one operation."""

    spec: DistributionSpec
    routing: Routing
    n_systems: int
    table: "HandlerTable"
    seen: dict[Any, Any] = field(default_factory=dict)
    """What has been agreed over ranks for this shard, once."""
    tags: dict[Any, Tag] = field(default_factory=dict, repr=False)
    """One object for each tag, so that equal tags are identical."""
    fired: list[Fired] | None = field(default=None, repr=False)
    """What has fired, while `trace` is open."""
    began: int = field(init=False, repr=False)
    """How many collectives this rank had to repeat in backward passes when the shard was made."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "began", self.comm.traffic.tracked)

    @classmethod
    def of(cls, spec: DistributionSpec, routing: Routing, n_systems: int) -> "Shard":
        """The shard of these three: one object, however often it is asked for. Every rank must call it."""
        for shard in routing.shards:
            if (shard.spec, shard.n_systems) == (spec, n_systems):
                return shard  # type: ignore[no-any-return]
        table = find_layout(spec)
        shard = cls(spec, table.storage.prepared(routing), n_systems, table)
        routing.shards.append(shard)
        return shard

    @property
    def storage(self) -> "Storage":
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
        if "ids" not in self.seen:
            self.seen["ids"] = self.routing.padded(self.owners.ids)
        return self.seen["ids"]  # type: ignore[no-any-return]

    @property
    def comm(self) -> Comm:
        """The ranks that hold the other shares."""
        return self.routing.comm

    @property
    def n_owned(self) -> int:
        """How many atoms this rank owns."""
        return self.routing.n_owned

    @property
    def n_ghost(self) -> int:
        """How many remote atoms this rank reads."""
        return self.routing.n_ghost

    def tag(self, rows: Rows | None, points_at: PointsAt | None = None, end: Ends = None, row_dim: int = 0) -> Tag:
        """The tag with these values."""
        key = rows, points_at, end, row_dim
        found = self.tags.get(key)
        if found is None:
            found = self.tags[key] = Tag(self, *key)
        return found


class ShardTensor(Tensor):
    """A tensor with a tag. The storage is the plain tensor's.

    An operation that no handler of the shard's table takes is plain torch's, with the tag carried on to where its rows are
    in the result.
    """

    tag: Tag

    @property
    def shard(self) -> Shard:
        """The partition that this is a part of."""
        return self.tag.shard

    @property
    def rows(self) -> Rows | None:
        """What dim `row_dim` enumerates."""
        return self.tag.rows

    @property
    def points_at(self) -> PointsAt | None:
        """What the values index."""
        return self.tag.points_at

    @property
    def end(self) -> Ends:
        """Which end of the edges the values name."""
        return self.tag.end

    @property
    def row_dim(self) -> int:
        """Which dim enumerates `rows`."""
        return self.tag.row_dim

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch: the first handler of the shard's table whose predicate holds, else plain torch and `carry`."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SPEAK_OF_NO_ROWS:
                return func(*args)
            sources: list[ShardTensor] = []
            for a in args:
                kind = type(a)
                if kind is ShardTensor:
                    sources.append(a)
                elif kind is tuple or kind is list:
                    collect(a, sources)
            if kwargs:
                collect(kwargs.values(), sources)
            else:
                kwargs = {}
            if not sources:
                return func(*args, **kwargs)
            shard = sources[0].tag.shard
            return shard.table.dispatch(func, shard, sources, args, kwargs)

    @classmethod
    def wrap(
        cls,
        t: Tensor,
        *,
        spec: DistributionSpec,
        meta: Routing,
        config: DomainConfig | None = None,
        n_systems: int = 1,
        rows: Rows | str | None = None,
        points_at: PointsAt | str | None = None,
        end: Ends = None,
    ) -> "ShardTensor":
        """`t` as a ShardTensor that shares its storage; `t` itself stays plain. Every rank must call it.

        `meta`: this rank's counts and routing; tensors wrapped with the same `spec`, `meta` and `n_systems` belong
        together. `config`: its ranks must be the routing's. `rows`: what dim 0 enumerates. `points_at`: what the values
        index; `end`: which end of the edges they name (`BOTH` for an edge_index).

        Raises:
            SpecError: for ranks that are not the routing's, an index that is not of integers, or rows that do not fit.

        """
        if config is not None and config.comm is not meta.comm:
            raise SpecError("this routing was made for other ranks than config's: make both with one Comm.")
        shard = Shard.of(spec, meta, n_systems)
        what = None if rows is None else Rows(rows), None if points_at is None else PointsAt(points_at)
        _check_wrapped(t, shard, *what)
        return tag(t, shard, *what, end)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the values: a shard belongs to one process."""
        return copy.deepcopy(self.detach().as_subclass(Tensor), memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle the values: a shard belongs to one process."""
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)


_GETTERS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "layout",
    "is_cuda",
    "is_sparse",
)
_SPEAK_OF_NO_ROWS = frozenset(
    [*(getattr(Tensor, name).__get__ for name in _GETTERS), Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
)
"""Asked often, and answered with no tensor."""


def tag(t: Tensor, shard: Shard, rows: Rows | None = None, points_at: PointsAt | None = None, end: Ends = None) -> ShardTensor:
    """`t` as a ShardTensor that shares its storage; `t` itself stays plain.

    Where `end` has one for each row, t is an edge_index (2, E), and its rows are the edges, along dim 1.
    """
    if rows is GLOBAL:
        shard.seen["global"] = True
    if isinstance(end, tuple) and rows is None:
        rows, row_dim = edges_of(shard), 1
    else:
        row_dim = 0
    return tag_in_place(t.as_subclass(ShardTensor), shard, rows, points_at, end, row_dim)


def tag_all(ids: Tensor, shard: Shard) -> ShardTensor:
    """The ids (n_owned + n_ghost,) of all rows that edges count, in their order: what they pick are the rows themselves."""
    nodes = tag(ids, shard, PADDED, NODES)
    nodes.__dict__["names_all"] = True
    return nodes


def edges_of(shard: Shard) -> Rows:
    """What the rows of per-edge tensors are: this rank's edges, or in a replicated layout everybody's."""
    return SYSTEM if shard.storage.replicated else EDGE


def tag_in_place(
    t: Tensor,
    shard: Shard,
    rows: Rows | None = None,
    points_at: PointsAt | None = None,
    end: Ends = None,
    row_dim: int = 0,
) -> ShardTensor:
    """Tag the very object, so that an in-place operation whose result is dropped leaves a tagged accumulator."""
    if type(t) is not ShardTensor:
        t.__class__ = ShardTensor
    t.tag = shard.tag(rows, points_at, end, row_dim)  # type: ignore[attr-defined]
    return t  # type: ignore[return-value]


def _check_wrapped(t: Tensor, shard: Shard, rows: Rows | None, points_at: PointsAt | None) -> None:
    if points_at is not None and (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
        raise SpecError(f"a tensor of {t.dtype} cannot point at {points_at}: an index is of integers.")
    expected = {OWNED: shard.n_owned, PADDED: shard.n_owned + shard.n_ghost, STALE: shard.n_owned + shard.n_ghost}
    n = None if rows is None else expected.get(rows)
    if n is not None and t.shape[:1] != (n,):
        raise SpecError(f"{rows} rows are {n} on this rank, but the tensor's shape is {tuple(t.shape)}.")


def holds_ghosts(t: ShardTensor) -> bool:
    """Its rows are this rank's atoms, then its ghosts."""
    return t.tag.rows is PADDED or t.tag.rows is STALE


@contextmanager
def trace(shard: Shard) -> Iterator[list[Fired]]:
    """List what fires in this shard while it is open: every operation on its tensors, in order."""
    fired: list[Fired] = []
    before = shard.fired
    object.__setattr__(shard, "fired", fired)
    try:
        yield fired
    finally:
        object.__setattr__(shard, "fired", before)


def plain(t: Tensor) -> Tensor:
    """The same tensor without its tag; differentiable, shares storage."""
    return t.as_subclass(Tensor) if isinstance(t, ShardTensor) else t


def collect(args: Iterable[Any], found: list[ShardTensor]) -> None:
    """Put the ShardTensors among `args`, also within lists, into `found`."""
    for a in args:
        kind = type(a)
        if kind is ShardTensor:
            found.append(a)
        elif kind is tuple or kind is list:
            collect(a, found)
