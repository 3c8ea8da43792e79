"""All rows that edges count, by the index that names them."""

import torch
from graphs import RandomGraph

from alchemi_shardtensor import plain, tag_all_rows
from alchemi_shardtensor.testing import EXACT, ranks

F64 = torch.float64


@ranks(1, 3)
def test_they_are_a_copy_whose_gradient_goes_home(comm):
    graph = RandomGraph(comm)
    x = graph.nodes(torch.randn(graph.n, 3, dtype=F64, generator=torch.Generator().manual_seed(0)))
    nodes = tag_all_rows(torch.arange(graph.routing.n_owned + graph.routing.n_ghost), x.shard)
    before = plain(x).clone()
    expected = graph.routing.with_ghosts(before)
    for _ in range(2):
        rows = x[nodes]
        assert torch.equal(plain(rows), expected)
        plain(rows).mul_(7)
        assert torch.equal(plain(x), before)
    leaf, weights = before.clone().requires_grad_(), torch.rand(len(nodes), 3, dtype=F64)
    (gradient,) = torch.autograd.grad((plain(leaf[nodes]) * weights).sum(), leaf)
    assert (gradient - graph.routing.reduce_ghosts(weights)).abs().max() < EXACT
