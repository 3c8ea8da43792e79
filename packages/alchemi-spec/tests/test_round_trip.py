import json
import pickle

import pytest
from hypothesis import given, settings
from spec_strategies import COMPILES, POLICIES, RICH, schema_of_policies, specs

import alchemi_spec
from alchemi_spec import SPEC_LJ_HALO, SPEC_MPNN_HALO, LocalPolicy, MLIPSpec, OutputKind, SpecError
from alchemi_spec.value import Value

EXAMPLES = settings(deadline=None, max_examples=50)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("specs") / "spec.json"


@EXAMPLES
@given(specs())
def test_a_loaded_specification_equals_the_saved_one(path, spec):
    spec.save(path)
    again = MLIPSpec.load(path)
    assert again == spec and hash(again) == hash(spec) and again.model_dump_json() == spec.model_dump_json()
    assert [path] == list(path.parent.iterdir())


@EXAMPLES
@given(specs())
def test_a_specification_is_printed_as_the_code_that_makes_it(spec):
    assert eval(repr(spec), vars(alchemi_spec).copy()) == spec
    assert str(spec) == repr(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy_survives_json(policy, path):
    spec = MLIPSpec(name="x", distribution={"policy": policy.model_dump(mode="json")})
    assert spec.distribution.policy == policy and type(spec.distribution.policy) is type(policy)
    spec.save(path)
    assert MLIPSpec.load(path) == spec


@pytest.mark.parametrize("compiling", COMPILES, ids=repr)
def test_every_compile_policy_survives_json(compiling, path):
    spec = SPEC_MPNN_HALO.replaced(compile=compiling)
    spec.save(path)
    assert MLIPSpec.load(path) == spec


def places(value, at=()):
    """The paths in the JSON of `value` of all values with named fields, itself first, with these values."""
    if isinstance(value, Value):
        yield at, value
        value = dict(value)
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, tuple) else ():
        yield from places(part, (*at, key if isinstance(key, int) and isinstance(value, tuple) else str(key)))


def written(spec, at):
    """The JSON of `spec`, and the part of it at the path `at`."""
    whole = part = json.loads(spec.model_dump_json())
    for key in at:
        part = part[key]
    return whole, part


def refusal(path, written):
    path.write_text(written if isinstance(written, str) else json.dumps(written))
    with pytest.raises(SpecError) as refused:
        MLIPSpec.load(path)
    return str(refused.value)


@pytest.mark.parametrize(("at", "key"), [(at, key) for at, value in places(RICH) for key in type(value).model_fields], ids=str)
def test_a_missing_key_is_refused_by_name(path, at, key):
    whole, part = written(RICH, at)
    del part[key]
    assert key in refusal(path, whole).rpartition("version 1:")[2]


@pytest.mark.parametrize("at", [at for at, _ in places(RICH)], ids=str)
def test_an_unknown_key_is_refused_by_name(path, at):
    whole, part = written(RICH, at)
    part["polcy"] = {}
    assert "polcy: unknown key" in refusal(path, whole)


def test_a_file_that_is_not_a_specification_is_refused_with_a_reason(path):
    whole = json.loads(SPEC_MPNN_HALO.model_dump_json())
    assert "has version 2; this alchemi-spec reads version 1" in refusal(path, whole | {"version": 2})
    assert "is not JSON" in refusal(path, "{'name'")
    assert "is not a specification" in refusal(path, "[]")
    assert "output_kinds.energy" in refusal(path, whole | {"output_kinds": {"energy": "per_atom"}})
    assert "ignores_longer_edges" in refusal(path, whole | {"ignores_longer_edges": "some"})
    path.write_bytes(b"\xff")
    with pytest.raises(SpecError, match="is not JSON"):
        MLIPSpec.load(path)


def test_a_failed_write_keeps_the_old_file(path, monkeypatch):
    SPEC_LJ_HALO.save(path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        SPEC_MPNN_HALO.save(path)
    assert MLIPSpec.load(path) == SPEC_LJ_HALO
    assert [path] == list(path.parent.iterdir())


def test_json_does_not_depend_on_the_order_of_sets():
    assert json.loads(RICH.model_dump_json())["all_reduce_outputs"] == ["energy", "stress"]


def test_a_specification_is_frozen_and_changed_by_checked_copies():
    with pytest.raises(ValueError, match="frozen"):
        SPEC_MPNN_HALO.name = "other"
    for change in (lambda kinds: kinds.update(x=1), lambda kinds: kinds.__setitem__("x", 1), lambda kinds: kinds.clear()):
        with pytest.raises(TypeError, match="changed by copying"):
            change(SPEC_MPNN_HALO.output_kinds)
    assert SPEC_MPNN_HALO.replaced(name="x") == MLIPSpec(name="x") != SPEC_MPNN_HALO
    local = SPEC_MPNN_HALO.distribution.replaced(policy=LocalPolicy())
    assert SPEC_MPNN_HALO.replaced(distribution=local).distribution.policy == LocalPolicy()
    assert SPEC_MPNN_HALO.model_copy(update={"name": "x"}) == SPEC_MPNN_HALO.replaced(name="x")
    with pytest.raises(SpecError, match="owned_only_outputs has 'energy', which is per_graph"):
        SPEC_MPNN_HALO.replaced(owned_only_outputs={"energy"})
    with pytest.raises(SpecError, match="nme: unknown key"):
        SPEC_MPNN_HALO.replaced(nme="x")


def test_outputs_that_do_not_exist_or_have_another_kind_are_refused():
    for field in ("owned_only_outputs", "all_reduce_outputs"):
        with pytest.raises(SpecError, match=f"{field} has 'dipole', which is not in output_kinds"):
            MLIPSpec(name="x", **{field: {"dipole"}})
    with pytest.raises(SpecError, match="all_reduce_outputs has 'forces', which is per_node .* only per_graph"):
        MLIPSpec(name="x", all_reduce_outputs={"forces"})
    with pytest.raises(SpecError, match="name: missing"):
        MLIPSpec()


def test_the_schema_requires_every_key_and_lists_the_policies():
    schema = MLIPSpec.json_schema()
    assert set(schema["required"]) == set(schema["properties"]) == set(MLIPSpec.model_fields)
    for name, part in schema["$defs"].items():
        if part["type"] == "object":
            assert set(part["required"]) == set(part["properties"]) and part["additionalProperties"] is False, name
    assert schema["$defs"]["OutputKind"]["enum"] == [str(kind) for kind in OutputKind]
    policies, kinds = schema_of_policies()
    assert policies["discriminator"] == {"propertyName": "kind"}
    assert {"graph_parallel", "halo", "local", "sharded"} <= set(kinds)
    assert kinds["halo"]["layout"]["enum"] == ["owned", "padded"]
