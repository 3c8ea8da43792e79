import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from e3nn.util import jit
from mace.calculators import MACECalculator, foundations_models
from small_mace import silica, small_mace

from alchemi_models_mace import MACEWrapper
from alchemi_spec import Model, UntrustedPickle

PICKLE = Path(__file__).parent / "data" / "small-e3nn-0.4.4.model"
VARIANTS = {
    "residual": {},
    "not scaled": {"scaled": False},
    "agnostic": {"interaction": "RealAgnosticInteractionBlock"},
    "density": {"interaction": "RealAgnosticDensityInteractionBlock"},
    "foundation": {
        "interaction": "RealAgnosticDensityResidualInteractionBlock",
        "pair_repulsion": True,
        "distance_transform": "Agnesi",
    },
}
ENVELOPES = VARIANTS | {
    "gaussians": {"radial_type": "gaussian"},
    "chebyshev": {"radial_type": "chebyshev", "num_bessel": 2, "distance_transform": "Soft"},
    **{
        f"{name}, cutoff last": {"interaction": f"RealAgnostic{name}InteractionBlock", "apply_cutoff": False}
        for name in ("", "Residual", "Density", "DensityResidual", "AttResidual", "ResidualNonLinear")
    },
}
"""Models in which an edge beyond the cutoff adds exactly zero."""
EXACT = 1e-12


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_maces_own_calculator(variant):
    model, atoms = small_mace(**VARIANTS[variant]), silica()
    atoms.calc = MACECalculator(models=[copy.deepcopy(model)], device="cpu", default_dtype="float64")
    wrapper = MACEWrapper(model)
    results = wrapper(contract_data(atoms, wrapper.cutoff))
    assert results["energy"].item() == pytest.approx(atoms.get_potential_energy(), rel=1e-12)
    np.testing.assert_allclose(results["forces"], atoms.get_forces(), atol=1e-12)
    np.testing.assert_allclose(results["stress"][0], atoms.get_stress(voigt=False), atol=1e-12)


def test_a_pickle_of_e3nn_0_4_4_gives_the_numbers_it_gave_there():
    wrapper = MACEWrapper.from_checkpoint(PICKLE, trust_pickle=True)
    expected = json.loads(PICKLE.with_suffix(".json").read_text())
    results = wrapper(contract_data(silica(), wrapper.cutoff))
    assert results["energy"].item() == pytest.approx(expected["energy"], rel=1e-12)
    np.testing.assert_allclose(results["forces"], expected["forces"], atol=1e-12)
    np.testing.assert_allclose(results["stress"][0], expected["stress"], atol=1e-12)
    assert not any(p.requires_grad for p in wrapper.parameters())


def test_case_16_a_pickle_must_be_trusted_and_the_text_says_how():
    with pytest.raises(UntrustedPickle, match=r"runs whatever code.*\n.*trust_pickle=True.*--trust-pickle"):
        MACEWrapper.from_checkpoint(PICKLE)


def test_neither_file_nor_name_lists_the_names():
    with pytest.raises(FileNotFoundError, match="no file nowhere.model.*medium-mpa-0.*off-small"):
        MACEWrapper.from_checkpoint("nowhere.model", trust_pickle=True)


@pytest.mark.parametrize(
    ("name", "loader", "requested"), [("medium-mpa-0", "mace_mp", "medium-mpa-0"), ("off-small", "mace_off", "small")]
)
def test_a_named_model_comes_from_maces_own_loader(monkeypatch, name, loader, requested):
    """MACE's own loader downloads; a small model of the same class stands in for it."""
    calls = []

    def load(model, **options):
        calls.append((model, options["return_raw_model"]))
        return small_mace().float()

    monkeypatch.setattr(foundations_models, loader, load)
    wrapper = MACEWrapper.from_checkpoint(name)
    assert calls == [(requested, True)] and wrapper.dtype is torch.float32


def test_the_wrapper_computes_in_the_model_s_dtype():
    wrapper = MACEWrapper(small_mace())
    double = wrapper(contract_data(silica(), wrapper.cutoff))
    single = wrapper.float()(contract_data(silica(), wrapper.cutoff))
    assert {v.dtype for v in single.values()} == {torch.float32} and {v.dtype for v in double.values()} == {torch.float64}
    assert (single["forces"] - double["forces"]).abs().max() < 1e-4
    back = wrapper.double()(contract_data(silica(), wrapper.cutoff))
    assert (back["forces"] - double["forces"]).abs().max() < 1e-4


@pytest.mark.parametrize("variant", ENVELOPES)
def test_edges_beyond_the_cutoff_change_nothing(variant):
    wrapper, atoms = MACEWrapper(small_mace(**ENVELOPES[variant])), silica()
    assert wrapper.distribution_spec.ignores_longer_edges
    within, longer = (contract_data(atoms, wrapper.cutoff + skin) for skin in (0.0, 1.0))
    assert longer["edge_index"].shape[1] > within["edge_index"].shape[1]
    expected, results = wrapper(within), wrapper(longer)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("name", ["AttResidual", "ResidualNonLinear"])
def test_lists_are_filtered_for_interactions_that_read_more_than_masked_features(name):
    wrapper, atoms = MACEWrapper(small_mace(interaction=f"RealAgnostic{name}InteractionBlock")), silica()
    assert not wrapper.distribution_spec.ignores_longer_edges
    within, longer = (wrapper(contract_data(atoms, wrapper.cutoff + skin)) for skin in (0.0, 1.0))
    assert (longer["forces"] - within["forces"]).abs().max() > 1e-6


def test_lists_are_filtered_for_repulsion_beyond_the_cutoff_and_for_unknown_classes():
    caesium = small_mace(atomic_numbers=[8, 55], pair_repulsion=True)  # 2 x 2.44 Å against 4.5 Å
    other = type("Other", (type(caesium),), {})
    unknown = small_mace()
    unknown.__class__ = other
    for model in (caesium, unknown):
        assert not MACEWrapper(model).distribution_spec.ignores_longer_edges


def water(moved):
    """Two molecules in a box of 4000 Å, far from its origin, wrapped into it."""
    molecule = np.array([[0, 0, 0.12], [0, 0.76, -0.48], [0, -0.76, -0.48]])
    positions = np.concatenate([molecule, molecule[:, [2, 0, 1]] + [1.5, 2.2, 0.4]]) + [500.3, 500.7, 500.1]
    atoms = Atoms("OHHOHH", positions + moved, cell=[4000, 4000, 4000], pbc=True)
    atoms.wrap()
    return atoms


def changes(wrapper, moved):
    """Largest changes of energy, forces and virial when the molecules are moved."""
    before, after = (wrapper(contract_data(water(by), wrapper.cutoff)) for by in (0.0, moved))
    units = {"energy": 1, "forces": 1, "stress": 4000**3}
    return [(after[name] - before[name]).abs().max().item() * unit for name, unit in units.items()]


@pytest.mark.parametrize("moved", [1000.0, 3498.7], ids=["moved", "moved onto the box's corner"])
@pytest.mark.parametrize("variant", [{}, {"scaled": False, "pair_repulsion": True}], ids=["scaled", "not scaled"])
def test_case_11_water_far_from_the_origin(variant, moved):
    """Float32's last digit at 1500 Å is 1e-4 Å."""
    wrapper = MACEWrapper(small_mace(atomic_numbers=[1, 8], **variant))
    assert max(changes(wrapper, moved)) < 1e-10
    assert max(changes(wrapper.float(), moved)) < 1e-5


def test_case_11_the_reverse_has_differences_in_float64_too():
    wrapper = MACEWrapper(small_mace(atomic_numbers=[1, 8]))
    single = contract_data(water(3498.7), wrapper.cutoff, torch.float32)
    double = {name: field.double() if field.is_floating_point() else field for name, field in single.items()}
    expected, results = wrapper(double), wrapper(single)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=EXACT, atol=EXACT)


def test_a_scripted_model_computes_as_it_was_scripted():
    expected = MACEWrapper(small_mace().float())(contract_data(silica(), 4.5))
    results = MACEWrapper(jit.compile(small_mace().float()))(contract_data(silica(), 4.5))
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)


def test_only_requested_outputs_are_computed():
    wrapper = MACEWrapper(small_mace())
    data = contract_data(silica(), wrapper.cutoff)
    full = wrapper(data)
    assert wrapper(data, ("energy",)).keys() == {"energy"}
    np.testing.assert_allclose(wrapper(data, ("forces",))["forces"], full["forces"], atol=1e-13)
    assert data["positions"].requires_grad is False


def test_heads_elements_and_cutoff_are_the_models():
    model = small_mace(
        heads=["dft", "mp2"],
        atomic_energies=np.array([[-1.0, -2.0], [-3.0, -4.0]]),
        atomic_inter_scale=[1.0, 1.3],
        atomic_inter_shift=[0.0, 0.1],
    )
    data = contract_data(silica(), 4.5)
    energies = [MACEWrapper(model, head)(data)["energy"].item() for head in ("dft", "mp2", None)]
    assert energies[0] != energies[1] == energies[2]
    with pytest.raises(ValueError, match="no head 'ccsd': choose one of dft, mp2"):
        MACEWrapper(model, "ccsd")
    wrapper = MACEWrapper(model)
    assert wrapper.elements == {8, 14} and wrapper.cutoff == 4.5 and isinstance(wrapper, Model)
