"""Edges against brute force, on any cell and any number of ranks."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alchemi_halo import Frames, HaloStrategy
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
    """Every (receiver, sender, S) with |x[sender] + S @ cell - x[receiver]| < cutoff, no list library involved."""
    frames = Frames.of(cell[None], pbc[None])
    spread = (positions @ frames.inverse[0]).amax(0) - (positions @ frames.inverse[0]).amin(0)
    most = [int(cutoff / h + s) + 1 if p else 0 for h, s, p in zip(frames.heights[0], spread, pbc, strict=True)]
    shifts = torch.tensor(list(itertools.product(*[range(-m, m + 1) for m in most])), dtype=F64)
    images = positions[:, None] + shifts @ torch.where(pbc[:, None], cell, 0.0)
    d = (images[None] - positions[:, None, None]).norm(dim=-1)
    same = torch.eye(len(positions), dtype=torch.bool)[..., None] & (shifts == 0).all(-1)
    r, s, k = ((d < cutoff) & ~same).nonzero().unbind(1)
    return {(int(a), int(b), *map(int, shifts[c])) for a, b, c in zip(r, s, k, strict=True)}


def shared_edges(comm, positions, batch, cell, pbc, cutoff):
    """The edges of all ranks by global ids, through the routing itself; and the owned and ghost counts."""
    halo = HaloStrategy()
    owner = halo.owners(positions, batch, cell, pbc, comm.size)
    mine = (owner == comm.rank).nonzero().flatten()
    routing, (sender, receiver), shifts = halo.connect(positions[mine], batch[mine], cell, pbc, cutoff, comm)
    ids = routing.padded(mine)
    assert len(ids) == routing.n_owned + routing.n_ghost == len(ids.unique())
    assert torch.equal(receiver, receiver.sort().values)
    edges = [(int(ids[r]), int(ids[s]), *map(int, k)) for r, s, k in zip(receiver, sender, shifts, strict=True)]
    everyone = comm.gather_objects((edges, len(mine)))
    return [e for part, _ in everyone for e in part], [n for _, n in everyone]


def same_edges(comm, positions, cell, pbc, cutoff):
    found, _ = shared_edges(comm, positions, torch.zeros(len(positions), dtype=torch.long), cell[None], pbc[None], cutoff)
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
    """1 to 40 atoms anywhere, angles from 25 to 155 degrees, left-handed too, every mix of pbc."""
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


@ranks(3)
def test_systems_of_a_batch_do_not_see_each_other(comm):
    systems = [random_system(seed) for seed in (3, 4, 5)]
    positions = torch.cat([p for p, _, _ in systems])
    sizes = torch.tensor([len(p) for p, _, _ in systems])
    batch = torch.repeat_interleave(torch.arange(3), sizes)
    cell, pbc = torch.stack([c for _, c, _ in systems]), torch.stack([p for _, _, p in systems])
    found, _ = shared_edges(comm, positions, batch, cell, pbc, 3.5)
    expected = set()
    for (p, c, periodic), first in zip(systems, [0, *sizes.cumsum(0).tolist()], strict=False):
        expected |= {(r + first, s + first, *k) for r, s, *k in brute_force(p, c, periodic, 3.5)}
    assert len(found) == len(set(found)) and set(found) == expected


@pytest.mark.parametrize("n_ranks", [2, 3, 5, 7, 13])
@pytest.mark.parametrize("box", [(20, 20, 20), (60, 8, 8), (40, 40, 5)])
def test_owned_atoms_are_balanced(n_ranks, box):
    positions = torch.rand(1000, 3, dtype=F64) * torch.tensor(box)
    cell = torch.diag(torch.tensor(box, dtype=F64))[None]
    owner = HaloStrategy().owners(positions, torch.zeros(1000, dtype=torch.long), cell, ALL[None], n_ranks)
    counts = torch.bincount(owner, minlength=n_ranks)
    assert counts.sum() == 1000 and counts.max() <= 1.15 * 1000 / n_ranks and counts.min() > 0


def test_many_small_systems_are_balanced_too():
    batch = torch.arange(10).repeat_interleave(3)
    cell = torch.zeros(10, 3, 3, dtype=F64)
    owner = HaloStrategy().owners(torch.rand(30, 3), batch, cell, torch.zeros(10, 3, dtype=torch.bool), 4)
    assert torch.bincount(owner, minlength=4).max() <= 9


@pytest.mark.parametrize(
    "cell",
    [torch.zeros(3, 3), torch.ones(3, 3), torch.tensor([[4.0, 0, 0], [0, 4, 0], [0, 0, torch.nan]]), torch.eye(3) * 1e-4],
)
def test_a_cell_that_spans_nothing_is_refused(cell):
    with pytest.raises(InvalidCell, match="system 1"):
        Frames.of(torch.stack([torch.eye(3) * 4, cell]), torch.stack([ALL, ALL]))


def test_a_vector_that_is_not_periodic_is_ignored():
    pbc = torch.tensor([[True, False, True]])
    cell = torch.tensor([[[4.0, 0, 0], [torch.nan, 0, 0], [1, 0, 5]]])
    frame = Frames.of(cell, pbc)
    torch.testing.assert_close(frame.vectors[0, 1].abs(), torch.tensor([0, 1, 0], dtype=F64))
    torch.testing.assert_close(frame.vectors[0, 0], torch.tensor([4, 0, 0], dtype=F64))
