"""A small network of messages over two layers, its energy and the gradient, as one graph."""

import pytest
import torch
from graphs import RandomGraph
from torch._dynamo import lookup_backend
from torch.utils._python_dispatch import _disable_current_modes

from alchemi_shardtensor import OWNED, compile_step, plain, tag
from alchemi_shardtensor.testing import EXACT, ranks
from alchemi_spec import MissingHandler

F64 = torch.float64


class Network:
    """Energies (n_systems,) and their gradient by this rank's positions."""

    def __init__(self, comm):
        g = torch.Generator().manual_seed(1)
        self.graph = RandomGraph(comm, n=11, n_edges=40)
        everyone = torch.rand(self.graph.n, 3, dtype=F64, generator=g)
        self.positions = plain(self.graph.nodes(everyone)).clone()
        self.weight = torch.nn.Parameter(torch.rand(3, 3, dtype=F64, generator=g))

    def __call__(self):
        graph = self.graph
        x = tag(self.positions, graph.shard, OWNED).detach().requires_grad_()
        sender, receiver = graph.local_edge_index
        message = torch.tanh((x[sender] - x[receiver]) @ self.weight)
        features = torch.zeros_like(x).index_add_(0, receiver, message)
        message = torch.tanh(features[sender] + message)
        atomic = torch.zeros(len(x), 3, dtype=F64).scatter_add_(0, receiver[:, None].expand_as(message), message)
        energy = torch.zeros(graph.n_systems, dtype=F64).index_add_(0, graph.local_batch, (atomic * atomic).sum(1))
        (gradient,) = torch.autograd.grad(energy.sum(), x)
        return {"energy": plain(energy).detach(), "gradient": plain(gradient)}


def assert_follows(step, network):
    """The compiled step gives what the network gives, also for other positions and another parameter."""
    for _ in range(2):
        network.positions.mul_(1.1)
        network.weight.data.mul_(0.9)
        for name, expected in network().items():
            result = step()[name]
            assert type(result) is torch.Tensor and not result.requires_grad
            assert (result - expected).abs().amax() < EXACT, name


@ranks(1, 2)
def test_a_step_is_one_graph_that_reads_its_tensors_where_they_are(comm):
    graphs, network = [], Network(comm)

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    assert_follows(compile_step(network, [network.positions], comm, backend), network)
    (graph,) = graphs
    ops = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert sum("all_to_all" in op for op in ops) == (4 if comm.size > 1 else 0)


def scripted(x):
    return x * x + 1


def test_what_torchscript_planned_in_earlier_calls_is_planned_anew():
    """On CUDA such a plan launches fused kernels, which no trace has."""
    x, function = torch.ones(3), torch.jit.script(scripted)
    for _ in range(3):
        function(x)
    assert function.get_debug_state().execution_plans
    step = compile_step(lambda: {"y": function(x)}, [x], backend="eager")
    with pytest.raises(RuntimeError, match="optimized_plan_"):
        function.get_debug_state()
    assert step()["y"].tolist() == [2, 2, 2]


@pytest.mark.long
@ranks(2)
def test_inductor_keeps_the_exchanges(comm):
    network = Network(comm)
    assert_follows(compile_step(network, [network.positions], comm), network)


def unseen(x):
    out = torch.empty_like(x)
    with _disable_current_modes():
        out.copy_(x)
    return out * x


REFUSED = {
    "item": lambda x: x * x.sum().item(),
    "if": lambda x: x if x.sum() > 0 else -x,
    "tolist": lambda x: x * x.tolist()[0],
    "numpy": lambda x: torch.tensor(x.numpy().max()),
    "mask": lambda x: x[x > 0],
    "kernel": unseen,
}


@pytest.mark.parametrize("form", REFUSED)
def test_a_step_that_cannot_be_one_graph_is_refused_by_its_line(form):
    x, function = torch.rand(3), REFUSED[form]
    with pytest.raises(MissingHandler, match="cannot be compiled to one graph.*test_compiled.py:[0-9]+: .*x"):
        compile_step(lambda: {"y": function(x)}, [x], backend="eager")


def test_a_kernel_that_fills_zeros_unseen_is_found_by_its_result():
    x = torch.rand(3)

    def step():
        out = torch.zeros_like(x)
        with _disable_current_modes():
            out.add_(x)
        return {"y": out * 2}

    with pytest.raises(MissingHandler, match="another y"):
        compile_step(step, [x], backend="eager")
