"""Steps on tensors that stay where they are: what keeps them from being captured is found, and named everywhere."""

import opaque
import pytest
import torch
from graphs import UNEVEN, RandomGraph

from alchemi_shardtensor import EDGE, LOST, OWNED, CapturedStep, Comm, DomainConfig, SideStream, plain
from alchemi_shardtensor.capture import WARMUP_CALLS, HostSyncDetector
from alchemi_shardtensor.testing import ADJOINT, adjoint_gap, ranks
from alchemi_spec import DistributionSpec, OpAdapter, SameRows, SpecError

CPU = torch.device("cpu")
WAITING = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: 1 if x.sum() > 0 else 0,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "in backward": lambda x: torch.autograd.grad(Waiting.apply(x.requires_grad_()).sum(), x),
}


class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * grad.sum().item()


@pytest.mark.parametrize("form", WAITING)
def test_what_waits_for_the_device_is_named_by_its_line(form):
    with HostSyncDetector() as waits:
        WAITING[form](torch.rand(3))
    assert len(waits.found) == 1 and "test_capture.py:" in waits.found[0] and ": " in waits.found[0]


def test_what_does_not_wait_is_not_named():
    with HostSyncDetector() as waits:
        x = torch.rand(4)
        torch.where(x > 0, x, 0).cumsum(0)[torch.tensor([1, 2])].clamp(max=3).index_add_(0, torch.tensor([0]), x[:1])
    assert waits.found == []


@ranks(1, 2, 3)
def test_a_wait_on_one_rank_is_known_on_all_and_the_step_goes_on_as_it_is(comm):
    made = []

    def step():
        made.append(comm.all_reduce(torch.ones(1)))
        if comm.rank == comm.size - 1 and made[-1].item() < 0:
            made.clear()
        return len(made)

    captured = CapturedStep(step, comm, SideStream(CPU))
    assert [captured() for _ in range(WARMUP_CALLS + 2)] == list(range(1, WARMUP_CALLS + 3))
    assert "_local_scalar_dense at " in captured.why_not and "made[-1].item() < 0" in captured.why_not


def test_what_is_no_mode_and_no_type_is_refused():
    with pytest.raises(SpecError, match="compile='graph' is no way .* 'auto', 'capture', 'inductor', 'off'"):
        DomainConfig(compile="graph")
    with pytest.raises(SpecError, match="wire=torch.int8 is no type of floats"):
        DomainConfig(wire=torch.int8)


def test_a_step_that_waits_for_nothing_runs_on_the_cpu_without_a_graph():
    x = torch.zeros(2)
    captured = CapturedStep(lambda: x.add_(1), Comm(), SideStream(CPU))
    for n in range(1, WARMUP_CALLS + 3):
        assert captured() is x and x[0] == n
    assert captured.why_not is None and captured.graph is None


@ranks(2, 3)
@pytest.mark.parametrize(("wire", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_features_travel_in_a_narrower_type_and_coordinates_do_not(comm, wire, error):
    graph = RandomGraph(comm, owners=UNEVEN)
    object.__setattr__(graph.routing, "wire", wire)
    g = torch.Generator().manual_seed(1)
    features, coordinates = (torch.rand(graph.n, k, dtype=torch.float64, generator=g) for k in (5, 3))
    before = comm.traffic.bytes
    narrow, exact = graph.routing.exchange_all(features[graph.mine], coordinates[graph.mine])
    rows = len(graph.routing.send)
    assert comm.traffic.bytes - before == rows * (5 * wire.itemsize + 3 * 8)
    assert narrow.dtype == torch.float64 and torch.equal(exact, coordinates[graph.ghosts])
    if len(narrow):
        gap = (narrow - features[graph.ghosts]).abs().max()
        assert 0 < gap < error
    random = torch.randn(graph.routing.n_owned, 3, dtype=torch.float64)
    assert adjoint_gap(graph.routing.exchange, random, comm) < ADJOINT


@ranks(2)
def test_a_kernel_on_lists_of_rows_keeps_them_if_it_is_declared(comm):
    spec = DistributionSpec(custom_ops=(OpAdapter("opaque::doubled", {}, {0: SameRows()}),))
    for declared in (True, False):
        graph = RandomGraph(comm, spec=spec) if declared else RandomGraph(comm)
        x = torch.arange(graph.n * 2.0).reshape(-1, 2)
        mine = graph.nodes(x)
        edges = mine[graph.local_edge_index[0]]
        for rows, kind in ((mine, OWNED), (edges, EDGE)):
            (found,) = opaque.doubled([rows, torch.ones(2)])
            assert found.rows is (kind if declared else LOST)
            torch.testing.assert_close(plain(found), plain(rows) * 2 + 2)
