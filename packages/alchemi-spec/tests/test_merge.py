import contextlib
import functools
import operator
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spec_strategies import COMPILES, HALOS, POLICIES, SHARDED, related, specs

from alchemi_spec import (
    SPEC_DFTD3_HALO,
    SPEC_EWALD_HALO,
    SPEC_LJ_HALO,
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_PME_HALO,
    SPEC_UMA_HALO,
    CompilePolicy,
    GatherInputs,
    GraphParallelPolicy,
    HaloStoragePolicy,
    LocalPolicy,
    MLIPSpec,
    OpAdapter,
    OutputKind,
    ShardedStoragePolicy,
    SliceOwned,
    SpecError,
)

EXAMPLES = settings(deadline=None, max_examples=60)


def merged(*values):
    """The values merged from left to right, or None if two contradict each other; the message must then show both."""
    with contextlib.suppress(SpecError):
        return functools.reduce(operator.or_, values)
    with pytest.raises(SpecError, match=r"\S+ and \S+"):
        functools.reduce(operator.or_, values)
    return None


@pytest.mark.parametrize("values", [POLICIES, COMPILES], ids=["policies", "compile policies"])
def test_merging_is_commutative_idempotent_and_associative(values):
    assert all(value | value == value for value in values)
    pairs = {(a, b): merged(a, b) for a, b in product(values, values)}
    assert all(pairs[a, b] == pairs[b, a] for a, b in pairs)
    for a, b, c in product(values, values, values):
        left, right = pairs[a, b], pairs[b, c]
        if left is not None and right is not None and None not in (one := pairs[left, c], other := pairs[a, right]):
            assert one == other


def test_a_merged_policy_is_right_for_both():
    for halo, sharded in product(HALOS, SHARDED):
        assert halo | sharded == sharded | halo == sharded
    for policy in POLICIES:
        assert LocalPolicy() | policy == policy
    both = HaloStoragePolicy(layout="padded", depth=2)
    for other in (SPEC_MPNN_HALO, SPEC_LJ_HALO):
        assert (other | SPEC_DFTD3_HALO).distribution.policy == both
    shallow, deep = (HaloStoragePolicy(layout="padded", scatter="local", depth=depth) for depth in (1, 3))
    assert shallow | deep == deep
    assert GraphParallelPolicy() | GraphParallelPolicy(collective="exchange") == GraphParallelPolicy(collective="exchange")


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (HaloStoragePolicy(), GraphParallelPolicy(), "policy.kind: 'halo' and 'graph_parallel'"),
        (ShardedStoragePolicy(), GraphParallelPolicy(), "policy.kind: 'sharded' and 'graph_parallel'"),
        (ShardedStoragePolicy(), ShardedStoragePolicy(gather="local"), "policy.gather: GatherRule.DISTRIBUTED and GatherRule"),
        (CompilePolicy(mode="off"), CompilePolicy(mode="capture"), "compile.mode: 'off' and 'capture'"),
        (CompilePolicy(mode="inductor"), CompilePolicy(inductor=False), "mode='inductor' and inductor=False"),
    ],
)
def test_the_error_names_the_field_and_both_values(a, b, said):
    with pytest.raises(SpecError) as clash:
        a | b
    assert said in str(clash.value)


def test_specifications_that_contradict_each_other_are_refused():
    one = MLIPSpec(name="one")
    adapted = [one.distribution.replaced(custom_ops=[OpAdapter("a::b", {0: t})]) for t in (GatherInputs(), SliceOwned())]
    others = {
        "per_system_reduce: True and False": (one, one.replaced(distribution={"per_system_reduce": False})),
        "output_kinds['energy']: OutputKind.PER_GRAPH and OutputKind.GLOBAL": (
            one,
            one.replaced(output_kinds={"energy": OutputKind.GLOBAL}),
        ),
        "'forces' in owned_only_outputs: False and True": (one, one.replaced(owned_only_outputs={"forces"})),
        "'energy' in all_reduce_outputs: True and False": (one.replaced(all_reduce_outputs={"energy"}), one),
        "a::b is adapted in two ways: OpAdapter(op='a::b', arg_transforms={0: GatherInputs()}) and OpAdapter(op='a::b', arg_": (
            one.replaced(distribution=adapted[0]),
            one.replaced(distribution=adapted[1]),
        ),
    }
    for said, (a, b) in others.items():
        with pytest.raises(SpecError) as clash:
            a | b
        assert said in str(clash.value)


def holds(whole, part):
    """`whole` has everything that `part` has."""
    a, b = whole.distribution, part.distribution
    assert set(a.custom_ops) >= set(b.custom_ops) and set(a.helpers) >= set(b.helpers)
    assert a.per_system_reduce is b.per_system_reduce and a.policy | b.policy == a.policy
    assert all(part.output_kinds[k] in (whole.output_kinds[k], OutputKind.UNKNOWN) for k in part.output_kinds)
    assert whole.owned_only_outputs >= part.owned_only_outputs and whole.all_reduce_outputs >= part.all_reduce_outputs
    assert part.ignores_longer_edges or not whole.ignores_longer_edges
    assert whole.compile | part.compile == whole.compile
    assert set(whole.name.split("+")) >= set(part.name.split("+"))


def canonical(spec):
    """The fields of a specification without its name, and adapters without their order."""
    d = spec.distribution
    sets = {"custom_ops": frozenset(d.custom_ops), "helpers": frozenset(d.helpers)}
    return {**dict(spec), "name": None, "distribution": {**dict(d), **sets}}


@EXAMPLES
@given(st.one_of(st.tuples(related, related), st.tuples(specs(), specs()), st.tuples(related, specs())))
def test_a_merge_has_everything_of_both_or_names_the_difference(pair):
    a, b = pair
    assert a | a == a
    both, other = merged(a, b), merged(b, a)
    assert (both is None) == (other is None)
    if both is not None:
        holds(both, a)
        holds(both, b)
        assert canonical(both) == canonical(other)


@EXAMPLES
@given(related, related, related)
def test_merging_specifications_is_associative(a, b, c):
    left, right = merged(a, b), merged(b, c)
    if left is not None and right is not None and (one := merged(left, c)) and (other := merged(a, right)):
        assert one == other


@pytest.mark.parametrize(("a", "b"), list(product([True, False], repeat=2)))
def test_a_merge_ignores_longer_edges_if_both_do(a, b):
    specs = [SPEC_MPNN_HALO.replaced(ignores_longer_edges=ignores) for ignores in (a, b)]
    assert (specs[0] | specs[1]).ignores_longer_edges is (a and b)


def test_presets_that_fit_together_merge():
    assert (SPEC_MPNN_HALO | SPEC_UMA_HALO).compile == CompilePolicy(capture=False)
    charged = SPEC_LJ_HALO | SPEC_EWALD_HALO | SPEC_PME_HALO
    assert charged.name == "lj_halo+ewald_halo+pme_halo"
    assert charged.distribution.custom_ops == SPEC_EWALD_HALO.distribution.custom_ops + SPEC_PME_HALO.distribution.custom_ops
    assert merged(SPEC_MPNN_GP, SPEC_MPNN_HALO) is None
