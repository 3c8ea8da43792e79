import copy
import pickle

import pytest
import torch
from graphs import RandomGraph
from torch import Tensor

from alchemi_shardtensor import (
    BOTH,
    EDGE,
    LOST,
    NODES,
    OWNED,
    RECEIVER,
    SENDER,
    SYSTEM,
    SYSTEMS,
    Comm,
    ShardTensor,
    handles,
    plain,
    points_at,
    prefetch_ghosts,
    tag,
)
from alchemi_shardtensor.testing import EXACT, count_traffic, ranks
from alchemi_spec import MissingHandler

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta")
F64 = torch.float64
OTHER_GATHERS = {
    "getitem": lambda x, i: x[i],
    "getitem_tuple": lambda x, i: x[i, :],
    "index_select": lambda x, i: x.index_select(0, i),
    "torch.index_select": lambda x, i: torch.index_select(x, 0, index=i),
    "gather": lambda x, i: x.gather(0, i.view(-1, 1).expand(-1, 3)),
    "take_along_dim": lambda x, i: x.take_along_dim(i[:, None], 0),
    "torch.take_along_dim": lambda x, i: torch.take_along_dim(x, i.view(-1, 1), dim=0),
    "F.embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "torch.embedding": lambda x, i: torch.embedding(x, i),
    "torch.gather": lambda x, i: torch.gather(x, -2, i[:, None].expand(-1, 3)),
}


def scatter_by(reduce, include_self):
    return lambda out, i, v: out.scatter_reduce(0, i.view(-1, 1).expand_as(v), v, reduce, include_self=include_self)


def index_by(reduce, include_self):
    return lambda out, i, v: out.index_reduce_(0, i, v, reduce, include_self=include_self)


OTHER_SCATTERS = {
    "scatter_add_": lambda out, i, v: out.scatter_add_(0, i.view(-1, 1).expand_as(v), v),
    "scatter_add": lambda out, i, v: out.scatter_add(0, i.view(-1, 1).expand_as(v), v),
    "torch.scatter_add": lambda out, i, v: torch.scatter_add(out, 0, index=i.view(-1, 1).expand_as(v), src=v),
    "index_add_": lambda out, i, v: out.index_add_(0, i, v),
    "index_add": lambda out, i, v: out.index_add(0, i, source=v),
    "scatter_reduce_": lambda out, i, v: out.scatter_reduce_(0, i.view(-1, 1).expand_as(v), v, reduce="sum"),
    "scatter_reduce": lambda out, i, v: out.scatter_reduce(0, i.view(-1, 1).expand_as(v), v, "sum"),
    "index_put_": lambda out, i, v: out.index_put_((i,), v, accumulate=True),
    "torch.index_put": lambda out, i, v: torch.index_put(out, (i[:, None], torch.tensor([2, 0, 1])), v, accumulate=True),
    **{f"scatter_{r}{s}": scatter_by(r, s) for r in ("mean", "amax", "amin") for s in (True, False)},
    **{f"index_{r}{s}": index_by(r, s) for r in ("mean", "amax", "amin") for s in (True, False)},
}


def values(comm, n, k=3):
    return comm.broadcast_object(torch.rand(n, k, dtype=F64))


@ranks(1, 2, 3)
@pytest.mark.parametrize("form", OTHER_GATHERS)
def test_a_gather_through_senders_exchanges_once_and_one_through_receivers_never(comm, form):
    graph, x = RandomGraph(comm), None
    x = values(comm, graph.n)
    gather = OTHER_GATHERS[form]
    leaf = graph.nodes(x).requires_grad_()
    sender, receiver = graph.local_edge_index
    with count_traffic(comm) as traffic:
        rows, own = gather(leaf, sender), gather(leaf, receiver)
    assert traffic.exchanges == (comm.size > 1)
    assert (rows.rows, own.rows) == (EDGE, EDGE)
    assert torch.equal(plain(rows), gather(x, graph.edge_index[0, graph.edges]))
    assert torch.equal(plain(own), gather(x, graph.edge_index[1, graph.edges]))


@ranks(1, 2, 3)
@pytest.mark.parametrize("form", OTHER_SCATTERS)
@pytest.mark.parametrize("row", [0, 1], ids=["senders", "receivers"])
def test_a_scatter_equals_one_process_with_a_non_zero_accumulator(comm, form, row):
    graph = RandomGraph(comm)
    v, start = values(comm, len(graph.edge_index[0])), values(comm, graph.n)
    scatter = OTHER_SCATTERS[form]
    expected = scatter(start.clone(), graph.edge_index[row], v)
    with count_traffic(comm) as traffic:
        out = scatter(plain(graph.nodes(start)), graph.local_edge_index[row], graph.edge(v))
    assert out.rows is OWNED
    if "a" not in form.rpartition("_")[2].replace("add", ""):  # a mean or an extreme asks more of the ranks
        assert (traffic.reverses, traffic.exchanges) == (row == 0 and comm.size > 1, 0)
    torch.testing.assert_close(plain(out), expected[graph.mine], rtol=0, atol=EXACT)


@ranks(1, 2, 3)
@pytest.mark.parametrize("form", OTHER_SCATTERS)
def test_a_scatter_through_the_batch_is_the_per_system_sum_on_every_rank(comm, form):
    graph = RandomGraph(comm, n_systems=3)
    v, start = values(comm, graph.n), values(comm, 3)
    scatter = OTHER_SCATTERS[form]
    out = scatter(start.clone(), graph.local_batch, graph.nodes(v))
    assert out.rows is SYSTEM
    torch.testing.assert_close(plain(out), scatter(start, graph.batch, v), rtol=0, atol=EXACT)


@ranks(1, 2)
def test_in_place_keeps_numbers_and_tag_when_its_result_is_dropped(comm):
    graph = RandomGraph(comm)
    v, out = values(comm, graph.n), torch.zeros(2, 3, dtype=F64)
    alias = out
    out.index_add_(0, graph.local_batch, graph.nodes(v))
    assert isinstance(alias, ShardTensor) and alias.rows is SYSTEM
    torch.testing.assert_close(plain(alias).sum(0), v.sum(0))


@ranks(2, 3)
def test_as_many_systems_as_rows_confuse_nothing(comm):
    """The index says what it points at, not the shapes."""
    owners = [r % comm.size for r in range(3 * comm.size)]
    graph = RandomGraph(comm, n=3 * comm.size, n_systems=3, owners=owners)
    v, per_system = values(comm, graph.n), values(comm, 3)
    assert graph.routing.n_owned == graph.n_systems
    spread = tag(per_system, graph.shard, SYSTEM)[graph.local_batch] * graph.nodes(v)
    out = torch.zeros(3, 3, dtype=F64).index_add_(0, graph.local_batch, spread)
    expected = torch.zeros(3, 3, dtype=F64).index_add_(0, graph.batch, per_system[graph.batch] * v)
    torch.testing.assert_close(plain(out), expected)


def toy_energy(x, edge_index, batch, strain, n_systems):
    """Two rounds of messages, a mid-network total that feeds back, and a strain leaf."""
    x = x + torch.einsum("ni,nij->nj", x, strain[batch])
    sender, receiver = edge_index[0], edge_index[1]
    h = x
    for _ in range(2):
        message = torch.tanh(h[sender] - 0.3 * h[receiver])
        h = h + torch.zeros_like(h).index_add_(0, receiver, message)
    charge = h[:, 0]
    excess = torch.zeros(n_systems, dtype=x.dtype).scatter_add_(0, batch, charge)
    charge = charge - 0.1 * excess[batch]
    return torch.zeros(n_systems, dtype=x.dtype).scatter_add_(-1, batch, charge**2 + h.sum(-1))


@ranks(1, 2, 3)
@pytest.mark.parametrize("owners", [None, [0] * 20 + [1, 1, 1]])
def test_energy_gradient_and_strain_gradient_equal_one_process(comm, owners):
    graph = RandomGraph(comm, owners=owners)
    x = values(comm, graph.n)
    whole, strain = x.clone().requires_grad_(), torch.zeros(2, 3, 3, dtype=F64, requires_grad=True)
    energy = toy_energy(whole, graph.edge_index, graph.batch, strain, 2)
    forces, stress = torch.autograd.grad(energy.sum(), [whole, strain])

    leaf, strain = graph.nodes(x).requires_grad_(), torch.zeros(2, 3, 3, dtype=F64, requires_grad=True)
    with count_traffic(comm) as traffic:
        shared = toy_energy(leaf, graph.local_edge_index, graph.local_batch, strain, 2)
        f, s = torch.autograd.grad(shared.sum(), [leaf, strain])
    assert (f.rows, s.rows) == (OWNED, SYSTEM)
    assert traffic.exchanges == traffic.reverses == (2 if comm.size > 1 else 0)
    torch.testing.assert_close(plain(shared), energy, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(plain(f), forces[graph.mine], rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(plain(s), stress, rtol=EXACT, atol=EXACT)


@ranks(1, 3)
def test_sums_and_means_over_rows_are_global(comm):
    graph = RandomGraph(comm)
    x, w = values(comm, graph.n), values(comm, len(graph.edge_index[0]))
    shared, edges = graph.nodes(x), graph.edge(w)
    for mine, whole in ((shared, x), (edges, w)):
        for reduce in (torch.sum, torch.mean):
            for dim in (None, 0, -2, (0, 1)):
                kwargs = {} if dim is None else {"dim": dim}
                result = reduce(mine, **kwargs)
                assert result.rows is SYSTEM
                torch.testing.assert_close(plain(result), reduce(whole, **kwargs))
    assert shared.sum(-1).rows is OWNED


@ranks(2)
def test_the_largest_index_counts_what_is_pointed_at_also_on_an_empty_rank(comm):
    graph = RandomGraph(comm, owners=[0] * 23)
    assert int(graph.local_batch.max()) + 1 == 2
    assert int(graph.local_edge_index.max()) + 1 == len(graph.mine)


ONE = RandomGraph(Comm(), n=6, n_edges=4)
THREE = RandomGraph(Comm(), n=3, n_edges=4)
X = torch.rand(6, 6, dtype=F64)


W = torch.rand(3, 3, 3, dtype=F64)
MINE = torch.tensor([0, 2, 5])
ROWS_KEPT = [
    lambda x: x * 2 + x[:, :1],
    lambda x: x.T,
    lambda x: x.mT,
    lambda x: x.t() + torch.ones(3, 1, dtype=F64),
    lambda x: x.transpose(0, 1).transpose(-1, 0),
    lambda x: x.permute(1, 0),
    lambda x: x.unsqueeze(0),
    lambda x: x.unsqueeze(1).squeeze(1),
    lambda x: x[None],
    lambda x: x[:, None, :, None],
    lambda x: x[..., 0],
    lambda x: x[..., None, 1:],
    lambda x: x[:, [2, 0]],
    lambda x: x[torch.arange(len(x)), (x[:, 0] > 0.5).long()],
    lambda x: torch.stack([x[:, 0], torch.zeros_like(x)[torch.arange(len(x)), (x[:, 0] > 0.5).long()]]).sum(0),
    lambda x: x[:, [[0, 1], [2, 0]]],
    lambda x: x.T[1:],
    lambda x: x.T[[2, 0, 1], None],
    lambda x: x.select(1, 2),
    lambda x: x.flatten(1),
    lambda x: x[:, :, None].expand(-1, 3, 3).reshape(len(x), -1),
    lambda x: x.view(-1, 3, 1),
    lambda x: x.movedim(0, 1),
    lambda x: x.expand(3, -1, -1),
    lambda x: x[:, 0] + W[0, :, :1],
    lambda x: torch.stack([x, x, x]),
    lambda x: torch.stack([x[:, 0]] * 3).sum(0),
    lambda x: torch.stack([x, x], dim=1),
    lambda x: torch.stack([x] * 3).sum(dim=0),
    lambda x: torch.cat([x, x], dim=-1),
    lambda x: torch.cat([x.T, x.T]),
    lambda x: torch.nn.functional.linear(x, W[0]),
    lambda x: x @ W[0],
    lambda x: W @ x.T,
    lambda x: W[0] @ x.mT,
    lambda x: x.unsqueeze(1) @ W[0],
    lambda x: torch.einsum("nk->kn", x),
    lambda x: torch.einsum("nk,kl->nl", x, W[0]),
    lambda x: torch.einsum("akl,nl->akn", W, x),
    lambda x: torch.einsum("...k,kl->...l", x, W[0]),
    lambda x: torch.einsum("a...,...k->ak...", W[:, :1, 0], x[:, None]),
    lambda x: x.unsqueeze(0).squeeze(0),
    lambda x: x.tile(2),
    lambda x: torch.nn.functional.normalize(x, dim=-1),
    lambda x: torch.nn.functional.layer_norm(x, (3,)),
    lambda x: x.T.cumsum(0),
    lambda x: W[0, 0] @ x.unsqueeze(-1).expand(-1, 3, 3),
    lambda x: x.T.unbind(0)[1],
    lambda x: torch.tensordot(x, W[0], dims=1),
    lambda x: torch.tensordot(W, x, dims=((1,), (-1,))),
    lambda x: x.sum(-1),
    lambda x: x.T.sum(0),
    lambda x: x.amax(1, keepdim=True),
    lambda x: x.max(1).values,
    lambda x: x.sort(1).values,
    lambda x: x.topk(2).values,
    lambda x: torch.linalg.vector_norm(x, dim=-1),
    lambda x: torch.linalg.norm(x, dim=1, keepdim=True),
    lambda x: torch.nn.functional.one_hot((x[:, 0] > 0.5).long(), 3),
    lambda x: W[0][(x[:, 0] > 0.5).long()],
    lambda x: W[:, (x[:, 0] > 0.5).long()],
    lambda x: W[(x[:, 0] > 0.5).long(), :, (x[:, 1] > 0.5).long()],
    lambda x: torch.nn.functional.embedding((x[:, 0] > 0.5).long(), W[0]),
    lambda x: W[0].index_select(1, (x[:, 0] > 0.5).long()),
    lambda x: x.softmax(-1),
    lambda x: torch.where(x > 0.5, x, 0.0),
    lambda x: torch.nn.functional.silu(x).to(torch.float32),
    lambda x: x.split(1, dim=1)[1],
    lambda x: torch.max(x, other=1 - x),
    lambda x: torch.zeros_like(x),
]


@pytest.mark.parametrize("number", range(len(ROWS_KEPT)))
def test_rows_are_where_the_tag_says_though_every_length_is_three(number):
    """The same operation on all six atoms, of which three are owned: the tagged dim picks them out."""
    whole = ROWS_KEPT[number](X[:, :3])
    share = ROWS_KEPT[number](tag(X[MINE, :3], THREE.shard, OWNED))
    assert share.rows is OWNED
    torch.testing.assert_close(plain(share), whole.index_select(share.row_dim, MINE), rtol=1e-14, atol=0)


@pytest.mark.parametrize("made", [lambda x: x.new_ones(3), lambda x: W.to(x), lambda x: W.type_as(x), lambda x: x.shape])
def test_what_only_borrows_a_type_or_a_shape_stays_plain(made):
    assert type(made(tag(X[MINE, :3], THREE.shard, OWNED))) is not ShardTensor


@ranks(1, 2, 3)
def test_any_selection_of_rows_sums_to_the_whole_selection(comm):
    """Also where a rank's selection is all, or none, of its atoms."""
    graph = RandomGraph(comm)
    x = values(comm, graph.n)
    shared = graph.nodes(x)
    for chosen in (x[:, 0] > 0.5, x[:, 0] > 2, graph.mine[0] <= torch.arange(graph.n)):
        chosen = comm.broadcast_object(chosen)
        torch.testing.assert_close(plain(shared[chosen[graph.mine]].sum()), x[chosen].sum())
        assert bool(graph.nodes(chosen).any()) == bool(chosen.any())
        assert bool(graph.nodes(chosen).all()) == bool(chosen.all())
    for part in (shared.flatten(), shared.view(-1), shared[None], shared.T, torch.cat(shared.split(2, dim=1), dim=1)):
        torch.testing.assert_close(plain(part.sum()), x.sum())


def filled(z, x):
    z[:] = x
    return z


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: torch.rand(6, 6, dtype=F64) @ x,
        lambda x: x[:, ONE.local_edge_index[0]],
        lambda x: x @ x.T,
        lambda x: torch.tensordot(x, x, 1),
        lambda x: torch.cdist(x, x),
        lambda x: x.topk(1, 0),
        lambda x: torch.einsum("ij,kj->ik", x, x),
        lambda x: torch.nn.functional.linear(x, x),
        lambda x: (x[:, 0].unsqueeze(1) - x[:, 0]).sum(),
        lambda x: torch.cumsum(x, 0).sum(),
        lambda x: x.cumsum_(0).sum(),
        lambda x: torch.nn.functional.batch_norm(x, None, None, training=True),
        lambda x: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
        lambda x: torch.nn.functional.normalize(x, dim=0),
        lambda x: torch.fft.fft(x, dim=0).abs().sum(),
        lambda x: x.flip(0).sum(),
        lambda x: x.roll(1, 0).sum(),
        lambda x: torch.linalg.qr(x)[0].sum(),
        lambda x: x[:1].sum(),
        lambda x: (x[1:] - x[:-1]).sum(),
        lambda x: x[[0, 2]].sum(),
        lambda x: torch.cat([x, torch.ones(1, 6, dtype=F64)]).sum(),
        lambda x: x.quantile(0.5, 0, keepdim=True).sum(),
        lambda x: x.unsqueeze_(0).sum(),
        lambda x: filled(torch.zeros(6, 6, dtype=F64), x).sum(),
        lambda x: x[0].sum(),
        lambda x: x.T.max(1),
        lambda x: x.argmax(),
        lambda x: x.split(2)[0].sum(),
        lambda x: x.chunk(2)[1].sum(),
        lambda x: x.view(-1, 12).sum(),
        lambda x: x[:, None] - x[None],
        lambda x: torch.zeros(2, dtype=F64).index_add_(0, ONE.local_batch, (x.roll(1, 0) * x).sum(1)),
        lambda x: torch.zeros(2, dtype=F64).index_add_(0, ONE.local_batch[1:], (x[1:] - x[:-1]).sum(1)),
        lambda x: x.flip(0)[ONE.local_edge_index[0]],
        lambda x: x.__setitem__(0, 0.0),
        lambda x: x.__setitem__(slice(2), 0.0),
        lambda x: tag(torch.zeros(2, 6), ONE.shard, SYSTEM).__setitem__(0, x[0]),
        lambda x: x[ONE.local_edge_index[:, 1:]].sum(),
        lambda x: torch.ops.aten.index_select(x, 0, ONE.local_edge_index[0]),
        lambda x: x.median(),
        lambda x: x.prod(0),
        lambda x: torch.linalg.norm(x, 2),
        lambda x: torch.linalg.vector_norm(x, float("inf")),
        lambda x: torch.zeros(2, 6, dtype=F64).scatter_reduce_(0, ONE.local_batch[:, None].expand(-1, 6), x, "prod"),
        lambda x: torch.einsum("ni,mi->nm", x, x),
        lambda x: torch.einsum("ni,nj->ij", x, torch.rand(6, 6, dtype=F64)),
        lambda x: x.take_along_dim(ONE.local_edge_index[0]),
        lambda x: torch.zeros(2, 6, dtype=F64).__setitem__(ONE.local_batch, x),
        lambda x: torch.zeros(2, dtype=F64).scatter_(0, ONE.local_batch, x[:, 0], reduce="add"),
        lambda x: x[[ONE.local_edge_index[0], ONE.local_edge_index[1]]],
    ],
)
def test_what_would_be_wrong_on_a_share_is_refused_with_the_fix(refused):
    with pytest.raises(MissingHandler, match="register|index|Sums, means|Add with|dim=0|by a mask|OpAdapter"):
        refused(tag(X.clone(), ONE.shard, OWNED))


def test_a_tensor_that_is_not_per_atom_is_not_indexed_by_atoms():
    with pytest.raises(MissingHandler, match=r"shape \(5, 2\).*\n.*plain"):
        torch.rand(5, 2)[ONE.local_edge_index[0]]


def test_an_argument_returned_as_it_is_stays_plain():
    weights = torch.rand(6, 3, dtype=F64)
    assert weights.to(tag(X, ONE.shard, OWNED)) is weights
    assert type(weights) is Tensor


def test_ends_of_an_edge_index():
    index = ONE.local_edge_index
    sender, receiver = index
    assert (sender.end, receiver.end) == (SENDER, RECEIVER)
    assert (index[0].end, index[-1].end) == (SENDER, RECEIVER)
    assert [i.end for i in index.unbind(0)] == [SENDER, RECEIVER]
    assert index[:, torch.tensor([2, 1])].end is BOTH and index.clone().end is BOTH
    assert index.flip(0).end == index[[1, 0]].end == torch.stack([receiver, sender]).end == (RECEIVER, SENDER)
    assert torch.equal(plain(index.flip(0)[1]), plain(sender)) and index.flip(0)[1].end is SENDER
    assert torch.cat([sender, receiver]).end is None and torch.cat([sender, receiver]).points_at is NODES
    assert index.flip(1).end is None and index.T.end is None
    assert receiver.view(-1, 1).expand(-1, 3).end is RECEIVER


def test_a_static_input_travels_once_until_it_is_changed():
    graph = ONE
    numbers = tag(torch.arange(6), graph.shard, OWNED)
    sender = graph.local_edge_index[0]
    first = numbers[sender]
    numbers.add_(1)
    assert torch.equal(plain(numbers[sender]), plain(first) + 1)


def test_handlers_of_one_table_do_not_reach_another():
    @handles(Tensor.__getitem__, when=points_at(SYSTEMS), rows=OWNED)
    def zeros(shard, op, input, index):
        return input[index] * 0

    other = RandomGraph(Comm(), n=6, n_edges=4)
    object.__setattr__(other.shard, "table", other.shard.table + [zeros])
    per_system = torch.ones(2)
    assert per_system[other.local_batch].sum() == 0
    assert per_system[ONE.local_batch].sum() == 6


def test_pickling_leaves_the_shard_behind():
    x = tag(X, ONE.shard, OWNED)
    assert type(pickle.loads(pickle.dumps(x))) is Tensor


@ranks(2)
def test_an_untagged_input_of_uneven_shape_is_an_error_on_every_rank(comm):
    graph = RandomGraph(comm, owners=[0] * 20 + [1, 1, 1])
    x = torch.rand(len(graph.mine), 3, dtype=F64, requires_grad=True)
    energy = torch.zeros(2, 3, dtype=F64).index_add(0, graph.local_batch, x)
    with pytest.raises(MissingHandler, match="differ between ranks"):
        torch.autograd.grad(energy.sum(), x)


@pytest.mark.parametrize("form", [lambda x: x.view(x.shape[0], -1), lambda x: x.reshape((len(x), -1, 2))])
def test_a_rank_without_rows_takes_the_shape_that_others_take(form):
    empty = tag(torch.empty(0, 3, 4), ONE.shard, OWNED)
    assert form(empty).shape[1:] == form(torch.empty(5, 3, 4)).shape[1:]
    assert form(empty).rows is OWNED


def test_parts_of_a_row_of_an_edge_index_still_point():
    index = ONE.local_edge_index
    assert (index[0][1:].points_at, index[0][1:].end) == (NODES, SENDER)
    for part in (index[0, :], index[0, ...], index[0, torch.tensor([True, False, True, True])]):
        assert (part.points_at, part.end, part.rows) == (NODES, SENDER, EDGE)
    assert index[1].sort().values.end is RECEIVER
    assert index[1].sort().indices.points_at is None and index[1].argsort().points_at is None


@ranks(1, 2, 3)
def test_systems_are_counted_on_all_ranks_together(comm):
    graph = RandomGraph(comm, n_systems=3)
    assert torch.equal(plain(torch.bincount(graph.local_batch)), torch.bincount(graph.batch))


@ranks(1, 2)
def test_two_reduced_terms_do_not_share_their_gradients(comm):
    """A collective that worked in place would overwrite what autograd shares between the two."""
    graph = RandomGraph(comm, n_systems=1)
    x = values(comm, graph.n)
    total = torch.ones(3)
    before = total.clone()
    comm.all_reduce(total)
    assert torch.equal(total, before)
    leaf = graph.nodes(x).requires_grad_()
    terms = [torch.zeros(1, dtype=F64).index_add_(0, graph.local_batch, (leaf**p).sum(1)) for p in (1, 2)]
    (g,) = torch.autograd.grad((terms[0] + terms[1]).sum(), leaf)
    torch.testing.assert_close(plain(g), 1 + 2 * x[graph.mine])


def test_gradients_of_leaves_of_different_shapes_one_after_the_other():
    energy = torch.zeros(2, dtype=F64).index_add(0, ONE.local_batch, X[:, 0])
    for shape in ((2, 3), (1,), (2, 3), (4, 3)):
        leaf = torch.ones(shape, dtype=F64, requires_grad=True)
        (g,) = torch.autograd.grad((energy.sum() * leaf).sum(), leaf)
        assert g.shape == shape


def test_means_of_half_precision_do_not_overflow():
    x = tag(torch.ones(80_000, 2, dtype=torch.float16), ONE.shard, OWNED)
    assert x.mean().item() == 1 and x.mean().dtype is torch.float16


def test_inference_mode_and_deepcopy():
    with torch.inference_mode():
        x = tag(torch.arange(6.0), ONE.shard, OWNED)
        assert x[ONE.local_edge_index[0]].rows is EDGE
    assert type(copy.deepcopy(tag(X, ONE.shard, OWNED))) is Tensor


@ranks(1, 2, 3)
def test_backward_leaves_the_whole_gradient_in_parameters_and_in_owned_rows(comm):
    """Twice, since gradients accumulate; the loss is the square of a per-system sum."""
    graph = RandomGraph(comm)
    x, weights = values(comm, graph.n), values(comm, 3)

    def loss(x, edge_index, batch, weights):
        h = torch.zeros_like(x).index_add_(0, edge_index[1], torch.tanh(x[edge_index[0]] @ weights))
        return (torch.zeros(2, dtype=F64).index_add_(0, batch, h.sum(1)) ** 2).sum()

    whole, w = x.clone().requires_grad_(), weights.clone().requires_grad_()
    mine, v = graph.nodes(x).requires_grad_(), weights.clone().requires_grad_()
    for _ in range(2):
        loss(whole, graph.edge_index, graph.batch, w).backward()
        loss(mine, graph.local_edge_index, graph.local_batch, v).backward()
    torch.testing.assert_close(plain(mine.grad), whole.grad[graph.mine], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(v.grad), w.grad, rtol=1e-12, atol=1e-12)
    loss(mine, graph.local_edge_index, graph.local_batch, v).backward(inputs=[v])
    torch.testing.assert_close(plain(v.grad), w.grad * 1.5, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(plain(mine.grad), whole.grad[graph.mine], rtol=1e-12, atol=1e-12)


def test_what_is_lost_stays_lost_whatever_it_meets():
    x = tag(X, ONE.shard, OWNED)
    total = tag(torch.ones(()), ONE.shard, SYSTEM)
    scalar = torch.nn.functional.mse_loss(x, x * 2)
    for lost in (scalar, scalar * 2, scalar + total, total * scalar, x * scalar, scalar * x, x[0] + x):
        assert lost.rows is LOST
    leaf = tag(X.clone(), ONE.shard, OWNED).requires_grad_()
    with pytest.raises(MissingHandler, match="one rank's part or the"):
        torch.autograd.grad(total + torch.nn.functional.mse_loss(leaf, leaf * 2), leaf)


@ranks(1, 2, 3, 4)
def test_a_gather_of_what_was_brought_sends_nothing_until_it_changes(comm):
    """Also on a rank without rows, where all empty tensors look alike."""
    graph = RandomGraph(comm, owners=[0] * 20 + [1, 1, 2])
    whole = torch.rand(graph.n, 3, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    mine, other = graph.nodes(whole.detach()), graph.nodes(-whole.detach())
    sender, shared = graph.local_edge_index[0], int(comm.size > 1)
    for change in (0, 1):
        plain(mine).add_(change)
        with count_traffic(comm) as traffic:
            prefetch_ghosts(graph.shard, plain(mine))
            leaf = mine.detach().requires_grad_()
            rows, others = leaf[sender], other.detach()[sender]
            (gradient,) = torch.autograd.grad((rows**3).sum() + others.sum(), leaf)
        assert (traffic.exchanges, traffic.reverses) == (2 * shared, shared)  # that of the other, too
        expected = (whole + change)[graph.edge_index[0]]
        torch.testing.assert_close(plain(rows), expected[graph.edges], rtol=0, atol=0)
        (wanted,) = torch.autograd.grad((expected**3).sum(), whole)
        torch.testing.assert_close(plain(gradient), wanted[graph.mine], rtol=1e-13, atol=1e-13)
    plain(mine).add_(1)
    with count_traffic(comm) as traffic:
        mine.detach()[sender]
    assert traffic.exchanges == shared
