"""The halo strategy: edges against brute force, and balance, for any cell and any number of ranks."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_halo import HaloStrategy
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import Comm
from alchemi_shardtensor.testing import ranks
from alchemi_spec import InvalidCell

F64 = torch.float64
CU_SHEAR = torch.tensor([[1, 0, 0], [0.9, 1, 0], [0.8, 0.7, 1]], dtype=F64)


def fcc(a, repeats):
    """Cubic fcc: positions (4 n^3, 3), cell (1, 3, 3)."""
    basis = torch.tensor([[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]], dtype=F64)
    cells = torch.tensor(list(itertools.product(range(repeats), repeat=3)), dtype=F64)
    positions = ((basis[None] + cells[:, None]) * a).reshape(-1, 3)
    return positions, torch.eye(3, dtype=F64)[None] * a * repeats


def brute_force(positions, cell, pbc, cutoff):
    """Every (receiver, sender, S) with |x[sender] + S @ cell - x[receiver]| < cutoff, without a neighbour list."""
    frames = LatticeFrames.of(cell[None], pbc[None])
    spread = (positions @ frames.inverse[0]).amax(0) - (positions @ frames.inverse[0]).amin(0)
    most = [int(cutoff / h + s) + 1 if p else 0 for h, s, p in zip(frames.heights[0], spread, pbc, strict=True)]
    shifts = torch.tensor(list(itertools.product(*[range(-m, m + 1) for m in most])), dtype=F64)
    images = positions[:, None] + shifts @ torch.where(pbc[:, None], cell, 0.0)
    d = (images[None] - positions[:, None, None]).norm(dim=-1)
    same = torch.eye(len(positions), dtype=torch.bool)[..., None] & (shifts == 0).all(-1)
    r, s, k = ((d < cutoff) & ~same).nonzero().unbind(1)
    return {(int(a), int(b), *map(int, shifts[c])) for a, b, c in zip(r, s, k, strict=True)}


BISECTION = HaloStrategy()


def edges_of_all_ranks(comm, positions, batch, cell, pbc, cutoff, halo=BISECTION):
    """The edges of all ranks by global ids, which the routing exchanges, and the number of atoms that each rank owns."""
    some = slice(comm.rank, None, comm.size)  # any part of the atoms will do
    partition = halo.partition(positions[some], batch[some], cell, pbc, comm)
    mine = (partition.owners(positions, batch, cell, pbc) == comm.rank).nonzero().flatten()
    routing, (sender, receiver), shifts = halo.build_neighbour_list(positions[mine], batch[mine], cell, pbc, cutoff, comm)
    ids = routing.with_ghosts(mine)
    assert len(ids) == routing.n_owned + routing.n_ghost == len(ids.unique())
    assert torch.equal(receiver, receiver.sort().values)
    edges = [(int(ids[r]), int(ids[s]), *map(int, k)) for r, s, k in zip(receiver, sender, shifts, strict=True)]
    everyone = comm.gather_objects((edges, len(mine)))
    return [e for part, _ in everyone for e in part], [n for _, n in everyone]


def same_edges(comm, positions, cell, pbc, cutoff):
    found, _ = edges_of_all_ranks(comm, positions, torch.zeros(len(positions), dtype=torch.long), cell[None], pbc[None], cutoff)
    assert len(found) == len(set(found))
    assert set(found) == brute_force(positions, cell, pbc, cutoff)
    return len(found)


def rattled(positions, amount, seed):
    return positions + amount * torch.randn(positions.shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


ALL = torch.tensor([True, True, True])


@ranks(1, 2, 3, 4)
def test_case_8_strongly_sheared_copper(comm):
    positions, cell = fcc(3.6, 2)
    positions, cell = rattled(positions @ CU_SHEAR, 0.1, 1), cell[0] @ CU_SHEAR
    same_edges(comm, positions, cell, ALL, 5.0)


def random_system(seed):
    """1 to 40 atoms anywhere; angles from 25 to 155 degrees, also left-handed cells, every mix of pbc."""
    g = torch.Generator().manual_seed(seed)
    n = int(torch.randint(1, 41, (1,), generator=g))
    while True:
        angles = torch.deg2rad(25 + 130 * torch.rand(3, generator=g, dtype=F64))
        lengths = 2.5 + 6 * torch.rand(3, generator=g, dtype=F64)
        (ca, cb, cc), sc = angles.cos(), angles[2].sin()
        cy = (ca - cb * cc) / sc
        cz2 = 1 - cb**2 - cy**2
        if cz2 > 0.02:
            break
    zero = torch.zeros((), dtype=F64)
    cell = torch.stack([torch.stack([zero + 1, zero, zero]), torch.stack([cc, sc, zero]), torch.stack([cb, cy, cz2.sqrt()])])
    cell = cell * lengths[:, None]
    if torch.rand(1, generator=g) < 0.5:
        cell = cell.flip(0)
    pbc = torch.rand(3, generator=g) < 0.6
    positions = (torch.rand(n, 3, generator=g, dtype=F64) * 5 - 2) @ cell
    return positions, cell, pbc


@ranks(1, 2, 3, 4)
def test_case_8_random_cells(comm):
    for seed in range(25):
        positions, cell, pbc = random_system(seed)
        same_edges(comm, positions, cell, pbc, 3.5)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**31))
def test_case_8_more_random_cells_on_one_rank(seed):
    positions, cell, pbc = random_system(seed)
    same_edges(Comm(), positions, cell, pbc, 3.0)


@ranks(1, 2)
def test_case_6_a_cell_much_smaller_than_the_cutoff(comm):
    a = 3.6
    primitive = torch.tensor([[0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=F64) * a
    assert same_edges(comm, torch.zeros(1, 3, dtype=F64), primitive, ALL, 6.0) == 78


@ranks(12, timeout=240)
def test_case_6_slabs_thinner_than_the_cutoff(comm):
    positions = torch.rand(96, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) * torch.tensor([8.0, 8.0, 60.0])
    cell = torch.diag(torch.tensor([8.0, 8.0, 60.0], dtype=F64))
    same_edges(comm, positions, cell, ALL, 6.0)


@ranks(1, 2)
@pytest.mark.parametrize("pbc", [ALL, ~ALL], ids=["periodic", "open"])
def test_atoms_thousands_of_ångströms_apart(comm, pbc):
    side = 4000.0
    near = torch.tensor([[0.02, 0.16, side - 1.68], [side - 1, side - 0.6, side - 0.04], [side - 1.1, side, 0.3]], dtype=F64)
    cell = torch.eye(3, dtype=F64) * side
    found, _ = edges_of_all_ranks(comm, near, torch.zeros(3, dtype=torch.long), cell[None], pbc[None], 4.5)
    assert set(found) == brute_force(near, cell, pbc, 4.5) and len(found) == (6 if pbc.all() else 0)
    thin = torch.diag(torch.tensor([side, side, 3.0], dtype=F64))
    flat = torch.cat([near, near[:1] + torch.tensor([2.0, 1, 1])]) % 3990.0
    found, _ = edges_of_all_ranks(comm, flat, torch.zeros(4, dtype=torch.long), thin[None], pbc[None], 4.5)
    assert set(found) == brute_force(flat, thin, pbc, 4.5) and found


@ranks(3)
def test_no_edge_connects_two_systems_of_a_batch(comm):
    systems = [random_system(seed) for seed in (3, 4, 5)]
    positions = torch.cat([p for p, _, _ in systems])
    sizes = torch.tensor([len(p) for p, _, _ in systems])
    batch = torch.repeat_interleave(torch.arange(3), sizes)
    cell, pbc = torch.stack([c for _, c, _ in systems]), torch.stack([p for _, _, p in systems])
    found, _ = edges_of_all_ranks(comm, positions, batch, cell, pbc, 3.5)
    expected = set()
    for (p, c, periodic), first in zip(systems, [0, *sizes.cumsum(0).tolist()], strict=False):
        expected |= {(r + first, s + first, *k) for r, s, *k in brute_force(p, c, periodic, 3.5)}
    assert len(found) == len(set(found)) and set(found) == expected


@ranks(1, 3)
@pytest.mark.parametrize("depth", [2, 3])
def test_a_list_of_depth_2_or_more_also_has_the_edges_of_senders(comm, depth):
    systems, cutoff = [random_system(seed) for seed in (3, 8)], 2.5
    positions = torch.cat([p for p, _, _ in systems])
    batch = torch.repeat_interleave(torch.arange(2), torch.tensor([len(p) for p, _, _ in systems]))
    cell, pbc = torch.stack([c for _, c, _ in systems]), torch.stack([p for _, _, p in systems])
    first = len(systems[0][0])
    every = brute_force(*systems[0], cutoff) | {(r + first, s + first, *k) for r, s, *k in brute_force(*systems[1], cutoff)}
    partition = BISECTION.partition(positions, batch, cell, pbc, Comm(), n_ranks=comm.size)
    mine = (partition.owners(positions, batch, cell, pbc) == comm.rank).nonzero().flatten()
    routing, (sender, receiver), shifts = BISECTION.build_neighbour_list(
        positions[mine], batch[mine], cell, pbc, cutoff, comm, depth
    )
    ids, receivers = routing.with_ghosts(mine), set(mine.tolist())
    for _ in range(depth - 1):
        receivers |= {s for r, s, *_ in every if r in receivers}
    found = [(int(ids[r]), int(ids[s]), *map(int, k)) for r, s, k in zip(receiver, sender, shifts, strict=True)]
    assert len(found) == len(set(found)) and set(found) == {edge for edge in every if edge[0] in receivers}


def slab(g):
    return fcc(3.6, 6)[0] * torch.tensor([1, 1, 0.5]), torch.diag(torch.tensor([21.6, 21.6, 70], dtype=F64)), ALL


def cluster(g):
    return torch.randn(2000, 3, dtype=F64, generator=g) * 8, torch.zeros(3, 3, dtype=F64), ~ALL


def density_step(g):
    thin, dense = torch.rand(300, 3, dtype=F64, generator=g), torch.rand(2700, 3, dtype=F64, generator=g)
    both = torch.cat([thin, dense * torch.tensor([0.2, 1, 1]) + torch.tensor([0.8, 0, 0])])
    cell = torch.tensor([[40, 0, 0], [12, 30, 0], [-9, 5, 25]], dtype=F64)
    return both @ cell, cell, ALL


def crystal(g):
    positions, cell = fcc(3.6, 8)
    return positions, cell[0], ALL


def gas(g):
    pbc = torch.tensor([True, False, True])
    return torch.rand(1000, 3, dtype=F64, generator=g) * 30 - 50, torch.eye(3, dtype=F64) * 30, pbc


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 7, 13, 64])
@pytest.mark.parametrize("shape", [slab, cluster, density_step, crystal, gas])
def test_case_19_owned_atoms_are_balanced(n_ranks, shape):
    positions, cell, pbc = shape(torch.Generator().manual_seed(0))
    batch, one = torch.zeros(len(positions), dtype=torch.long), (cell[None], pbc[None])
    partition = HaloStrategy().partition(positions, batch, *one, Comm(), n_ranks=n_ranks)
    counts = torch.bincount(partition.owners(positions, batch, *one), minlength=n_ranks)
    mean = len(positions) / n_ranks
    assert counts.sum() == len(positions) and counts.max() <= max(1.02 * mean, mean + 1) and counts.min() >= 0.95 * mean - 1


@ranks(3)
def test_the_planes_do_not_depend_on_which_rank_had_the_atoms(comm):
    positions, cell, pbc = density_step(torch.Generator().manual_seed(0))
    batch, one = torch.zeros(len(positions), dtype=torch.long), (cell[None], pbc[None])
    mine = torch.arange(len(positions)) % 2 == comm.rank  # rank 2 has none
    split, alone = (
        HaloStrategy().partition(positions[rows], batch[rows], *one, by, n_ranks=7).owners(positions, batch, *one)
        for rows, by in ((mine, comm), (slice(None), Comm()))
    )
    assert torch.equal(split, alone) and len(alone.unique()) == 7


def test_weights_are_balanced_instead_of_numbers_of_atoms():
    g = torch.Generator().manual_seed(0)
    positions, batch = torch.rand(4000, 3, dtype=F64, generator=g) * 20, torch.zeros(4000, dtype=torch.long)
    weights = torch.where(positions[:, 0] < 5, 9.0, 1.0) * 1.7e-6  # for example seconds
    one = torch.eye(3, dtype=F64)[None] * 20, ALL[None]
    owner = HaloStrategy().partition(positions, batch, *one, Comm(), weights, n_ranks=5).owners(positions, batch, *one)
    loads = torch.zeros(5).index_add_(0, owner, weights.float())
    assert loads.max() / loads.mean() < 1.02 and torch.bincount(owner).max() > 1.5 * 800


def test_the_planes_move_with_the_cell():
    positions, cell, pbc = crystal(None)
    batch = torch.zeros(len(positions), dtype=torch.long)
    partition = HaloStrategy().partition(positions, batch, cell[None], pbc[None], Comm(), n_ranks=6)
    strain = torch.eye(3, dtype=F64) + torch.tensor([[0.1, 0.05, 0], [0, -0.1, 0.02], [0, 0, 0.03]])
    before = partition.owners(positions, batch, cell[None], pbc[None])
    inner = positions + 1e-3  # off the faces of the cell, where round-off decides
    before = partition.owners(inner, batch, cell[None], pbc[None])
    assert torch.equal(before, partition.owners(inner @ strain, batch, (cell @ strain)[None], pbc[None]))


@pytest.mark.parametrize("sizes", [[300, 30, 300], [40] * 3, [1000, 1], [5], [0, 7, 0, 90]])
def test_as_few_systems_of_a_batch_as_possible_are_divided(sizes):
    batch = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    positions = torch.rand(len(batch), 3, dtype=F64) * 10
    many = torch.eye(3, dtype=F64).repeat(len(sizes), 1, 1) * 10, ALL.repeat(len(sizes), 1)
    owner = HaloStrategy().partition(positions, batch, *many, Comm(), n_ranks=4).owners(positions, batch, *many)
    assert torch.bincount(owner, minlength=4).max() <= len(batch) / 4 + 2
    assert len(torch.stack([batch, owner]).unique(dim=1)[0]) <= len(sizes) + 4


def test_many_systems_stay_whole():
    sizes = torch.randint(1, 60, (50,), generator=torch.Generator().manual_seed(0))
    batch = torch.repeat_interleave(torch.arange(50), sizes)
    many = torch.zeros(50, 3, 3, dtype=F64), torch.zeros(50, 3, dtype=torch.bool)
    positions = torch.rand(len(batch), 3, dtype=F64)
    owner = HaloStrategy().partition(positions, batch, *many, Comm(), n_ranks=4).owners(positions, batch, *many)
    assert torch.bincount(owner).max() <= 1.15 * len(batch) / 4
    assert len(torch.stack([batch, owner]).unique(dim=1)[0]) == 50


@ranks(4)
@pytest.mark.parametrize("shape", [None, (4, 1, 1), (1, 2, 2)])
def test_a_processor_grid_finds_the_same_edges(comm, shape):
    for seed in range(5):
        positions, cell, pbc = random_system(seed)
        batch, grid = torch.zeros(len(positions), dtype=torch.long), HaloStrategy("grid", shape)
        found, _ = edges_of_all_ranks(comm, positions, batch, cell[None], pbc[None], 3.5, grid)
        assert len(found) == len(set(found)) and set(found) == brute_force(positions, cell, pbc, 3.5)


def test_a_processor_grid_has_the_smallest_surface_and_as_many_parts_as_ranks():
    cell, pbc = torch.diag(torch.tensor([80.0, 20, 20], dtype=F64))[None], ALL[None]
    positions, batch = torch.rand(5000, 3, dtype=F64) @ cell[0], torch.zeros(5000, dtype=torch.long)
    grid = HaloStrategy("grid").partition(positions, batch, cell, pbc, Comm(), n_ranks=16)
    assert grid.shape.tolist() == [[4, 2, 2]]
    owner = grid.owners(positions, batch, cell, pbc)
    x, y, z = (positions / torch.tensor([20.0, 10, 10])).floor().long().unbind(1)
    assert torch.equal(owner, (x * 2 + y) * 2 + z)
    with pytest.raises(ValueError, match=r"\(2, 2, 1\) has 4 parts, but there are 16"):
        HaloStrategy("grid", (2, 2, 1)).partition(positions, batch, cell, pbc, Comm(), n_ranks=16)


@ranks(5, 7, 13, timeout=240)
def test_case_19_no_ghost_is_missing_on_a_prime_number_of_ranks(comm):
    for positions, cell in (fcc(3.6, 3), (slab(None)[0][::3], slab(None)[1][None])):
        same_edges(comm, rattled(positions, 0.1, 0), cell[0], ALL, 4.0)


@ranks(1, 4)
def test_a_thin_region_of_a_wide_cell_and_atoms_far_outside_the_cell(comm):
    g = torch.Generator().manual_seed(0)
    cell = torch.tensor([[60.0, 0, 0], [20, 9, 0], [5, 3, 30]], dtype=F64)
    positions = (torch.rand(70, 3, dtype=F64, generator=g) + torch.randint(-1, 2, (70, 3), generator=g)) @ cell
    same_edges(comm, positions, cell, ALL, 4.0)


@pytest.mark.parametrize(
    "cell",
    [torch.zeros(3, 3), torch.ones(3, 3), torch.tensor([[4.0, 0, 0], [0, 4, 0], [0, 0, torch.nan]]), torch.eye(3) * 1e-4],
)
def test_a_cell_without_a_volume_is_refused(cell):
    with pytest.raises(InvalidCell, match="system 1"):
        LatticeFrames.of(torch.stack([torch.eye(3) * 4, cell]), torch.stack([ALL, ALL]))


def test_a_cell_vector_that_is_not_periodic_is_ignored():
    pbc = torch.tensor([[True, False, True]])
    cell = torch.tensor([[[4.0, 0, 0], [torch.nan, 0, 0], [1, 0, 5]]])
    frame = LatticeFrames.of(cell, pbc)
    torch.testing.assert_close(frame.vectors[0, 1].abs(), torch.tensor([0, 1, 0], dtype=F64))
    torch.testing.assert_close(frame.vectors[0, 0], torch.tensor([4, 0, 0], dtype=F64))
