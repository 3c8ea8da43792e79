"""Hypothesis strategies for all valid specifications, and lists of all valid policies and compile policies."""

from itertools import product

from hypothesis import strategies as st

from alchemi_spec import (
    AllReduceSum,
    CompilePolicy,
    DistributionSpec,
    GatherInputs,
    GatherInputsFull,
    GatherRule,
    GraphParallelPolicy,
    HaloStoragePolicy,
    LocalPolicy,
    MethodAdapter,
    MLIPSpec,
    OpAdapter,
    OutputKind,
    PythonAdapter,
    SameRows,
    ScatterOutputs,
    ScatterRule,
    ShardedStoragePolicy,
    SliceOutputsOwned,
    SliceOwned,
    SpecError,
)


def all_of(make, **choices):
    """All combinations of choices that `make` accepts."""
    made = []
    for values in product(*choices.values()):
        try:
            made.append(make(**dict(zip(choices, values, strict=True))))
        except SpecError:
            pass
    return made


RULES = {"scatter": list(ScatterRule), "gather": list(GatherRule)}
HALOS = all_of(HaloStoragePolicy, layout=["owned", "padded"], depth=[1, 2, 3], **RULES)
SHARDED = all_of(ShardedStoragePolicy, **RULES)
POLICIES = [*HALOS, *SHARDED, *all_of(GraphParallelPolicy, collective=["auto", "exchange", "all_gather"]), LocalPolicy()]
COMPILES = all_of(CompilePolicy, mode=["auto", "off", "capture", "inductor"], capture=[True, False], inductor=[True, False])
OUTPUTS = {"energy": OutputKind.PER_GRAPH, "forces": OutputKind.PER_NODE, "charges": OutputKind.PER_NODE}

words = st.sampled_from("energy forces stress charges x _y Z2 longer_name été μ".split())
dotted = words | st.builds("{}.{}".format, words, words)
functions = st.builds("{}:{}".format, dotted, dotted)
ops = st.builds("{}::{}".format, words, words) | st.builds("{}::{}.{}".format, words, words, words) | functions
places = st.integers(0, 20) | words
inputs = st.sampled_from([GatherInputs(), GatherInputsFull(), SliceOwned()])
outputs = st.sampled_from([ScatterOutputs(), AllReduceSum(), SliceOutputsOwned(), SameRows()])
adapters = st.builds(OpAdapter, ops, st.dictionaries(places, inputs, max_size=3), st.dictionaries(places, outputs, max_size=3))
methods = st.builds(MethodAdapter, module_path=dotted, class_name=dotted, method_name=dotted, replacement=functions)
pythons = st.builds(PythonAdapter, module_path=dotted, function_name=dotted, replacement=functions)


def few(elements):
    return st.lists(elements, max_size=3, unique_by=lambda adapter: adapter.target).map(tuple)


distributions = st.builds(
    DistributionSpec,
    policy=st.sampled_from(POLICIES),
    custom_ops=few(adapters),
    helpers=few(methods | pythons),
    per_system_reduce=st.booleans(),
)


@st.composite
def specs(draw, distributions=distributions, kinds=None):
    """Any specification. `kinds`: the names of its outputs, each with the kind that it has, unless it is UNKNOWN."""
    some = st.dictionaries(words, st.sampled_from(list(OutputKind)), max_size=5)
    if kinds:
        some = st.fixed_dictionaries({}, optional={k: st.sampled_from([v, OutputKind.UNKNOWN]) for k, v in kinds.items()})
    output_kinds = draw(some)
    of_kind = lambda kind: sorted(name for name, found in output_kinds.items() if found is kind)  # noqa: E731
    listed = lambda kind: st.sets(st.sampled_from(of_kind(kind))) if of_kind(kind) else st.just(set())  # noqa: E731
    return MLIPSpec(
        name=draw(words),
        distribution=draw(distributions),
        output_kinds=output_kinds,
        owned_only_outputs=draw(listed(OutputKind.PER_NODE)),
        all_reduce_outputs=draw(listed(OutputKind.PER_GRAPH)),
        ignores_longer_edges=draw(st.booleans()),
        compile=draw(st.sampled_from(COMPILES)),
    )


KNOWN_ADAPTERS = [OpAdapter("ns::a", {0: GatherInputs()}), OpAdapter("ns::b", {}, {"x": AllReduceSum()}), OpAdapter("ns::c")]
KNOWN_HELPERS = [
    MethodAdapter(module_path="m", class_name="C", method_name="f", replacement="m:g"),
    PythonAdapter(module_path="m", function_name="f", replacement="m:h"),
]
related = specs(
    st.builds(
        DistributionSpec,
        policy=st.sampled_from([HaloStoragePolicy(), LocalPolicy(), ShardedStoragePolicy()]),
        custom_ops=few(st.sampled_from(KNOWN_ADAPTERS)),
        helpers=few(st.sampled_from(KNOWN_HELPERS)),
    ),
    OUTPUTS,
)
"""Specifications that often merge."""


def schema_of_policies():
    """The part of the JSON schema on policies, and the schema of each kind (some versions of pydantic write it elsewhere)."""
    schema = MLIPSpec.json_schema()
    part = schema["$defs"]["DistributionSpec"]["properties"]["policy"]
    kinds = [schema["$defs"][kind["$ref"].split("/")[-1]] if "$ref" in kind else kind for kind in part["oneOf"]]
    return part, {kind["properties"]["kind"]["const"]: kind["properties"] for kind in kinds}


RICH = MLIPSpec(
    name="rich",
    distribution=DistributionSpec(
        policy=HaloStoragePolicy(layout="padded"),
        custom_ops=(
            OpAdapter("ns::a.out", {0: GatherInputs(), "x": GatherInputsFull()}, {1: ScatterOutputs(), "y": AllReduceSum()}),
            OpAdapter("m:f", {10: SliceOwned()}, {0: SliceOutputsOwned()}),
        ),
        helpers=tuple(KNOWN_HELPERS),
    ),
    owned_only_outputs={"forces"},
    all_reduce_outputs={"energy", "stress"},
    ignores_longer_edges=True,
)
"""A specification with a value in every field."""
