"""What a shard remembers: never a reason for one rank to communicate and another not, and gone with the shard."""

import gc
import weakref
from contextlib import contextmanager

import pytest
import torch
from graphs import LAYOUTS, RandomGraph

from alchemi_shardtensor import GLOBAL, OWNED, Comm, ShardCache, plain, tag
from alchemi_shardtensor.storage import Snapshot
from alchemi_shardtensor.testing import EXACT, count_traffic, ranks
from alchemi_spec import MissingHandler

F64 = torch.float64


@contextmanager
def no_garbage_collection():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_shard_is_freed_with_its_last_tensor(layout):
    """Ghosts and cached features of old shards would fill the memory until the garbage collector ran."""
    with no_garbage_collection():
        graph = RandomGraph(Comm(), n=6, n_edges=9, layout=layout)
        x = graph.nodes(torch.rand(6, 3, dtype=F64)).requires_grad_()
        sender, receiver = graph.local_edge_index
        h = x * 2
        h = h * torch.repeat_interleave(torch.ones(2, 1, dtype=F64), graph.local_batch.bincount(), dim=0)
        h = h + torch.zeros_like(h).index_add(0, receiver, h[sender])
        energy = torch.zeros(2, dtype=F64).index_add(0, graph.local_batch, h.sum(-1))
        torch.autograd.grad(energy.sum(), x)
        alive = weakref.ref(graph.shard)
        del graph, x, h, sender, receiver, energy
        assert alive() is None


@ranks(2, 3)
def test_what_is_kept_of_a_feature_goes_with_it(comm):
    graph = RandomGraph(comm)
    x = graph.nodes(torch.rand(graph.n, 3, dtype=F64))
    with no_garbage_collection():
        for _ in range(3):
            h = torch.tanh(x)
            h[graph.local_edge_index[0]]
        kept = [t for t in graph.shard.cache.tensors if graph.shard.cache.known(t).with_ghosts is not None]
    assert len(kept) == 1 and kept[0] is h


@ranks(2, 3)
def test_untagged_inputs_that_differ_in_a_later_backward_pass_are_an_error_on_every_rank(comm):
    """One rank must not skip the question because its own shapes are those of the last time."""
    graph = RandomGraph(comm)

    def differentiate(n):
        scale = torch.ones(n, dtype=F64, requires_grad=True)
        x = graph.nodes(torch.rand(graph.n, 3, dtype=F64)) * scale.sum()
        return torch.autograd.grad(x.sum(), scale)

    differentiate(5)
    with pytest.raises(MissingHandler, match=r"shapes differ between ranks.*\(6,\)"):
        differentiate(5 + (comm.rank == 1))
    (gradient,) = differentiate(5)
    assert gradient.shape == (5,)


@ranks(1, 2, 3)
def test_plain_rows_of_all_atoms_are_told_from_those_of_a_rank_that_owns_all(comm):
    """The other ranks, which own nothing, would ask for rows that nobody sends."""
    graph = RandomGraph(comm, n=5, n_edges=8, owners=[0] * 5, layout="replicated")
    graph.nodes(torch.zeros(5, 1))  # from here on, tensors of all atoms are there
    whole = torch.rand(5, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = whole[graph.edge_index[0][graph.edges]]
    for x in (whole, whole[graph.mine]):
        assert (plain(x[graph.local_edge_index[0]]) - expected).abs().sum() < EXACT


def test_a_snapshot_matches_what_is_unchanged_and_nothing_else():
    x = torch.rand(4, 3)
    kept = Snapshot(x)
    assert kept.matches(x) and kept.matches(x.detach()) and kept.matches(x.view(4, 3))
    assert not any(map(kept.matches, (x.clone(), x[:3], x.t(), x.view(torch.int32), x[1:])))
    x += 1
    assert not kept.matches(x)


def test_no_other_memory_gets_the_address_of_what_is_remembered():
    """An address alone, of a tensor that was freed, would match the next tensor that gets it: on one rank only."""
    for _ in range(50):
        kept = Snapshot(torch.rand(1000))
        assert not kept.matches(torch.rand(1000))
    empty = Snapshot(torch.empty(0, 3))
    assert not empty.matches(torch.empty(0, 3))


def test_what_is_only_read_of_the_cache_leaves_no_entry():
    cache, x = ShardCache(), torch.rand(3)
    assert cache.known(x).with_ghosts is None and len(cache.tensors) == 0
    assert cache.of(x) is cache.of(x) and len(cache.tensors) == 1


@ranks(2)
def test_global_and_owned_rows_of_equal_number_are_told_apart_by_their_tags(comm):
    graph = RandomGraph(comm, n=4, n_edges=6, owners=[0] * 4, layout="replicated")
    x = torch.rand(4, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    with count_traffic(comm) as traffic:
        tag(x, graph.shard, GLOBAL)[graph.local_edge_index[0]]
        tag(x[graph.mine], graph.shard, OWNED)[graph.local_edge_index[0]]
    assert traffic.reductions == 0
