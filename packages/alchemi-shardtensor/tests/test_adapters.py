"""Opaque operators with their transforms around them, and foreign methods replaced around one call."""

import opaque
import pytest
import torch
from graphs import RandomGraph

from alchemi_shardtensor import LOST, OWNED, STALE, SYSTEM, adapted, plain, tag, wrap_custom_op
from alchemi_shardtensor.testing import EXACT, count_traffic, ranks
from alchemi_spec import (
    AllReduceSum,
    DistributionSpec,
    GatherInputs,
    GatherInputsFull,
    HaloStoragePolicy,
    MethodAdapter,
    OpAdapter,
    PythonAdapter,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
    SpecError,
)

F64 = torch.float64
CLOSE = {"rtol": EXACT, "atol": EXACT}
PAIRS = {
    "live": OpAdapter(torch.ops.opaque.pairs.default, {0: GatherInputs()}, {0: ScatterOutputs()}),
    "custom_op": OpAdapter(opaque.pairs, {"x": GatherInputs()}, {0: ScatterOutputs()}),
    "packet": OpAdapter(torch.ops.opaque.pairs, {"x": GatherInputs()}, {0: ScatterOutputs()}),
    "by name": OpAdapter("opaque::pairs", {0: GatherInputs()}, {0: ScatterOutputs()}),
}


def spec_with(*ops, layout="owned", helpers=()):
    return DistributionSpec(policy=HaloStoragePolicy(layout=layout), custom_ops=ops, helpers=helpers)


def values(n):
    return torch.rand(n, 3, dtype=F64, generator=torch.Generator().manual_seed(2))


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded"])
@pytest.mark.parametrize("form", PAIRS)
def test_an_opaque_kernel_reads_ghosts_and_its_partial_rows_go_home(comm, layout, form):
    """Full lists and half lists, by position and by name, with their gradient."""
    graph = RandomGraph(comm, layout=layout, spec=spec_with(PAIRS[form], layout=layout))
    x = values(graph.n)
    whole, mine = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected = opaque.pairs(whole, graph.edge_index)
    for call in (
        lambda: torch.ops.opaque.pairs(mine, graph.local_edge_index),
        lambda: torch.ops.opaque.pairs.default(x=mine, edge_index=graph.local_edge_index),
        lambda: opaque.pairs(mine, graph.local_edge_index),
    ):
        with count_traffic(comm) as traffic:
            found = call()
        assert found.rows is (OWNED if layout == "owned" else STALE)
        assert (traffic.exchanges, traffic.reverses) == ((layout == "owned") * (comm.size > 1), comm.size > 1)
        torch.testing.assert_close(graph.owned(found), expected[graph.mine], **CLOSE)
    total = torch.zeros(2, 3, dtype=F64).index_add_(0, graph.local_batch, found**2)
    (g,) = torch.autograd.grad(total.sum(), mine)
    (e,) = torch.autograd.grad((expected**2).sum(), whole)
    torch.testing.assert_close(graph.owned(g), e[graph.mine], **CLOSE)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "replicated", "local"])
def test_each_atom_is_counted_once_and_partial_sums_are_summed(comm, layout):
    adapter = OpAdapter("opaque::total", {"x": SliceOwned(), 1: SliceOwned()}, {0: AllReduceSum(), "count": AllReduceSum()})
    policy = RandomGraph(comm, layout=layout).shard.spec.policy
    graph = RandomGraph(comm, layout=layout, spec=DistributionSpec(policy=policy, custom_ops=(adapter,)))
    x = values(graph.n)
    found = torch.ops.opaque.total(graph.nodes(x), graph.nodes(x[:, 0]))
    assert found.rows is SYSTEM and torch.ops.opaque.smoothed(tag(x, graph.shard, SYSTEM)).rows is SYSTEM
    torch.testing.assert_close(plain(found), torch.ops.opaque.total(x, x[:, 0]), **CLOSE)


@ranks(1, 2, 3)
def test_a_kernel_that_needs_all_rows_in_order_gets_them(comm):
    adapter = OpAdapter("opaque::smoothed", {0: GatherInputsFull()}, {0: SliceOutputsOwned()})
    graph = RandomGraph(comm, spec=spec_with(adapter))
    x = values(graph.n)
    whole, mine = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected, found = opaque.smoothed(whole), opaque.smoothed(mine)
    assert found.rows is OWNED
    torch.testing.assert_close(plain(found), expected[graph.mine], **CLOSE)
    weights = values(graph.n).flip(0)
    (g,) = torch.autograd.grad((expected * weights).sum(), whole)
    (h,) = torch.autograd.grad((found * graph.nodes(weights)).sum(), mine)
    torch.testing.assert_close(plain(h), g[graph.mine], **CLOSE)


@ranks(2)
def test_what_no_adapter_declares_is_lost_and_refused_in_a_reduction(comm):
    graph = RandomGraph(comm)
    found = opaque.smoothed(graph.nodes(values(graph.n)))
    assert found.rows is LOST
    with pytest.raises(RuntimeError, match="would be one over a slice"):
        found.sum()
    graph = RandomGraph(comm, spec=spec_with(OpAdapter("opaque::smoothed", {7: GatherInputs()})))
    with pytest.raises(SpecError, match=r"opaque::smoothed has no argument 7: it takes x\."):
        opaque.smoothed(graph.nodes(values(graph.n)))


def test_an_adapter_of_an_operator_that_is_not_registered_is_idle():
    assert wrap_custom_op(OpAdapter("nobody::has_this")).ops == ("nobody::has_this",)


def doubled(original, self, x):
    return 2 * original(self, x)


def shifted(original, x):
    return original(x) + 1


@ranks(1, 2)
def test_methods_and_functions_are_replaced_around_the_call_and_put_back(comm):
    """By either form; also where the call fails, and with two specifications one in the other."""
    method = MethodAdapter(opaque.Model, "scale", "test_adapters:doubled")
    named = MethodAdapter(module_path="opaque", class_name="Model", method_name="scale", replacement="opaque:halved")
    function = PythonAdapter(opaque.offset, opaque.raised)
    before = vars(opaque.Model)["scale"], opaque.offset
    x = torch.ones(2)
    with adapted(spec_with(helpers=(named, function))):
        assert opaque.Model().forward(x).tolist() == [0.5 * 3 + 11] * 2
        with adapted(spec_with(helpers=(function,))):
            assert opaque.Model().forward(x).tolist() == [0.5 * 3 + 21] * 2
    assert (vars(opaque.Model)["scale"], opaque.offset) == before
    assert opaque.Model().forward(x).tolist() == [4, 4]
    with pytest.raises(ZeroDivisionError), adapted(spec_with(helpers=(named,))):
        raise ZeroDivisionError
    assert vars(opaque.Model)["scale"] is before[0]
    with (
        pytest.raises(SpecError, match="opaque:nothing, which is not there"),
        adapted(
            spec_with(helpers=(PythonAdapter(module_path="opaque", function_name="offset", replacement="opaque:nothing"),))
        ),
    ):
        pass
    assert method.class_name == "Model"


@ranks(1, 2, 3)
def test_a_python_function_that_is_opaque_has_its_transforms_put_around_it(comm):
    adapter = OpAdapter(opaque.python_pairs, {"x": GatherInputs()}, {0: ScatterOutputs()})
    graph = RandomGraph(comm, spec=spec_with(adapter))
    x = values(graph.n)
    with adapted(graph.shard.spec):
        found = opaque.python_pairs(graph.nodes(x), graph.local_edge_index)
        assert torch.equal(opaque.python_pairs(x, graph.edge_index), opaque.pairs(x, graph.edge_index))
    torch.testing.assert_close(plain(found), opaque.pairs(x, graph.edge_index)[graph.mine], **CLOSE)


@ranks(1, 2, 3)
def test_a_scripted_helper_is_run_as_the_python_it_was_compiled_from(comm):
    """TorchScript hides what it gathers and adds: a part would come out, with no tag."""
    helper = PythonAdapter(module_path="opaque", function_name="scripted_sum", replacement="alchemi_shardtensor:unscripted")
    graph = RandomGraph(comm, spec=spec_with(helpers=(helper,)))
    x = values(graph.n)
    expected = opaque.scripted_sum(x, graph.batch, 2)
    with adapted(graph.shard.spec):
        found = opaque.scripted_sum(graph.nodes(x), graph.local_batch, 2)
    assert found.rows is SYSTEM
    torch.testing.assert_close(plain(found), expected, **CLOSE)
    with pytest.raises(RuntimeError, match="was handed an index that points at other rows"):
        torch.jit.script(opaque.Summed())(graph.nodes(x), graph.local_batch)


@ranks(2)
def test_rows_are_known_again_behind_a_scripted_module(comm):
    graph = RandomGraph(comm)
    x = values(graph.n)
    found = torch.jit.script(torch.nn.Linear(3, 4, dtype=F64))(graph.nodes(x))
    assert found.rows is OWNED and found.sum().rows is SYSTEM
    assert torch.jit.script(torch.nn.Linear(3, 4, dtype=F64))(tag(x, graph.shard, SYSTEM)).rows is SYSTEM
