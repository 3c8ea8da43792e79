"""The runner: one configuration file a system, one row of JSON a measurement, parity beside every speed.

    cd benchmarks
    python run.py configs/argon.toml --out results/argon.json
    python run.py configs/quartz-mace.toml --compile off capture --measure evaluate --out results/quartz-mace.json
    python run.py configs/argon.toml --weak 100000 --ranks 1 2 4 8 --out results/argon-weak.json

What the figures mean is in README.md; `report.py` makes tables and plots of them. Rows of as many ranks share their processes,
and their caches of compiled kernels. The file is written after each row, so a run that is stopped keeps what it had.
"""

import argparse
import gc
import json
import statistics
import time
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from common import MODELS, PRELOAD, STRUCTURES, exchange_share, timed, with_clock, write_report

from alchemi_dist import Batch, DistributedModel, Domain, DomainConfig, RankPool, ShardedBatch
from alchemi_domain.distributed_model import spec_of
from alchemi_dynamics import NVE, NoseHooverChain, Simulation, thermalize
from alchemi_spec import StrategyKind

PROFILED = 5
"""Steps in which the share of communication is measured."""
SETTLING = 2
"""Steps after a rebuild that a block leaves out: TorchScript compiles where shapes are new."""
SENT = ("bytes", "messages", "exchanges", "reverses", "reductions")


@dataclass(frozen=True)
class Job:
    """One measurement, for a row: `atoms` is an ASE structure, `config` the file's content."""

    config: dict
    atoms: object
    ranks: int
    compile: str
    measure: str
    weak: int | None = None

    @property
    def label(self):
        """What parity names it by."""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, {self.compile}"


def made_domain(comm, model, job, skin):
    """The model on the atoms, and what its first evaluation gave and took (ms): compilation is in it."""
    if comm.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(comm.device)
    wire = job.config.get("wire")
    strategy = job.config.get("strategy", "halo")
    config = DomainConfig(comm, strategy, job.compile, getattr(torch, wire) if wire else None)
    batch = ShardedBatch.scatter(Batch.from_ase(job.atoms) if comm.rank == 0 else None, config)
    domain = Domain(DistributedModel(model, config, specification(model, job.config)), batch, skin)
    return domain, *timed(comm, domain.evaluate)


def specification(model, config):
    """With a `collective`, the model's under a graph partition whose rows it brings; otherwise what its strategy takes."""
    if "collective" not in config:
        return None
    if not config.get("strategy", "halo").startswith("graph"):
        raise ValueError('a collective brings the rows of a graph partition: set strategy = "graph", too.')
    spec = spec_of(model, StrategyKind.GRAPH_PARTITION)
    policy = spec.distribution.policy.replaced(collective=config["collective"])
    return spec.replaced(distribution=spec.distribution.replaced(policy=policy))


def on_rank_0(domain, results):
    """Energy (B,) everywhere and all atoms' forces (n_atoms, 3) on rank 0, on the host."""
    return {"energy": results["energy"].cpu(), "forces": domain.batch.gather(results["forces"], dst=0).cpu()}


def counts(domain):
    """Atoms, ghosts and edges of this rank, without what fills captured tensors up; and how steps are run."""
    data = domain.model.prepare(domain.batch, skin=domain.skin)
    numbers = {"owned": len(domain.batch.ids), "ghosts": data["positions"].shard.routing.n_ghost}
    how = str(domain.buffers.capacity) if domain.why_eager is None else f"eager: {domain.why_eager}"
    return numbers | {"edges": data["edge_index"].shape[1], "captured": how, "recaptures": domain.recaptures}


def sent(comm, function, steps=1):
    """What this rank sends in each of the `steps` of a call."""
    before = [getattr(comm.traffic, name) for name in SENT]
    function()
    added = [getattr(comm.traffic, name) - b for name, b in zip(SENT, before, strict=True)]
    return {name: n // steps if n % steps == 0 else n / steps for name, n in zip(SENT, added, strict=True)}


def memory(comm):
    """Peaks of this rank since the domain was begun: of tensors, and of what torch had from the device."""
    if comm.device.type != "cuda":
        return {"peak_gib": None, "reserved_gib": None}
    peaks = torch.cuda.max_memory_allocated(comm.device), torch.cuda.max_memory_reserved(comm.device)
    return {name: round(n / 2**30, 3) for name, n in zip(("peak_gib", "reserved_gib"), peaks, strict=True)}


def milliseconds(comm, function, times):
    """Median and 95th percentile."""
    taken = sorted(timed(comm, function)[1] for _ in range(times))
    return statistics.median(taken), taken[int(0.95 * times)]


def repeated(function, times):
    """Call it so often."""
    for _ in range(times):
        function()


def evaluate(comm, model, job):
    """Energy and forces, lists as they are: steps in a loop, each with a synchronisation."""
    comm, settings = with_clock(comm), job.config["evaluate"]
    domain, _, first = made_domain(comm, model, job, skin=0.0)
    repeated(domain.evaluate, settings["warmup"])
    median, p95 = milliseconds(comm, domain.evaluate, settings["steps"])
    found = {"ms_per_step": median, "p95_ms": p95, "first_ms": first} | sent(comm, domain.evaluate) | memory(comm)
    found["exchange_share"] = exchange_share(comm, partial(repeated, domain.evaluate, PROFILED))
    return found | counts(domain), on_rank_0(domain, domain.evaluate())


def single(comm, model, job):
    """One evaluation, to compare with."""
    domain, results, _ = made_domain(comm, model, job, skin=0.0)
    return None, on_rank_0(domain, results)


def dynamics(comm, model, job):
    """A trajectory whole, and its parts: the bare step, a rebuild, steps between two of them."""
    comm, settings = with_clock(comm), job.config["dynamics"]
    domain, _, first = made_domain(comm, model, job, settings["skin"])
    simulation = Simulation(domain, integrator(job.measure, settings))
    thermalize(simulation.state, settings["temperature"], seed=1)
    simulation.run(settings["check"])
    results = {"positions": domain.batch.gather(simulation.state.positions, dst=0).cpu()}
    found = {"first_ms": first, "p95_ms": None} | whole(comm, simulation, settings["steps"], len(job.atoms)) | memory(comm)
    found["exchange_share"] = exchange_share(comm, partial(simulation.run, PROFILED))
    found["bare_ms"], found["bare_p95_ms"] = milliseconds(comm, domain.evaluate, job.config["evaluate"]["steps"])
    blocks = [block(comm, simulation, settings["block"]) for _ in range(settings["repeats"])]
    found["rebuild_ms"] = statistics.median(rebuild for rebuild, _ in blocks)
    between = [step for _, step in blocks if step is not None]
    found["between_ms"] = statistics.median(between) if between else None
    return found | counts(domain), results


def integrator(measure, settings):
    """The ensemble's, which remembers nothing yet."""
    if measure == "nve":
        return NVE(settings["timestep"])
    return NoseHooverChain(settings["timestep"], settings["temperature"], settings["damping"])


def whole(comm, simulation, steps, n_atoms):
    """`steps` steps by the loop, rebuilds and all."""
    energy, rebuilds, again = simulation.integrator.conserved(simulation.state), simulation.rebuilds, simulation.rolled_back
    times = []
    found = sent(comm, lambda: times.append(timed(comm, partial(simulation.run, steps))[1]), steps)
    drift = (simulation.integrator.conserved(simulation.state) - energy).abs().item() / n_atoms
    found |= {"ms_per_step": times[0] / steps, "steps": steps}
    found |= {"rebuilds": simulation.rebuilds - rebuilds, "rolled_back": simulation.rolled_back - again}
    return found | {"temperature": simulation.state.temperature().item(), "drift_ev_per_atom": drift}


def block(comm, simulation, steps):
    """How long a rebuild and an evaluation take (ms), and each of the steps soon after; None where lists ended among them."""
    _, rebuild = timed(comm, simulation.rebuild)
    simulation.run(SETTLING)
    before = simulation.rebuilds + simulation.rolled_back
    _, ms = timed(comm, partial(simulation.run, steps))
    return rebuild, None if simulation.rebuilds + simulation.rolled_back > before else ms / steps


def rebuild(comm, model, job):
    """What a partition costs: cutting space, migrating, making lists; the first step after it, and the second."""
    comm, settings = with_clock(comm), job.config["rebuild"]
    domain, results, _ = made_domain(comm, model, job, job.config["dynamics"]["skin"])
    results = on_rank_0(domain, results)
    generator = torch.Generator(comm.device).manual_seed(comm.rank)
    parts = [rebuilt(comm, domain, settings["displacement"], generator) for _ in range(settings["repeats"] + 1)]
    found = {name: statistics.median(part[name] for part in parts[1:]) for name in parts[0]}
    found |= sent(comm, domain.evaluate) | memory(comm)
    return found | counts(domain) | {"p95_ms": None, "exchange_share": None}, results


def rebuilt(comm, domain, displacement, generator):
    """How long each part takes (ms), atoms having moved by `displacement` (Å) so that some migrate."""
    moved = domain.batch.positions
    moved.add_(torch.randn(moved.shape, dtype=moved.dtype, device=comm.device, generator=generator), alpha=displacement)
    _, cut = timed(comm, domain.batch.repartition)
    batch, migrate = timed(comm, domain.batch.migrate)
    _, lists = timed(comm, partial(domain.build_neighbour_list, batch))
    _, first = timed(comm, domain.evaluate)
    _, step = timed(comm, domain.evaluate)
    return {"cut_ms": cut, "migrate_ms": migrate, "lists_ms": lists, "first_step_ms": first, "ms_per_step": step}


MEASURES = {"evaluate": evaluate, "nvt": dynamics, "nve": dynamics, "rebuild": rebuild}


class Pools:
    """One pool of processes for each number of ranks, started when it is asked for."""

    def __init__(self, options):
        self.options, self.kept = options, {}

    def __call__(self, function, model, job):
        """What each rank found, and rank 0's results."""
        if job.ranks not in self.kept:
            self.kept[job.ranks] = RankPool(job.ranks, self.options.device, preload=PRELOAD[job.config["model"]["make"]])
        per_rank = self.kept[job.ranks].run(function, model, job, timeout=self.options.timeout)
        return [found for found, _ in per_rank], per_rank[0][1]

    def close(self):
        """End them all."""
        for pool in self.kept.values():
            pool.close()


def slowest(per_rank):
    """The ranks' findings as one: the largest number of each, the first rank's words, all ranks' edges."""
    row = {name: largest([found[name] for found in per_rank]) for name in per_rank[0]}
    row["edges"] = sum(found["edges"] for found in per_rank)
    row["imbalance"] = row["owned"] * len(per_rank) / max(sum(found["owned"] for found in per_rank), 1)
    return row


def largest(values):
    """Of numbers; None and text as the first rank has them, None if any has none."""
    return values[0] if isinstance(values[0], str) or None in values else max(values)


def rates(ms, n_atoms, timestep):
    """The same speed in the units in which others give theirs."""
    return {
        "katom_steps_per_s": n_atoms / ms,
        "us_per_atom_step": ms * 1e3 / n_atoms,
        "ns_per_day_1fs": 86.4 / ms,
        "ns_per_day": 86.4 / ms * timestep,
    }


def rounded(value):
    """A float to five digits; anything else as it is."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


class Parity:
    """Differences from one rank without compilation; where that does not fit, from the first row of the kind."""

    def __init__(self, model, pooled):
        self.model, self.pooled, self.known = model, pooled, {}

    def __call__(self, job, results):
        """The largest difference of forces (eV/Å) or positions (Å), the energy's relative one, and what they are from."""
        moving = "positions" in results
        key = (job.measure if moving else "evaluate", len(job.atoms))
        if key not in self.known:
            trusted = moving or (job.ranks == 1 and job.compile == "off" and job.measure == "evaluate")
            self.known[key] = (None if trusted else self.alone(job)) or (job.label, results)
        label, one = self.known[key]
        found = {name: (value - one[name]).abs().max().item() for name, value in results.items()}
        if "energy" in found:
            found["energy"] /= one["energy"].abs().max().item()
        return found | {"against": "itself" if one is results else label}

    def alone(self, job):
        """A plain evaluation on one rank, or None where it fails."""
        job = Job(job.config, job.atoms, 1, "off", "evaluate")
        try:
            return job.label, self.pooled(single, self.model, job)[1]
        except Exception as error:
            print(f"no parity with one rank: {first_line(error)}", flush=True)
            return None


def first_line(error):
    """An exception's type and what it says first."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def head(job, options):
    """What is known of a row before it is measured."""
    config, model = job.config, job.config["model"]
    row = {"model": model["name"].format(**model.get("arguments", {})), "kernels": model["kernels"], "system": config["system"]}
    row |= {"measure": job.measure, "atoms": len(job.atoms), "ranks": job.ranks, "weak": job.weak, "device": options.device}
    row |= {"dtype": config["dtype"], "compile": job.compile, "wire": config.get("wire")}
    row |= {"strategy": config.get("strategy", "halo"), "collective": config.get("collective")}
    if job.measure != "evaluate":
        row["skin"] = config["dynamics"]["skin"]
    if job.measure in ("nvt", "nve"):
        row["timestep_fs"] = config["dynamics"]["timestep"]
    return row


def measured(model, job, options, pooled, parity):
    """One row; with `error` where it failed."""
    row = head(job, options)
    try:
        per_rank, results = pooled(MEASURES[job.measure], model, job)
        found = slowest(per_rank)
        found |= rates(found["ms_per_step"], len(job.atoms), row.get("timestep_fs", 1.0))
        row |= {name: rounded(value) for name, value in found.items()}
        if "forces" in results:
            row |= {"energy": results["energy"].sum().item(), "max_force": results["forces"].abs().max().item()}
        row["parity"] = parity(job, results)
    except Exception as error:
        row["error"] = first_line(error)
    return row


def copies(n):
    """Three factors of n, as equal as they come."""
    threes = [(a, b, n // (a * b)) for a in range(1, n + 1) for b in range(1, a + 1) if n % (a * b) == 0]
    return min(threes, key=max)


def jobs(config, weak):
    """All measurements: strong scaling over `config["atoms"]`, or weak over atoms a rank."""
    make = STRUCTURES[config["structure"]]
    sizes = [(n, n) for n in weak] or [(n, None) for n in config["atoms"]]
    for n, per_rank in sizes:
        for ranks in config["ranks"]:
            atoms = make(n, copies(ranks) if per_rank else (1, 1, 1))
            for mode in config["compile"]:
                for measure in config["measure"]:
                    yield Job(config, atoms, ranks, mode, measure, per_rank)


def overridden(config, options):
    """The file's configuration with what the command line says instead."""
    for name in ("atoms", "ranks", "compile", "measure"):
        config[name] = getattr(options, name) or config[name]
    for change in options.set:
        path, _, value = change.partition("=")
        *tables, name = path.split(".")
        table = config
        for key in tables:
            table = table[key]
        table[name] = tomllib.loads(f"value = {value}")["value"]
    return config


def arguments(words=None):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--atoms", type=int, nargs="+")
    parser.add_argument("--weak", type=int, nargs="+", default=[], help="atoms a rank, instead of --atoms")
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--compile", nargs="+", choices=["auto", "capture", "inductor", "off"])
    parser.add_argument("--measure", nargs="+", choices=list(MEASURES))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="such as dynamics.steps=20")
    parser.add_argument("--peers", type=Path, help="rows of peers.py, to be kept beside these")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no measurement is begun")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that a measurement may take")
    return parser.parse_args(words)


def main(words=None):
    """Measure what the configuration and the command line ask for."""
    options, began = arguments(words), time.monotonic()
    config = overridden(tomllib.loads(options.config.read_text(encoding="utf-8")), options)
    rows = json.loads(options.peers.read_text(encoding="utf-8"))["rows"] if options.peers else []
    make, dtype = MODELS[config["model"]["make"]], getattr(torch, config["dtype"])
    model = make(**config["model"].get("arguments", {}), dtype=dtype)
    pooled = Pools(options)
    parity = Parity(model, pooled)
    for job in jobs(config, options.weak):
        if time.monotonic() - began > options.budget:
            print(f"the budget of {options.budget} s is spent: the rest is left out", flush=True)
            break
        rows.append(measured(model, job, options, pooled, parity))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
        write_report(options.out, options.device, rows)
    pooled.close()


if __name__ == "__main__":
    main()
