"""Energy, forces and stress of a structure on two ranks, from Python: `uv run python examples/01_evaluate.py`."""

from pathlib import Path

import ase.io

from alchemi_dist import Batch, DistributedModel, DomainConfig, RankPool, ShardedBatch, load_model


def evaluate(comm, atoms):
    """Runs on every rank; each holds its share of the atoms."""
    config = DomainConfig(comm)
    model = DistributedModel(load_model("sevennet", comm), config)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    results = model(batch)
    return results["energy"].item(), batch.gather(results["forces"]), results["stress"][0]


if __name__ == "__main__":
    quartz = ase.io.read(Path(__file__).parent / "data" / "quartz.extxyz")
    with RankPool(2) as pool:
        energy, forces, stress = pool.run(evaluate, quartz)[0]
    print(f"energy {energy:.6f} eV, largest force {forces.norm(dim=-1).max():.6f} eV/Å")
    print(f"stress, eV/Å^3:\n{stress.numpy()}")
