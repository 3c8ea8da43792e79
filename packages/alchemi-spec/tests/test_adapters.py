import functools
import json

import pytest

from alchemi_spec import (
    AllReduceSum,
    DistributionSpec,
    GatherInputs,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
    ScatterOutputs,
    SliceOwned,
    SpecError,
)


class OpOverload:
    def __init__(self, name):
        self.name = lambda: name


class OpOverloadPacket:
    _qualified_op_name = "ns::op"

    def __getattr__(self, name):
        raise AttributeError(name)


class CustomOpDef:
    _qualname = "ns::op"


class Outer:
    class Inner:
        def method(self):
            pass


def function():
    pass


HERE = __name__


@pytest.mark.parametrize(
    ("live", "name"),
    [
        (OpOverload("ns::op"), "ns::op"),
        (OpOverload("ns::op.out"), "ns::op.out"),
        (OpOverloadPacket(), "ns::op"),
        (CustomOpDef(), "ns::op"),
        (function, f"{HERE}:function"),
        (Outer.Inner.method, f"{HERE}:Outer.Inner.method"),
        ("ns::op", "ns::op"),
        ("ns::op.default", "ns::op"),
        ("ns::op.Tensor", "ns::op.Tensor"),
        ("package.module:name", "package.module:name"),
    ],
)
def test_a_live_op_is_reduced_to_its_name_without_torch(live, name):
    assert OpAdapter(live).op == OpAdapter(op=live).op == name


@pytest.mark.parametrize(
    "nameless",
    [lambda: 0, functools.partial(function), 3, None, functools.wraps(function)(lambda: 0)],
    ids=["lambda", "partial", "number", "none", "wrapped lambda"],
)
def test_an_object_without_a_name_is_refused(nameless):
    def local():
        pass

    for it in (nameless, local):
        with pytest.raises(SpecError, match="no name by which it can be found again"):
            OpAdapter(it)
        with pytest.raises(SpecError, match="no name by which it can be found again"):
            PythonAdapter(function, it)


@pytest.mark.parametrize("name", ["", "op", "ns::", "ns::op.a.b", "1::x", "m:", ":f", "m:f.<locals>.g", "a b::c", "ns:::x"])
def test_an_invalid_name_is_refused(name):
    with pytest.raises(SpecError, match="OpAdapter: op: "):
        OpAdapter(name)


def test_positions_are_read_back_as_numbers_and_names_as_names():
    adapter = OpAdapter("ns::op", {0: GatherInputs(), "x": SliceOwned(), "12": SliceOwned()}, {"1": AllReduceSum()})
    assert list(adapter.arg_transforms) == [0, "x", 12] and list(adapter.output_transforms) == [1]
    assert list(json.loads(adapter.model_dump_json())["arg_transforms"]) == ["0", "x", "12"]
    assert OpAdapter.model_validate_json(adapter.model_dump_json()) == adapter
    assert eval(repr(adapter)) == adapter
    with pytest.raises(SpecError, match="position -1: count from the front"):
        OpAdapter("ns::op", {-1: GatherInputs()})


def test_an_output_transform_is_refused_as_an_input_transform():
    with pytest.raises(SpecError, match="arg_transforms.0"):
        OpAdapter("ns::op", {0: ScatterOutputs()})
    with pytest.raises(SpecError, match="output_transforms.x"):
        OpAdapter("ns::op", output_transforms={"x": {"kind": "gather_inputs"}})


def test_both_forms_of_a_method_adapter_are_equal():
    named = MethodAdapter(module_path=HERE, class_name="Outer.Inner", method_name="method", replacement=f"{HERE}:function")
    assert MethodAdapter(Outer.Inner, "method", function) == named
    assert MethodAdapter(Outer.Inner, method_name="method", replacement=f"{HERE}:function") == named
    assert eval(repr(named)) == named and hash(named) == hash(eval(repr(named)))


def test_both_forms_of_a_python_adapter_are_equal():
    named = PythonAdapter(module_path=HERE, function_name="function", replacement=f"{HERE}:Outer")
    assert PythonAdapter(function, Outer) == named == PythonAdapter(f"{HERE}:function", Outer)
    assert eval(repr(named)) == named


def test_adapters_with_wrong_names_are_refused():
    with pytest.raises(SpecError, match="Inner has no method 'methd'"):
        MethodAdapter(Outer.Inner, "methd", function)
    with pytest.raises(SpecError, match="module_path.*class_name.*method_name.*replacement"):
        MethodAdapter()
    with pytest.raises(SpecError, match="class_name: 'A-B' is not a dotted name"):
        MethodAdapter(module_path="m", class_name="A-B", method_name="f", replacement="m:g")
    with pytest.raises(SpecError, match="replacement: 'g' names no module: write 'module:name'"):
        PythonAdapter(module_path="m", function_name="f", replacement="g")
    with pytest.raises(SpecError, match="no name by which"):
        MethodAdapter(type("Local", (), {"f": function}), "f", function)


def test_two_different_adapters_of_one_target_are_refused():
    one, other = OpAdapter("a::b"), OpAdapter("a::b", {0: GatherInputs()})
    assert DistributionSpec(custom_ops=[one, one]).custom_ops == (one,)
    with pytest.raises(SpecError, match=r"custom_ops: a::b is adapted in two ways: OpAdapter\(op='a::b'\) and OpAdapter"):
        DistributionSpec(custom_ops=[one, other])
    with pytest.raises(SpecError, match="helpers: .*Outer.Inner.method is adapted in two ways"):
        DistributionSpec(helpers=[MethodAdapter(Outer.Inner, "method", r) for r in (function, Outer)])
