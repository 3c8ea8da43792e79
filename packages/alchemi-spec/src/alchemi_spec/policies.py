"""Storage policies: which rows a model sees, and what its gathers and scatters do. Other packages can add policies."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializeAsAny, ValidationInfo, model_validator
from pydantic_core import CoreSchema, core_schema

from alchemi_spec.value import Value, Word, agreed, clash

GROUP = "alchemi.policies"
"""The group of entry points that register a policy's class under its kind."""


class ScatterRule(Word):
    """What happens to a contribution that a scatter adds to a row."""

    HALO_CORRECTION = "halo_correction"
    """Contributions to ghost rows are sent to the owners and added there, by one reverse; by none if all receivers are
    owned. The ghost rows are stale afterwards."""
    LOCAL = "local"
    """It stays on this rank, in the row that it was added to."""
    DISTRIBUTED = "distributed"
    """The index holds global ids. Each contribution is sent to the owner of its row."""


class GatherRule(Word):
    """Where a gather gets the rows that it reads."""

    HALO_READ = "halo_read"
    """An exchange fetches ghost rows when they are read; in a padded layout, only if they are stale."""
    LOCAL = "local"
    """From the rows on this rank; nothing is sent."""
    DISTRIBUTED = "distributed"
    """The index holds global ids. Each remote row is fetched once from its owner."""


class StrategyKind(Word):
    """How atoms are divided among ranks: the `kind` of a strategy. A model may choose its specification by it."""

    HALO = "halo"
    """By space: each rank owns a region, and atoms that leave it migrate to another rank."""
    GRAPH_PARTITION = "graph"
    """By index or along a curve: each rank owns a block of atoms, which never migrate."""


class StoragePolicy(Value):
    """The base class of all policies. Another package adds one by an entry point of `alchemi.policies` named after its kind."""

    kind: str
    scatter: ScatterRule
    gather: GatherRule

    def merged(self, other: "StoragePolicy") -> "StoragePolicy | None":
        """The policy that serves both, or None if `other` must decide. By default both must be equal.

        Raises:
            SpecError: if two policies of one kind differ.

        """
        return _same(self, other) if self.kind == other.kind else None

    def __or__(self, other: "StoragePolicy") -> "StoragePolicy":
        """The policy under which the models of both can run together.

        Raises:
            SpecError: if there is none.

        """
        merged = self.merged(other) or other.merged(self)
        if merged is None:
            raise clash("policy.kind", self.kind, other.kind)
        return merged


class ShardedStoragePolicy(StoragePolicy):
    """Owned rows, addressed by global ids. Any row can read or add to any other, but each index must be routed."""

    kind: Literal["sharded"] = "sharded"
    scatter: Literal[ScatterRule.DISTRIBUTED, ScatterRule.LOCAL] = ScatterRule.DISTRIBUTED
    gather: Literal[GatherRule.DISTRIBUTED, GatherRule.LOCAL] = GatherRule.DISTRIBUTED


class HaloStoragePolicy(StoragePolicy):
    """Partition by space: each rank owns the atoms of a region, and reads remote atoms near it as ghosts.

    `layout="owned"`: the model sees owned rows only; a gather through senders fetches exactly the ghost rows that it reads.
    `layout="padded"`: the model sees [owned | ghost] rows. This is for opaque kernels, and models that index such rows. A
    scatter through the batch index counts owned rows only.

    `depth`: ghosts are atoms up to this many cutoffs away. With `scatter="local"` the neighbour list also has the edges of
    receivers up to `depth - 1` cutoffs away, so `depth` layers need no exchange. After each layer, rows are complete up to a
    distance that is one cutoff shorter.
    """

    kind: Literal["halo"] = "halo"
    scatter: ScatterRule = ScatterRule.HALO_CORRECTION
    gather: GatherRule = GatherRule.HALO_READ
    layout: Literal["owned", "padded"] = "owned"
    depth: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        if self.scatter is ScatterRule.DISTRIBUTED or self.gather is GatherRule.DISTRIBUTED:
            raise ValueError("a halo's indices are local, and 'distributed' rules route global ids: use ShardedStoragePolicy")
        if self.layout == "owned":
            self._refuse_ghost_rows()
        if self.scatter is ScatterRule.HALO_CORRECTION and self.gather is GatherRule.LOCAL:
            raise ValueError(
                "scatter='halo_correction' leaves ghosts stale, and gather='local' would read them: use gather='halo_read', "
                "which sends nothing while they are fresh, or scatter='local'"
            )
        return self

    def _refuse_ghost_rows(self) -> None:
        """Refuse rules that need ghost rows, which layout='owned' does not have."""
        if self.gather is GatherRule.LOCAL:
            raise ValueError(
                "layout='owned' has no ghost rows for gather='local' to read: use gather='halo_read', or layout='padded'"
            )
        if self.scatter is ScatterRule.LOCAL:
            raise ValueError(
                "layout='owned' has no ghost rows for scatter='local' to add to: use scatter='halo_correction', which sends "
                "nothing if all receivers are owned, or layout='padded'"
            )
        if self.depth > 1:
            raise ValueError(
                f"layout='owned' has no ghost rows, so depth={self.depth} has no meaning: use depth=1, or layout='padded' with "
                f"scatter='local'"
            )

    def merged(self, other: StoragePolicy) -> StoragePolicy | None:
        """Merge with a sharded policy to that policy, and with another halo to one that is right for both.

        Ghost rows, and rules that exchange, do no harm to a model that does not need them. So the result has them if either
        policy has them, and the larger depth.
        """
        if isinstance(other, ShardedStoragePolicy):
            return other
        if not isinstance(other, HaloStoragePolicy):
            return None
        padded = "padded" in (self.layout, other.layout)
        corrected = ScatterRule.HALO_CORRECTION in (self.scatter, other.scatter)
        read = GatherRule.HALO_READ in (self.gather, other.gather)
        return HaloStoragePolicy(
            layout="padded" if padded else "owned",
            scatter=ScatterRule.HALO_CORRECTION if corrected else ScatterRule.LOCAL,
            gather=GatherRule.HALO_READ if read else GatherRule.LOCAL,
            depth=max(self.depth, other.depth),
        )


class GraphParallelPolicy(StoragePolicy):
    """Partition by index or along a curve: the model sees owned rows, and remote rows are fetched when they are read.

    `collective`: fetch the rows that are read by an `exchange`, or all rows by an `all_gather`. `auto`: by an all-gather if
    most rows are read.
    `geometry="replicated"`: for a model that builds its edges itself. It gets the positions of all atoms (N, 3) in the order
    of ids and no edges, and its indices are global ids. The function that builds edges must keep those of owned receivers
    and tag them: `MethodAdapter(Model, "build", "alchemi_graphpart:keep_owned")`.
    """

    kind: Literal["graph_parallel"] = "graph_parallel"
    scatter: Literal[ScatterRule.LOCAL] = ScatterRule.LOCAL
    gather: Literal[GatherRule.HALO_READ] = GatherRule.HALO_READ
    collective: Literal["auto", "exchange", "all_gather"] = "auto"
    geometry: Literal["owned", "replicated"] = "owned"

    def merged(self, other: StoragePolicy) -> StoragePolicy | None:
        """Merge with another graph-parallel policy. `auto` yields to a choice."""
        if not isinstance(other, GraphParallelPolicy):
            return None
        collective = agreed("policy.collective", self.collective, other.collective, "auto")
        return self.replaced(collective=collective, geometry=agreed("policy.geometry", self.geometry, other.geometry))


class LocalPolicy(StoragePolicy):
    """Every rank holds all rows."""

    kind: Literal["local"] = "local"
    scatter: Literal[ScatterRule.LOCAL] = ScatterRule.LOCAL
    gather: Literal[GatherRule.LOCAL] = GatherRule.LOCAL

    def merged(self, other: StoragePolicy) -> StoragePolicy:
        """The other policy, since this one needs nothing."""
        return other


def _same(a: StoragePolicy, b: StoragePolicy) -> StoragePolicy:
    for field in type(a).model_fields:
        agreed(f"policy.{field}", getattr(a, field), getattr(b, field))
    return a


class _ByKind:
    """Marks a field that is validated by the class that its `kind` names among the installed policies."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.with_info_before_validator_function(_from_kind, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        kinds = [handler(point.load().__pydantic_core_schema__) for _, point in sorted(_installed().items())]
        return {"oneOf": kinds, "discriminator": {"propertyName": "kind"}}


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


def _from_kind(written: Any, info: ValidationInfo) -> Any:
    if not isinstance(written, Mapping):
        return written
    installed = _installed()
    kind = written.get("kind")
    if kind not in installed:
        raise ValueError(
            f"no policy has the kind {kind!r}; installed are {', '.join(sorted(installed))}: use one of them, or install the "
            f"package that adds it by an entry point of {GROUP}"
        )
    return installed[kind].load().model_validate(written, context=info.context)


Policy = Annotated[SerializeAsAny[StoragePolicy], _ByKind()]
"""The type of a field that takes any policy, or a dict with its `kind`."""
