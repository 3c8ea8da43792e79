"""Neighbour lists against ASE's for any cell, and the special parts of the algorithm: shared cells, chunks, round-off."""

import sys

import numpy as np
import pytest
import torch
from ase.neighborlist import primitive_neighbor_list

from alchemi_kernels import neighbour_list

MODULE = sys.modules["alchemi_kernels.neighbour_list"]
F64 = torch.float64
ALL, NONE = torch.tensor([True] * 3), torch.tensor([False] * 3)


def listed(receiver, sender, shifts):
    """The pairs as a set; checks that each is listed once and that receivers ascend."""
    assert receiver.dtype == sender.dtype == torch.long and shifts.dtype == F64
    assert torch.equal(receiver, receiver.sort().values)
    found = [tuple(map(int, pair)) for pair in torch.cat([torch.stack([receiver, sender], 1), shifts], 1).tolist()]
    assert len(found) == len(set(found))
    return set(found)


def from_ase(points, receivers, vectors, periodic, cutoff):
    given = periodic.tolist(), vectors.numpy(), points.double().numpy(), cutoff
    i, j, s = primitive_neighbor_list("ijS", *given)
    kept = np.isin(i, receivers.numpy())
    return set(zip(i[kept].tolist(), j[kept].tolist(), *s[kept].T.tolist(), strict=True))


def check(points, receivers, vectors, periodic, cutoff):
    found = listed(*neighbour_list(points, receivers, vectors, periodic, cutoff))
    assert found == from_ase(points, receivers, vectors, periodic, cutoff)
    return found


def anywhere(n, vectors, seed=0, cells=0):
    """n points in the cell, or up to `cells` cells away, and about half of them as receivers."""
    g = torch.Generator().manual_seed(seed)
    points = (torch.rand(n, 3, dtype=F64, generator=g) + torch.randint(-cells, cells + 1, (n, 3), generator=g)) @ vectors
    return points, (torch.rand(n, generator=g) < 0.5).nonzero().flatten()


CUBE = 11.0 * torch.eye(3, dtype=F64)
SHEARED = torch.tensor([[9.0, 0, 0], [8.1, 9.5, 0], [-7.0, 6.0, 10.0]], dtype=F64)
CELLS = {
    "cubic": (CUBE, ALL),
    "triclinic": (SHEARED, ALL),
    "left-handed": (SHEARED[[1, 0, 2]], ALL),
    "turned": (SHEARED[:, [2, 0, 1]] @ torch.linalg.qr(SHEARED).Q, ALL),
    "slab": (SHEARED, torch.tensor([True, True, False])),
    "wire": (SHEARED, torch.tensor([False, True, False])),
    "molecule": (CUBE, NONE),
    "long": (torch.diag(torch.tensor([4.0, 60.0, 9.0], dtype=F64)), ALL),
}


@pytest.mark.parametrize("cells", [0, 3])
@pytest.mark.parametrize("name", CELLS)
def test_pairs_equal_those_of_ase(name, cells):
    vectors, periodic = CELLS[name]
    for seed, cutoff in enumerate((2.5, 7.0)):
        points, some = anywhere(60, vectors, seed, cells)
        assert check(points, torch.arange(60), vectors, periodic, cutoff) or cells
        check(points, some, vectors, periodic, cutoff)
        check(points, some[:1], vectors, periodic, cutoff)


def test_random_cells():
    g = torch.Generator().manual_seed(0)
    for seed in range(40):
        vectors = 5 * torch.randn(3, 3, dtype=F64, generator=g)
        if vectors.det().abs() < 10:
            continue
        points, some = anywhere(1 + seed, vectors, seed, cells=seed % 3)
        check(points, some, vectors, torch.rand(3, generator=g) < 0.6, 3.5)


def test_a_cell_much_smaller_than_the_cutoff():
    primitive = 1.8 * torch.tensor([[0, 1, 1], [1, 0, 1], [1, 1, 0]], dtype=F64)
    alone = torch.zeros(1, 3, dtype=F64), torch.zeros(1, dtype=torch.long)
    assert len(check(*alone, primitive, ALL, 6.0)) == 78
    check(*anywhere(4, SHEARED / 4, cells=2), SHEARED / 4, ALL, 8.9)  # ASE leaves out what is at the cutoff


def test_a_pair_far_from_the_cell_is_the_same_pair():
    points, some = anywhere(60, SHEARED)
    near = neighbour_list(points, some, SHEARED, ALL, 5.0)
    moves = torch.randint(-1000, 1000, (60, 3), generator=torch.Generator().manual_seed(1)).double()
    receiver, sender, shifts = neighbour_list(points + moves @ SHEARED, some, SHEARED, ALL, 5.0)
    assert listed(receiver, sender, shifts + moves[sender] - moves[receiver]) == listed(*near)


def test_one_atom_and_no_atoms():
    one, row = torch.tensor([[3.0, 2, 1]], dtype=F64), torch.zeros(1, dtype=torch.long)
    for points, rows in ((one, row), (one, row[:0]), (one[:0], row[:0])):
        receiver, sender, shifts = neighbour_list(points, rows, CUBE, ALL, 5.0)
        assert receiver.shape == sender.shape == (0,) and shifts.shape == (0, 3)
        assert receiver.dtype == sender.dtype == torch.long and shifts.dtype == F64


def test_atoms_at_the_same_position_are_a_pair():
    points = torch.tensor([[1.0, 1, 1], [1, 1, 1], [12, 1, 1]], dtype=F64)
    found = listed(*neighbour_list(points, torch.arange(3), CUBE, ALL, 0.5))
    assert found == {(0, 1, 0, 0, 0), (1, 0, 0, 0, 0), (0, 2, -1, 0, 0), (1, 2, -1, 0, 0), (2, 0, 1, 0, 0), (2, 1, 1, 0, 0)}


def cluster(n=4000, density=0.05):
    g = torch.Generator().manual_seed(0)
    return (n / density) ** (1 / 3) * (torch.rand(n, 3, dtype=F64, generator=g) - 0.5)


@pytest.mark.parametrize("side", [100.0, 200.0, 1e4, 1e6])
def test_empty_space_costs_little(side, monkeypatch):
    """A cluster around the origin of a wide periodic cell lies in its eight corners. The space between them is not searched,
    and neither is the space between two clusters."""
    searched, runs = [], MODULE._candidate_runs

    def counted(grid, at):
        found = runs(grid, at)
        searched.append(int(found[1].sum()))
        return found

    monkeypatch.setattr(MODULE, "_candidate_runs", counted)
    points, everyone = cluster(), torch.arange(4000)
    alone = listed(*neighbour_list(points, everyone, CUBE, NONE, 5.0))
    assert sum(searched) < 2.5 * len(alone)
    searched.clear()
    assert listed(*neighbour_list(points, everyone, side * torch.eye(3, dtype=F64), ALL, 5.0)) == alone
    assert sum(searched) < 2.5 * len(alone)  # all pairs would be 175 times
    searched.clear()
    apart = points + side / 2 * (everyone % 2)[:, None]
    assert neighbour_list(apart, everyone, side * torch.eye(3, dtype=F64), ALL, 5.0)[0].numel()
    assert sum(searched) < 8 * len(alone)


def test_a_molecule_in_a_very_thin_gas():
    points = torch.cat([1e6 * cluster(300, 300.0), cluster(50)])
    near = (torch.cdist(points, points) <= 4.0).fill_diagonal_(False).nonzero()
    receiver, sender, shifts = neighbour_list(points, torch.arange(350), CUBE, NONE, 4.0)
    assert listed(receiver, sender, shifts) == {(i, j, 0, 0, 0) for i, j in near.tolist()} and len(near)


@pytest.mark.parametrize("candidates", [2, 300, 2**40])
def test_the_chunk_size_does_not_change_the_list(candidates, monkeypatch):
    points, some = anywhere(500, 2 * SHEARED, cells=1)
    expected = neighbour_list(points, some, 2 * SHEARED, ALL, 6.0)
    monkeypatch.setattr(MODULE, "MAX_CANDIDATES", candidates)
    monkeypatch.setattr(MODULE, "MAX_RECEIVERS", max(1, candidates // 10))
    found = neighbour_list(points, some, 2 * SHEARED, ALL, 6.0)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_float32_is_exact():
    points, some = anywhere(80, SHEARED, cells=2)
    found = neighbour_list(points.float().requires_grad_(), some, SHEARED.float(), ALL, 5.0)
    expected = neighbour_list(points.float().double(), some, SHEARED.float().double(), ALL, 5.0)
    assert listed(*found) == listed(*expected)


def test_a_pair_at_the_cutoff_is_found_from_both_ends():
    """Round-off decides whether it is listed, but always the same way: for all atoms, and for one with its neighbours."""
    a, n = 0.7 + 4.7 / 3, 5
    sites = torch.cartesian_prod(*[torch.arange(n, dtype=F64)] * 3)
    moves = torch.randint(-2, 3, sites.shape, generator=torch.Generator().manual_seed(0)) * n
    points, vectors = a * (sites + moves) @ SHEARED / 10, a * n * SHEARED / 10
    for cutoff in torch.linalg.vector_norm(a * SHEARED / 10, dim=1).tolist():
        found = listed(*neighbour_list(points, torch.arange(n**3), vectors, ALL, cutoff))
        assert found == {(j, i, -x, -y, -z) for i, j, x, y, z in found}
        for row in range(0, n**3, 9):
            near = torch.tensor(sorted({row} | {j for i, j, *_ in found if i == row}))
            i, j, shifts = neighbour_list(points[near], (near == row).nonzero().flatten(), vectors, ALL, cutoff)
            assert listed(near[i], near[j], shifts) == {pair for pair in found if pair[0] == row}


def test_nan_and_infinite_points_are_refused():
    for bad in (torch.nan, torch.inf):
        for row in (0, 9):
            points, _ = anywhere(10, CUBE)
            points[row, 1] = bad
            for periodic in (ALL, NONE):
                with pytest.raises(ValueError, match="nan or infinite"):
                    neighbour_list(points, torch.tensor([0]), CUBE, periodic, 5.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CELLS)
def test_cuda_gives_the_same_list(name):
    vectors, periodic = CELLS[name]
    points, some = anywhere(3000, 3 * vectors, cells=1)
    expected = listed(*neighbour_list(points, some, 3 * vectors, periodic, 6.0))
    found = neighbour_list(*(t.cuda() for t in (points, some, 3 * vectors, periodic)), 6.0)
    assert all(t.is_cuda for t in found) and listed(*(t.cpu() for t in found)) == expected
