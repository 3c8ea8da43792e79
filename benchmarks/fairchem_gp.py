"""fairchem-core's own graph parallel inference on the iron of `run.py`'s configs/iron-uma.toml, so that one job measures both.

    python benchmarks/fairchem_gp.py --atoms 2000 16000 --ranks 1 2 --mode all_to_all --out results/fairchem.json
    python benchmarks/run.py benchmarks/configs/iron-uma.toml --peers results/fairchem.json --out results/iron-uma.json

The same weights, in fairchem's `MLIPPredictUnit`, on the process groups that its own workers make; energy and forces of data
that is on the device already. `--mode allgather` splits by index, `all_to_all` in space, as fairchem names them; `--compile`
is its own torch.compile. One row a size and number of ranks, `error` where it failed.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import torch
from common import STRUCTURES, timed, uma_checkpoint, uma_settings, write_report

from alchemi_dist import RankPool


def predicted(comm, checkpoint, atoms, options):
    """Median and p95 in ms, GiB at most, energy and largest force."""
    from fairchem.core.common import gp_utils  # noqa: PLC0415  only on ranks
    from fairchem.core.common.distutils import assign_device_for_local_rank  # noqa: PLC0415
    from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch  # noqa: PLC0415
    from fairchem.core.units.mlip_unit.predict import MLIPPredictUnit  # noqa: PLC0415

    on_cpu = comm.device.type == "cpu"
    assign_device_for_local_rank(on_cpu, comm.rank)
    if comm.size > 1 and not gp_utils.initialized():
        partition = "spatial" if options.mode == "all_to_all" else "index_split"
        gp_utils.setup_graph_parallel_groups(comm.size, "gloo" if on_cpu else "nccl")
        gp_utils.set_gp_config(gp_utils.GraphParallelConfig(comm.size, gp_utils.GPMode(options.mode), partition))
    settings = uma_settings(checkpointing=options.checkpointing, kernels=options.kernels)
    settings.compile = options.compile
    unit = MLIPPredictUnit(str(checkpoint), comm.device.type, inference_settings=settings)
    data = atomicdata_list_to_batch([AtomicData.from_ase(atoms, task_name="omat", r_data_keys=["spin", "charge"])])
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(options.warmup):
        found = unit.predict(data)
    times = sorted(timed(comm, lambda: unit.predict(data))[1] for _ in range(options.steps))
    row = {"ms_per_step": statistics.median(times), "p95_ms": times[int(0.95 * len(times))]}
    row["peak_gib"] = None if on_cpu else round(torch.cuda.max_memory_allocated() / 2**30, 3)
    return row | {"energy": found["energy"].item(), "max_force": found["forces"].abs().max().item()}


def main():
    """Measure and report what the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, nargs="+", default=[2000, 16000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--mode", choices=["allgather", "all_to_all"], default="all_to_all")
    parser.add_argument("--kernels", default="umas_fast_gpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text(encoding="utf-8"))["rows"] if options.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "uma.pt"
        uma_checkpoint(checkpoint, options.layers)
        for ranks in options.ranks:
            with RankPool(ranks, options.device, preload=["alchemi_models_uma"]) as pool:
                for n_atoms in options.atoms:
                    atoms = STRUCTURES["iron"](n_atoms)
                    row = {"peer": f"fairchem-core {options.mode}", "model": f"UMA-S, {options.layers} layers, random"}
                    row |= {"system": "bcc iron", "measure": "evaluate", "atoms": len(atoms), "ranks": ranks}
                    row |= {"kernels": options.kernels, "compile": "torch.compile" if options.compile else None}
                    row |= {"dtype": "float32", "device": options.device}
                    try:
                        everyone = pool.run(predicted, checkpoint, atoms, options, timeout=options.timeout)
                        row |= max(everyone, key=lambda found: found["ms_per_step"])
                    except Exception as error:
                        row["error"] = f"{type(error).__name__}: {error}"[-300:]
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                    write_report(options.out, options.device, rows)


if __name__ == "__main__":
    main()
