"""One model under every layout equals one process: energy, gradients of nodes and of a strain leaf."""

import opaque  # noqa: F401  registers operators
import pytest
import torch
import torch.utils.checkpoint
from graphs import LAYOUTS, UNEVEN, RandomGraph

from alchemi_shardtensor import (
    BOTH,
    EDGE,
    GLOBAL,
    LOST,
    NODES,
    OWNED,
    PADDED,
    PARTIAL,
    STALE,
    SYSTEM,
    SYSTEMS,
    Comm,
    DomainConfig,
    ShardTensor,
    TraceEvent,
    plain,
    trace,
)
from alchemi_shardtensor.testing import EXACT, FP32, count_traffic, ranks
from alchemi_spec import (
    DistributionSpec,
    GatherInputsFull,
    GatherRule,
    OpAdapter,
    ScatterRule,
    SliceOutputsOwned,
    SpecError,
    StoragePolicy,
)

F64 = torch.float64


def equalised(x, numbers, edge_index, batch, strain, n_systems, field):
    """A message-passing network with all that has gone wrong somewhere.

    A strain leaf; a lookup by a static input; an in-place scatter whose result is dropped and one that is rebound; a
    scatter to senders; a mid-network sum that feeds back (charges equilibrated in each system); a replicated scalar.
    """
    x = x + torch.einsum("ni,nij->nj", x, strain[batch])
    sender, receiver = edge_index
    h = torch.cat([torch.sin(x), torch.linspace(0.5, 1.5, 10, dtype=x.dtype)[numbers][:, None]], dim=1)
    for _ in range(3):
        message = torch.tanh(h[sender] - 0.3 * h[receiver]) / (1 + (x[sender] - x[receiver]).square().sum(1, keepdim=True))
        into, back = torch.zeros_like(h), torch.zeros_like(h)
        into.index_add_(0, receiver, message)
        back = back.scatter_add_(0, sender[:, None].expand_as(message), 0.1 * message)
        h = h + into - back
        charge = h[:, 0]
        total = torch.zeros(n_systems, dtype=x.dtype).index_add_(0, batch, charge)
        count = torch.zeros(n_systems, dtype=x.dtype).scatter_add_(0, batch, torch.ones_like(charge))
        h = torch.cat([(charge - (total / count)[batch])[:, None], h[:, 1:] * field], dim=1)
    energy = torch.zeros(n_systems, dtype=x.dtype)
    energy.index_add_(0, batch, (h**2).sum(1))
    return energy + 0.01 * (total**2 / count)


def whole(comm, graph, n_systems):
    """The values that all ranks share, and one process's energy and gradients."""
    g = torch.Generator().manual_seed(3)
    x = torch.rand(graph.n, 3, dtype=F64, generator=g)
    numbers = torch.randint(0, 10, (graph.n,), generator=g)
    leaves = x.clone().requires_grad_(), torch.zeros(n_systems, 3, 3, dtype=F64, requires_grad=True), field()
    energy = equalised(leaves[0], numbers, graph.edge_index, graph.batch, leaves[1], n_systems, leaves[2])
    return x, numbers, energy.detach(), torch.autograd.grad(energy.sum(), leaves)


def field():
    return torch.tensor(1.1, dtype=F64, requires_grad=True)


@ranks(1, 2, 3)
@pytest.mark.parametrize("owners", [None, UNEVEN], ids=["random", "uneven"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_energy_forces_and_stress_equal_one_process_under_every_layout(comm, layout, owners):
    n_systems = 3
    graph = RandomGraph(comm, n_systems=n_systems, owners=owners, layout=layout)
    x, numbers, energy, (forces, stress, slope) = whole(comm, graph, n_systems)
    leaf, strain, scale = graph.nodes(x).requires_grad_(), torch.zeros(n_systems, 3, 3, dtype=F64, requires_grad=True), field()
    shared = equalised(leaf, graph.nodes(numbers), graph.local_edge_index, graph.local_batch, strain, n_systems, scale)
    assert shared.rows is SYSTEM
    f, s, e = torch.autograd.grad(shared.sum(), [leaf, strain, scale])
    assert (s.rows, e.rows) == (SYSTEM, SYSTEM)
    close = {"rtol": EXACT, "atol": EXACT}
    torch.testing.assert_close(plain(shared).detach(), energy, **close)
    torch.testing.assert_close(graph.owned(f), forces[graph.mine], **close)
    torch.testing.assert_close(plain(s), stress, **close)
    torch.testing.assert_close(plain(e), slope, **close)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_equal_one_process_under_every_layout(comm, layout):
    """Of the squared forces, as a loss on forces needs them: with respect to nodes, a strain and a replicated scalar."""
    graph = RandomGraph(comm, n=11, n_edges=30, n_systems=2, layout=layout)
    g = torch.Generator().manual_seed(3)
    x, numbers = torch.rand(graph.n, 3, dtype=F64, generator=g), torch.randint(0, 10, (graph.n,), generator=g)
    arguments = numbers, graph.edge_index, graph.batch
    tagged = graph.nodes(numbers), graph.local_edge_index, graph.local_batch
    found = []
    for node, (z, edge_index, batch) in ((x.clone(), arguments), (graph.nodes(x), tagged)):
        leaves = node.requires_grad_(), torch.zeros(2, 3, 3, dtype=F64, requires_grad=True), field()
        energy = equalised(leaves[0], z, edge_index, batch, leaves[1], 2, leaves[2])
        forces, stress = torch.autograd.grad(energy.sum(), leaves[:2], create_graph=True)
        loss = torch.zeros(2, dtype=F64).index_add_(0, batch, (forces**2).sum(1)).sum() + (stress**2).sum()
        found.append(torch.autograd.grad(loss, leaves))
    (e_x, e_strain, e_scale), (f_x, f_strain, f_scale) = found
    close = {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(graph.owned(f_x), e_x[graph.mine], **close)
    torch.testing.assert_close(plain(f_strain), e_strain, **close)
    torch.testing.assert_close(plain(f_scale), e_scale, **close)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_backward_fills_grad_as_one_process_does_under_every_layout(comm, layout):
    graph = RandomGraph(comm, n_systems=2, layout=layout)
    x, numbers, _, (forces, stress, slope) = whole(comm, graph, 2)
    leaf, strain, scale = graph.nodes(x).requires_grad_(), torch.zeros(2, 3, 3, dtype=F64, requires_grad=True), field()
    energy = equalised(leaf, graph.nodes(numbers), graph.local_edge_index, graph.local_batch, strain, 2, scale)
    energy.sum().backward()
    close = {"rtol": EXACT, "atol": EXACT}
    rows = graph.mine if leaf.rows is GLOBAL else slice(len(graph.mine))
    torch.testing.assert_close(plain(leaf.grad)[rows], forces[graph.mine], **close)
    torch.testing.assert_close(plain(strain.grad), stress, **close)
    torch.testing.assert_close(plain(scale.grad), slope, **close)


@ranks(1, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_float32_agrees_to_its_round_off_under_every_layout(comm, layout):
    graph = RandomGraph(comm, layout=layout)
    g = torch.Generator().manual_seed(3)
    x, h = torch.rand(graph.n, 3, generator=g), torch.rand(graph.n, 4, generator=g)
    whole, leaf = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected = layers(h, whole, graph.edge_index, graph.batch, 3)
    found = layers(graph.nodes(h), leaf, graph.local_edge_index, graph.local_batch, 3)
    (e,), (f,) = torch.autograd.grad(expected.sum(), whole), torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(plain(found), expected, rtol=FP32, atol=0)
    torch.testing.assert_close(graph.owned(f), e[graph.mine], rtol=0, atol=FP32 * float(e.abs().max()))


def layers(h, x, edge_index, batch, n_layers):
    """A network whose first features are static: the gather of each layer, and of positions, is one exchange."""
    sender, receiver = edge_index
    r = (x[sender] - x[receiver]).square().sum(1, keepdim=True)
    for _ in range(n_layers):
        h = h + torch.tanh(torch.zeros_like(h).index_add_(0, receiver, h[sender] * torch.exp(-r)))
    return torch.zeros(2, dtype=x.dtype).index_add_(0, batch, h.sum(1))


@ranks(1, 2, 3)
@pytest.mark.parametrize("n_layers", [1, 2, 4])
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded", "exchanged", "gathered"])
def test_l_layers_cost_l_minus_1_exchanges_of_features(comm, layout, n_layers):
    """And one of positions, one of the static features, once, and as many reverses as went out with a gradient.

    In the padded layout positions and static features are there from the start; in the sharded one, receivers are not
    known to be owned, but that none is read is known from the routing.
    """
    graph = RandomGraph(comm, layout=layout)
    g = torch.Generator().manual_seed(3)
    x, h = torch.rand(graph.n, 3, dtype=F64, generator=g), torch.rand(graph.n, 4, dtype=F64, generator=g)
    static, many = graph.nodes(h), comm.size > 1
    given = layout == "padded"
    for step in range(3):
        leaf = graph.nodes(x).requires_grad_()
        with count_traffic(comm) as forward:
            energy = layers(static, leaf, graph.local_edge_index, graph.local_batch, n_layers)
        with count_traffic(comm) as backward:
            torch.autograd.grad(energy.sum(), leaf)
        statics = 0 if given or step else 1
        assert forward.exchanges == many * (n_layers - 1 + (not given) + statics)
        assert backward.reverses == many * n_layers
        assert (forward.reverses, backward.exchanges) == (0, 0)
        assert (forward.host_syncs, backward.host_syncs) == (0, 0) or (layout == "sharded" and step == 0)


@ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_order_of_the_edges_changes_nothing(comm, layout):
    """Shuffled, and half of the list in the opposite order: case 10."""
    graph = RandomGraph(comm, layout=layout)
    g = torch.Generator().manual_seed(3)
    x, h = torch.rand(graph.n, 3, dtype=F64, generator=g), torch.rand(graph.n, 4, dtype=F64, generator=g)
    n = len(graph.edges)
    shuffled = torch.randperm(n, generator=g)
    half = torch.cat([torch.arange(n // 2).flip(0), torch.arange(n // 2, n)])
    energies = []
    for order in (torch.arange(n), shuffled, half):
        edges = graph.local_edge_index[:, order]
        energies.append(plain(layers(graph.nodes(h), graph.nodes(x), edges, graph.local_batch, 3)))
    torch.testing.assert_close(energies[1], energies[0], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(energies[2], energies[0], rtol=EXACT, atol=EXACT)
    whole = layers(h, x, graph.edge_index, graph.batch, 3)
    torch.testing.assert_close(energies[0], whole, rtol=EXACT, atol=EXACT)


@ranks(2, 3)
def test_a_write_into_padded_rows_makes_ghosts_stale(comm):
    graph = RandomGraph(comm, layout="padded")
    x = torch.rand(graph.n, 2, generator=torch.Generator().manual_seed(1))
    fresh, (sender, receiver) = graph.nodes(x), graph.local_edge_index
    assert fresh.rows is PADDED and (fresh * 2 + 1).rows is PADDED
    with count_traffic(comm) as traffic:
        fresh[sender], (fresh * 2)[sender]
    assert traffic.exchanges == 0
    into = torch.zeros_like(fresh).index_add_(0, receiver, fresh[sender])
    assert into.rows is STALE and (into + fresh).rows is STALE
    with count_traffic(comm) as traffic:
        into[receiver], into[sender], into[sender]
    assert traffic.exchanges == 1
    fresh[receiver] = torch.zeros(2)
    assert fresh.rows is STALE
    expected = x.clone()
    expected[graph.edge_index[1]] = 0
    torch.testing.assert_close(plain(fresh[sender]), expected[graph.edge_index[0, graph.edges]])


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded", "replicated"])
def test_a_selection_by_a_mask_of_values_is_the_whole_selection(comm, layout):
    """Ghosts do not count; by system, as loops over systems do it, and by row numbers made of a mask."""
    graph = RandomGraph(comm, layout=layout, owners=UNEVEN)
    x = torch.rand(graph.n, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    h, batch, chosen = graph.nodes(x), graph.local_batch, x[:, 0] > 0.4
    mask = h[:, 0] > 0.4
    per_system = torch.zeros(2, 2, dtype=F64)
    for b in range(2):
        per_system[b] = h[batch == b].sum(0)
        torch.testing.assert_close(plain(per_system[b]), x[graph.batch == b].sum(0), rtol=EXACT, atol=EXACT)
    assert per_system.rows is SYSTEM
    summed = torch.zeros(2, 2, dtype=F64).index_add_(0, batch[mask], h[mask])
    expected = torch.zeros(2, 2, dtype=F64).index_add_(0, graph.batch[chosen], x[chosen])
    torch.testing.assert_close(plain(summed), expected, rtol=EXACT, atol=EXACT)
    if layout != "padded":  # where numbers of rows would name ghosts
        for rows in (mask.nonzero().flatten(), torch.where(mask)[0]):
            torch.testing.assert_close(plain(h[rows].sum(0)), x[chosen].sum(0), rtol=EXACT, atol=EXACT)
        h[rows] = torch.zeros(2, dtype=F64)
        torch.testing.assert_close(plain(h.sum(0)), x[~chosen].sum(0), rtol=EXACT, atol=EXACT)


@ranks(2, 3)
def test_some_rows_of_a_padded_layout_are_not_summed(comm):
    """Which of them are ghosts is not known of a plain mask, or of row numbers."""
    graph = RandomGraph(comm, layout="padded")
    x = graph.nodes(torch.rand(graph.n, 2))
    batch = graph.local_batch
    chosen = torch.arange(len(x)) > 3
    for refused in (
        lambda: x[chosen].sum(),
        lambda: torch.zeros(2, 2).index_add_(0, batch[chosen], x[chosen]),
        lambda: torch.zeros(2, 2).index_put_((batch[chosen],), x[chosen], accumulate=True),
        lambda: torch.zeros(2, 2).index_add_(0, batch[(x[:, 0] > 0).nonzero().flatten()], x[(x[:, 0] > 0).nonzero().flatten()]),
    ):
        with pytest.raises(RuntimeError, match="padded layout|over a slice|whose they are"):
            refused()


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded", "exchanged", "replicated"])
def test_python_that_runs_in_a_backward_pass_gathers_and_adds_too(comm, layout):
    """Checkpointed parts are run again in it; so is the backward of a Function of one's own.

    The latter not in the padded layout: gradients of ghosts are parts, which a hand-written sum would have to count.
    """
    graph = RandomGraph(comm, layout=layout)
    x = torch.rand(graph.n, 3, dtype=F64, generator=torch.Generator().manual_seed(1))

    def energy(x, edge_index, batch, run):
        sender, receiver = edge_index

        def neutral(q):
            total = torch.zeros(2, dtype=F64).index_add_(0, batch, q)
            return (q - total[batch] / 10) ** 3

        def messages(h):
            return torch.zeros_like(h).index_add_(0, receiver, torch.tanh(h[sender] * h[receiver]))

        y = run(neutral, x.sum(1) * 1.0)
        z = run(messages, x * 1.0)
        bent = y**3 if layout == "padded" else Cubed.apply(y, batch)
        return torch.zeros(2, dtype=F64).index_add_(0, batch, bent * z.sum(1))

    def checkpointed(function, *args):
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    whole, leaf = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected = energy(whole, graph.edge_index, graph.batch, lambda f, *a: f(*a))
    found = energy(leaf, graph.local_edge_index, graph.local_batch, checkpointed)
    torch.testing.assert_close(plain(found), expected, rtol=EXACT, atol=EXACT)
    (e,), (f,) = torch.autograd.grad(expected.sum(), whole), torch.autograd.grad(found.sum(), leaf)
    torch.testing.assert_close(graph.owned(f), e[graph.mine], rtol=EXACT, atol=EXACT)


class Cubed(torch.autograd.Function):
    """y^3 + per-system sum of y, with a backward of its own that adds through the batch."""

    @staticmethod
    def forward(ctx, y, batch):
        ctx.y, ctx.batch = y, batch
        total = torch.zeros(2, dtype=F64).index_add_(0, batch, y)
        return y**3 + total[batch]

    @staticmethod
    def backward(ctx, grad):
        y = ctx.y
        tagged = torch.zeros_like(y) + grad
        total = torch.zeros(2, dtype=F64).index_add_(0, ctx.batch, tagged)
        return grad * 3 * y.as_subclass(torch.Tensor) ** 2 + total[ctx.batch].as_subclass(torch.Tensor), None


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded"])
def test_what_is_written_through_a_view_or_an_out_argument_is_known_of_the_whole(comm, layout):
    graph = RandomGraph(comm, layout=layout)
    x = torch.rand(graph.n, 4, dtype=F64, generator=torch.Generator().manual_seed(1))

    def energy(h, edge_index, batch):
        sender, receiver = edge_index
        for _ in range(2):
            out = torch.zeros_like(h)
            out[:, :2].index_add_(0, receiver, torch.tanh(h[sender][:, :2]))
            bare = torch.zeros(h.shape, dtype=F64)
            bare[:, 2:].index_add_(0, receiver, torch.sin(h[sender][:, 2:]))
            torch.add(h, out + bare, out=h)
        total = torch.zeros((), dtype=F64)
        torch.sum(h, dim=(0, 1), out=total)
        return total + torch.zeros(2, dtype=F64).index_add_(0, batch, h.sum(1)).sum()

    found = energy(graph.nodes(x), graph.local_edge_index, graph.local_batch)
    expected = energy(x.clone(), graph.edge_index, graph.batch)
    assert found.rows is SYSTEM
    torch.testing.assert_close(plain(found), expected, rtol=EXACT, atol=EXACT)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_edge_index_may_be_turned_doubled_and_used_whole(comm, layout):
    graph = RandomGraph(comm, layout=layout)
    x = torch.rand(graph.n, 2, dtype=F64, generator=torch.Generator().manual_seed(1))

    def total(x, edge_index):
        both = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        turned, ends = edge_index.T, x[edge_index]
        return (
            (x[both[0]] * x[both[1]].cos()).sum()
            + (x[turned[:, 0]] - 2 * x[turned[:, 1]]).sum()
            + (ends[0] - ends[1]).square().sum()
            + torch.einsum("ij,jk", x[both[0]], torch.eye(2, dtype=F64)).sum()
        )

    torch.testing.assert_close(plain(total(graph.nodes(x), graph.local_edge_index)), total(x, graph.edge_index))


@ranks(2, 3)
def test_ranks_that_take_another_way_are_told_before_some_wait_for_ever(comm):
    """A rank without atoms of a kind skips what the others differentiate."""
    graph = RandomGraph(comm)
    leaf = graph.nodes(torch.rand(graph.n, dtype=F64)).requires_grad_()
    h = torch.zeros_like(leaf) if comm.rank == 0 else leaf * 2
    message = torch.zeros_like(h).index_add_(0, graph.local_edge_index[1], h[graph.local_edge_index[0]])
    energy = torch.zeros(2, dtype=F64).index_add_(0, graph.local_batch, message + leaf)
    with pytest.raises(RuntimeError, match="collectives to repeat in the backward pass"):
        torch.autograd.grad(energy.sum(), leaf)


@ranks(1, 2)
def test_what_was_gathered_is_gathered_anew_when_it_has_changed(comm):
    """Also behind autograd's back, and for a second graph."""
    graph = RandomGraph(comm)
    x = torch.rand(graph.n, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    q, (sender, receiver) = graph.nodes(x), graph.local_edge_index
    whole = x[graph.edge_index[0, graph.edges]]
    q[sender]
    q.data.add_(1.0)
    torch.testing.assert_close(plain(q[sender]), whole + 1)
    q.data = 3 * q.data
    torch.testing.assert_close(plain(q[sender]), 3 * (whole + 1))
    leaf = graph.nodes(x).requires_grad_()
    h = leaf + 1.0
    for _ in range(2):
        energy = torch.zeros(2, 2, dtype=F64).index_add_(
            0, graph.local_batch, torch.zeros_like(h).index_add_(0, receiver, h[sender])
        )
        torch.autograd.grad(energy.sum(), leaf)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded"])
def test_with_per_system_reductions_off_a_sum_is_this_ranks_part(comm, layout):
    """It can be added up and differentiated; what would be wrong for a part is refused."""
    spec = DistributionSpec(policy=LAYOUTS[layout], per_system_reduce=False)
    graph = RandomGraph(comm, layout=layout, spec=spec)
    x = torch.rand(graph.n, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    leaf, start = graph.nodes(x).requires_grad_(), torch.ones(2, dtype=F64)
    with count_traffic(comm) as traffic:
        part = start.index_add(0, graph.local_batch, (leaf**2).sum(1))
    assert part.rows is PARTIAL and traffic.reductions == 0
    whole = torch.ones(2, dtype=F64).index_add_(0, graph.batch, (x**2).sum(1))
    torch.testing.assert_close(comm.all_reduce(plain(part).detach()), whole, rtol=EXACT, atol=EXACT)
    assert (2 * part.sum()).rows is PARTIAL and (part + part)[0].rows is PARTIAL
    assert torch.stack([part, torch.zeros_like(part)]).sum(0).rows is PARTIAL and part.to(torch.float32).rows is PARTIAL
    assert part.to(torch.int64).rows is LOST and torch.stack([part, torch.ones(part.shape)]).rows is LOST
    assert (part**2).rows is LOST and (part + 1).rows is LOST and (part * part).rows is LOST
    (g,) = torch.autograd.grad(3 * part.sum(), leaf)
    torch.testing.assert_close(graph.owned(g), 6 * x[graph.mine], rtol=EXACT, atol=EXACT)
    with pytest.raises(RuntimeError, match="the parts have to be added up first"):
        part[graph.local_batch]


@ranks(1, 2)
def test_two_specifications_interleaved_do_not_disturb_each_other(comm):
    """Step by step in turn, with an adapter in one: each is what it is alone."""
    doubling = OpAdapter("opaque::smoothed", {0: GatherInputsFull()}, {0: SliceOutputsOwned()})
    one = RandomGraph(comm, layout="owned")
    two = RandomGraph(comm, layout="padded", seed=1, owners=UNEVEN)
    three = RandomGraph(comm, spec=DistributionSpec(policy=LAYOUTS["owned"], custom_ops=(doubling,), per_system_reduce=False))
    alone = [list(steps(graph)) for graph in (one, two, three)]
    together = list(zip(*(steps(graph) for graph in (one, two, three)), strict=True))
    for column, expected in zip(zip(*together, strict=True), alone, strict=True):
        assert all(torch.equal(a, b) and a.rows is b.rows for a, b in zip(column, expected, strict=True))
    assert [steps_of[-1].rows for steps_of in alone] == [SYSTEM, SYSTEM, PARTIAL]
    with pytest.raises(RuntimeError, match="of two partitions"):
        one.nodes(torch.rand(one.n)).sum() + two.nodes(torch.rand(two.n)).sum()


def steps(graph):
    """A network, a step at a time."""
    h = graph.nodes(torch.rand(graph.n, 3, dtype=F64, generator=torch.Generator().manual_seed(1)))
    sender, receiver = graph.local_edge_index
    for _ in range(2):
        message = h[sender]
        yield message
        h = torch.tanh(torch.zeros_like(h).index_add_(0, receiver, message))
        yield h
    yield torch.zeros(2, 3, dtype=F64).index_add_(0, graph.local_batch, h)


@ranks(1, 2)
def test_a_trace_lists_events(comm):
    graph = RandomGraph(comm)
    h, (sender, receiver) = graph.nodes(torch.rand(graph.n, 3)), graph.local_edge_index
    h.sum()
    with trace(graph.shard) as fired:
        torch.zeros_like(h).index_add_(0, receiver, torch.tanh(h[sender]))
    assert fired == [
        TraceEvent("zeros_like", None, OWNED),
        TraceEvent("__getitem__", "gather_nodes", EDGE),
        TraceEvent("tanh", None, EDGE),
        TraceEvent("index_add_", "to_nodes", OWNED),
    ]
    h.sum()
    assert len(fired) == 4


@ranks(1, 2)
def test_wrap_is_the_public_constructor(comm):
    graph = RandomGraph(comm)
    spec, config = DistributionSpec(), DomainConfig(comm)
    meta = {"spec": spec, "meta": graph.routing, "config": config, "n_systems": 2}
    x = torch.rand(len(graph.mine), 3, dtype=F64)
    h = ShardTensor.wrap(x, rows="owned", **meta)
    edge_index = ShardTensor.wrap(plain(graph.local_edge_index), points_at=NODES, end=BOTH, **meta)
    batch = ShardTensor.wrap(plain(graph.local_batch), rows=OWNED, points_at="systems", **meta)
    assert h.shard is edge_index.shard is batch.shard and h.data_ptr() == x.data_ptr() and type(x) is torch.Tensor
    whole = h[edge_index[0]].sum()
    total = torch.zeros(2, 3, dtype=F64).index_add_(0, batch, h)
    assert (whole.rows, total.rows) == (SYSTEM, SYSTEM)
    for message, wrong in {
        "integers": {"points_at": SYSTEMS},
        f"owned rows are {len(x)}": {"t": torch.rand(len(x) + 1), "rows": OWNED},
        "other ranks": {"config": DomainConfig(Comm(comm.group, comm.device)), "rows": OWNED},
        "no layout serves a policy of kind 'third'": {"spec": DistributionSpec(policy=Third())},
    }.items():
        with pytest.raises(SpecError, match=message):
            ShardTensor.wrap(**{"t": x, **meta, **wrong})


class Third(StoragePolicy):
    kind: str = "third"
    scatter: ScatterRule = ScatterRule.LOCAL
    gather: GatherRule = GatherRule.LOCAL
