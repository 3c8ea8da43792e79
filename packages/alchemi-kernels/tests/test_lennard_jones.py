"""Lennard-Jones in plain torch against brute force and derivatives; the Triton kernel against plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from systems import CUTOFF, CUTOFFS, SYSTEMS, edges_beyond, first, moved, parameters

from alchemi_kernels import lennard_jones
from alchemi_kernels.lennard_jones_torch import lennard_jones_pair

EXACT = 1e-12
FP32 = 2e-6  # sums of a hundred terms that cancel


def close(got, expected, tolerance):
    """Compare all numbers, relative to the largest of each field."""
    for a, b in zip(got, expected, strict=True):
        scale = b.abs().max().item() if b.numel() else 0.0
        torch.testing.assert_close(a, b.to(a.dtype), rtol=0, atol=tolerance * max(scale, 1e-3))


def brute_force(system, points, strain):
    """Differentiable energies (n,) from the formula of a pair; edges beyond the cutoff are left out."""
    points, cell = points + points @ strain, system.cell + system.cell @ strain
    lattice = torch.einsum("ei,eij->ej", system.shifts, cell[system.batch[system.receiver]])
    r = (points[system.sender] - points[system.receiver] + lattice).norm(dim=1)
    kept = r < CUTOFF
    r, receiver = r[kept], system.receiver[kept]
    x = ((r / CUTOFF - 0.9) / 0.1).clamp(0, 1)
    switch = 1 - 10 * x**3 + 15 * x**4 - 6 * x**5
    pair = 4 * 0.010341 * ((3.4 / r) ** 12 - (3.4 / r) ** 6) * switch
    return torch.zeros(system.n, dtype=torch.float64).index_add(0, receiver, pair / 2)


@pytest.mark.parametrize("name", [name for name in SYSTEMS if name != "with ghosts"])
def test_energies_forces_and_virials_equal_autograd(name):
    system = SYSTEMS[name]
    points, strain = system.points.clone().requires_grad_(), torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    energies = brute_force(system, points, strain)
    gradient, virial = torch.autograd.grad(energies.sum(), [points, strain])
    found = lennard_jones(system, **parameters())
    close((found.energies, found.forces, found.virials.sum(0)), (energies.detach(), -gradient, virial), EXACT)
    close(found.virials, found.virials.mT, EXACT)


def test_ghosts_are_read_and_have_no_results():
    whole, n = SYSTEMS["a batch"], 27
    found, expected = (lennard_jones(system, **parameters()) for system in (first(whole, n), whole))
    assert len(whole.points) > n and len(first(whole, n).points) == len(whole.points)
    close(found, [field[:n] for field in expected], EXACT)


def test_forces_equal_finite_differences_of_the_energy():
    system, h = SYSTEMS["images of 5 atoms"], 1e-5
    forces = lennard_jones(system, **parameters()).forces
    for atom, axis in [(0, 0), (2, 1), (4, 2)]:
        step = torch.zeros_like(system.points)
        step[atom, axis] = h
        plus, minus = (
            lennard_jones(system._replace(points=system.points + s), **parameters()).energies.sum() for s in (step, -step)
        )
        assert abs((plus - minus) / (2 * h) + forces[atom, axis]) < 1e-9


def test_the_switch_begins_and_ends_smoothly():
    """Energy, slope and curvature are continuous; beyond 0.9 cutoff the slope is the energy's."""
    sigma, epsilon = (torch.tensor(x, dtype=torch.float64) for x in (3.4, 1.0))
    for edge in (0.9 * CUTOFF, CUTOFF):
        r = edge + torch.tensor([-1e-6, 1e-6], dtype=torch.float64)
        energy, slope = lennard_jones_pair(r, sigma, epsilon, CUTOFF)
        assert energy.diff().abs() < 1e-6 and slope.diff().abs() < 1e-5
    r = torch.linspace(3.0, 1.01 * CUTOFF, 400, dtype=torch.float64, requires_grad=True)
    energy, slope = lennard_jones_pair(r, sigma, epsilon, CUTOFF)
    torch.testing.assert_close(slope, torch.autograd.grad(energy.sum(), r)[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_an_edge_of_the_cutoff_or_longer_adds_exactly_zero(cutoff, dtype):
    given = parameters(dtype) | {"cutoff": cutoff}
    for system in edges_beyond(cutoff):
        assert all((field == 0).all() for field in lennard_jones(system, **given))
    near = lennard_jones(edges_beyond(0.95 * cutoff)[0], **given)
    assert all((field != 0).any() for field in near)


def test_a_nan_position_gives_nan_results():
    system = SYSTEMS["open"]
    points = system.points.clone()
    points[3, 1] = torch.nan
    found = lennard_jones(system._replace(points=points), **parameters())
    assert all(field[3].isnan().any() for field in found)


@pytest.mark.parametrize("name", SYSTEMS)
def test_float32_equals_float64_to_round_off(name):
    """Differences and sums are in float64, also far from the origin, with virials or without."""
    expected = lennard_jones(SYSTEMS[name], **parameters())
    system = SYSTEMS[name]._replace(points=SYSTEMS[name].points + 1e5)
    found = lennard_jones(system, **parameters(torch.float32))
    assert all(field.dtype == torch.float64 for field in found)
    close(found, expected, FP32)
    if name != "with ghosts":
        assert (found.forces.sum(0).abs() < 1e-13).all()
    bare = lennard_jones(system, **parameters(torch.float32), virial=False)
    assert bare.virials is None and torch.equal(bare.forces, found.forces) and torch.equal(bare.energies, found.energies)


def test_results_do_not_require_gradients():
    system = SYSTEMS["open"]
    found = lennard_jones(system._replace(points=system.points.clone().requires_grad_()), **parameters())
    assert not any(field.requires_grad for field in found)


@pytest.mark.parametrize("script", ["triton_interpreted", "triton_compiled"])
def test_the_triton_kernel(script):
    """Triton reads TRITON_INTERPRET when it is imported, so this runs in a process of its own."""
    variables = {"TRITON_INTERPRET": "1"} if script == "triton_interpreted" else {}
    path = Path(__file__).with_name(f"{script}.py")
    done = subprocess.run([sys.executable, path], env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", SYSTEMS)
def test_the_triton_kernel_on_cuda(name, dtype):
    on_cuda = moved(SYSTEMS[name], "cuda")
    expected = lennard_jones(SYSTEMS[name], **parameters(dtype))
    found = lennard_jones(on_cuda, **parameters(dtype, "cuda"))
    close([field.cpu() for field in found], expected, EXACT if dtype == torch.float64 else FP32)


@pytest.mark.gpu
def test_a_captured_call_reads_the_points_at_each_replay():
    on_cuda = moved(SYSTEMS["a batch"], "cuda")
    given = parameters(device="cuda")
    lennard_jones(on_cuda, **given)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = lennard_jones(on_cuda, **given)
    on_cuda.points.mul_(1.01)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, lennard_jones(on_cuda, **given), strict=True))
