"""NVIDIA's nvalchemi-toolkit on the quartz and argon of `common.py`, on 1 and 2 GPUs, so that one job measures both.

    python benchmarks/peers.py --case mace --atoms 9000 --ranks 1 2 --cueq --compile --out peers.json
    python benchmarks/peers.py --case lj --atoms 1000188 --ranks 1 2 --measure forces nve --out peers.json

Needs nvalchemi-toolkit 0.3 with nvalchemi-toolkit-ops 0.5. Their usage is that of their own benchmark/distributed: the
list is built once and a step is `model(batch)` on one rank, `halo_exchange` and `DistributedModel` on several; molecular
dynamics is `NVE` with a `NeighborListHook`, within `DomainParallel` on several. `--compile` is `torch.compile` of the MACE
module or of a `FusedStage`'s step on one rank, `DomainConfig.compile` on several. Each count of ranks has its own processes,
which are killed after `--timeout` s; what failed becomes a row with "error". With `--reference FILE` forces are compared
with ours there; the file is made if there is none.
"""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from common import argon, mace, quartz, write_report  # isort: split

import argparse
import faulthandler
import importlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import e3nn
import numpy as np
import torch
import torch.distributed as dist
from ase import units
from ase.md.velocitydistribution import MaxwellBoltzmannDistribution, Stationary

CUTOFF, SIGMA, EPSILON = 8.5, 3.4, 0.010341  # Å, Å, eV, as `alchemi_dist.LennardJones`
SWITCH_WIDTH = 0.1 * CUTOFF  # the same quintic, from 0.9 cutoff, as ours
PEER = "nvalchemi-toolkit 0.3.0"
NAMES = {
    "data": ("AtomicData", "Batch"),
    "distributed": ("DistributedModel", "DomainConfig", "DomainParallel", "ShardedBatch", "pin_fp32"),
    "distributed.particle_halo": ("halo_exchange",),
    "dynamics": ("NVE",),
    "dynamics.base": ("DynamicsStage", "FusedStage"),
    "hooks": ("NeighborListHook",),
    "models.lj": ("LennardJonesModelWrapper",),
    "models.mace": ("MACEWrapper",),
    "neighbors": ("compute_neighbors",),
}


def library():
    """The peer's names. Only the ranks import it, so that the launcher starts at once and can say that it is missing."""
    return SimpleNamespace(
        **{
            name: getattr(importlib.import_module(f"nvalchemi.{module}"), name)
            for module, names in NAMES.items()
            for name in names
        }
    )


def phase(words):
    """Say in the rank's log how far it is."""
    print(f"[{time.perf_counter():9.1f} s] {words}", file=sys.stderr, flush=True)


# ---- on a rank ----


class Site:
    """One rank: its device, its mesh if there are several, and how to wait for all."""

    def __init__(self, options):
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device(options.device, self.rank) if options.device == "cuda" else torch.device("cpu")
        self.mesh = None
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.ranks > 1 or options.decompose_one:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self.mesh = dist.device_mesh.DeviceMesh(options.device, list(range(self.ranks)), mesh_dim_names=("domain",))

    def synchronize(self):
        """Wait for the device, if it is one."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def total(self, tensor):
        """The sum over the ranks."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def peak(self):
        """GiB that torch has allocated at most since `reset`."""
        return torch.cuda.max_memory_allocated(self.device) / 2**30 if self.device.type == "cuda" else None

    def reset(self):
        """Begin a new peak."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)


def structure(options):
    """The system within its cell."""
    atoms = quartz(options.atoms) if options.case == "mace" else argon(options.atoms)
    atoms.wrap()
    return atoms


def our_mace(options):
    """`common.mace`'s module, traceable where it is to be compiled: the same weights either way."""
    before = e3nn.get_optimization_defaults()
    if options.compile and not options.keep_script:
        e3nn.set_optimization_defaults(jit_script_fx=False)
    try:
        return mace(options.channels, getattr(torch, options.dtype)).model
    finally:
        if not options.cueq:
            e3nn.set_optimization_defaults(**before)


def peer_model(options, site, lib):
    """The peer's wrapper of the same potential."""
    if options.case == "lj":
        return lib.LennardJonesModelWrapper(EPSILON, SIGMA, CUTOFF, switch_width=SWITCH_WIDTH, half_list=options.half_list)
    model = our_mace(options).to(site.device)
    if options.cueq:
        from mace.cli.convert_e3nn_cueq import run  # noqa: PLC0415  as their from_checkpoint does

        model = run(model, return_model=True, device=site.device.type).to(site.device)
        torch.set_default_dtype(torch.float32)
    if options.compile and site.mesh is None:
        model = torch.compile(model.eval().requires_grad_(False))
    return lib.MACEWrapper(model)


def batch_of(atoms, options, site, lib, moving=False):
    """The system as the peer's batch, on the device."""
    dtype = getattr(torch, options.dtype)
    fields = {"positions": atoms.positions, "cell": np.asarray(atoms.cell)[None], "atomic_masses": atoms.get_masses()}
    if moving:
        fields |= {"forces": np.zeros((len(atoms), 3)), "energy": np.zeros((1, 1))}
    data = lib.AtomicData(
        atomic_numbers=torch.as_tensor(atoms.numbers, dtype=torch.long, device=site.device),
        pbc=torch.as_tensor(atoms.pbc, device=site.device)[None],
        **{key: torch.as_tensor(value, dtype=dtype, device=site.device) for key, value in fields.items()},
    )
    if moving:
        MaxwellBoltzmannDistribution(atoms, temperature_K=options.temperature, rng=np.random.default_rng(1))
        Stationary(atoms)
        velocities = atoms.get_velocities()  # in ASE's unit of time, which is theirs
        data.add_node_property("velocities", torch.as_tensor(velocities, dtype=dtype, device=site.device))
    return lib.Batch.from_data_list([data], device=site.device)


def most_neighbors(options):
    """Width of the matrix of neighbours; None lets the peer estimate it, at 0.2 atoms per Å^3."""
    return options.max_neighbors if options.case == "lj" else None


def force_step(options, site, lib, model, atoms):
    """(step, order of the atoms over the ranks): energy and forces of the peer with its list built."""
    config = model.model_config.neighbor_config
    if site.mesh is None:
        batch = batch_of(atoms, options, site, lib)
        lib.compute_neighbors(batch, config=config, max_neighbors=most_neighbors(options))
        return lambda: model(batch), torch.arange(len(atoms))
    domain = lib.DomainConfig(cutoff=config.cutoff, mesh=site.mesh)
    distributed = lib.DistributedModel(model, domain, compile=options.compile)
    batch = batch_of(atoms, options, site, lib) if site.rank == 0 else None
    sharded = lib.ShardedBatch.from_batch(batch, mesh=site.mesh, config=domain)
    order = sharded.partitioner.assign_atoms_to_ranks(batch.positions).cpu().argsort(stable=True) if site.rank == 0 else None
    distributed._ensure_initialized(sharded)
    halo, differentiable = distributed._halo_config, distributed._needs_forces()
    lib.halo_exchange(sharded, halo, compute_forces=differentiable)
    lib.compute_neighbors(sharded.padded_batch, config=config, max_neighbors=most_neighbors(options))
    phase(f"{sharded.n_owned} atoms, {sharded.padded_batch.num_nodes - sharded.n_owned} ghosts")

    def step():
        lib.halo_exchange(sharded, halo, compute_forces=differentiable)
        return distributed(sharded)

    return step, order


def measure_forces(options, site, lib, model):
    """Times of the steps in s, peaks in GiB, and the results."""
    step, order = force_step(options, site, lib, model, structure(options))
    times, whole = [], None
    for number in range(options.warmup + options.steps):
        site.total(torch.zeros(1, device=site.device))
        site.synchronize()
        start = time.perf_counter()
        results = step()
        site.synchronize()
        times.append(time.perf_counter() - start)
        if number < options.warmup:
            phase(f"warm-up step {number}: {times[-1]:.3f} s")
        if number == options.warmup - 1:
            whole = site.peak()
            site.reset()
        if number < options.warmup + options.steps - 1:
            del results
    steady = site.peak()
    return {
        "times": times[options.warmup :],
        "first_s": times[0],
        "peak_gib": max(whole, steady) if steady is not None else None,
        "steady_peak_gib": steady,
        "energy": results["energy"].detach().double().sum().item(),
        "forces": results["forces"].detach().cpu(),
        "order": order,
    }


def simulation(options, site, lib, model):
    """(dynamics, batch, list hook): the peer's NVE."""
    hook = lib.NeighborListHook(
        model.model_config.neighbor_config,
        skin=options.skin,
        max_neighbors=most_neighbors(options),
        stage=lib.DynamicsStage.BEFORE_COMPUTE,
    )
    integrator = lib.NVE(model=model, dt=options.timestep, hooks=[hook])
    batch = batch_of(structure(options), options, site, lib, moving=True) if site.rank == 0 else None
    if site.mesh is None:
        whole_step = options.compile and options.case == "lj"
        return lib.FusedStage([(0, integrator)], compile_step=True) if whole_step else integrator, batch, hook
    cutoff = model.model_config.neighbor_config.cutoff
    domain = lib.DomainConfig(cutoff=cutoff, skin=options.skin, mesh=site.mesh, compile=options.compile)
    dynamics = lib.DomainParallel(integrator, config=domain)
    return dynamics, dynamics.partition(batch), hook


def conserved(batch, site):
    """(total energy in eV, temperature in K) of all ranks."""
    twice = (batch.atomic_masses.double().reshape(-1, 1) * batch.velocities.double() ** 2).sum()
    twice, atoms = site.total(torch.stack([twice, twice.new_tensor(batch.num_nodes)])).tolist()
    return batch.energy.double().sum().item() + twice / 2, twice / (3 * atoms * units.kB)


def measure_nve(options, site, lib, model):
    """The rate over `--md-steps` steps, and what happened meanwhile."""
    dynamics, batch, hook = simulation(options, site, lib, model)

    def advance(steps):
        nonlocal batch
        for _ in range(steps):
            batch, _ = dynamics.step(batch)

    for number in range(options.md_warmup):
        start = time.perf_counter()
        advance(1)
        site.synchronize()
        phase(f"MD warm-up step {number}: {time.perf_counter() - start:.3f} s")
    before, _ = conserved(batch, site)
    site.reset()
    site.total(torch.zeros(1, device=site.device))
    site.synchronize()
    start = time.perf_counter()
    advance(options.md_steps)
    site.synchronize()
    elapsed = time.perf_counter() - start
    after, temperature = conserved(batch, site)
    atoms = site.total(torch.tensor(batch.num_nodes, device=site.device)).item()
    rebuilds = 0
    for _ in range(10):
        advance(1)
        rebuilds += hook._rebuild_flags is None or bool(hook._rebuild_flags.any())
    return {
        "times": [elapsed / options.md_steps],
        "peak_gib": site.peak(),
        "energy": after,
        "temperature": temperature,
        "drift_ev_per_atom": abs(after - before) / atoms,
        "atoms_left": atoms,
        "rebuilds_in_10_steps": rebuilds,
    }


def work(options, folder):
    """All that one rank does."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(5.0, options.timeout - 3))
    phase("importing")
    lib = library()
    lib.pin_fp32()
    site = Site(options)
    phase("making the model")
    model = peer_model(options, site, lib)
    site.reset()
    phase(f"measuring {options.measuring}")
    found = {"forces": measure_forces, "nve": measure_nve}[options.measuring](options, site, lib, model)
    torch.save(found, folder / f"rank{site.rank}.pt")
    phase("done")
    faulthandler.cancel_dump_traceback_later()
    sys.stderr.flush()
    os._exit(0)  # theirs may hang in destructors; the result is written


def our_results(comm, model, atoms):
    """Our energy and forces (N, 3)."""
    from alchemi_dist import Batch, DistributedModel, DomainConfig, ShardedBatch  # noqa: PLC0415

    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    distributed = DistributedModel(model, config)
    results = distributed.compute(distributed.prepare(batch), batch, ("energy", "forces"))
    return results["energy"].item(), batch.gather(results["forces"]).cpu()


def reference(options):
    """Our own energy and forces on one rank, for parity; without them the measurements go on."""
    try:
        from alchemi_dist import LennardJones, RankPool  # noqa: PLC0415

        model = mace(options.channels, getattr(torch, options.dtype)) if options.case == "mace" else LennardJones()
        with RankPool(1, options.device, preload=["alchemi_models_mace"]) as pool:
            energy, forces = pool.run(our_results, model, structure(options))[0]
        torch.save({"energy": energy, "forces": forces}, options.reference)
    except Exception as error:
        print(json.dumps({"reference": str(options.reference), "error": str(error)[-options.log_chars :]}), flush=True)


# ---- the launcher ----


def launch(options, ranks, measuring, folder):
    """Run the ranks, each in its own process group, and return what went wrong or None."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = json.dumps({**vars(options), "out": None, "reference": None, "measuring": measuring})
    running, start = [], time.monotonic()
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "CUEQUIVARIANCE_OPS_PARALLEL_COMPILE": "0",  # their advice for several ranks
            "TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/peer_cache/inductor{rank}",  # theirs too
            "TRITON_CACHE_DIR": f"{tempfile.gettempdir()}/peer_cache/triton{rank}",
        }
        with (folder / f"rank{rank}.log").open("w") as log:
            command = [sys.executable, __file__, "--rank-of", str(folder), "--told", told]
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True))
    wrong = None
    while wrong is None and any(process.poll() is None for process in running):
        time.sleep(0.1)
        failed = [rank for rank, process in enumerate(running) if process.poll() not in (None, 0)]
        if failed:
            wrong = f"rank {failed[0]} ended with {running[failed[0]].returncode}"
        elif time.monotonic() - start > options.timeout:
            wrong = f"stopped after {options.timeout:.0f} s"
    for process in running:
        try:
            os.killpg(process.pid, signal.SIGKILL)  # a group of its own, begun here
        except ProcessLookupError:
            pass
        process.wait()
    failed = [rank for rank, process in enumerate(running) if not (folder / f"rank{rank}.pt").exists()]
    return wrong or (f"no result of rank {failed[0]}" if failed else None)


def in_global_order(found):
    """Forces (N, 3) of all ranks, in the structure's order."""
    owned = torch.cat([rank["forces"] for rank in found])
    forces = torch.empty_like(owned)
    forces[found[0]["order"]] = owned
    return forces


def summary(found):
    """What the ranks found, the slowest rank's times."""
    worst = max(found, key=lambda rank: statistics.median(rank["times"]))["times"]
    row = {
        "ms_per_step": round(statistics.median(worst) * 1e3, 3),
        "p95_ms": round(sorted(worst)[int(0.95 * len(worst))] * 1e3, 3),
    }
    for key in ("peak_gib", "steady_peak_gib"):
        if found[0].get(key) is not None:
            row[key] = round(max(rank[key] for rank in found), 3)
    rest = ("energy", "first_s", "temperature", "drift_ev_per_atom", "atoms_left", "rebuilds_in_10_steps")
    return row | {key: found[0][key] for key in rest if key in found[0]}


def describe(options, ranks, measuring):
    """What a row says before anything is measured."""
    several = ranks > 1 or options.decompose_one
    whole_step = measuring == "nve" and options.case == "lj"
    how = "DomainConfig.compile" if several else "FusedStage.compile" if whole_step else "torch.compile"
    return {
        "peer": PEER,
        "measure": measuring,
        "model": f"MACE {options.channels}x0e+{options.channels}x1o" if options.case == "mace" else "Lennard-Jones",
        "system": "alpha-quartz" if options.case == "mace" else "argon",
        "atoms": len(structure(options)),
        "ranks": ranks,
        "device": options.device,
        "dtype": options.dtype,
        "compile": how if options.compile else None,
        "kernels": "warp" if options.case == "lj" else "cueq" if options.cueq else "e3nn",
    }


def measured(options, ranks, measuring, forces):
    """One row; the forces go to `forces`."""
    row = describe(options, ranks, measuring)
    with tempfile.TemporaryDirectory() as folder:
        folder, start = Path(folder), time.monotonic()
        wrong = launch(options, ranks, measuring, folder)
        row["wall_s"] = round(time.monotonic() - start, 1)
        if wrong:
            logs = [(folder / f"rank{rank}.log").read_text(errors="replace")[-options.log_chars :] for rank in range(ranks)]
            return row | {"error": wrong, "log": logs}
        found = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(ranks)]
    row |= summary(found)
    if measuring == "nve":
        rate = 1e3 / row["ms_per_step"]
        details = {"skin": options.skin, "timestep_fs": options.timestep, "steps": options.md_steps}
        return row | details | {"steps_per_s": round(rate, 3), "ns_per_day": round(rate * options.timestep * 0.0864, 3)}
    ours = in_global_order(found)
    forces[f"{row['model']} {row['kernels']} {row['dtype']} {row['compile']} {ranks}"] = ours.float()
    row["max_force"] = ours.abs().max().item()
    if options.reference and options.reference.exists():
        expected = torch.load(options.reference, weights_only=True)
        row["energy_off_ours"] = abs(row["energy"] - expected["energy"]) / abs(expected["energy"])
        row["forces_off_ours"] = (ours.double() - expected["forces"].double()).abs().max().item()
    return row


def parse():
    """The command line; a rank takes its options from the launcher's JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=["mace", "lj"], default="mace")
    parser.add_argument("--atoms", type=int, default=9000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--measure", choices=["forces", "nve"], nargs="+", default=["forces"])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    parser.add_argument("--cueq", action="store_true", help="cuEquivariance kernels")
    parser.add_argument("--compile", action="store_true", help="their compiled path, see above")
    parser.add_argument("--keep-script", action="store_true", help="leave e3nn's TorchScript in what is compiled")
    parser.add_argument("--decompose-one", action="store_true", help="DistributedModel and DomainParallel on one rank too")
    parser.add_argument("--half-list", action="store_true", help="each pair once in LJ's list (one rank only)")
    parser.add_argument("--max-neighbors", type=int, default=128, help="width of LJ's matrix of neighbours")
    parser.add_argument("--skin", type=float, default=1.0)
    parser.add_argument("--temperature", type=float, default=80.0)
    parser.add_argument("--timestep", type=float, default=2.0)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--md-warmup", type=int, default=10)
    parser.add_argument("--md-steps", type=int, default=100)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--timeout", type=float, default=90.0)
    parser.add_argument("--log-chars", type=int, default=3000)
    parser.add_argument("--reference", type=Path, help="our forces, made there if there is no such file")
    parser.add_argument("--out", type=Path, help="JSON; added to if there; forces beside it, .pt")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--told", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Measure and report what the arguments ask for."""
    options = parse()
    if options.rank_of:
        work(argparse.Namespace(**options.told), options.rank_of)
    if options.reference and not options.reference.exists():
        reference(options)
    saved = options.out.with_suffix(".pt") if options.out else None
    forces = torch.load(saved, weights_only=True) if saved and saved.exists() else {}
    rows = json.loads(options.out.read_text())["rows"] if options.out and options.out.exists() else []
    for ranks in options.ranks:
        for measuring in options.measure:
            rows.append(measured(options, ranks, measuring, forces))
            print(json.dumps(rows[-1]), flush=True)
            if options.out:
                write_report(options.out, options.device, rows)
                torch.save(forces, saved)


if __name__ == "__main__":
    main()
