import pytest
import torch
from graphs import RandomGraph

from alchemi_shardtensor import Comm, Routing, sum_over_ranks
from alchemi_shardtensor.testing import ADJOINT, adjoint_gap, count_traffic, ranks

UNEVEN = [0] * 20 + [1, 1, 2]
"""Rank 0 owns nearly all; rank 3 of four owns nothing."""


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("owners", [None, UNEVEN])
@pytest.mark.parametrize("features", [(), (4,), (2, 3), (0,)])
def test_exchange_and_reverse_are_each_others_adjoint(comm, owners, features):
    routing = RandomGraph(comm, owners=owners).routing
    x = torch.randn(routing.n_owned, *features, dtype=torch.float64)
    ghosts = torch.randn(routing.n_ghost, *features, dtype=torch.float64)
    with count_traffic(comm) as traffic:
        assert adjoint_gap(routing.exchange, x, comm) < ADJOINT
    assert (traffic.exchanges, traffic.reverses) == (1, 1)
    assert adjoint_gap(routing.reverse, ghosts, comm) < ADJOINT


@ranks(1, 2, 3)
def test_the_sum_over_ranks_is_its_own_adjoint(comm):
    x = torch.randn(3, 2, dtype=torch.float64)
    assert adjoint_gap(lambda t: sum_over_ranks(t, comm), x, comm) < ADJOINT


@ranks(2, 3)
def test_ghost_rows_are_their_owners_rows(comm):
    graph = RandomGraph(comm)
    x = torch.arange(graph.n * 2.0).reshape(-1, 2)
    assert torch.equal(graph.routing.exchange(x[graph.mine]), x[graph.ghosts])
    flags = x[:, 0] > 7
    assert torch.equal(graph.routing.exchange(flags[graph.mine]), flags[graph.ghosts])


@ranks(1, 2, 3)
def test_second_derivatives_pass_through_exchange_and_reverse(comm):
    """d/dx of |d/dx sum(ghosts^3)|^2 equals one process: x^3 summed over its reads."""
    graph = RandomGraph(comm)
    x = graph.comm.broadcast_object(torch.rand(graph.n, dtype=torch.float64))
    mine = x[graph.mine].requires_grad_()
    (g,) = torch.autograd.grad((graph.routing.padded(mine) ** 3).sum(), mine, create_graph=True)
    (gg,) = torch.autograd.grad((g**2).sum(), mine)
    reads = torch.zeros(graph.n, dtype=torch.float64)
    for copies in comm.gather_objects(torch.cat([graph.mine, graph.ghosts])):
        reads.index_add_(0, copies, torch.ones(len(copies), dtype=torch.float64))
    expected = 2 * (3 * reads * x**2) * (6 * reads * x)
    torch.testing.assert_close(gg, expected[graph.mine], rtol=1e-12, atol=1e-12)


@ranks(1, 2, 3)
def test_rows_and_objects_are_gathered_in_the_order_of_ranks(comm):
    rows = torch.full((comm.rank, 2), comm.rank)
    assert comm.all_gather_rows(rows).tolist() == [[r, r] for r in range(comm.size) for _ in range(r)]
    assert comm.gather_objects({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    last = comm.size - 1
    assert comm.broadcast_object(f"from {comm.rank}", source=last) == f"from {last}"


def fail(here):
    if here:
        raise ValueError("atom 7")


@ranks(1, 3)
def test_an_error_of_one_rank_is_raised_on_all_with_one_text(comm):
    with pytest.raises(ValueError, match="^atom 7"), comm.agreement():
        fail(comm.rank == comm.size - 1)
    with comm.agreement():
        pass


def test_wrong_rows_are_refused():
    routing = Routing.alone(3, Comm())
    with pytest.raises(ValueError, match="3 owned rows, not 4"):
        routing.exchange(torch.zeros(4))
    with pytest.raises(ValueError, match="0 ghost rows, not 1"):
        routing.reverse(torch.zeros(1))
