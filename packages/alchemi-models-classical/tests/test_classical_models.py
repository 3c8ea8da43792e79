"""Classical potentials as alchemi's models, on the whole structure: against ASE's own, and by finite differences."""

import pytest
import torch
from ase import Atoms
from ase.build import bulk
from ase.calculators.lj import LennardJones as AseLennardJones
from ase.stress import voigt_6_to_full_3x3_stress

from alchemi_kernels import LatticeFrames, neighbour_list
from alchemi_models_classical import LennardJones
from alchemi_spec import Model

F64 = torch.float64


def data_of(atoms, cutoff):
    """The fields of the data contract for one structure."""
    positions, cell, pbc = torch.tensor(atoms.positions), torch.tensor(atoms.cell.array)[None], torch.tensor(atoms.pbc)[None]
    frames = LatticeFrames.of(cell, pbc)
    receiver, sender, shifts = neighbour_list(
        positions, torch.arange(len(atoms)), frames.vectors[0], frames.periodic[0], cutoff
    )
    batch = torch.zeros(len(atoms), dtype=torch.long)
    return {
        "positions": positions,
        "batch": batch,
        "cell": cell,
        "pbc": pbc,
        "edge_index": torch.stack([sender, receiver]),
        "edge_shifts": shifts.to(F64),
    }


def compressed_argon():
    atoms = bulk("Ar", a=5.0, cubic=True)
    atoms.rattle(0.2, seed=1)
    atoms.set_cell(atoms.cell @ [[1.02, 0.03, 0], [0, 0.98, 0.01], [0, 0, 1]], scale_atoms=True)
    return atoms


def test_lennard_jones_equals_ases_where_neither_is_cut():
    atoms = Atoms("Ar4", [[0, 0, 0], [3.7, 0, 0], [0, 3.9, 0.3], [0.2, 0.1, 4.1]])
    atoms.calc = AseLennardJones(sigma=3.4, epsilon=0.010341, rc=1e3, smooth=False)
    results = LennardJones(cutoff=12.0)(data_of(atoms, 12.0), ("energy", "forces"))
    torch.testing.assert_close(results["energy"].item(), atoms.get_potential_energy(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(results["forces"], torch.from_numpy(atoms.get_forces()), rtol=1e-9, atol=1e-9)


def test_forces_and_stress_are_derivatives_of_the_energy():
    model, atoms, step = LennardJones(), compressed_argon(), 1e-4

    def energy(change):
        moved = atoms.copy()
        change(moved)
        return model(data_of(moved, model.cutoff), ("energy",))["energy"].item()

    def slope(change):
        return (energy(lambda a: change(a, step)) - energy(lambda a: change(a, -step))) / (2 * step)

    results = model(data_of(atoms, model.cutoff), ("forces", "stress"))
    for axis in range(3):

        def displace(a, by, axis=axis):
            a.positions[1, axis] += by

        assert results["forces"][1, axis].item() == pytest.approx(-slope(displace), abs=1e-7)
    for k in range(6):

        def strain(a, by, k=k):
            voigt = [0.0] * 6
            voigt[k] = by if k < 3 else by / 2
            a.set_cell(a.cell.array + a.cell.array @ voigt_6_to_full_3x3_stress(voigt), scale_atoms=True)

        full = results["stress"][0]
        found = [full[0, 0], full[1, 1], full[2, 2], full[1, 2], full[0, 2], full[0, 1]][k].item()
        assert found == pytest.approx(slope(strain) / atoms.get_volume(), abs=1e-8)


def test_it_fulfils_the_contract_and_is_zero_from_its_cutoff_on():
    model = LennardJones(cutoff=6.0)
    assert isinstance(model, Model) and model.distribution_spec.ignores_longer_edges
    far = Atoms("Ar2", [[0, 0, 0], [0, 0, 6.0]])
    results = model(data_of(far, 7.0), ("energy", "forces"))
    assert results["energy"].item() == 0 and (results["forces"] == 0).all()
