"""One model under every layout equals one process: energy, gradients of nodes and of a strain leaf."""

import pytest
import torch
from graphs import LAYOUTS, UNEVEN, RandomGraph

from alchemi_shardtensor import SYSTEM, plain
from alchemi_shardtensor.testing import EXACT, ranks

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
        message = torch.tanh(h[sender] - 0.3 * h[receiver]) / (1 + (x[sender] - x[receiver]).norm(dim=1, keepdim=True))
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
