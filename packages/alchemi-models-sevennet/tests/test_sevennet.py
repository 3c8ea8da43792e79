import shutil

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.neighborlist import neighbor_list
from sevenn import util
from sevenn.calculator import SevenNetCalculator

from alchemi_models_sevennet import SevenNetWrapper
from alchemi_spec import Model, UntrustedPickle

EXACT = 1e-12


@pytest.fixture(scope="module")
def wrapper():
    return SevenNetWrapper()


def silica():
    """Silicon and oxygen on rattled diamond sites, strained: nothing is zero by symmetry."""
    atoms = bulk("Si", cubic=True)
    atoms.numbers[[0, 3, 5]] = 8
    atoms.set_cell(atoms.cell.array @ [[1.01, 0.01, 0], [0, 0.98, 0.02], [0, 0, 1.005]], scale_atoms=True)
    atoms.rattle(0.1, seed=1)
    return atoms


def contract_data(atoms, cutoff, dtype=torch.float64):
    """The fields of the data contract, from ASE's own neighbour list."""
    receiver, sender, shifts = neighbor_list("ijS", atoms, cutoff, max_nbins=1000)
    return {
        "positions": torch.tensor(atoms.positions, dtype=dtype),
        "atomic_numbers": torch.tensor(atoms.numbers),
        "batch": torch.zeros(len(atoms), dtype=torch.long),
        "cell": torch.tensor(atoms.cell.array, dtype=dtype)[None],
        "pbc": torch.tensor(atoms.pbc)[None],
        "edge_index": torch.tensor(np.stack([sender, receiver])),
        "edge_shifts": torch.tensor(shifts, dtype=dtype),
        "nodes": torch.arange(len(atoms)),
    }


@pytest.mark.parametrize("atoms", [silica(), molecule("CH3CH2OH", vacuum=4.0)], ids=["crystal", "molecule"])
def test_equals_sevennets_own_calculator(wrapper, atoms):
    atoms.calc = SevenNetCalculator("7net-0", device="cpu")
    results = wrapper(contract_data(atoms, wrapper.cutoff))
    assert results["energy"].item() == pytest.approx(atoms.get_potential_energy(), rel=2e-6)
    np.testing.assert_allclose(results["forces"], atoms.get_forces(), atol=5e-6)
    np.testing.assert_allclose(results["stress"][0], atoms.get_stress(voigt=False), atol=3e-5)


def test_a_multi_fidelity_model_equals_its_calculator_and_needs_a_fidelity():
    atoms = silica()
    atoms.calc = SevenNetCalculator("7net-mf-0", modal="PBE", device="cpu")
    wrapper = SevenNetWrapper("7net-mf-0", modal="PBE")
    results = wrapper(contract_data(atoms, wrapper.cutoff))
    assert results["energy"].item() == pytest.approx(atoms.get_potential_energy(), rel=2e-6)
    np.testing.assert_allclose(results["forces"], atoms.get_forces(), atol=5e-6)
    with pytest.raises(ValueError, match="fidelities.*R2SCAN.*PBE.*choose one with modal"):
        SevenNetWrapper("7net-mf-0")


def test_float64_forces_and_stress_are_the_energys_derivatives():
    wrapper, atoms, h = SevenNetWrapper().double(), silica(), 1e-4

    def energy(moved):
        return wrapper(contract_data(moved, wrapper.cutoff), ("energy",))["energy"].item()

    results = wrapper(contract_data(atoms, wrapper.cutoff))
    assert {v.dtype for v in results.values()} == {torch.float64}
    slopes = []
    for sign in (1, -1):
        moved = atoms.copy()
        moved.positions[3, 1] += sign * h
        slopes.append(sign * energy(moved))
    assert results["forces"][3, 1].item() == pytest.approx(-sum(slopes) / (2 * h), abs=1e-6)
    for i, j in [(2, 2), (0, 1)]:
        work = 0.0
        for sign in (1, -1):
            strain = np.zeros((3, 3))
            strain[i, j] += sign * h / 2
            strain[j, i] += sign * h / 2
            strained = atoms.copy()
            strained.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            work += sign * energy(strained)
        assert results["stress"][0, i, j].item() == pytest.approx(work / (2 * h) / atoms.get_volume(), abs=1e-7)


@pytest.mark.parametrize(("name", "modal"), [("7net-0", None), ("7net-mf-0", "PBE"), ("7net-l3i5", None)])
def test_edges_beyond_the_cutoff_change_nothing(name, modal):
    """The first two have XPLOR's envelope, the third a polynomial; SevenNet masks neither."""
    wrapper, atoms = SevenNetWrapper(name, modal=modal).double(), silica()
    assert wrapper.distribution_spec.ignores_longer_edges
    within, longer = (contract_data(atoms, wrapper.cutoff + skin) for skin in (0.0, 1.0))
    assert longer["edge_index"].shape[1] > within["edge_index"].shape[1]
    expected, results = wrapper(within), wrapper(longer)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=EXACT, atol=EXACT)


def test_lists_are_filtered_for_an_activation_that_does_not_map_zero_to_zero(tmp_path):
    checkpoint = torch.load(util.pretrained_name_to_path("7net-0"), weights_only=False, map_location="cpu")
    checkpoint["config"]["act_radial"] = "sigmoid"
    torch.save(checkpoint, tmp_path / "mine.pth")
    wrapper = SevenNetWrapper(tmp_path / "mine.pth", trust_pickle=True).double()
    assert not wrapper.distribution_spec.ignores_longer_edges
    within, longer = (wrapper(contract_data(silica(), wrapper.cutoff + skin)) for skin in (0.0, 1.0))
    assert (longer["forces"] - within["forces"]).abs().max() > 1e-6


def water(moved):
    """Two molecules in a box of 4000 Å, far from its origin, wrapped into it."""
    atoms = molecule("H2O") + molecule("H2O")
    atoms.positions[3:] = atoms.positions[3:, [2, 0, 1]] + [1.5, 2.2, 0.4]
    atoms = Atoms(atoms.numbers, atoms.positions + [500.3, 500.7, 500.1] + moved, cell=[4000, 4000, 4000], pbc=True)
    atoms.wrap()
    return atoms


@pytest.mark.parametrize("moved", [1000.0, 3498.7], ids=["moved", "moved onto the box's corner"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_case_11_water_far_from_the_origin(dtype, tolerance, moved):
    """Float32's last digit at 1500 Å is 1e-4 Å. Energy, forces and virial."""
    wrapper = SevenNetWrapper().to(dtype)
    before, after = (wrapper(contract_data(water(by), wrapper.cutoff)) for by in (0.0, moved))
    for name, unit in {"energy": 1, "forces": 1, "stress": 4000**3}.items():
        assert (after[name] - before[name]).abs().max() * unit < tolerance, name


def test_case_11_the_reverse_has_differences_in_float64_too():
    wrapper = SevenNetWrapper().double()
    single = contract_data(water(3498.7), wrapper.cutoff, torch.float32)
    double = {name: field.double() if field.is_floating_point() else field for name, field in single.items()}
    expected, results = wrapper(double), wrapper(single)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=EXACT, atol=EXACT)


def test_an_element_that_the_model_does_not_know_gives_no_number(wrapper):
    atoms = silica()
    atoms.numbers[1] = 85
    results = wrapper(contract_data(atoms, wrapper.cutoff))
    assert 85 not in wrapper.elements and results["energy"].isnan().all() and results["forces"].isnan().any()


def test_elements_and_cutoff_are_the_models(wrapper):
    assert wrapper.cutoff == 5.0 and len(wrapper.elements) == 89 and isinstance(wrapper, Model)


def test_a_file_must_be_trusted_and_an_unknown_name_lists_the_names(tmp_path):
    path = shutil.copy(util.pretrained_name_to_path("7net-0"), tmp_path / "mine.pth")
    with pytest.raises(UntrustedPickle, match="trust_pickle=True"):
        SevenNetWrapper(path)
    assert SevenNetWrapper(path, trust_pickle=True).cutoff == 5.0
    with pytest.raises(ValueError, match="Valid pretrained model names"):
        SevenNetWrapper("7net-nowhere")
