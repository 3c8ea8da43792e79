"""More ranks than the machine has cores, 8 and 16, some of them without atoms or edges: the same numbers as one."""

import pytest
import torch
from ase.build import bulk
from parity import check, evaluate
from small_mace import silica, small_mace
from small_uma import small_uma

from alchemi_dist import Batch, Comm, DistributedModel, Domain, DomainConfig, LennardJones, ShardedBatch
from alchemi_dynamics import NVE, Simulation, thermalize
from alchemi_models_mace import MACEWrapper
from alchemi_models_uma import UMAWrapper

pytestmark = pytest.mark.long
MODELS = {
    "mace": lambda: MACEWrapper(small_mace().requires_grad_(False)).double(),
    "uma": lambda: UMAWrapper(small_uma(), "omat"),
}
STRUCTURES = {"crystal": silica(2), "twelve atoms": silica()[:6] + silica()[:6]}
STRUCTURES["twelve atoms"].positions[6:] += [0, 0, 30]


@pytest.mark.parametrize(("name", "strategy"), [("mace", "halo"), ("mace", "graph"), ("uma", "graph"), ("uma", "halo")])
def test_a_model_on_8_and_16_ranks_is_that_on_one(rank_pool, name, strategy):
    model = MODELS[name]()
    one = evaluate(Comm(), model, STRUCTURES)
    for n_ranks in (8, 16):
        for found in rank_pool(16).run(evaluate, model, STRUCTURES, strategy, ranks=n_ranks, timeout=240):
            check(found, one)


def trajectory(comm, mode):
    """Positions of hot argon after 40 steps; how often lists were rebuilt, whether atoms migrated, why steps were eager."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True) * (5, 5, 5)
    config = DomainConfig(comm, compile=mode)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    simulation = Simulation(Domain(DistributedModel(LennardJones(), config), batch, 0.4), NVE(2.0))
    thermalize(simulation.state, 400.0, seed=1)
    before = simulation.state.ids.tolist()
    simulation.run(40)
    domain, moved = simulation.domain, any(comm.gather_objects(before != simulation.state.ids.tolist()))
    return domain.batch.gather(simulation.state.positions), simulation.rebuilds, moved, domain.why_eager


@pytest.mark.parametrize(("mode", "why"), [("off", "compile is off"), ("capture", None)])
def test_a_trajectory_on_8_and_16_ranks_is_that_on_one(rank_pool, mode, why):
    expected, rebuilds, *_ = trajectory(Comm(), "off")
    assert rebuilds > 1
    for n_ranks in (8, 16):
        for positions, again, moved, why_eager in rank_pool(16).run(trajectory, mode, ranks=n_ranks, timeout=240):
            torch.testing.assert_close(positions, expected, rtol=0, atol=1e-9)
            assert again > 1 and moved and why_eager == why
