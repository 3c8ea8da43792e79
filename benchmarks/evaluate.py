"""Energy and forces of MACE on alpha-quartz: ms per step on 1, 2, ... GPUs in one run, parity beside every speed.

    python benchmarks/evaluate.py --atoms 9000 --ranks 1 2 --out benchmarks/results/evaluate.json

The list is built once; what is timed is `DistributedModel.compute`: exchanges, forward, backward. Medians over `--steps`
steps after `--warmup`, each step ended by a device synchronisation on every rank.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from common import mace, quartz, synchronize, write_report

from alchemi_dist import Batch, DistributedModel, DomainConfig, RankPool, ShardedBatch


def measure(comm, model, atoms, warmup, steps):
    """Step times of this rank in s, its counts, and the results."""
    config = DomainConfig(comm)
    if comm.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(comm.device)
    batch = ShardedBatch.share(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    distributed = DistributedModel(model, config)
    data = distributed.prepare(batch)
    times = []
    for _ in range(warmup + steps):
        comm.all_reduce(torch.zeros(1, device=comm.device))
        synchronize(comm)
        start = time.perf_counter()
        results = distributed.compute(data, batch, ("energy", "forces"))
        synchronize(comm)
        times.append(time.perf_counter() - start)
    before = comm.traffic.bytes
    distributed.compute(data, batch, ("energy", "forces"))
    counts = {
        "owned": len(batch.ids),
        "ghosts": len(data["nodes"]) - len(batch.ids),
        "edges": data["edge_index"].shape[1],
        "bytes_sent_per_step": comm.traffic.bytes - before,
        "peak_gib": torch.cuda.max_memory_allocated(comm.device) / 2**30 if comm.device.type == "cuda" else None,
    }
    forces = batch.gather(results["forces"]).cpu()
    return times[warmup:], counts, results["energy"].cpu(), forces if comm.rank == 0 else None


def summary(ranks, per_rank):
    """One row: the slowest rank's median is the step's."""
    medians = [statistics.median(times) * 1e3 for times, *_ in per_rank]
    worst = per_rank[medians.index(max(medians))][0]
    return {
        "ranks": ranks,
        "ms_per_step": round(max(medians), 3),
        "p95_ms": round(sorted(worst)[int(0.95 * len(worst))] * 1e3, 3),
        "per_rank": [counts for _, counts, *_ in per_rank],
    }


def main():
    """Measure and report what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, nargs="+", default=[9000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--cueq", action="store_true", help="cuEquivariance kernels")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()

    model = mace(options.channels, getattr(torch, options.dtype))
    if options.cueq:
        model = model.with_cueq()
    rows = []
    for n_atoms in options.atoms:
        atoms, one = quartz(n_atoms), None
        for ranks in options.ranks:
            with RankPool(ranks, options.device, preload=["alchemi_models_mace"]) as pool:
                per_rank = pool.run(measure, model, atoms, options.warmup, options.steps)
            row = {"model": f"MACE {options.channels}x0e+{options.channels}x1o", "kernels": "cueq" if options.cueq else "e3nn"}
            row |= {"system": "alpha-quartz", "atoms": len(atoms), "device": options.device, "dtype": options.dtype}
            row |= summary(ranks, per_rank)
            energy, forces = per_rank[0][2:]
            one = one or (row["ms_per_step"], energy, forces)
            row["speedup"] = round(one[0] / row["ms_per_step"], 3)
            row["parity"] = {
                "energy": ((energy - one[1]) / one[1]).abs().item(),
                "forces": (forces - one[2]).abs().max().item(),
                "max_force": forces.abs().max().item(),
            }
            rows.append(row)
            print(json.dumps({k: v for k, v in row.items() if k != "per_rank"}), flush=True)
    if options.out:
        write_report(options.out, options.device, rows)


if __name__ == "__main__":
    main()
