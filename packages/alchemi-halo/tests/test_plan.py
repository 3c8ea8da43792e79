"""Plans against partitions of real atoms, and against formulas where there are too many atoms to hold."""

import time

import numpy as np
import pytest
import torch

from alchemi_halo import Density, HaloStrategy, plan
from alchemi_kernels import LatticeFrames, neighbour_list
from alchemi_shardtensor import Comm
from alchemi_shardtensor.testing import ranks
from alchemi_spec import InputError, InvalidCell

N = 20_000
PER_VOLUME = 0.05
"""Atoms per Å^3."""
REACH = 6.5
SIDE = (N / PER_VOLUME) ** (1 / 3)
ALL, NONE = (True, True, True), (False, False, False)

GHOSTS = 0.035
"""Tolerance of the ghosts of all ranks. The real number varies by its square root; a plan is the mean."""
SMALL = 0.07
"""The same for a few thousand atoms, or for ranks that are thinner than the reach along two axes."""
STEP = 0.1
"""Tolerance for a rank across a step of the density: the plan assumes its mean density at every face."""
PEERS = 0.15
"""Tolerance of the mean number of neighbours: a region within reach across an edge or corner may have no pair of atoms."""


def uniform(g):
    cell = np.eye(3) * SIDE
    return g.random((N, 3)) @ cell, cell, ALL, Density.uniform(N, cell)


def triclinic(g):
    cell = np.array([[1, 0, 0], [0.6, 1, 0], [0.5, 0.4, 1]]) * SIDE
    return g.random((N, 3)) @ cell, cell, ALL, Density.uniform(N, cell)


def open_box(g):
    cell = np.eye(3) * SIDE
    return g.random((N, 3)) @ cell, cell, NONE, Density.uniform(N, cell, NONE)


def slab(g):
    cell = np.diag([1.5, 1.3, 1.0]) * SIDE
    return g.random((N, 3)) * [1, 1, 0.4] @ cell, cell, ALL, Density.slab(N, cell, filled=0.4)


def cluster(g):
    x = g.normal(size=(N, 3))
    x *= (3 * N / (4 * np.pi * PER_VOLUME) * g.random((N, 1))) ** (1 / 3) / np.linalg.norm(x, axis=1)[:, None]
    return x, np.eye(3), NONE, Density.cluster(N, PER_VOLUME)


def step(g):
    cell = np.diag([1.2, 1.0, 0.9]) * SIDE
    x = g.random((N, 3)) * [0.5, 1, 1] + np.where(np.arange(N) < N * 10 // 11, 0, 0.5)[:, None] * [1, 0, 0]
    return x @ cell, cell, ALL, Density.step(N, cell, ratio=10)


def as_tensors(positions, cell, pbc):
    return (
        torch.tensor(positions),
        torch.zeros(len(positions), dtype=torch.long),
        torch.tensor(cell)[None],
        torch.tensor(pbc)[None],
    )


def pairs(positions, cell, pbc, reach):
    frames = LatticeFrames.of(torch.tensor(cell)[None], torch.tensor(pbc)[None])
    everyone = torch.arange(len(positions))
    found = neighbour_list(torch.tensor(positions), everyone, frames.vectors[0], frames.periodic[0], reach)
    return found[0].numpy(), found[1].numpy()


def real(positions, cell, pbc, n_ranks, edges, method="bisection"):
    """Owned atoms, ghosts and neighbour ranks of each rank, from every pair of atoms and its owners."""
    one = as_tensors(positions, cell, pbc)
    owner = HaloStrategy(method).partition(*one, Comm(), n_ranks=n_ranks).owners(*one).numpy()
    away = owner[edges[0]] != owner[edges[1]]
    reader, atom = np.unique(np.stack([owner[edges[0][away]], edges[1][away]]), axis=1)
    peers = np.unique(np.stack([reader, owner[atom]]), axis=1)[0]
    return (np.bincount(rows, minlength=n_ranks) for rows in (owner, reader, peers))


@pytest.mark.parametrize("shape", [uniform, triclinic, open_box, slab, cluster, step])
def test_agrees_with_the_real_partition(shape):
    *atoms, density = shape(np.random.default_rng(0))
    edges = pairs(*atoms, REACH)
    for n_ranks in (2, 3, 8, 13, 16):
        owned, ghosts, peers = real(*atoms, n_ranks, edges)
        planned = plan(density, n_ranks, REACH)
        assert planned.owned.sum() == planned.n_atoms == N
        assert np.abs(planned.owned - owned).max() <= 1 + 0.005 * N / n_ranks  # the tolerance of the real search
        assert planned.ghosts.sum() == pytest.approx(ghosts.sum(), rel=STEP if shape is step else GHOSTS)
        assert planned.ghosts.max() == pytest.approx(ghosts.max(), rel=STEP)
        assert planned.neighbours.mean() == pytest.approx(peers.mean(), rel=PEERS)


@pytest.mark.parametrize("shape", [uniform, triclinic, slab, cluster, step])
def test_agrees_with_the_real_grid(shape):
    *atoms, density = shape(np.random.default_rng(1))
    owned, ghosts, _ = real(*atoms, 12, pairs(*atoms, REACH), "grid")
    planned = plan(density, 12, REACH, method="grid")
    np.testing.assert_allclose(np.sort(planned.owned), np.sort(owned), atol=4 * np.sqrt(N / 12))
    assert planned.imbalance == pytest.approx(owned.max() / owned.mean(), rel=0.06)
    assert planned.ghosts.sum() == pytest.approx(ghosts.sum(), rel=GHOSTS)


def test_a_structure_repeated_is_planned_from_its_unit_cell():
    g, cell, repeat = np.random.default_rng(2), np.diag([18.0, 16.0, 30.0]), (4, 5, 1)
    sites = np.stack(np.meshgrid(np.arange(8), np.arange(7), np.arange(5)), -1).reshape(-1, 3)
    unit = (sites + g.random(sites.shape)) / [8, 7, 5] * [18, 16, 12]  # an amorphous slab in vacuum
    shifts = np.stack(np.meshgrid(np.arange(4), np.arange(5), 0), -1).reshape(-1, 3) @ cell
    atoms = (unit + shifts[:, None]).reshape(-1, 3), cell * np.array(repeat)[:, None], ALL
    small, large = Density.of(unit, cell, ALL, repeat), Density.of(*atoms)
    assert small.n_atoms == large.n_atoms == 280 * 20
    edges = pairs(*atoms, 5.0)
    for n_ranks in (2, 4, 6):
        _, ghosts, peers = real(*atoms, n_ranks, edges)
        for density in (small, large):
            planned = plan(density, n_ranks, 5.0)
            assert planned.ghosts.sum() == pytest.approx(ghosts.sum(), rel=SMALL)
            assert planned.neighbours.sum() == pytest.approx(peers.sum(), rel=PEERS)
    many = plan(Density.of(unit, cell, ALL, (4000, 4000, 1)), 4096, 5.0)
    assert many.n_atoms == 280 * 4000**2 and (many.neighbours == 8).all()
    side = 4000 * np.sqrt(18 * 16 / 4096)
    assert many.ghosts.mean() == pytest.approx(280 / 288 * (4 * side * 5.0), rel=0.25)  # no neighbours in the vacuum


@ranks(2)
def test_agrees_with_the_routing_of_two_ranks(comm):
    positions, cell, pbc, density = triclinic(np.random.default_rng(3))
    x, batch, cell, pbc = as_tensors(positions, cell, pbc)
    mine = HaloStrategy().partition(x, batch, cell, pbc, Comm(), n_ranks=2).owners(x, batch, cell, pbc) == comm.rank
    routing = HaloStrategy().build_neighbour_list(x[mine], batch[mine], cell, pbc, REACH, comm).routing
    planned = plan(density, 2, REACH)
    assert routing.n_owned == pytest.approx(planned.owned[comm.rank], abs=0.005 * N / 2)
    assert routing.n_ghost == pytest.approx(planned.ghosts[comm.rank], rel=0.05)
    assert sum(n > 0 for n in routing.recv_splits) == planned.neighbours[comm.rank] == 1


@pytest.mark.parametrize("method", ["bisection", "grid"])
def test_one_rank_has_no_ghosts(method):
    for density in (Density.uniform(100, np.eye(3) * 4), Density.cluster(100, 0.05)):
        alone = plan(density, 1, 6.0, method=method)
        assert (alone.owned.tolist(), alone.ghosts.tolist(), alone.neighbours.tolist()) == (pytest.approx([100]), [0], [0])
        assert (alone.imbalance, alone.ghost_ratio) == (1, 0)


def test_an_atom_is_one_ghost_however_many_images_are_within_reach():
    cell = np.array([[1, 0, 0], [0.3, 1, 0], [0, 0.2, 1]]) * (300 / PER_VOLUME) ** (1 / 3)
    for reach in (40.0, 200.0):
        everything = plan(Density.uniform(300, cell), 12, reach)
        np.testing.assert_allclose(everything.ghosts, 300 - 25, rtol=1e-6)
        assert (everything.neighbours == 11).all()


def test_ranks_thinner_than_the_reach():
    cell = np.diag([400.0, 50.0, 20.0])
    x = np.random.default_rng(4).random((N, 3)) @ cell
    edges = pairs(x, cell, ALL, REACH)
    for n_ranks, method in ((128, "bisection"), (200, "grid")):  # 150 and 100 atoms a rank, 5 Å at the thinnest
        _, ghosts, peers = real(x, cell, ALL, n_ranks, edges, method)
        planned = plan(Density.uniform(N, cell), n_ranks, REACH, method=method)
        assert planned.ghosts.sum() == pytest.approx(ghosts.sum(), rel=SMALL)
        assert planned.ghost_ratio > 1
        assert planned.neighbours.mean() == pytest.approx(peers.mean(), rel=PEERS)


def test_a_billion_atoms_on_4096_ranks_is_the_formula_of_a_cube():
    n, side = 1e9, (1e9 / PER_VOLUME / 4096) ** (1 / 3)
    band = PER_VOLUME * (6 * side**2 * REACH + 3 * np.pi * side * REACH**2 + 4 / 3 * np.pi * REACH**3)
    start = time.process_time()
    plans = [plan(Density.uniform(n, np.eye(3) * 16 * side), 4096, REACH, method=method) for method in ("bisection", "grid")]
    assert time.process_time() - start < 2  # 0.3 s
    dense = plan(Density.uniform(n * 1e4, np.eye(3) * 16 * side), 4096, REACH)  # atoms right up to the faces
    for planned in plans:
        assert planned.imbalance < 1.00001 and (planned.neighbours == 26).all()
        np.testing.assert_allclose(planned.boxes[:, 1] - planned.boxes[:, 0], 1 / 16, rtol=1e-5)
        np.testing.assert_allclose(planned.ghosts, planned.ghosts.mean(), rtol=1e-4)
        assert 0.8 * band < planned.ghosts.mean() < band
    np.testing.assert_allclose(dense.ghosts, 1e4 * band, rtol=5e-3)


def test_edges_and_corners_of_a_sheared_region_follow_steiners_formula():
    cell = np.array([[1, 0, 0], [0.6, 1, 0], [0.5, 0.4, 1]]) * 120
    dense = plan(Density.uniform(1e13, 4 * cell), 64, 10.0, method="grid")
    faces = 2 * np.linalg.norm(np.cross(cell[[1, 2, 0]], cell[[2, 0, 1]]), axis=1).sum()
    volume = faces * 10.0 + np.pi * 10.0**2 * np.linalg.norm(cell, axis=1).sum() + 4 / 3 * np.pi * 10.0**3
    np.testing.assert_allclose(dense.ghosts, 1e13 / 64 * volume / np.linalg.det(cell), rtol=5e-3)


def test_the_first_plane_separates_the_first_of_three_ranks():
    boxes = plan(Density.uniform(9e6, np.diag([12.0, 10.0, 8.0])), 3, 1.0).boxes
    np.testing.assert_allclose(boxes[0], [[0, 0, 0], [1 / 3, 1, 1]], atol=1e-6)
    np.testing.assert_allclose(boxes[2], [[1 / 3, 0.5, 0], [1, 1, 1]], atol=1e-6)


def test_no_rank_reads_across_a_vacuum_wider_than_the_reach():
    column = np.diag([10.0, 10.0, 300.0])
    assert plan(Density.slab(3000, column, filled=0.5), 3, 6.0).neighbours.tolist() == [1, 2, 1]
    assert plan(Density.uniform(3000, column), 3, 6.0).neighbours.tolist() == [2, 2, 2]


def test_bytes_equal_those_counted_on_two_gpus():
    """MACE 128x0e + 128x1o on 9,000 atoms (benchmarks/results/evaluate.json): positions and features in float32."""
    quartz = plan(Density.uniform(9000, np.eye(3)), 2, 0.1)
    object.__setattr__(quartz, "ghosts", np.array([1434, 1433]))
    counted = [6639716, 6640228]
    np.testing.assert_allclose(quartz.bytes(2, (128, 512), 4, position_itemsize=4), counted, rtol=4e-4)
    assert quartz.messages(2).tolist() == [5, 5]  # positions, features twice, gradients of one layer and of positions
    assert quartz.bytes(1, 10, 4).tolist() == [1434 * (48 + 40), 1433 * (48 + 40)]


@pytest.mark.parametrize("method", ["bisection", "grid"])
def test_more_ranks_than_atoms(method):
    planned = plan(Density.uniform(3, np.eye(3) * 10), 8, 3.0, method=method)
    assert planned.owned.sum() == pytest.approx(3)
    assert (planned.ghosts[planned.owned < 0.5] == 0).all() and (planned.neighbours[planned.owned < 0.5] == 0).all()
    assert np.isfinite(planned.ghosts).all() and (planned.ghosts <= 3).all()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: plan(Density.uniform(10, np.eye(3)), 0, 1.0), "n_ranks = 0"),
        (lambda: plan(Density.uniform(10, np.eye(3)), 2.5, 1.0), "n_ranks = 2.5"),
        (lambda: plan(Density.uniform(10, np.eye(3)), 2, float("nan")), "reach = nan"),
        (lambda: plan(Density.uniform(10, np.eye(3)), 2, -1.0), "reach = -1"),
        (lambda: plan(Density.uniform(10, np.eye(3)), 2, 1.0, method="curve"), "'bisection', 'grid'"),
        (lambda: Density.uniform(0, np.eye(3)), "1 atom"),
        (lambda: Density.uniform(float("inf"), np.eye(3)), "finite numbers"),
        (lambda: Density.uniform(10, np.eye(2)), r"cell has the shape \(2, 2\)"),
        (lambda: Density(np.ones(3), np.eye(3), ALL), r"\(nx, ny, nz\)"),
        (lambda: Density.slab(10, np.eye(3), filled=0.0), "filled = 0.0"),
        (lambda: Density.cluster(10, 0.0), "per_volume = 0.0"),
        (lambda: Density.of(np.ones((4, 3)), np.ones(3), ALL), r"cell of shape \(3,\)"),
        (lambda: Density.of(np.ones((4, 3)), np.eye(3), ALL, (1, 1.5, 1)), "1.5"),
        (lambda: Density.of(np.zeros((0, 3)), np.eye(3), ALL), r"\(0, 3\)"),
        (lambda: Density.of([[0, 0, np.nan]], np.eye(3), ALL), "finite"),
        (lambda: Density.of(np.ones((4, 3)), np.eye(3), (True, True, False), (2, 2, 2)), "1 where it is not periodic"),
        (lambda: plan(Density.uniform(10, np.eye(3)), 2, 1.0).bytes(2, (8, 8, 8), 4), "layers = 2"),
    ],
)
def test_bad_input_is_refused(make, says):
    with pytest.raises(InputError, match=says):
        make()


def test_cells_without_a_volume_are_refused():
    with pytest.raises(InvalidCell, match="spans no volume"):
        Density.uniform(10, np.diag([1.0, 1.0, 0.0]))
    with pytest.raises(InvalidCell, match="do not span a cell"):
        Density.of(np.zeros((1, 3)), np.zeros((3, 3)), ALL)
