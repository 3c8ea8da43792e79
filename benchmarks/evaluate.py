"""Energy and forces of MACE on alpha-quartz: ms per step on 1, 2, ... GPUs in one run, parity beside every speed.

    python benchmarks/evaluate.py --atoms 9000 --ranks 1 2 --out benchmarks/results/evaluate.json

The list is built once; what is timed is `DistributedModel.compute`: exchanges, forward, backward. Medians over `--steps`
steps after `--warmup`, each step ended by a device synchronisation on every rank.
"""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from mace import modules  # isort: split

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path

import ase.io
import numpy as np
import torch
from e3nn import o3

from alchemi_dist import Batch, DistributedModel, DomainConfig, RankPool, ShardedBatch
from alchemi_models_mace import MACEWrapper

QUARTZ = Path(__file__).parents[1] / "examples/data/quartz.extxyz"
LIBRARIES = ("torch", "e3nn", "mace-torch", "cuequivariance-torch", "vesin")


def quartz(n_atoms):
    """The committed 243-atom structure's unit cell, repeated to about `n_atoms` and rattled by 0.05 Å."""
    whole = ase.io.read(QUARTZ)
    cell = whole[np.all((whole.get_scaled_positions() + 1e-6) % 1 < 1 / 3, axis=1)]
    assert len(cell) == 9
    cell.set_cell(whole.cell / 3)
    repeats = max(1, round((n_atoms / len(cell)) ** (1 / 3)))
    atoms = cell * (repeats, repeats, repeats)
    atoms.rattle(0.05, seed=3)
    return atoms


def mace(channels, dtype):
    """MACE with random weights at the size of the published models."""
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    model = modules.ScaleShiftMACE(
        r_max=5.0,
        num_bessel=8,
        num_polynomial_cutoff=5,
        max_ell=3,
        interaction_cls=block,
        interaction_cls_first=block,
        num_interactions=2,
        num_elements=2,
        hidden_irreps=o3.Irreps(f"{channels}x0e+{channels}x1o"),
        MLP_irreps=o3.Irreps("16x0e"),
        gate=torch.nn.functional.silu,
        atomic_energies=np.array([-1.0, -1.0]),
        avg_num_neighbors=40.0,
        atomic_numbers=[8, 14],
        correlation=3,
        radial_type="bessel",
        atomic_inter_scale=1.0,
        atomic_inter_shift=0.0,
    )
    return MACEWrapper(model.to(dtype).requires_grad_(False).eval())


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


def synchronize(comm):
    """Wait for the device, if it is one."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


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
    machine = torch.cuda.get_device_name(0) if options.device == "cuda" else platform.processor() or platform.machine()
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES if installed(name)}
    report = {
        "machine": machine,
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    report |= {"versions": versions, "date": time.strftime("%Y-%m-%d"), "rows": rows}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def installed(name):
    """Whether a distribution is there."""
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


if __name__ == "__main__":
    main()
