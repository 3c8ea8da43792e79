"""The specification of a model: a frozen value that says how the model can run on many ranks. It is saved as JSON."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, Field, model_validator

from alchemi_spec.adapters import MethodAdapter, OpAdapter, PythonAdapter
from alchemi_spec.errors import SpecError
from alchemi_spec.policies import GraphParallelPolicy, HaloStoragePolicy, Policy, StrategyKind
from alchemi_spec.value import COMPLETE, Names, Table, Value, Word, agreed, as_spec_error

A = TypeVar("A", OpAdapter, MethodAdapter | PythonAdapter)


class OutputKind(Word):
    """What one row of an output describes. It decides how the outputs of all ranks are combined."""

    PER_NODE = "per_node"
    """An atom: each rank returns the rows of its own atoms."""
    PER_GRAPH = "per_graph"
    """A whole structure: the model's sum over atoms is summed over ranks, and the same on every rank."""
    GLOBAL = "global"
    """Already the same on every rank: returned unchanged."""
    UNKNOWN = "unknown"
    """The tag of the result decides."""


class CompilePolicy(Value):
    """How the steps of a model can be compiled, and how they are.

    `capture`: a CUDA graph can capture the step. `inductor`: torch's inductor can compile it. `mode`: which of them to use;
    `auto` is the fastest that the model supports, `off` is eager. `trim`: a captured step leaves out edges longer than the
    cutoff, which the skin adds. This is faster if an edge costs more than the check of its length.
    """

    mode: Literal["auto", "off", "capture", "inductor"] = "auto"
    capture: bool = True
    inductor: bool = True
    trim: bool = True

    @model_validator(mode="after")
    def _supports_its_mode(self) -> Self:
        if not getattr(self, self.mode, True):
            raise ValueError(
                f"mode={self.mode!r} and {self.mode}=False: the model does not support it. Use mode='auto', or {self.mode}=True"
            )
        return self

    def __or__(self, other: "CompilePolicy") -> "CompilePolicy":
        """The compile policy that both models support. A mode `auto` yields to the other's.

        Raises:
            SpecError: if both have a mode, and not the same.

        """
        return CompilePolicy(
            mode=agreed("compile.mode", self.mode, other.mode, "auto"),
            capture=self.capture and other.capture,
            inductor=self.inductor and other.inductor,
            trim=self.trim or other.trim,
        )


def _once(adapters: Iterable[A]) -> tuple[A, ...]:
    """The adapters without repetitions. Two different adapters of one target are refused."""
    by_target: dict[str, A] = {}
    for new in adapters:
        if (old := by_target.setdefault(new.target, new)) != new:
            raise ValueError(f"{new.target} is adapted in two ways: {old!r} and {new!r}; keep one of them")
    return tuple(by_target.values())


class DistributionSpec(Value):
    """How to run a network whose rows are distributed over ranks. It knows no chemistry.

    `custom_ops` adapt opaque ops, and `helpers` replace methods and functions, while the model runs. `per_system_reduce`: a
    scatter through the batch index is summed over ranks. Without it each rank keeps its partial sum; then name the output in
    `MLIPSpec.all_reduce_outputs`. `a | b` has everything of both, or raises an error that names the difference.
    """

    policy: Policy = HaloStoragePolicy()
    custom_ops: Annotated[tuple[OpAdapter, ...], AfterValidator(_once)] = ()
    helpers: Annotated[
        tuple[Annotated[MethodAdapter | PythonAdapter, Field(discriminator="kind")], ...], AfterValidator(_once)
    ] = ()
    per_system_reduce: bool = True

    def __or__(self, other: "DistributionSpec") -> "DistributionSpec":
        """The distribution that serves both.

        Raises:
            SpecError: if the two contradict each other. The message names the field and both values.

        """
        return DistributionSpec(
            policy=self.policy | other.policy,
            custom_ops=self.custom_ops + other.custom_ops,
            helpers=self.helpers + other.helpers,
            per_system_reduce=agreed("per_system_reduce", self.per_system_reduce, other.per_system_reduce),
        )


class MLIPSpec(Value):
    """The specification of a potential: how it can run on many ranks.

    It is frozen and compared by value. `spec.replaced(field=...)` makes a changed copy and checks it (pydantic's
    `model_copy` does not check). `save` and `load` keep every value exactly. `a | b` is the specification of a pipeline of
    both: it has everything of both, or raises an error that names the difference.

    `owned_only_outputs`: per-atom outputs that are already complete for owned atoms. For all others, ghost rows are added to
    the rows of their owners. `all_reduce_outputs`: per-structure outputs of which each rank returns a partial sum. They are
    summed over ranks at the end.

    `ignores_longer_edges`: edges longer than the cutoff do not change the results of the model. A neighbour list with a skin
    is then passed to the model unchanged; otherwise its longer edges are removed at each step. Each model declares this for
    itself; no preset sets it.
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
        """The specification for a kind of strategy: graph partition turns a default halo policy into `GraphParallelPolicy`."""
        policy = self.distribution.policy
        if strategy is StrategyKind.HALO or policy != HaloStoragePolicy():
            return self
        return self.replaced(distribution=self.distribution.replaced(policy=GraphParallelPolicy()))

    def __or__(self, other: "MLIPSpec") -> "MLIPSpec":
        """The specification of a pipeline of both models.

        Raises:
            SpecError: if the two contradict each other. The message names the field and both values.

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
            owned_only_outputs=_merged_outputs("owned_only_outputs", self, other),
            all_reduce_outputs=_merged_outputs("all_reduce_outputs", self, other),
            ignores_longer_edges=self.ignores_longer_edges and other.ignores_longer_edges,
            compile=self.compile | other.compile,
        )

    def save(self, path: str | Path) -> None:
        """Write the specification as JSON. If that fails, an existing file stays as it was."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file that `save` wrote. No key may be missing, since defaults may change from one release to the next.

        Raises:
            SpecError: if a key is unknown, missing or out of range. The message names each.

        """
        try:
            written = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise SpecError(f"{path} is not JSON ({error}): write specifications with MLIPSpec.save.") from None
        if isinstance(written, dict) and written.get("version", 1) != 1:
            raise SpecError(
                f"{path} has version {written['version']!r}; this alchemi-spec reads version 1: install a newer one."
            )
        with as_spec_error(f"{path} is not a specification of version 1"):
            return cls.model_validate(written, context=COMPLETE)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema (draft 2020-12) of the files that `save` writes, with all installed policies."""
        schema = cls.model_json_schema(mode="serialization")
        return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _joined(a: str, b: str) -> str:
    """The name `a+b`, with each part once."""
    return "+".join(dict.fromkeys([*a.split("+"), *b.split("+")]))


def _merged_outputs(field: Literal["owned_only_outputs", "all_reduce_outputs"], a: MLIPSpec, b: MLIPSpec) -> frozenset[str]:
    """The outputs that either lists. An output that both models return must be listed by both or by neither."""
    listed_a, listed_b = getattr(a, field), getattr(b, field)
    for name, kind in a.output_kinds.items():
        if OutputKind.UNKNOWN not in (kind, b.output_kinds.get(name, OutputKind.UNKNOWN)):
            agreed(f"{name!r} in {field}", name in listed_a, name in listed_b)
    return frozenset(listed_a | listed_b)
