"""Molecular dynamics whole: rebuilds, migration and thermostat included. step/s and ns/day on 1, 2, ... ranks in one run.

    python benchmarks/md.py --model lj --atoms 100000 --ranks 1 2 --out benchmarks/results/md.json

NVE at `--temperature` K, `--timestep` fs. Parity: the largest difference of the positions from the first row's after the
first `--check` steps, and the drift of the energy per atom over the run.
"""

import json
import time

import torch
from common import argon, arguments, mace, quartz, synchronize, write_report

from alchemi_dist import Batch, DistributedModel, Domain, DomainConfig, LennardJones, RankPool, ShardedBatch
from alchemi_dist.dynamics import NVE, Simulation, thermalize


def measure(comm, model, atoms, options):
    """Steps per second, what happened meanwhile, and the positions after the first steps."""
    config = DomainConfig(comm)
    batch = ShardedBatch.share(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    simulation = Simulation(Domain(DistributedModel(model, config), batch, options.skin), NVE(options.timestep))
    thermalize(simulation.state, options.temperature, seed=1)
    simulation.run(options.check)
    positions = simulation.domain.batch.gather(simulation.state.positions, dst=0).cpu()
    energy, rebuilds = simulation.integrator.conserved(simulation.state), simulation.rebuilds
    synchronize(comm)
    start = time.perf_counter()
    simulation.run(options.steps)
    synchronize(comm)
    rate = options.steps / (time.perf_counter() - start)
    drift = (simulation.integrator.conserved(simulation.state) - energy).abs().item() / len(atoms)
    start = time.perf_counter()
    for _ in range(10):
        simulation.domain.evaluate()
    synchronize(comm)
    bare = (time.perf_counter() - start) / 10 * 1e3
    found = {"rebuilds": simulation.rebuilds - rebuilds, "taken_back": simulation.taken_back, "bare_ms": bare}
    return rate, found, drift, simulation.state.temperature().item(), positions


def main():
    """Measure and report what the arguments ask for."""
    parser = arguments(__doc__)
    parser.add_argument("--cueq", action="store_true", help="cuEquivariance kernels")
    parser.add_argument("--temperature", type=float, default=80.0)
    parser.add_argument("--timestep", type=float, default=2.0)
    parser.add_argument("--check", type=int, default=10)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    make, model = (argon, LennardJones()) if options.model == "lj" else (quartz, mace(options.channels, torch.float32))
    model = model.with_cueq() if options.cueq else model
    rows = []
    for n_atoms in options.atoms:
        atoms, one = make(n_atoms), None
        for ranks in options.ranks:
            with RankPool(ranks, options.device, preload=["alchemi_models_mace"]) as pool:
                rate, found, drift, temperature, positions = pool.run(measure, model, atoms, options)[0]
            one = positions if one is None else one
            row = {"model": options.model, "kernels": "cueq" if options.cueq else "torch", "atoms": len(atoms), "ranks": ranks}
            row |= {
                "device": options.device,
                "gpus": torch.cuda.device_count(),
                "skin": options.skin,
                "timestep_fs": options.timestep,
            }
            row |= {
                "steps_per_s": round(rate, 3),
                "ms_per_step": round(1e3 / rate, 3),
                "ns_per_day": round(rate * options.timestep * 0.0864, 3),
            }
            row |= {"temperature": round(temperature, 2), "parity_positions": (positions - one).abs().max().item()}
            rows.append(row | {"drift_ev_per_atom": drift} | found)
            print(json.dumps(rows[-1]), flush=True)
    if options.out:
        write_report(options.out, options.device, rows)


if __name__ == "__main__":
    main()
