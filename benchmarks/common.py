"""What the benchmarks share: structures, models, clocks, and the report of the machine."""

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase.build import bulk

from alchemi_dist import Comm, LennardJones

QUARTZ = Path(__file__).parents[1] / "examples/data/quartz.extxyz"
LIBRARIES = ("torch", "e3nn", "mace-torch", "cuequivariance-torch", "fairchem-core", "sevenn")


def quartz(n_atoms, copies=(1, 1, 1)):
    """The committed 243-atom structure's unit cell, repeated to about `n_atoms` times `copies`, rattled by 0.05 Å."""
    whole = ase.io.read(QUARTZ)
    cell = whole[np.all((whole.get_scaled_positions() + 1e-6) % 1 < 1 / 3, axis=1)]
    assert len(cell) == 9
    cell.set_cell(whole.cell / 3)
    return _repeated(cell, n_atoms, copies, rattle=0.05)


def argon(n_atoms, copies=(1, 1, 1)):
    """Fcc argon at its density near 87 K (a = 5.4 Å), about `n_atoms` times `copies`, rattled by 0.1 Å."""
    return _repeated(bulk("Ar", "fcc", a=5.4, cubic=True), n_atoms, copies, rattle=0.1)


def _repeated(cell, n_atoms, copies, rattle):
    repeats = max(1, round((n_atoms / len(cell)) ** (1 / 3)))
    atoms = cell * tuple(repeats * n for n in copies)
    atoms.rattle(rattle, seed=3)
    return atoms


STRUCTURES = {"argon": argon, "quartz": quartz}


def lennard_jones(dtype):
    """Argon's."""
    return LennardJones().to(dtype)


def mace(channels, dtype, cueq=False):
    """MACE with random weights at the size of the published models."""
    from mace import modules  # noqa: PLC0415, I001  one model's libraries are not another's; before e3nn, whose constants
    from e3nn import o3  # noqa: PLC0415  torch refuses to load otherwise

    from alchemi_models_mace import MACEWrapper  # noqa: PLC0415

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
    wrapper = MACEWrapper(model.to(dtype).requires_grad_(False).eval())
    return wrapper.with_cueq() if cueq else wrapper


def sevennet(weights, dtype):
    """A pretrained SevenNet, whose weights come with the wheel of `sevenn`."""
    from alchemi_models_sevennet import SevenNetWrapper  # noqa: PLC0415  one model's libraries are not another's

    return SevenNetWrapper(weights).to(dtype)


MODELS = {"lennard_jones": lennard_jones, "mace": mace, "sevennet": sevennet}
PRELOAD = {"lennard_jones": [], "mace": ["alchemi_models_mace"], "sevennet": ["alchemi_models_sevennet"]}


class TimedTransport:
    """A transport that adds up the seconds spent in it, waiting for other ranks included."""

    def __init__(self, inner):
        self.inner, self.rank, self.size, self.carrier = inner, inner.rank, inner.size, inner.carrier
        self.seconds = 0.0

    def _timed(self, collective, *arguments):
        start = time.perf_counter()
        collective(*arguments)
        self.seconds += time.perf_counter() - start

    def all_to_all(self, out, rows, receive, send):
        """`inner`'s."""
        self._timed(self.inner.all_to_all, out, rows, receive, send)

    def all_gather(self, out, t):
        """`inner`'s."""
        self._timed(self.inner.all_gather, out, t)

    def all_reduce(self, t, op):
        """`inner`'s."""
        self._timed(self.inner.all_reduce, t, op)

    def broadcast(self, t, source):
        """`inner`'s."""
        self._timed(self.inner.broadcast, t, source)


def with_clock(comm):
    """The same ranks; on the CPU, where no profiler shows it, with the time of their communication."""
    return Comm(TimedTransport(comm.transport), comm.device) if comm.device.type == "cpu" else comm


def synchronize(comm):
    """Wait for the device, if it is one."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def barrier(comm):
    """Wait for all ranks and their devices."""
    comm.all_reduce(torch.zeros(1, device=comm.device))
    synchronize(comm)


def timed(comm, function):
    """What a call returns, and the ms from when all ranks are ready until this rank's device has finished."""
    barrier(comm)
    start = time.perf_counter()
    result = function()
    synchronize(comm)
    return result, (time.perf_counter() - start) * 1e3


def exchange_share(comm, function):
    """The part of a call's wall time that this rank communicates, waiting for others included; None if it cannot be told.

    On CUDA the sum of NCCL's kernels, also where they run beside others; on the CPU the time inside the transport.
    """
    if comm.size == 1:
        return 0.0
    barrier(comm)
    return (_share_on_cuda if comm.device.type == "cuda" else _share_on_cpu)(comm, function)


def _share_on_cpu(comm, function):
    before, start = comm.transport.seconds, time.perf_counter()
    function()
    return (comm.transport.seconds - before) / (time.perf_counter() - start)


def _share_on_cuda(comm, function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        start = time.perf_counter()
        function()
        synchronize(comm)
        wall = time.perf_counter() - start
    kernels = [e for e in profiler.events() if "nccl" in e.name and not e.name.startswith("nccl:")]  # which spans a call
    return sum(e.time_range.elapsed_us() for e in kernels) * 1e-6 / wall if kernels else None


def write_report(path, device, rows):
    """The rows, with machine and versions, as JSON; the file is replaced as a whole."""
    report = {
        "machine": torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or platform.machine(),
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES if installed(name)},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def installed(name):
    """Whether a distribution is there."""
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
