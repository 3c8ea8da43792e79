"""Reductions, counts and segments over rows that are spread out: the value and the gradient of one process."""

import pytest
import torch
import torch.nn.functional as F
from graphs import UNEVEN, RandomGraph

from alchemi_shardtensor import EDGE, LOST, OWNED, SYSTEM, SYSTEMS, plain, tag
from alchemi_shardtensor.testing import EXACT, count_traffic, ranks

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
F64 = torch.float64
CLOSE = {"rtol": EXACT, "atol": EXACT}
OVER_ROWS = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: torch.mean(x, dim=0, keepdim=True),
    "max": lambda x: x.max(),
    "min": lambda x: torch.min(x),
    "amax": lambda x: x.amax(0),
    "amin": lambda x: torch.amin(x, dim=(0, 1)),
    "norm": lambda x: x.norm(),
    "norm_p": lambda x: torch.norm(x, p=3, dim=0),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=0, keepdim=True),
    "vector_norm_1": lambda x: torch.linalg.vector_norm(x, 1),
    "var": lambda x: x.var(0),
    "std": lambda x: torch.std(x, dim=0, unbiased=False, keepdim=True),
    "std_all": lambda x: x.std(correction=2),
    "logsumexp": lambda x: x.logsumexp(0),
    "transposed": lambda x: x.T.sum(1),
    "gram": lambda x: x.T @ x,
    "einsum": lambda x: torch.einsum("ni,nj->ij", x, torch.tanh(x)),
    "dot": lambda x: x[:, 0] @ x[:, 1],
    "vdot": lambda x: torch.dot(x[:, 0], x[:, 2]),
    "tensordot": lambda x: torch.tensordot(x, x.sin(), dims=([0], [0])),
    "count": lambda x: torch.count_nonzero(x > 0.5, dim=0).double() * x.sum(),
    "any": lambda x: (x > 0.9).any(0) * x.sum(0),
    "all": lambda x: torch.all(x > 0.1) * x.sum(0),
}
ROW_BY_ROW = {
    "softmax": lambda x: x.softmax(0),
    "F.softmax": lambda x: F.softmax(x, dim=-2),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
}


def quantised(n, k=3):
    """Values of which many are equal, so that extremes have ties."""
    return torch.randint(1, 6, (n, k), generator=torch.Generator().manual_seed(5)).double() / 5


@ranks(1, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "replicated"])
@pytest.mark.parametrize("name", OVER_ROWS)
def test_a_reduction_over_rows_is_over_all_ranks_rows(comm, layout, name):
    graph, reduce = RandomGraph(comm, owners=UNEVEN, layout=layout), OVER_ROWS[name]
    if layout == "padded" and name in ("gram", "einsum", "dot", "vdot", "tensordot"):
        return  # refused: see below
    x = quantised(graph.n)
    one, mine = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected, found = reduce(one), reduce(mine)
    assert found.rows is SYSTEM
    torch.testing.assert_close(plain(found), expected, **CLOSE)
    seed = torch.linspace(1, 2, expected.numel(), dtype=F64).view_as(expected)
    (g,), (h,) = torch.autograd.grad(expected, one, seed), torch.autograd.grad(found, mine, seed)
    torch.testing.assert_close(graph.owned(h), g[graph.mine], **CLOSE)


@ranks(2)
@pytest.mark.parametrize("name", ["gram", "einsum", "dot"])
def test_a_contraction_over_padded_rows_is_refused(comm, name):
    graph = RandomGraph(comm, layout="padded")
    with pytest.raises(RuntimeError, match="contracts over this rank's rows only"):
        OVER_ROWS[name](graph.nodes(quantised(graph.n)))


@ranks(1, 3)
@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_a_softmax_over_rows_is_over_all_ranks_rows(comm, name):
    graph, softmax = RandomGraph(comm, owners=UNEVEN), ROW_BY_ROW[name]
    x = quantised(graph.n)
    one, mine = x.clone().requires_grad_(), graph.nodes(x).requires_grad_()
    expected, found = softmax(one), softmax(mine)
    assert found.rows is OWNED
    torch.testing.assert_close(plain(found), expected[graph.mine], **CLOSE)
    (g,) = torch.autograd.grad((expected * x**2).sum(), one)
    (h,) = torch.autograd.grad((found * graph.nodes(x) ** 2).sum(), mine)
    torch.testing.assert_close(plain(h), g[graph.mine], **CLOSE)


FORMS = {
    "scatter": lambda out, i, v, r, s: out.scatter_reduce(0, i.view(-1, 1).expand_as(v), v, r, include_self=s),
    "index": lambda out, i, v, r, s: out.index_reduce(0, i, v, r, include_self=s),
}


@ranks(1, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded", "replicated"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reduce", ["mean", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
def test_means_and_extremes_have_one_process_s_value_and_gradient_with_ties(comm, layout, form, reduce, include_self):
    """Into senders, receivers and systems, of which one gets nothing."""
    graph, scatter = RandomGraph(comm, n_systems=2, layout=layout), FORMS[form]
    x, v, start = quantised(graph.n), quantised(len(graph.edge_index[0])), quantised(graph.n).flip(0)
    start += 0 if include_self else 0.01  # torch shares a gradient with what it leaves out, if that ties
    leaves = [x.clone().requires_grad_(), v.clone().requires_grad_(), start.clone().requires_grad_()]
    tagged = [graph.nodes(x), graph.edge(v), graph.nodes(start)]
    tagged = [t.detach().requires_grad_() for t in tagged]
    graph_of = (leaves, graph.edge_index, graph.batch), (tagged, graph.local_edge_index, graph.local_batch)
    results = []
    for (a, b, c), (sender, receiver), batch in graph_of:
        nodes = [scatter(c, end, b * a[receiver], reduce, include_self) for end in (sender, receiver)]
        systems = scatter(torch.full((3, 3), 0.51, dtype=F64), batch, a, reduce, include_self)
        results.append((nodes, systems))
    (expected, per_system), (found, found_per_system) = results
    for e, f in zip(expected, found, strict=True):
        torch.testing.assert_close(graph.owned(f), e[graph.mine], **CLOSE)
    torch.testing.assert_close(plain(found_per_system), per_system, **CLOSE)
    losses = [(sum((n**2).sum() for n in nodes) + (s**3).sum()) for nodes, s in results]
    one = torch.autograd.grad(losses[0], leaves)
    many = torch.autograd.grad(losses[1], tagged)
    torch.testing.assert_close(graph.owned(many[0]), one[0][graph.mine], **CLOSE)
    torch.testing.assert_close(plain(many[1]), one[1][graph.edges], **CLOSE)
    torch.testing.assert_close(graph.owned(many[2]), one[2][graph.mine], **CLOSE)


def sorted_graph(comm, **kwargs):
    """Edges in the order of their receivers, as segments need them, and nodes in that of their systems."""
    graph = RandomGraph(comm, n_systems=3, **kwargs)
    order = torch.argsort(graph.local_edge_index[1].as_subclass(torch.Tensor), stable=True)
    graph.edges = graph.edges[order]
    graph.local_edge_index = graph.local_edge_index[:, order]
    return graph


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded"])
def test_counts_repeats_and_segments(comm, layout):
    graph = sorted_graph(comm, owners=UNEVEN, layout=layout)
    n, (sender, receiver) = graph.n, graph.edge_index
    x, v = quantised(n), quantised(len(sender))
    degrees = [torch.bincount(end) for end in graph.local_edge_index]
    for found, end in zip(degrees, graph.edge_index, strict=True):
        assert torch.equal(graph.owned(found), torch.bincount(end, minlength=n)[graph.mine])
    weighted = graph.local_edge_index[0].bincount(graph.edge(v[:, 0]))
    torch.testing.assert_close(graph.owned(weighted), torch.bincount(sender, v[:, 0], n)[graph.mine], **CLOSE)
    sizes = torch.bincount(graph.local_batch)
    assert sizes.rows is SYSTEM and torch.equal(plain(sizes), torch.bincount(graph.batch))

    per_atom = torch.repeat_interleave(torch.eye(3, dtype=F64), sizes, dim=0)
    assert torch.equal(graph.owned(per_atom), torch.eye(3, dtype=F64)[graph.batch][graph.mine])
    again = torch.zeros(3, 3, dtype=F64).index_add_(0, torch.arange(3).repeat_interleave(sizes), graph.nodes(x))
    assert again.rows is not SYSTEM  # arange is no index that is known to point at systems
    index = torch.repeat_interleave(tag(torch.arange(3), graph.shard, SYSTEM, SYSTEMS), sizes)
    summed = torch.zeros(3, 3, dtype=F64).index_add_(0, index, graph.nodes(x))
    torch.testing.assert_close(plain(summed), torch.zeros(3, 3, dtype=F64).index_add_(0, graph.batch, x), **CLOSE)

    for reduce in ("sum", "mean", "max", "min"):
        leaf = graph.nodes(x).requires_grad_()
        whole = x.clone().requires_grad_()
        found = torch.segment_reduce(leaf, reduce, lengths=sizes, unsafe=True)
        expected = torch.segment_reduce(whole, reduce, lengths=torch.bincount(graph.batch), unsafe=True)
        torch.testing.assert_close(plain(found), expected, **CLOSE)
        (g,), (h,) = (torch.autograd.grad((y**2).sum(), z) for y, z in ((expected, whole), (found, leaf)))
        torch.testing.assert_close(graph.owned(h), g[graph.mine], **CLOSE)
    if layout != "sharded":
        spread = torch.repeat_interleave(graph.nodes(x), degrees[1], dim=0)
        assert spread.rows is EDGE
        torch.testing.assert_close(plain(spread), x[receiver[graph.edges]], **CLOSE)
        found = torch.segment_reduce(graph.edge(v), "sum", lengths=degrees[1])
        torch.testing.assert_close(
            graph.owned(found), torch.zeros(n, 3, dtype=F64).index_add_(0, receiver, v)[graph.mine], **CLOSE
        )


@ranks(1, 2, 3)
def test_unique_systems_are_those_of_all_ranks(comm):
    graph = RandomGraph(comm, n_systems=3, owners=UNEVEN)
    chosen = graph.batch != 1
    mine = graph.local_batch[chosen[graph.mine]]
    for unique in (torch.unique, torch.Tensor.unique):
        present, place, counts = unique(mine, return_inverse=True, return_counts=True)
        expected = torch.unique(graph.batch[chosen], return_counts=True)
        assert torch.equal(plain(present), expected[0]) and torch.equal(plain(counts), expected[1])
        assert torch.equal(plain(present[place]), plain(mine))
    assert torch.equal(plain(torch.unique(mine)), expected[0])


@ranks(1, 2, 3)
def test_unique_nodes_still_point_and_read_rows(comm):
    """A compact sum over the named senders, spread out again, is the sum over edges."""
    graph = RandomGraph(comm)
    x = quantised(graph.n)
    sender, receiver = graph.local_edge_index
    named, place = sender.unique(return_inverse=True)
    assert (named.points_at, named.end, place.points_at) == ("nodes", "sender", None)
    torch.testing.assert_close(plain(graph.nodes(x)[named][place]), x[graph.edge_index[0, graph.edges]])
    assert receiver.unique(return_counts=True)[1].rows is LOST


def scatter_sum(src, index, dim=-1, dim_size=None):
    """As torch_scatter's and torch_runstats' helpers are written."""
    shape = [1] * src.dim()
    shape[dim] = -1
    index = index.view(shape).expand_as(src)
    size = list(src.size())
    size[dim] = int(index.max()) + 1 if dim_size is None else dim_size
    return torch.zeros(size, dtype=src.dtype).scatter_add_(dim, index, src)


def scatter_mean(src, index, dim=-1, dim_size=None):
    total = scatter_sum(src, index, dim, dim_size)
    count = scatter_sum(torch.ones_like(src), index, dim, dim_size).clamp(min=1)
    return total / count


def scatter_softmax(src, index, dim=0, dim_size=None):
    shape = [-1, *[1] * (src.dim() - 1)]
    index = index.view(shape).expand_as(src)
    size = [dim_size, *src.shape[1:]]
    highest = torch.full(size, float("-inf"), dtype=src.dtype).scatter_reduce_(0, index, src, "amax")
    weights = (src - highest.gather(0, index)).exp()
    return weights / torch.zeros(size, dtype=src.dtype).scatter_add_(0, index, weights).gather(0, index)


@ranks(1, 2, 3)
@pytest.mark.parametrize("layout", ["owned", "padded", "sharded"])
def test_helpers_of_scatter_libraries_are_right_as_they_end_in_these(comm, layout):
    graph = RandomGraph(comm, n_systems=3, layout=layout)
    n, x, v = graph.n, quantised(graph.n), quantised(len(graph.edge_index[0]))
    for end, whole in zip(graph.local_edge_index, graph.edge_index, strict=True):
        n_rows = graph.nodes(x).shape[0]
        for helper in (scatter_sum, scatter_mean):
            found = helper(graph.edge(v), end, 0, n_rows)
            torch.testing.assert_close(graph.owned(found), helper(v, whole, 0, n)[graph.mine], **CLOSE)
        attention = scatter_softmax(graph.edge(v), end, 0, n_rows)
        torch.testing.assert_close(plain(attention), scatter_softmax(v, whole, 0, n)[graph.edges], **CLOSE)
    for helper in (scatter_sum, scatter_mean):
        found = helper(graph.nodes(x), graph.local_batch, 0)
        torch.testing.assert_close(plain(found), helper(x, graph.batch, 0), **CLOSE)
    with count_traffic(comm) as traffic:
        scatter_mean(graph.nodes(x), graph.local_batch, 0)
    assert (traffic.exchanges, traffic.reductions) == (0, 2)
