import pytest
import torch
from graphs import UNEVEN, RandomGraph

from alchemi_shardtensor import (
    Comm,
    Owners,
    Routing,
    all_gather_rows,
    max_over_ranks,
    min_over_ranks,
    reduce_scatter_rows,
    sum_over_ranks,
)
from alchemi_shardtensor.testing import ADJOINT, adjoint_gap, as_one, count_traffic, ranks

F64 = torch.float64
FEATURES = [(), (4,), (2, 3), (0,)]


def counts_of(comm):
    """How many rows each rank has; the second has none."""
    return [3, 0, 2, 5][: comm.size]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", ["exchange", "all_gather"])
@pytest.mark.parametrize("owners", [None, UNEVEN], ids=["random", "uneven"])
@pytest.mark.parametrize("features", FEATURES)
def test_exchange_and_reverse_are_each_others_adjoint(comm, collective, owners, features):
    """Rank 0 of `UNEVEN` owns nearly all; rank 3 of four owns nothing."""
    routing = RandomGraph(comm, owners=owners).routing.with_collective(collective)
    x = torch.randn(routing.n_owned, *features, dtype=F64)
    ghosts = torch.randn(routing.n_ghost, *features, dtype=F64)
    with count_traffic(comm) as traffic:
        assert adjoint_gap(routing.exchange, x, comm) < ADJOINT
    assert (traffic.exchanges, traffic.reverses) == (1, 1)
    assert adjoint_gap(routing.reverse, ghosts, comm) < ADJOINT


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("features", FEATURES)
def test_gathered_and_scattered_rows_are_each_others_adjoint(comm, features):
    counts = counts_of(comm)
    x = torch.randn(counts[comm.rank], *features, dtype=F64)
    total = torch.randn(sum(counts), *features, dtype=F64)
    assert adjoint_gap(lambda t: all_gather_rows(t, counts, comm), x, comm) < ADJOINT
    assert adjoint_gap(lambda t: reduce_scatter_rows(t, counts, comm), total, comm) < ADJOINT


@ranks(1, 2, 3, 4)
def test_the_sum_over_ranks_is_its_own_adjoint(comm):
    x = torch.randn(3, 2, dtype=F64)
    assert adjoint_gap(lambda t: sum_over_ranks(t, comm), x, comm) < ADJOINT


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["exchange", "all_gather", "padded", "folded", "gathered", "scattered", "sum", "max", "min"])
def test_every_collective_is_differentiable_twice(comm, name):
    """Against finite differences, as one function of all ranks; a cube in front makes it bend."""
    counts, graph = counts_of(comm), RandomGraph(comm, n=5, n_edges=9)
    routing = graph.routing.with_collective("all_gather" if name == "all_gather" else "exchange")
    weights = torch.linspace(0.5, 1.5, 5, dtype=F64)[:, None] * (comm.rank + 1)
    mine = torch.arange(sum(counts)).split(counts)[comm.rank]
    functions = {
        "exchange": lambda x: routing.exchange(x[graph.mine]),
        "all_gather": lambda x: routing.exchange(x[graph.mine]),
        "padded": lambda x: routing.with_ghosts(x[graph.mine]),
        "folded": lambda x: routing.reduce_ghosts(x[torch.cat([graph.mine, graph.ghosts])] * (comm.rank + 1)),
        "gathered": lambda x: all_gather_rows(x.repeat(2, 1)[mine], counts, comm),
        "scattered": lambda x: reduce_scatter_rows(x.repeat(2, 1)[: sum(counts)] * (comm.rank + 1), counts, comm),
        "sum": lambda x: sum_over_ranks(x * weights, comm),
        "max": lambda x: max_over_ranks(x * weights, comm),
        "min": lambda x: min_over_ranks(x * weights, comm),
    }

    def cubed(x):
        return sum_over_ranks((functions[name](x**2) ** 2).sum(0), comm)

    x = torch.rand(5, 2, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    assert torch.autograd.gradcheck(as_one(cubed, comm), x)
    assert torch.autograd.gradgradcheck(as_one(cubed, comm), x)


@ranks(1, 2, 3)
def test_the_gradient_of_an_extreme_goes_in_equal_parts_to_the_ranks_that_hold_it(comm):
    x = torch.tensor([1.0, float(comm.rank == 0), comm.rank], dtype=F64, requires_grad=True)
    largest, smallest = max_over_ranks(x, comm), min_over_ranks(x, comm)
    assert largest.tolist() == [1, 1, comm.size - 1] and smallest.tolist() == [1, float(comm.size == 1), 0]
    (g,) = torch.autograd.grad(largest, x, torch.ones(3, dtype=F64) * (comm.rank == 0))
    assert g.tolist() == [1 / comm.size, float(comm.rank == 0), float(comm.rank == comm.size - 1)]


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("collective", ["exchange", "all_gather"])
def test_ghost_rows_are_their_owners_rows_whatever_their_type(comm, collective):
    graph = RandomGraph(comm)
    routing, x = graph.routing.with_collective(collective), torch.arange(graph.n * 2.0).reshape(-1, 2)
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128):
        field = (x % 7 > 3 if dtype == torch.bool else x).to(dtype)
        assert torch.equal(routing.exchange(field[graph.mine]), field[graph.ghosts])


@ranks(1, 2, 3)
def test_several_fields_travel_in_one_message(comm):
    """Of any types, those that are differentiated and those that are not; their gradients come home in one, too."""
    graph = RandomGraph(comm, owners=UNEVEN)
    shapes = {
        "a": ((3,), F64),
        "flag": ((), torch.bool),
        "b": ((2, 2), torch.float32),
        "id": ((), torch.int64),
        "o": ((0,), F64),
    }
    whole = {k: (torch.arange(graph.n).reshape(-1, *[1] * len(s)) % 5).expand(-1, *s).to(d) for k, (s, d) in shapes.items()}
    mine = [field[graph.mine].clone() for field in whole.values()]
    mine[0].requires_grad_(), mine[2].requires_grad_()
    with count_traffic(comm) as traffic:
        ghosts = graph.routing.exchange_all(*mine)
    assert traffic.exchanges == 1 and traffic.bytes == sum(f[0].nbytes for f in mine if len(f)) * len(graph.routing.send)
    assert all(torch.equal(g, field[graph.ghosts]) for g, field in zip(ghosts, whole.values(), strict=True))
    with count_traffic(comm) as traffic:
        ga, gb = torch.autograd.grad((ghosts[0] ** 2).sum() + ghosts[2].sum().double(), [mine[0], mine[2]])
    assert traffic.reverses == 1
    alone = graph.routing.reverse(2 * ghosts[0].detach())
    assert torch.equal(ga, alone) and torch.equal(gb, graph.routing.reverse(torch.ones_like(ghosts[2])))


@ranks(1, 2, 3)
def test_a_routing_is_found_from_global_ids(comm):
    graph = RandomGraph(comm, owners=UNEVEN)
    ids = graph.edge_index[:, graph.edges]
    routing, local = graph.routing.owners.route(ids)
    assert torch.equal(torch.cat([graph.mine, routing.exchange(graph.mine)])[local], ids)
    assert routing.n_ghost == len(set(ids.flatten().tolist()) - set(graph.mine.tolist()))
    still, _ = graph.routing.owners.route(graph.mine)
    assert still.no_exchange
    with pytest.raises(IndexError, match=f"points at {graph.n} nodes has values from 0 to 99"):
        graph.routing.owners.route(torch.tensor([0, 99] if comm.rank == 0 else [0, 1]))
    with pytest.raises(ValueError, match="must be owned by one rank, once"):
        Owners.of(torch.tensor([0, 1]), comm) if comm.size > 1 else Owners.of(torch.tensor([0, 0]), comm)


@ranks(1, 2, 3)
def test_all_rows_are_gathered_where_most_are_read_everywhere(comm):
    dense, sparse = RandomGraph(comm, n_edges=400), RandomGraph(comm, n_edges=3)
    assert (dense.routing.with_collective("auto").gather_row is None) is (comm.size == 1)
    assert sparse.routing.with_collective("auto").gather_row is None


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
    routing = Routing.without_ghosts(3, Comm())
    with pytest.raises(ValueError, match="3 owned rows, not 4"):
        routing.exchange(torch.zeros(4))
    with pytest.raises(ValueError, match="0 ghost rows, not 1"):
        routing.reverse(torch.zeros(1))


@ranks(1, 2)
def test_what_waits_for_the_device_is_counted(comm):
    x = torch.rand(4, 3)
    with count_traffic(comm) as traffic:
        x.sum().item(), bool(x.any()), x.nonzero(), x[x > 0.5], x.flatten().unique()
    assert traffic.host_syncs == 5
    with count_traffic(comm) as traffic:
        (x + 1)[torch.tensor([0, 1])].sum()
    assert traffic.host_syncs == 0
