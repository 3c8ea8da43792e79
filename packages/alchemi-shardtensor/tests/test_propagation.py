"""The table of operations, and tags that go through an operation as its row says."""

import pytest
import torch
from graphs import RandomGraph

from alchemi_shardtensor import LOST, OWNED, Comm, tag
from alchemi_shardtensor.rules import operations
from alchemi_shardtensor.rules.arguments import signature
from alchemi_shardtensor.rules.op_rules import along_one_dim
from alchemi_shardtensor.rules.operations import OPS, rule_of

SPACES = {
    "": (torch.Tensor, torch, torch.nn.functional, torch.autograd),
    "linalg_": (torch.linalg,),
    "special_": (torch.special,),
}


def is_an_operation(name):
    return any(
        hasattr(space, form)
        for prefix, spaces in SPACES.items()
        if name.startswith(prefix)
        for space in spaces
        for form in (name.removeprefix(prefix), name.removeprefix(prefix) + "_")
    )


def test_every_name_in_the_table_is_an_operation_of_torch():
    assert is_an_operation("sin") and is_an_operation("linalg_det") and not is_an_operation("sinn")
    assert [name for name in OPS if not is_an_operation(name)] == []


def test_no_name_is_in_two_rows_of_the_table():
    names = [name for names, _ in operations._ROWS for name in names.split()]
    assert sorted(names) == sorted(OPS)


@pytest.fixture
def with_fft(monkeypatch):
    """A copy of the table in which there is a row for torch.fft.fft."""
    monkeypatch.setattr(operations, "OPS", {**OPS, "fft_fft": along_one_dim("input n dim=-1")})
    rule_of.cache_clear()
    yield
    rule_of.cache_clear()


def transformed(dim):
    x = tag(torch.rand(6, 3), RandomGraph(Comm(), n=6, n_edges=4).shard, OWNED)
    return torch.fft.fft(x, dim=dim).rows


def test_rows_are_lost_after_an_operation_that_is_not_in_the_table():
    assert [transformed(dim) for dim in (0, 1)] == [LOST, LOST]


@pytest.mark.usefixtures("with_fft")
def test_propagation_follows_a_row_that_is_added():
    assert [transformed(dim) for dim in (0, 1)] == [LOST, OWNED]


@pytest.mark.parametrize(
    ("op", "name", "in_place", "writes"),
    [
        (torch.Tensor.add, "add", False, False),
        (torch.Tensor.add_, "add", True, True),
        (torch.Tensor.__add__, "__add__", False, False),
        (torch.Tensor.__setitem__, "__setitem__", False, True),
        (torch.Tensor.T.__get__, "T", False, False),
        (torch.Tensor.new_zeros, "new_zeros", False, False),
    ],
)
def test_the_rule_of_an_operation_knows_its_form(op, name, in_place, writes):
    rule = rule_of(op)
    assert (rule.name, rule.in_place, rule.writes) == (name, in_place, writes)
    assert rule.creates == (name == "new_zeros")


@pytest.mark.parametrize(
    ("text", "args", "kwargs", "named"),
    [
        ("input dim keepdim", (1, 2), {"keepdims": True}, {"input": 1, "dim": 2, "keepdim": True}),
        ("input *shape", (1, 2, 3), {}, {"input": 1, "shape": (2, 3)}),
        ("input *shape", (1, (2, 3)), {}, {"input": 1, "shape": (2, 3)}),
        ("input k dim=-1", (1, 2), {}, {"input": 1, "k": 2, "dim": -1}),
        ("input k dim=-1", (1, 2), {"axis": 0}, {"input": 1, "k": 2, "dim": 0}),
        ("input dim unbiased", (1, True), {}, {"input": 1}),
    ],
)
def test_arguments_have_one_name_whatever_the_form_of_the_call(text, args, kwargs, named):
    assert signature(text).bind(args, kwargs) == named
