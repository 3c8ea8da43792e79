"""Steps on tensors of fixed size: the same numbers, with any padding, and however often lists are rebuilt."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
from ase.build import bulk, molecule
from test_simulation import argon, gathered, simulation
from toy import Masked, Toy

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch, domain, static_buffers
from alchemi_dynamics import FIRE, NPT, NVE, Langevin, NoseHooverChain, Simulation, thermalize
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import DomainConfig
from alchemi_shardtensor.capture import WARMUP_CALLS
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import SPEC_LJ_HALO, SPEC_MPNN_HALO, CompilePolicy, DistributionSpec, ShardedStoragePolicy, SpecError

EXACT = 1e-11
MODELS = {"lj": LennardJones(cutoff=5.0), "toy": Toy(), "masked": Masked()}
ENSEMBLES = {
    "nve": lambda: NVE(4.0),
    "langevin": lambda: Langevin(4.0, 300.0, 0.01, seed=1),
    "nvt": lambda: NoseHooverChain(4.0, 300.0),
    "npt": lambda: NPT(4.0, 300.0, 0.01, shape="full"),
    "fire": lambda: FIRE(1e-3, cell="full"),
}


def run(comm, mode, atoms, model, integrator, steps, skin=0.8, temperature=300.0, **more):
    """A trajectory under `compile=mode`."""
    config = DomainConfig(comm, compile=mode)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    found = Simulation(Domain(DistributedModel(model, config), batch, skin), integrator, **more)
    thermalize(found.state, temperature, seed=3)
    found.run(steps)
    return found


def gaps(found, expected):
    """The largest difference of everything that moves."""
    pairs = [(gathered(found, name), gathered(expected, name)) for name in ("positions", "velocities", "forces")]
    pairs += [(getattr(found.state, name), getattr(expected.state, name)) for name in ("energy", "cell")]
    return max((a - b).abs().max().item() for a, b in pairs)


@ranks(2)
@pytest.mark.parametrize("ensemble", ENSEMBLES)
@pytest.mark.parametrize("name", ["lj", "toy"])
def test_a_trajectory_is_that_of_eager_steps(comm, name, ensemble):
    found, expected = (
        run(comm, mode, argon((2, 2, 3)), MODELS[name], ENSEMBLES[ensemble](), 20) for mode in ("capture", "off")
    )
    assert found.domain.buffers is not None and found.domain.why_eager is None
    assert expected.domain.buffers is None and expected.domain.why_eager == "compile is off"
    assert found.rebuilds == expected.rebuilds and gaps(found, expected) < EXACT


@ranks(2)
def test_case_14_nothing_is_captured_anew(comm):
    atoms = bulk("Si", cubic=True) * (4, 4, 4)
    atoms.rattle(0.05, seed=1)
    found, expected = (run(comm, mode, atoms, MODELS["masked"], NVE(2.0), 0, 0.3, 600.0) for mode in ("capture", "off"))
    owned = set(found.state.ids.tolist())
    found.run(12)
    evaluations, buffers = dict(found.domain._evaluations), found.domain.buffers
    found.run(48)
    expected.run(60)
    assert found.rebuilds > 3 and owned != set(found.state.ids.tolist())
    assert found.domain.recaptures == 0 and found.domain.buffers is buffers and found.domain._evaluations == evaluations
    assert gaps(found, expected) < EXACT


@ranks(2)
@pytest.mark.parametrize("name", ["lj", "toy"])
def test_buffers_that_become_too_small_are_made_larger(comm, name):
    atoms = argon((2, 2, 3))
    with patch.object(domain, "MARGINS", (1e-9, 0.05)), patch.object(static_buffers, "SPARE_ROWS", 0):
        found, expected = (run(comm, mode, atoms, MODELS[name], NVE(8.0), 60, 0.3, 900.0) for mode in ("capture", "off"))
    assert found.domain.recaptures > 0 and gaps(found, expected) < EXACT


@ranks(2)
def test_more_edges_within_the_cutoff_than_the_buffers_hold_are_noticed(comm):
    edges_to_pass, calls = Domain._edges_to_pass, []

    def too_few(self, data, batch):
        calls.append(data)
        return {name: n * 9 // 10 if len(calls) < 3 else n for name, n in edges_to_pass(self, data, batch).items()}

    tight = patch.object(domain, "MARGINS", (1e-9, 0.05)), patch.object(static_buffers, "SPARE_ROWS", 0)
    with patch.object(Domain, "_edges_to_pass", too_few), tight[0], tight[1]:
        found = run(comm, "capture", argon((2, 2, 3)), MODELS["toy"], NVE(4.0), 12)
    assert found.domain.recaptures > 0
    assert gaps(found, run(comm, "off", argon((2, 2, 3)), MODELS["toy"], NVE(4.0), 12)) < EXACT


def frames():
    """Three systems of different sizes and boxes, charge and spin set."""
    water, crystal, slab = molecule("H2O"), bulk("Cu", cubic=True) * (2, 2, 2), bulk("Si", cubic=True)
    slab.pbc = (True, True, False)
    crystal.rattle(0.1, seed=1)
    for i, atoms in enumerate((water, crystal, slab)):
        atoms.info |= {"charge": float(i), "spin": i + 1}
    return [water, crystal, slab]


@ranks(1, 4)
@pytest.mark.parametrize("name", ["lj", "toy"])
def test_batches_and_ranks_with_few_atoms_or_none(comm, name):
    for atoms in (frames(), [molecule("H2O")], [bulk("Cu")]):
        results = []
        for mode in ("capture", "off"):
            config = DomainConfig(comm, compile=mode)
            batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
            found = Domain(DistributedModel(MODELS[name], config), batch, 0.4)
            for _ in range(WARMUP_CALLS + 1):
                outputs = found.evaluate(("energy", "forces", "stress"))
            results.append(outputs | {"forces": found.batch.gather(outputs["forces"])})
            assert (found.buffers is None) == (mode == "off")
        assert results[0].keys() == results[1].keys()
        for key, expected in results[1].items():
            torch.testing.assert_close(results[0][key], expected, rtol=0, atol=EXACT)


@ranks(2)
@pytest.mark.parametrize(("name", "features", "sums"), [("lj", 0, 1), ("toy", 3, 2)])
def test_a_steady_step_waits_for_nothing_and_sends_positions_once(comm, name, features, sums):
    """Also where lists are trimmed, by the same positions of ghosts as the model sees."""
    found = run(comm, "capture", argon((2, 2, 3)), MODELS[name], NVE(2.0), WARMUP_CALLS + 1)
    with count_traffic(comm) as traffic:
        for _ in range(3):
            found._first()
            found._evaluate()
            found._second()
    assert traffic.host_syncs == 0 and traffic.reverses == 3 * features
    assert traffic.exchanges == 3 * (1 + features) and traffic.reductions == 3 * sums


@ranks(2)
@pytest.mark.parametrize("mode", ["off", "capture"])
def test_all_of_it_may_be_in_inference_mode(comm, mode):
    found, model = [], Toy()
    for inference in (False, True):
        with torch.inference_mode(inference):
            moved = run(comm, mode, argon((2, 2, 3)), model, NVE(4.0), 8)
            moved.rebuild()
            moved.run(2)
            found.append((moved, gathered(moved, "positions")))
    assert torch.equal(found[0][1], found[1][1]) and found[0][0].domain.why_eager == found[1][0].domain.why_eager


class Asking(Masked):
    """Waits for the device at each step."""

    def scaled(self, r):
        return super().scaled(r) if r.sum().item() >= 0 else r


@ranks(2)
def test_a_model_that_waits_runs_as_it_is_and_the_line_is_named(comm):
    found, expected = (run(comm, mode, argon((2, 2, 3)), Asking(), NVE(4.0), 30, 0.3, 600.0) for mode in ("capture", "off"))
    assert "r.sum().item() >= 0" in found.domain.why_eager and "test_capture.py:" in found.domain.why_eager
    assert found.rebuilds > 3 and gaps(found, expected) < EXACT
    assert torch.equal(found.state.positions, found._all_rows.positions[: len(found.state.ids)])


@ranks(2)
def test_ghosts_are_read_anew_at_each_step_also_where_no_version_tells(comm):
    """A graph's replay moves atoms without counting it."""
    config = DomainConfig(comm, compile="capture")
    batch = ShardedBatch.scatter(Batch.from_ase(argon((2, 2, 3))), config)
    spec = SPEC_MPNN_HALO.replaced(ignores_longer_edges=True)
    found = Domain(DistributedModel(MODELS["lj"], config, spec), batch, 0.0)
    for _ in range(3):
        before = comm.traffic.exchanges
        energy = found.evaluate()["energy"]
        assert comm.traffic.exchanges == before + 1
    positions = found.atoms.all_rows.positions
    with torch.autograd._unsafe_preserve_version_counter(positions):
        positions[: found.atoms.n_real] += 0.05 * torch.sin(found.batch.ids.double())[:, None]
    moved = DistributedModel(MODELS["lj"], config, spec)(found.batch)["energy"]
    assert (energy - moved).abs() > 1e-4
    torch.testing.assert_close(found.evaluate()["energy"], moved)


def test_why_steps_are_eager_is_said():
    def why(model, mode, spec=None):
        config = DomainConfig(compile=mode)
        batch = ShardedBatch.scatter(Batch.from_ase(argon((2, 2, 2))), config)
        return Domain(DistributedModel(model, config, spec), batch, 0.5).why_eager

    assert "there are no CUDA graphs on the CPU" in why(Toy(), "auto")
    sharded = SPEC_MPNN_HALO.replaced(distribution=DistributionSpec(policy=ShardedStoragePolicy()))
    assert "layout's tensors" in why(Toy(), "capture", sharded)
    asked = Toy.distribution_spec.replaced(compile=CompilePolicy(mode="capture"))
    assert why(Toy(), "auto", asked) is None
    unable = Toy.distribution_spec.replaced(compile=CompilePolicy(capture=False))
    assert "forbids capture" in why(Toy(), "inductor", unable)
    with pytest.raises(SpecError, match="compile='capture' is not possible: the model's specification forbids it"):
        why(Toy(), "capture", unable)
    with pytest.raises(SpecError, match="compile='inductor'"):
        why(MODELS["lj"], "inductor", SPEC_LJ_HALO)


def test_what_is_changed_between_runs_counts():
    def trajectory(mode):
        config = DomainConfig(compile=mode)
        batch = ShardedBatch.scatter(Batch.from_ase(argon((2, 2, 2))), config)
        found = Simulation(Domain(DistributedModel(MODELS["lj"], config), batch, 0.8), Langevin(4.0, 300.0, 0.01, seed=1))
        found.run(8)
        found.state.velocities = found.state.velocities * 0.5
        found.integrator.friction = 0.1
        found.run(8)
        again = Simulation(found.domain, NVE(4.0))  # goes on from there
        again.run(8)
        return again.state.positions.clone()

    torch.testing.assert_close(trajectory("capture"), trajectory("off"), rtol=0, atol=EXACT)


@ranks(2)
def test_forces_that_are_added_reach_every_atom(comm):
    def pull(state):
        state.forces = state.forces + torch.outer(state.ids.double(), torch.tensor([1e-4, 0.0, 0.0]))

    found, expected = (
        run(comm, mode, argon((2, 2, 2)), MODELS["lj"], NVE(4.0), 12, forces=[pull]) for mode in ("capture", "off")
    )
    assert gaps(found, expected) < EXACT and np.isfinite(gathered(found, "positions").numpy()).all()


@pytest.mark.long
@ranks(2)
def test_inductor_compiles_the_step(comm):
    config = DomainConfig(comm, compile="inductor")
    batch = ShardedBatch.scatter(Batch.from_ase(argon((2, 2, 2))), config)
    found = Domain(DistributedModel(Toy(layers=1), config), batch, 0.4)
    expected = simulation(comm, argon((2, 2, 2)), Toy(layers=1), NVE(1.0), skin=0.4).domain
    results = found.evaluate()
    assert found.why_uncompiled is None and found.why_eager is None
    for _ in range(2):
        for name, value in expected.evaluate().items():
            torch.testing.assert_close(results[name], value, rtol=0, atol=1e-9)
        for each in (found, expected):
            each.batch.positions.add_(0.05 * torch.sin(each.batch.ids.double())[:, None])
        results = found.evaluate()
