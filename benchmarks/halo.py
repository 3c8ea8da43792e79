"""What a partition costs: cutting space, migrating, making lists; beside a step, with its bytes, messages and balance.

    python benchmarks/halo.py --model lj --atoms 100000 --ranks 1 2 --out benchmarks/results/halo.json

Medians over `--repeats`, each part ended by a device synchronisation on every rank; the slowest rank counts. Atoms are
displaced by 0.2 Å before each rebuild, so that some migrate. The first step after a rebuild is apart: TorchScript is slow where
shapes are new. Parity: forces against the first row's.
"""

import json
import statistics
import time

import torch
from common import argon, arguments, mace, quartz, synchronize, write_report

from alchemi_dist import Batch, DistributedModel, Domain, DomainConfig, LennardJones, RankPool, ShardedBatch


def timed(comm, function):
    """What a call returns and how long all ranks take, in ms."""
    comm.all_reduce(torch.zeros(1, device=comm.device))
    synchronize(comm)
    start = time.perf_counter()
    result = function()
    synchronize(comm)
    return result, (time.perf_counter() - start) * 1e3


def measure(comm, model, atoms, skin, repeats):
    """Times of each part in ms, this rank's counts, and the forces."""
    config = DomainConfig(comm)
    batch = ShardedBatch.share(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    domain = Domain(DistributedModel(model, config), batch, skin)
    start = domain.evaluate()
    forces = domain.batch.gather(start["forces"], dst=0).cpu()
    times = {name: [] for name in ("cut", "migrate", "lists", "first_step", "step")}
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    for _ in range(repeats + 1):
        moved = domain.batch.positions
        moved.add_(torch.randn(moved.shape, dtype=moved.dtype, device=comm.device, generator=generator), alpha=0.2)
        _, cut = timed(comm, domain.batch.balanced)
        domain.batch, migrate = timed(comm, domain.batch.migrated)
        _, lists = timed(comm, domain.connect)
        _, first = timed(comm, domain.evaluate)
        _, step = timed(comm, domain.evaluate)
        for name, ms in zip(times, (cut, migrate, lists, first, step), strict=True):
            times[name].append(ms)
    before = (comm.traffic.bytes, comm.traffic.messages, comm.traffic.exchanges, comm.traffic.reverses)
    domain.evaluate()
    after = (comm.traffic.bytes, comm.traffic.messages, comm.traffic.exchanges, comm.traffic.reverses)
    counts = dict(
        zip(("bytes", "messages", "exchanges", "reverses"), (b - a for a, b in zip(before, after, strict=True)), strict=True)
    )
    routing = domain.data["positions"].shard.routing
    counts |= {"owned": routing.n_owned, "ghosts": routing.n_ghost, "edges": domain.data["edge_index"].shape[1]}
    return {name: statistics.median(ms[1:]) for name, ms in times.items()}, counts, forces


def main():
    """Measure and report what the arguments ask for."""
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    make, model = (argon, LennardJones()) if options.model == "lj" else (quartz, mace(options.channels, torch.float32))
    rows = []
    for n_atoms in options.atoms:
        atoms, one = make(n_atoms), None
        for ranks in options.ranks:
            with RankPool(ranks, options.device, preload=["alchemi_models_mace"]) as pool:
                per_rank = pool.run(measure, model, atoms, options.skin, options.repeats)
            slowest = {name: round(max(times[name] for times, *_ in per_rank), 3) for name in per_rank[0][0]}
            counts, forces = [c for _, c, _ in per_rank], per_rank[0][2]
            one = forces if one is None else one
            row = {"model": options.model, "atoms": len(atoms), "ranks": ranks, "device": options.device, "skin": options.skin}
            row |= {f"{name}_ms": ms for name, ms in slowest.items()}
            row["rebuild_over_step"] = round((slowest["migrate"] + slowest["lists"]) / slowest["step"], 2)
            row["imbalance"] = round(max(c["owned"] for c in counts) * ranks / len(atoms), 4)
            row |= {name: max(c[name] for c in counts) for name in ("bytes", "messages", "exchanges", "reverses", "ghosts")}
            row["parity"] = (forces - one).abs().max().item()
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.out:
        write_report(options.out, options.device, rows)


if __name__ == "__main__":
    main()
