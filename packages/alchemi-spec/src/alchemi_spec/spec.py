"""How a model may be spread over ranks, as a frozen value that travels as JSON."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from alchemi_spec.adapters import MethodAdapter, OpAdapter, PythonAdapter
from alchemi_spec.errors import SpecError
from alchemi_spec.policies import GraphParallelPolicy, HaloStoragePolicy, Policy, StrategyKind
from alchemi_spec.value import COMPLETE, Names, Table, Value, Word, agreed, in_plain_words

A = TypeVar("A", OpAdapter, MethodAdapter | PythonAdapter)


class OutputKind(Word):
    """What one row of an output describes, and so how the ranks' shares make the whole."""

    PER_NODE = "per_node"
    """An atom: each rank returns its own atoms' rows."""
    PER_GRAPH = "per_graph"
    """A whole structure: summed over ranks where the model forms it, and the same on every rank."""
    GLOBAL = "global"
    """The same on every rank already: passed through."""
    UNKNOWN = "unknown"
    """Decided by the tag of the result."""


class CompilePolicy(Value):
    """`capture`, `inductor`: whether the model can bear its step in one CUDA graph, or a compiler. `mode`: which to use.

    `auto` is the fastest that the model can bear; `off` is eager. `trim`: whether a captured step leaves out the edges between
    cutoff and skin, which pays where an edge costs more than a look at its length.
    """

    mode: Literal["auto", "off", "capture", "inductor"] = "auto"
    capture: bool = True
    inductor: bool = True
    trim: bool = True

    @model_validator(mode="after")
    def _borne(self) -> Self:
        if not getattr(self, self.mode, True):
            raise ValueError(
                f"mode={self.mode!r} and {self.mode}=False: the model cannot bear it. Use mode='auto', or {self.mode}=True"
            )
        return self

    def __or__(self, other: "CompilePolicy") -> "CompilePolicy":
        """What both can bear; a mode that both want, `auto` yielding."""
        return CompilePolicy(
            mode=agreed("compile.mode", self.mode, other.mode, "auto"),
            capture=self.capture and other.capture,
            inductor=self.inductor and other.inductor,
            trim=self.trim or other.trim,
        )


def _once(adapters: Iterable[A]) -> tuple[A, ...]:
    """Without repetitions; one target adapted in two ways is refused."""
    of: dict[str, A] = {}
    for new in adapters:
        if (old := of.setdefault(new.target, new)) != new:
            raise ValueError(f"{new.target} is adapted in two ways: {old!r} and {new!r}; keep one")
    return tuple(of.values())


class DistributionSpec(Value):
    """What it takes to run a network on rows that are spread over ranks; chemistry-free.

    `helpers` replace methods and functions while the model runs. `per_system_reduce`: a scatter through the batch index is
    summed over ranks; otherwise each rank's partial stays (then name the output in `MLIPSpec.all_reduce_outputs`).
    `a | b` serves both and loses nothing, or says what clashes.
    """

    policy: Policy = HaloStoragePolicy()
    custom_ops: Annotated[tuple[OpAdapter, ...], AfterValidator(_once)] = ()
    helpers: Annotated[
        tuple[Annotated[MethodAdapter | PythonAdapter, Field(discriminator="kind")], ...], AfterValidator(_once)
    ] = ()
    per_system_reduce: bool = True

    def __or__(self, other: "DistributionSpec") -> "DistributionSpec":
        """What serves both.

        Raises:
            SpecError: naming what clashes, with both values.

        """
        return DistributionSpec(
            policy=self.policy | other.policy,
            custom_ops=self.custom_ops + other.custom_ops,
            helpers=self.helpers + other.helpers,
            per_system_reduce=agreed("per_system_reduce", self.per_system_reduce, other.per_system_reduce),
        )


class MLIPSpec(Value):
    """What a potential declares so that it can be run on many ranks.

    Frozen, compared by value, changed by `spec.replaced(field=...)`, which checks the result (pydantic's `model_copy` does
    not). `save` and `load` round-trip exactly. `a | b` is for a pipeline of both: it loses nothing, or says what clashes.

    `owned_only_outputs`: per-node outputs whose owned rows are whole as they come; the ghosts' rows of the others are
    summed into their owners. `all_reduce_outputs`: per-graph outputs that come as each rank's partial; they are summed at
    the end.

    `ignores_longer_edges`: edges longer than the model's cutoff change nothing, so that a list with a skin may be shown as
    it is; otherwise it is filtered at each step. A model's to declare; no preset does.
    """

    version: Literal[1] = 1
    name: str
    distribution: DistributionSpec = DistributionSpec()
    output_kinds: Table[str, OutputKind] = {
        "energy": OutputKind.PER_GRAPH,
        "forces": OutputKind.PER_NODE,
        "stress": OutputKind.PER_GRAPH,
    }
    owned_only_outputs: Names = frozenset()
    all_reduce_outputs: Names = frozenset()
    ignores_longer_edges: bool = False
    compile: CompilePolicy = CompilePolicy()

    @model_validator(mode="after")
    def _outputs_exist(self) -> Self:
        kinds = {"owned_only_outputs": OutputKind.PER_NODE, "all_reduce_outputs": OutputKind.PER_GRAPH}
        for field, kind in kinds.items():
            for name in sorted(getattr(self, field)):
                found = self.output_kinds.get(name)
                if found is not kind:
                    raise ValueError(
                        f"{field} has {name!r}, which is {found or 'not'} in output_kinds: only {kind} outputs belong there"
                    )
        return self

    def under(self, strategy: StrategyKind) -> "MLIPSpec":
        """The same under another strategy: what sees owned rows in a halo has them brought as suits a graph partition."""
        policy = self.distribution.policy
        if strategy is StrategyKind.HALO or policy != HaloStoragePolicy():
            return self
        return self.replaced(distribution=self.distribution.replaced(policy=GraphParallelPolicy()))

    def __or__(self, other: "MLIPSpec") -> "MLIPSpec":
        """The specification of a pipeline of both.

        Raises:
            SpecError: naming what clashes, with both values.

        """
        kinds, others = self.output_kinds, other.output_kinds
        both = {
            name: agreed(f"output_kinds[{name!r}]", kinds[name], others[name], OutputKind.UNKNOWN)
            for name in kinds
            if name in others
        }
        return MLIPSpec(
            name=self.name if self.name == other.name else _joined(self.name, other.name),
            distribution=self.distribution | other.distribution,
            output_kinds={**kinds, **others, **both},
            owned_only_outputs=_listed("owned_only_outputs", self, other),
            all_reduce_outputs=_listed("all_reduce_outputs", self, other),
            ignores_longer_edges=self.ignores_longer_edges and other.ignores_longer_edges,
            compile=self.compile | other.compile,
        )

    def save(self, path: str | Path) -> None:
        """Write as JSON: a whole file, or none."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote. Nothing is left to defaults, which may change from one release to the next.

        Raises:
            SpecError: naming each key that is unknown, missing or out of range.

        """
        try:
            written = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise SpecError(f"{path} is not JSON ({error}): write specifications with MLIPSpec.save.") from None
        if isinstance(written, dict) and written.get("version", 1) != 1:
            raise SpecError(f"{path} has version {written['version']!r}; this alchemi-spec reads version 1: install another.")
        with in_plain_words(f"{path} is not a specification of version 1"):
            return cls.model_validate(written, context=COMPLETE)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """JSON schema (draft 2020-12) of what `save` writes, with the policies that are installed."""
        schema = cls.model_json_schema(mode="serialization")
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _joined(a: str, b: str) -> str:
    """`a+b`, each part once."""
    return "+".join(dict.fromkeys([*a.split("+"), *b.split("+")]))


def _listed(field: Literal["owned_only_outputs", "all_reduce_outputs"], a: MLIPSpec, b: MLIPSpec) -> frozenset[str]:
    """Outputs that either lists; one that both have and only one lists is a clash."""
    listed_a, listed_b = getattr(a, field), getattr(b, field)
    for name, kind in a.output_kinds.items():
        if OutputKind.UNKNOWN not in (kind, b.output_kinds.get(name, OutputKind.UNKNOWN)):
            agreed(f"{name!r} in {field}", name in listed_a, name in listed_b)
    return frozenset(listed_a | listed_b)
