"""The same numbers on CUDA: NCCL where every rank has a GPU of its own, through the host where they share."""

import pytest
import torch
from ase.build import bulk
from small_mace import silica, small_mace

from alchemi_dist import Batch, DistributedModel, DomainConfig, LennardJones, RankPool, ShardedBatch
from alchemi_dist.evaluate import TOLERANCE
from alchemi_models_mace import MACEWrapper

pytestmark = pytest.mark.gpu
GPUS = torch.cuda.device_count()


def evaluate(comm, model, atoms):
    config = DomainConfig(comm)
    batch = ShardedBatch.share(Batch.from_ase(atoms), config)
    results = DistributedModel(model, config)(batch)
    results["forces"] = batch.gather(results["forces"])
    return {name: value.cpu() for name, value in results.items()}


def argon():
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True) * (5, 5, 5)
    atoms.rattle(0.2, seed=1)
    return atoms


CASES = {
    "lj": (LennardJones(), argon()),
    "mace": (MACEWrapper(small_mace(8).requires_grad_(False)), silica(3)),
    "mace with an empty rank": (MACEWrapper(small_mace(8).requires_grad_(False)), silica()[:3]),
}


@pytest.fixture(scope="module")
def pools():
    """One pool for each number of ranks, and one on the CPU."""
    kept = {}

    def of(n_ranks, device="cuda"):
        if (n_ranks, device) not in kept:
            kept[n_ranks, device] = RankPool(n_ranks, device, preload=["alchemi_models_mace"])
        return kept[n_ranks, device]

    yield of
    for pool in kept.values():
        pool.close()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n_ranks", sorted({n for n in (1, 2, 4, 8) if n <= GPUS} | {2 * GPUS}))
def test_ranks_on_gpus_equal_one_process_on_the_cpu(pools, n_ranks, name, dtype):
    model, atoms = CASES[name]
    model = model.to(dtype)
    expected = pools(1, "cpu").run(evaluate, model, atoms)[0]
    everyone = pools(n_ranks).run(evaluate, model, atoms, timeout=240)
    for results in everyone:
        for key, value in expected.items():
            gap = (results[key] - value).abs().max()
            gap = gap / value.abs() if key == "energy" else gap
            assert gap <= TOLERANCE[dtype][key], f"{key} {gap.item()}"
