"""Real models on 1, 2, 3 and 4 ranks against one, and against their own calculators. The bars are cases.md's."""

import json
from pathlib import Path

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from mace.calculators import MACECalculator
from parity import evaluate
from small_mace import silica, small_mace
from typer.testing import CliRunner

from alchemi_dist import Batch, Comm, DistributedModel, Domain, DomainConfig, ShardedBatch, load_model
from alchemi_dist.cli import app
from alchemi_domain.evaluate import TOLERANCE
from alchemi_dynamics import NVE, Simulation, thermalize
from alchemi_models_mace import MACEWrapper
from alchemi_models_sevennet import SevenNetWrapper
from alchemi_shardtensor.capture import WARMUP_CALLS
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import UnsupportedElement, UntrustedPickle

ROOT = Path(__file__).parents[1]
PICKLE = ROOT / "packages/alchemi-models-mace/tests/data/small-e3nn-0.4.4.model"
EVERY = [1, 6, 7, 8, 14, 29]


def rattled(name):
    atoms = ase.io.read(ROOT / f"examples/data/{name}.extxyz")
    atoms.rattle(0.05, seed=1)
    return atoms


STRUCTURES = {name: rattled(name) for name in ("quartz", "urea", "copper")} | {
    "smaller than the cutoff": silica(),
    "two apart": Atoms("OSi", [[0, 0, 0], [0, 0, 20]]),
    "three atoms": Atoms("SiO2", [[0, 0, 0], [1.6, 0, 0], [-1.5, 0.6, 0]], cell=[9, 9, 9], pbc=[True, False, True]),
}
STRUCTURES["a batch of three"] = [STRUCTURES[name] for name in ("three atoms", "smaller than the cutoff", "two apart")]
ONLY_SILICA = {name: atoms for name, atoms in STRUCTURES.items() if name not in ("urea", "copper")}


def every_element_mace():
    return small_mace(num_elements=6, atomic_numbers=EVERY, atomic_energies=np.linspace(-1, -6, 6))


MODELS = {
    "mace": lambda: MACEWrapper(every_element_mace().requires_grad_(False)),
    "mace without scale and shift": lambda: MACEWrapper(small_mace(scaled=False).requires_grad_(False)),
    "mace pickled under e3nn 0.4.4": lambda: MACEWrapper.from_checkpoint(PICKLE, trust_pickle=True),
    "sevennet": SevenNetWrapper,
}


@pytest.fixture(scope="module")
def reference():
    """Each model and its results on one rank, computed once, in this process."""
    kept = {}

    def of(name, dtype):
        if (name, dtype) not in kept:
            model = MODELS[name]().to(dtype)
            structures = STRUCTURES if name in ("mace", "sevennet") else ONLY_SILICA
            kept[name, dtype] = model, structures, evaluate(Comm(), model, structures)
        return kept[name, dtype]

    return of


@pytest.mark.parametrize(
    ("name", "dtype", "n_ranks"),
    [
        *((name, torch.float64, n) for name in MODELS for n in (2, 3, 4)),
        ("mace", torch.float32, 4),
        ("sevennet", torch.float32, 3),
    ],
    ids=str,
)
def test_many_ranks_equal_one(reference, rank_pool, name, dtype, n_ranks):
    model, structures, one = reference(name, dtype)
    many = rank_pool(4).run(evaluate, model, structures, ranks=n_ranks)
    for rank in many:
        for structure, expected in one.items():
            assert rank[structure].keys() == expected.keys()
            for key, value in expected.items():
                gap = (rank[structure][key] - value).abs()
                gap = (gap / value.abs() if key == "energy" else gap).max().item()
                assert gap <= TOLERANCE[dtype][key], f"{structure}: {key} {gap:.1e}"


def captured(comm, model, structures):
    """Results of each structure by captured steps, with a skin to trim; and why steps are eager, if they are."""
    config, results, reasons = DomainConfig(comm, compile="capture"), {}, []
    for name, atoms in structures.items():
        batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
        domain = Domain(DistributedModel(model, config), batch, skin=0.4)
        for _ in range(WARMUP_CALLS + 1):
            results[name] = domain.evaluate(("energy", "forces", "stress"))
        results[name]["forces"] = domain.batch.gather(results[name]["forces"])
        reasons.append(domain.why_eager)
    return results, reasons


@pytest.mark.parametrize("name", ["mace pickled under e3nn 0.4.4", "mace without scale and shift", "sevennet"])
def test_captured_steps_of_real_models_equal_eager_ones(rank_pool, name):
    model = MODELS[name]().to(torch.float64)
    structures = {key: STRUCTURES[key] for key in ("smaller than the cutoff", "a batch of three")}
    one = evaluate(Comm(), model, structures)
    for results, reasons in rank_pool(4).run(captured, model, structures, ranks=2):
        assert reasons == [None, None]
        for structure in structures:
            assert results[structure].keys() == one[structure].keys()
            for key, value in one[structure].items():
                torch.testing.assert_close(results[structure][key], value, rtol=1e-10, atol=1e-9)


def test_mace_on_ranks_equals_its_own_calculator(rank_pool):
    calculator = MACECalculator(models=[every_element_mace()], device="cpu", default_dtype="float64")
    model = MODELS["mace"]()
    many = rank_pool(4).run(evaluate, model, STRUCTURES, ranks=3)[0]
    for name in ("quartz", "urea", "copper", "smaller than the cutoff"):
        atoms = STRUCTURES[name].copy()
        atoms.calc = calculator
        assert many[name]["energy"].item() == pytest.approx(atoms.get_potential_energy(), rel=1e-10)
        np.testing.assert_allclose(many[name]["forces"], atoms.get_forces(), atol=1e-9)
        if atoms.pbc.all():  # across a slab's vacuum MACE's calculator divides by a volume of its own making
            np.testing.assert_allclose(many[name]["stress"][0], atoms.get_stress(voigt=False), atol=1e-9)


def traffic_of(comm, model, atoms):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    distributed = DistributedModel(model, config)
    data, counts = distributed.prepare(batch), []
    for outputs in (("energy", "forces", "stress"), ("energy", "forces"), ("energy",)):
        distributed.compute(data, batch, outputs)  # static fields travel in the first call only
        with count_traffic(comm) as traffic:
            distributed.compute(data, batch, outputs)
        counts.append((traffic.exchanges, traffic.reverses, traffic.reductions))
    return counts


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_traffic_of_mace_is_one_exchange_for_positions_and_one_for_each_layer(rank_pool, n_ranks):
    """Two layers: three exchanges; the first layer's features do not depend on positions, so two reverses, all of them in
    the backward pass. Reductions: the energy at the end, and the strain's gradient."""
    for counts in rank_pool(4).run(traffic_of, MODELS["mace"](), STRUCTURES["smaller than the cutoff"], ranks=n_ranks):
        assert counts == [(3, 2, 2), (3, 2, 1), (3, 0, 1)]


@ranks(1, 2, 4)
def test_case_16_a_checkpoint_is_read_once_and_its_pickle_must_be_trusted(comm):
    reads, load = [], torch.load
    torch.load = lambda file, **options: reads.append(file) or load(file, **options)
    try:
        with pytest.raises(UntrustedPickle, match="--trust-pickle"):
            load_model(f"mace:{PICKLE}", comm)
        model = load_model(f"mace:{PICKLE}", comm, trust_pickle=True)
    finally:
        torch.load = load
    assert sum(comm.gather_objects(len([r for r in reads if str(r) == str(PICKLE)]))) == 1
    results = evaluate(comm, model, {"silica": silica()})["silica"]
    assert results["energy"].item() == pytest.approx(json.loads(PICKLE.with_suffix(".json").read_text())["energy"], rel=1e-10)


@ranks(1, 3)
def test_an_element_that_a_real_model_does_not_know(comm):
    model = load_model(f"mace:{PICKLE}", comm, trust_pickle=True)
    with pytest.raises(UnsupportedElement, match="is Cu .*\n.*O, Si"):
        evaluate(comm, model, {"copper": STRUCTURES["copper"]})


def test_cuequivariance_kernels_give_the_same_numbers(rank_pool, tmp_path):
    torch.save(small_mace(max_ell=1, correlation=2), tmp_path / "small.model")
    slow, fast = (MACEWrapper.from_checkpoint(tmp_path / "small.model", trust_pickle=True, cueq=cueq) for cueq in (False, True))
    assert torch.get_default_dtype() is torch.float32
    expected = rank_pool(4).run(evaluate, slow, {"silica": silica()}, ranks=1)[0]["silica"]
    results = rank_pool(4).run(evaluate, fast, {"silica": silica()}, ranks=2)[0]["silica"]
    for name in expected:
        np.testing.assert_allclose(results[name], expected[name], atol=1e-10)


def test_the_command_line_on_real_weights():
    arguments = ["evaluate", str(ROOT / "examples/data/copper.extxyz"), "--ranks", "2", "--check", "--json", "-"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["energy"][0] == pytest.approx(-247.43, abs=0.01) and max(report["parity"].values()) < 1e-5


def moved(comm, model):
    """Positions of hot silica after 12 steps under a thin skin."""
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(silica(2)) if comm.rank == 0 else None, config)
    simulation = Simulation(Domain(DistributedModel(model, config), batch, 0.2), NVE(1.5))
    thermalize(simulation.state, 1500.0, seed=2)
    simulation.run(12)
    assert simulation.rebuilds > 0 and simulation.rebuilds < 10
    return simulation.domain.batch.gather(simulation.state.positions)


@ranks(3, timeout=240)
def test_a_trajectory_of_mace_under_a_skin_is_that_of_one_rank(comm):
    model = MACEWrapper(small_mace().requires_grad_(False)).double()
    torch.testing.assert_close(moved(comm, model), moved(Comm(), model), rtol=0, atol=1e-10)
