"""Argon at 80 K on two ranks, from Python: `uv run python examples/02_molecular_dynamics.py`."""

from ase.build import bulk

from alchemi_dist import Batch, DistributedModel, Domain, DomainConfig, LennardJones, RankPool, ShardedBatch
from alchemi_dynamics import Langevin, Simulation, Thermo, TrajectoryWriter, thermalize


def simulate(comm, atoms):
    """Runs on every rank; each moves its own atoms."""
    config = DomainConfig(comm)
    domain = Domain(DistributedModel(LennardJones(), config), ShardedBatch.scatter(Batch.from_ase(atoms), config))
    thermo = Thermo(every=20)
    with TrajectoryWriter("argon.extxyz", every=20) as writer:
        simulation = Simulation(domain, Langevin(timestep=4.0, temperature=80.0, seed=1), hooks=[thermo, writer])
        thermalize(simulation.state, 80.0, seed=1)
        simulation.run(100)
    return thermo.reports


if __name__ == "__main__":
    with RankPool(2) as pool:
        reports = pool.run(simulate, bulk("Ar", a=5.3, cubic=True) * (3, 3, 3))[0]
    for row in reports:
        print(f"{row.time:4.2f} ps  {row.potential:9.5f} eV  {row.temperature:5.1f} K  drift {row.drift:+.1e} eV/atom")
