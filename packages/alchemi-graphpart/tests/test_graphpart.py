"""Graph partition: balanced blocks, atoms that never migrate, and each rank's edges and routing, against one rank."""

import itertools

import pytest
import torch

from alchemi_graphpart import GraphPartitionStrategy, hilbert_curve, strategy
from alchemi_graphpart.strategy import balanced_blocks
from alchemi_halo import HaloStrategy
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import Comm
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import StrategyKind

F64 = torch.float64
ALL = torch.tensor([[True] * 3])
SHEARED = torch.tensor([[9.0, 0, 0], [8.1, 9.5, 0], [-7.0, 6.0, 10.0]], dtype=F64)
CELLS = {
    "triclinic": (SHEARED, ALL),
    "left-handed": (SHEARED[[1, 0, 2]], ALL),
    "smaller than the cutoff": (SHEARED / 3, ALL),
    "slab": (SHEARED, torch.tensor([[True, True, False]])),
    "molecule": (0 * SHEARED, ~ALL),
}
EVERY = [GraphPartitionStrategy(), GraphPartitionStrategy("index")]


def anywhere(n, cell, seed=0):
    """n atoms in the cell and up to two cells away."""
    g = torch.Generator().manual_seed(seed)
    box = torch.where(cell.abs().sum() > 0, cell, 9 * torch.eye(3, dtype=F64))
    return (torch.rand(n, 3, dtype=F64, generator=g) + torch.randint(-2, 3, (n, 3), generator=g)) @ box


def edges_of_all_ranks(comm, chosen, positions, batch, cell, pbc, cutoff, depth=1):
    """The edges of all ranks by global ids, which the routing exchanges, and the number of atoms that each rank owns."""
    some = torch.arange(len(batch))[comm.rank :: comm.size]
    partition = chosen.partition(positions[some], batch[some], cell, pbc, comm, ids=some)
    mine = (partition.owners(positions, batch, cell, pbc, torch.arange(len(batch))) == comm.rank).nonzero().flatten()
    routing, (sender, receiver), shifts = chosen.build_neighbour_list(
        positions[mine], batch[mine], cell, pbc, cutoff, comm, depth
    )
    ids = routing.with_ghosts(mine)
    assert len(ids) == routing.n_owned + routing.n_ghost == len(ids.unique())
    assert torch.equal(receiver, receiver.sort().values) and (depth > 1 or (receiver < len(mine)).all())
    edges = [(int(ids[r]), int(ids[s]), *map(int, k)) for r, s, k in zip(receiver, sender, shifts, strict=True)]
    gathered = comm.gather_objects((edges, len(mine)))
    return [e for part, _ in gathered for e in part], [n for _, n in gathered]


@ranks(1, 2, 3, 4)
def test_edges_equal_those_of_the_halo_strategy_for_any_cell(comm):
    for chosen, (name, (cell, pbc)) in itertools.product(EVERY, CELLS.items()):
        positions, batch = anywhere(24, cell), torch.zeros(24, dtype=torch.long)
        found, owned = edges_of_all_ranks(comm, chosen, positions, batch, cell[None], pbc, 5.0)
        _, (s, r), shifts = HaloStrategy().build_neighbour_list(positions, batch, cell[None], pbc, 5.0, Comm())
        assert len(found) == len(set(found)) > 0, name
        assert set(found) == {(int(a), int(b), *map(int, k)) for a, b, k in zip(r, s, shifts, strict=True)}, name
        assert max(owned) - min(owned) <= 1


@ranks(4)
def test_blocks_of_a_batch_are_equal_and_no_rank_is_empty_if_there_are_enough_atoms(comm):
    for chosen, sizes in itertools.product(EVERY, [(5, 1, 9), (1, 1), (3, 0, 1), (4,)]):
        batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        cell = SHEARED.expand(len(sizes), 3, 3)
        _, owned = edges_of_all_ranks(comm, chosen, anywhere(len(batch), SHEARED), batch, cell, ALL.expand(len(sizes), 3), 4.0)
        assert sum(n > 0 for n in owned) == min(4, len(batch)) and max(owned) - min(owned) <= 1


@ranks(3)
def test_a_list_of_depth_2_also_has_the_edges_of_senders(comm):
    cell, n = 2 * SHEARED[None], 30
    positions, batch = anywhere(n, cell[0]), torch.zeros(n, dtype=torch.long)
    whole, _ = edges_of_all_ranks(comm, EVERY[0], positions, batch, cell, ALL, 4.0)
    partition = EVERY[0].partition(
        positions[comm.rank :: 3], batch[comm.rank :: 3], cell, ALL, comm, ids=torch.arange(n)[comm.rank :: 3]
    )
    mine = (partition.rank == comm.rank).nonzero().flatten()
    routing, (sender, receiver), shifts = EVERY[0].build_neighbour_list(
        positions[mine], batch[mine], cell, ALL, 4.0, comm, depth=2
    )
    ids = routing.with_ghosts(mine)
    found = {(int(ids[r]), int(ids[s]), *map(int, k)) for r, s, k in zip(receiver, sender, shifts, strict=True)}
    owned = set(mine.tolist())
    reached = owned | {s for r, s, *_ in whole if r in owned}
    assert found == {edge for edge in whole if edge[0] in reached} and len(found) > sum(edge[0] in owned for edge in whole)


@ranks(3)
def test_atoms_stay_with_their_owners_wherever_they_move(comm):
    ids, batch = torch.arange(comm.rank, 40, 3), torch.zeros(40, dtype=torch.long)
    positions = anywhere(40, SHEARED)
    partition = EVERY[0].partition(positions[ids], batch[ids], SHEARED[None], ALL, comm, ids=ids)
    before = partition.owners(positions[ids], batch[ids], SHEARED[None], ALL, ids)
    assert torch.equal(before, partition.owners(7 * positions[ids] + 3, batch[ids], 2 * SHEARED[None], ~ALL, ids))
    assert all(torch.equal(partition.rank, other) for other in comm.gather_objects(partition.rank))


@ranks(2)
def test_only_rows_that_edges_read_are_sent_and_each_rank_searches_its_own_receivers(comm):
    searched, search = [], strategy.neighbour_list
    strategy.neighbour_list = lambda points, rows, *rest: searched.append(len(rows)) or search(points, rows, *rest)
    try:
        cell = 6 * torch.eye(3, dtype=F64)
        chain = torch.stack([torch.arange(40.0, dtype=F64), *torch.zeros(2, 40, dtype=F64)], dim=1)
        mine = torch.arange(20) + 20 * comm.rank
        batch = torch.zeros(20, dtype=torch.long)
        edges = GraphPartitionStrategy("index").build_neighbour_list(chain[mine], batch, cell[None], ~ALL, 1.5, comm)
    finally:
        strategy.neighbour_list = search
    assert searched == [20] and edges.edge_index.shape[1] == 39
    with count_traffic(comm) as traffic:
        ghosts = edges.routing.exchange(chain[mine])
    assert ghosts[:, 0].tolist() == [20.0 if comm.rank == 0 else 19.0] and traffic.bytes == 24


def test_fewer_edges_cross_ranks_along_the_curve_than_with_a_shuffled_index():
    g = torch.Generator().manual_seed(0)
    positions, batch, cell = (
        30 * torch.rand(2000, 3, dtype=F64, generator=g),
        torch.zeros(2000, dtype=torch.long),
        30.0 * torch.eye(3),
    )
    _, (s, r), _ = HaloStrategy().build_neighbour_list(positions, batch, cell[None], ALL, 4.0, Comm())
    order = hilbert_curve.hilbert_index(positions, batch, LatticeFrames.of(cell[None], ALL)).argsort()
    crossing = {}
    for name, line in {"curve": order, "index": torch.arange(2000)}.items():
        owner = torch.empty(2000, dtype=torch.long)
        owner[line] = balanced_blocks(torch.ones(2000, dtype=F64), 8)
        crossing[name] = (owner[s] != owner[r]).double().mean()
    assert crossing["curve"] < 0.45 < 0.8 < crossing["index"]


def test_the_curve_is_a_closed_hilbert_curve():
    bits = 3
    grid = torch.cartesian_prod(*[torch.arange(2**bits)] * 3) << (hilbert_curve.BITS - bits)
    index = hilbert_curve._index_of(grid)
    walk = grid[index.argsort()] >> (hilbert_curve.BITS - bits)
    steps = walk.diff(dim=0).abs().sum(1)
    assert len(index.unique()) == len(grid) and (steps == 1).all()  # each step goes to a neighbour
    ends = (walk[0] - walk[-1]).abs() % (2**bits - 1)
    assert not ends.any()  # its ends meet at a face of the periodic cell


@pytest.mark.parametrize("n_ranks", [1, 2, 5, 8])
def test_blocks_have_equal_weights_and_no_rank_is_empty(n_ranks):
    g = torch.Generator().manual_seed(0)
    for weights in (torch.ones(40), torch.rand(40, generator=g), torch.tensor([1000.0] + [1.0] * 11), torch.ones(3)):
        owner = balanced_blocks(weights.double(), n_ranks)
        assert torch.equal(owner, owner.sort().values)
        assert len(owner.unique()) == min(n_ranks, len(weights))
    even = torch.bincount(balanced_blocks(torch.rand(4000, generator=g).double() + 0.5, n_ranks), minlength=n_ranks)
    assert even.max() < 1.05 * even.double().mean()


def test_the_strategy_declares_its_kind():
    assert all(chosen.kind is StrategyKind.GRAPH_PARTITION for chosen in EVERY)
