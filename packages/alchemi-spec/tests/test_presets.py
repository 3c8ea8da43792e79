import ast
import inspect
from itertools import combinations, pairwise

import pytest

import alchemi_spec
from alchemi_spec import MLIPSpec, presets

PRESETS = {name: value for name, value in vars(presets).items() if isinstance(value, MLIPSpec)}


def test_there_are_seven_presets_and_all_are_exported():
    families = "MPNN_HALO MPNN_GP UMA_HALO LJ_HALO EWALD_HALO PME_HALO DFTD3_HALO".split()
    assert set(PRESETS) == {f"SPEC_{family}" for family in families}
    assert set(PRESETS) <= set(alchemi_spec.__all__)
    assert all(name == f"SPEC_{spec.name.upper()}" for name, spec in PRESETS.items())


@pytest.mark.parametrize(("a", "b"), list(combinations(PRESETS, 2)))
def test_presets_differ_in_more_than_their_names(a, b):
    assert PRESETS[a].replaced(name="x") != PRESETS[b].replaced(name="x")


def test_no_preset_sets_ignores_longer_edges():
    assert not any(spec.ignores_longer_edges for spec in PRESETS.values())


def test_each_preset_has_a_long_docstring():
    body = ast.parse(inspect.getsource(presets)).body
    documented = {
        node.targets[0].id: after.value.value
        for node, after in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(after, ast.Expr)
    }
    assert all(len(documented[name]) > 150 for name in PRESETS)


def test_all_exported_names_exist():
    assert all(hasattr(alchemi_spec, name) for name in alchemi_spec.__all__)
