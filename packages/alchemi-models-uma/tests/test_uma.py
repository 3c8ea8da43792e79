"""The wrapper against fairchem's own calculator, in one process."""

import warnings

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from fairchem.core import FAIRChemCalculator
from fairchem.core.models.uma.nn.execution_backends import UMASFastGPUBackend
from fairchem.core.units.mlip_unit.api.inference import InferenceSettings
from fairchem.core.units.mlip_unit.predict import MLIPPredictUnit
from small_uma import DIRECT, in_chunks, save, small_uma

from alchemi_models_uma import UMAWrapper
from alchemi_models_uma.patches import scatter_edge_degrees
from alchemi_spec import InputError, StrategyKind, UntrustedPickle

F64 = torch.float64
PRECISE = InferenceSettings(activation_checkpointing=False, base_precision_dtype=F64)
MERGED = InferenceSettings(activation_checkpointing=False, base_precision_dtype=F64, merge_mole=True)
CHUNKED = InferenceSettings(activation_checkpointing=True, base_precision_dtype=F64)


def silica(task="omat", **info):
    atoms = bulk("Si", cubic=True) * (2, 2, 1)
    atoms.rattle(0.15, seed=1)
    atoms.numbers = np.random.default_rng(0).choice([8, 14], len(atoms))
    atoms.info |= info
    return atoms


def molecule(**info):
    return Atoms("OHHSi", [[0, 0, 0], [0.9, 0.1, 0], [-0.4, 0.8, 0], [0.3, -1.2, 0.9]], info=info)


CASES = {
    "omat": silica(),
    "omat with a charge": silica(charge=2, spin=3),
    "omol": molecule(),
    "omol with a spin": molecule(charge=-1, spin=2),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("uma") / "small.pt"
    save(path)
    return path


def data_of(atoms):
    """The fields that a model reads, for one process, by brute force."""
    from ase.neighborlist import primitive_neighbor_list  # noqa: PLC0415

    receiver, sender, shifts = primitive_neighbor_list("ijS", atoms.pbc, atoms.cell.complete(), atoms.positions, 4.5)
    fields = {
        "positions": torch.from_numpy(atoms.positions),
        "atomic_numbers": torch.from_numpy(atoms.numbers),
        "batch": torch.zeros(len(atoms), dtype=torch.long),
        "cell": torch.from_numpy(atoms.cell.array)[None],
        "pbc": torch.from_numpy(atoms.pbc)[None],
        "edge_index": torch.from_numpy(np.stack([sender, receiver])),
        "edge_shifts": torch.from_numpy(shifts).double(),
        "nodes": torch.arange(len(atoms)),
    }
    return fields | {name: torch.tensor([atoms.info[name]]) for name in ("charge", "spin") if name in atoms.info}


EXACT, FP32 = {"rtol": 1e-10, "atol": 1e-12}, {"rtol": 1e-6, "atol": 1e-7}
"""Fairchem itself merges experts in float32, whatever precision is requested."""
WAYS = {"mixture": (PRECISE, EXACT), "merged": (MERGED, FP32), "in chunks": (CHUNKED, EXACT)}


@pytest.mark.parametrize(("settings", "tolerance"), WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_gives_what_fairchem_s_calculator_gives(checkpoint, name, settings, tolerance):
    atoms, task = CASES[name].copy(), name.split()[0]
    with warnings.catch_warnings(action="ignore"):
        atoms.calc = FAIRChemCalculator(MLIPPredictUnit(str(checkpoint), "cpu", inference_settings=settings), task_name=task)
        expected = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if atoms.pbc.all():
            expected["stress"] = atoms.get_stress(voigt=False)
    wrapper = UMAWrapper.from_checkpoint(f"{checkpoint}", task=task, settings=settings, trust_pickle=True)
    if settings is CHUNKED:
        in_chunks(wrapper, 50)
    data = data_of(CASES[name])
    wrapper.validate(data)
    found = wrapper(data, tuple(expected))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key].squeeze(0) if key == "stress" else found[key], value, **tolerance)


def test_derivatives_are_the_energy_s():
    wrapper, data = UMAWrapper(small_uma(), "omat"), data_of(silica())
    found = wrapper(data)
    step, direction = 1e-4, torch.randn(len(data["positions"]), 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    moved = [wrapper(data | {"positions": data["positions"] + s * direction}, ["energy"])["energy"] for s in (step, -step)]
    assert (moved[0] - moved[1]).item() / 2 / step == pytest.approx(-(found["forces"] * direction).sum().item(), rel=1e-6)
    strain = step * torch.tensor([[0.3, 0.1, 0], [0.1, -0.2, 0.4], [0, 0.4, 0.5]], dtype=F64)
    energies = []
    for sign in (1, -1):
        deformation = torch.eye(3, dtype=F64) + sign * strain
        strained = {name: data[name] @ deformation for name in ("positions", "cell")}
        energies.append(wrapper(data | strained, ["energy"])["energy"])
    work = (found["stress"][0] * strain).sum() * data["cell"].det().abs()
    assert (energies[0] - energies[1]).item() / 2 == pytest.approx(work.item(), rel=1e-6)


def test_differences_are_formed_in_the_wider_type():
    """Far from the origin float32 positions would lose what float64 ones have."""
    wrapper, data = UMAWrapper(small_uma(dtype=torch.float32), "omat"), data_of(silica())
    near = wrapper(data)
    far = wrapper(data | {"positions": data["positions"] + 1e4})
    torch.testing.assert_close(far["forces"], near["forces"], rtol=0, atol=1e-6)
    assert far["forces"].dtype == torch.float32


def test_merged_experts_are_for_one_composition_charge_and_spin():
    wrapper, data = UMAWrapper(small_uma(), "omat", MERGED), data_of(silica())
    expected = UMAWrapper(small_uma(), "omat")(data)
    wrapper.validate(data)
    torch.testing.assert_close(wrapper(data), expected, rtol=1e-10, atol=1e-12)
    wrapper.validate(data_of(silica() * (1, 1, 2)))
    for other, what in ((data_of(bulk("Si")), "composition"), (data | {"charge": torch.tensor([1.0])}, "charge")):
        with pytest.raises(InputError, match=f"merged for one {what}"):
            wrapper.validate(other)


def test_charges_and_spins_beyond_fairchem_s_ranges_are_refused():
    wrapper, data = UMAWrapper(small_uma(), "omat"), data_of(silica())
    for bad in ({"charge": torch.tensor([0.5])}, {"charge": torch.tensor([101.0])}, {"spin": torch.tensor([-1])}):
        with pytest.raises(InputError, match="whole numbers from"):
            wrapper.validate(data | bad)


def test_errors_of_loading_name_the_reason(checkpoint):
    with pytest.raises(UntrustedPickle, match="--trust-pickle"):
        UMAWrapper.from_checkpoint(checkpoint, task="omat")
    with pytest.raises(FileNotFoundError, match="uma-s-1p1"):
        UMAWrapper.from_checkpoint("no-such-model")
    with pytest.raises(ValueError, match="no task 'oc20': choose one of omat, omol"):
        UMAWrapper.from_checkpoint(f"{checkpoint}@oc20", trust_pickle=True)
    assert UMAWrapper.from_checkpoint(f"{checkpoint}@omol", trust_pickle=True).task == "omol"


def test_the_specification_follows_the_strategy():
    mixture, plain = UMAWrapper(small_uma(), "omat"), UMAWrapper(small_uma(mixture=False), "omat")
    assert mixture.distribution_spec().distribution.policy.kind == "halo"
    assert mixture.distribution_spec(StrategyKind.GRAPH_PARTITION).distribution.policy.kind == "graph_parallel"
    assert plain.distribution_spec().compile.capture and not mixture.distribution_spec().compile.capture


def test_a_model_without_experts_is_for_any_composition_and_has_its_kernels_prepared():
    fast = InferenceSettings(activation_checkpointing=False, base_precision_dtype=F64, merge_mole=True)
    plain, data = small_uma(num_experts=0), data_of(silica())
    wrapper = UMAWrapper(plain, "omat", fast)
    expected = wrapper(data)
    for other in (data, data_of(bulk("Si"))):
        wrapper.validate(other)
    quick = UMAWrapper(small_uma(mixture=False, execution_mode="umas_fast_pytorch"), "omat", fast)
    slow = UMAWrapper(small_uma(mixture=False), "omat", fast)
    torch.testing.assert_close(quick(data), slow(data), rtol=1e-10, atol=1e-12)
    assert expected["energy"].isfinite().all()


def test_wrappers_of_one_model_do_not_touch_it_nor_each_other():
    model, data = small_uma(), data_of(silica())
    merged, other = UMAWrapper(model, "omat", MERGED), UMAWrapper(model, "omol")
    expected = other(data)
    merged.validate(data)
    torch.testing.assert_close(other(data), expected, rtol=1e-10, atol=1e-12)  # edges are turned at random about their axes
    assert model.backbone.num_experts == 4 and model.output_heads["energyandforcehead"].merged_on_dataset is None


def test_elements_energies_stay_in_float64():
    wrapper = UMAWrapper(small_uma(), "omat")
    before = wrapper.references.clone()
    assert torch.equal(wrapper.float().references, before) and wrapper.dtype == torch.float32
    assert wrapper(data_of(silica()))["energy"].dtype == F64


def test_a_model_with_direct_forces_equals_its_calculator(tmp_path):
    sizes = {"mixture": False, "direct_forces": True, "regress_stress": False, "heads": DIRECT}
    save(tmp_path / "direct.pt", **sizes)
    atoms = silica()
    with warnings.catch_warnings(action="ignore"):
        unit = MLIPPredictUnit(str(tmp_path / "direct.pt"), "cpu", inference_settings=PRECISE)
        atoms.calc = FAIRChemCalculator(unit, task_name="omat")
        expected = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    wrapper = UMAWrapper.from_checkpoint(tmp_path / "direct.pt", task="omat", settings=PRECISE, trust_pickle=True)
    assert set(wrapper.distribution_spec().output_kinds) == {"energy", "forces"}
    found = wrapper(data_of(silica()), ("energy", "forces"))
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-10, atol=1e-12)


def test_scatter_edge_degrees_equals_fairchem_s():
    g = torch.Generator().manual_seed(0)
    x, radial, wigner = (torch.randn(*shape, generator=g) for shape in ((5, 9, 4), (7, 12), (7, 35)))
    target = torch.randint(0, 5, (7,), generator=g)
    original = UMASFastGPUBackend.edge_degree_scatter
    expected = original(x, radial, wigner, target, 3, 4, 5.0)
    torch.testing.assert_close(scatter_edge_degrees(original, x, radial, wigner, target, 3, 4, 5.0), expected)
