"""Storage policies: which rows a model sees, and what its gathers and scatters do. A union that others may add to."""

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Literal, Self

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, SerializeAsAny, ValidationInfo, model_validator
from pydantic_core import CoreSchema, core_schema

from alchemi_spec.value import Value, Word, agreed, clash

GROUP = "alchemi.policies"
"""The entry points that name a policy's class by its kind."""


class ScatterRule(Word):
    """What becomes of a contribution that a scatter adds to a row."""

    HALO_CORRECTION = "halo_correction"
    """What lands on ghost rows is summed into their owners: one reverse, none where all receivers are owned. Ghosts are
    stale after it."""
    LOCAL = "local"
    """It stays where it lands."""
    DISTRIBUTED = "distributed"
    """The index holds global ids, and each contribution is routed to its row's owner."""


class GatherRule(Word):
    """Where the rows come from that a gather reads."""

    HALO_READ = "halo_read"
    """Ghost rows arrive by the exchange at the moment they are read; in a padded layout, only if they are stale."""
    LOCAL = "local"
    """They are served from the rows at hand; nothing travels."""
    DISTRIBUTED = "distributed"
    """The index holds global ids, and each remote row is fetched once."""


class StrategyKind(Word):
    """How atoms are shared out, by which a model may choose its specification; a strategy's `kind`."""

    HALO = "halo"
    """By space: each rank owns a region, and atoms that leave it migrate."""
    GRAPH_PARTITION = "graph"
    """By index or along a curve: balanced, and atoms stay where they are."""


class StoragePolicy(Value):
    """The base of all policies. Another package adds one as an entry point of `alchemi.policies`, named by its kind."""

    kind: str
    scatter: ScatterRule
    gather: GatherRule

    def merged(self, other: "StoragePolicy") -> "StoragePolicy | None":
        """The policy that serves both, or None to let `other` decide. Here: both the same.

        Raises:
            SpecError: where two of one kind clash.

        """
        return _same(self, other) if self.kind == other.kind else None

    def __or__(self, other: "StoragePolicy") -> "StoragePolicy":
        """The policy under which the models of both run together.

        Raises:
            SpecError: where there is none.

        """
        merged = self.merged(other) or other.merged(self)
        if merged is None:
            raise clash("policy.kind", self.kind, other.kind)
        return merged


class ShardedStoragePolicy(StoragePolicy):
    """Owned rows, named by global ids: any row may read or add to any other, at the price of routing each index."""

    kind: Literal["sharded"] = "sharded"
    scatter: Literal[ScatterRule.DISTRIBUTED, ScatterRule.LOCAL] = ScatterRule.DISTRIBUTED
    gather: Literal[GatherRule.DISTRIBUTED, GatherRule.LOCAL] = GatherRule.DISTRIBUTED


class HaloStoragePolicy(StoragePolicy):
    """Partition by space: each rank owns the atoms of a region and reads those within reach of it.

    `layout="owned"`: the model sees owned rows only, and a gather through senders brings exactly the ghost rows it reads.
    `layout="padded"`: the model sees [owned | ghost] rows, for opaque kernels and models that index such rows; a scatter
    through the batch index counts owned rows only.

    `depth` is how many cutoffs wide the band of ghosts is. With `scatter="local"` the edges of receivers up to `depth - 1`
    cutoffs away are there too, so that `depth` layers need no exchange: each scatter leaves whole rows one cutoff less far.
    """

    kind: Literal["halo"] = "halo"
    scatter: ScatterRule = ScatterRule.HALO_CORRECTION
    gather: GatherRule = GatherRule.HALO_READ
    layout: Literal["owned", "padded"] = "owned"
    depth: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        owned, corrected = self.layout == "owned", self.scatter is ScatterRule.HALO_CORRECTION
        contradictions = {
            "a halo's indices are local, and 'distributed' rules route global ids: use ShardedStoragePolicy": (
                self.scatter is ScatterRule.DISTRIBUTED or self.gather is GatherRule.DISTRIBUTED
            ),
            "layout='owned' has no ghost rows for gather='local' to serve: use gather='halo_read', or layout='padded'": (
                owned and self.gather is GatherRule.LOCAL
            ),
            "layout='owned' has no ghost rows for scatter='local' to leave contributions on: use scatter='halo_correction', "
            "which costs nothing where all receivers are owned, or layout='padded'": owned and not corrected,
            f"layout='owned' has no band of ghost rows to make depth={self.depth} wide: use depth=1, or layout='padded' with "
            f"scatter='local'": owned and self.depth > 1,
            "scatter='halo_correction' leaves ghosts stale, and gather='local' would read them: use gather='halo_read', "
            "which costs nothing while they are fresh, or scatter='local'": corrected and self.gather is GatherRule.LOCAL,
        }
        for why, contradicts in contradictions.items():
            if contradicts:
                raise ValueError(why)
        return self

    def merged(self, other: StoragePolicy) -> StoragePolicy | None:
        """Sharded with sharded. Of two halos, the deeper, with what is right for both.

        A model that can do without ghosts in its rows can have them, and one that can do without an exchange can have it.
        """
        if isinstance(other, ShardedStoragePolicy):
            return other
        if not isinstance(other, HaloStoragePolicy):
            return None
        return HaloStoragePolicy(
            layout=max(self.layout, other.layout),  # in the order of the alphabet: padded after owned
            scatter=min(self.scatter, other.scatter),  # halo_correction before local
            gather=min(self.gather, other.gather),
            depth=max(self.depth, other.depth),
        )


class GraphParallelPolicy(StoragePolicy):
    """Partition by index or along a curve: the model sees owned rows, and remote ones arrive when they are read.

    `collective`: by a routed `exchange` of the rows that are read, by an `all_gather` of all, or whichever suits the sizes.
    `geometry="replicated"`: for a model that builds its edges itself: positions are all atoms' (N, 3), in the order of ids, no
    edges are listed, and indices are global ids. Its builder is to keep the edges of owned receivers and tag them, as
    `MethodAdapter(Model, "build", "alchemi_graphpart:keep_owned")` has it do.
    """

    kind: Literal["graph_parallel"] = "graph_parallel"
    scatter: Literal[ScatterRule.LOCAL] = ScatterRule.LOCAL
    gather: Literal[GatherRule.HALO_READ] = GatherRule.HALO_READ
    collective: Literal["auto", "exchange", "all_gather"] = "auto"
    geometry: Literal["owned", "replicated"] = "owned"

    def merged(self, other: StoragePolicy) -> StoragePolicy | None:
        """With its like, `auto` yielding to a choice."""
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
        """Whatever the other needs."""
        return other


def _same(a: StoragePolicy, b: StoragePolicy) -> StoragePolicy:
    for field in type(a).model_fields:
        agreed(f"policy.{field}", getattr(a, field), getattr(b, field))
    return a


class _ByKind:
    """Marks a field whose class is found by its `kind` among the installed policies, when it is validated."""

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
            f"package that adds it (an entry point of {GROUP})"
        )
    return installed[kind].load().model_validate(written, context=info.context)


Policy = Annotated[SerializeAsAny[StoragePolicy], _ByKind()]
"""A field that takes any policy, and a dict by its `kind`."""
