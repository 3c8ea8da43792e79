"""What the benchmarks share: structures, models, clocks, and the report of the machine."""

import importlib.metadata
import json
import os
import platform
import tempfile
import time
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase.build import bulk

from alchemi_dist import Comm, LennardJones

QUARTZ = Path(__file__).parents[1] / "examples/data/quartz.extxyz"
LIBRARIES = ("torch", "e3nn", "mace-torch", "cuequivariance-torch", "openequivariance", "fairchem-core", "sevenn")


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


def iron(n_atoms, copies=(1, 1, 1)):
    """Bcc iron (a = 2.87 Å), about `n_atoms` times `copies`, rattled by 0.05 Å."""
    return _repeated(bulk("Fe", "bcc", a=2.87, cubic=True), n_atoms, copies, rattle=0.05)


STRUCTURES = {"argon": argon, "iron": iron, "quartz": quartz}


def lennard_jones(dtype):
    """Argon's."""
    return LennardJones().to(dtype)


def mace(channels, dtype, kernels="e3nn"):
    """MACE with random weights at the size of the published models; kernels e3nn's, `"cueq"` or `"oeq"`."""
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
    return wrapper if kernels == "e3nn" else getattr(wrapper, f"with_{kernels}")()


def sevennet(weights, dtype):
    """A pretrained SevenNet, whose weights come with the wheel of `sevenn`."""
    from alchemi_models_sevennet import SevenNetWrapper  # noqa: PLC0415  one model's libraries are not another's

    return SevenNetWrapper(weights).to(dtype)


def uma_checkpoint(path, layers):
    """Write UMA-S's sizes with random weights as fairchem writes checkpoints: 128 channels, lmax 2, 32 experts, cutoff 6 Å."""
    import hydra  # noqa: PLC0415  one model's libraries are not another's
    from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint  # noqa: PLC0415

    torch.manual_seed(0)
    model = hydra.utils.instantiate(uma_config(layers))
    averaged = {f"module.{k}": v for k, v in model.state_dict().items()} | {"n_averaged": torch.tensor(1)}
    torch.save(MLIPInferenceCheckpoint(uma_config(layers), model.state_dict(), averaged, [UMA_ENERGY]), path)


def uma_config(layers):
    """What a checkpoint of UMA-S says of its model, but for the tasks."""
    uma, names = "fairchem.core.models.uma", {"omat": "omat"}
    sizes = dict.fromkeys(("sphere_channels", "hidden_channels", "edge_channels"), 128)
    backbone = sizes | {"model": f"{uma}.escn_moe.eSCNMDMoeBackbone", "num_layers": layers, "lmax": 2, "mmax": 2, "cutoff": 6.0}
    backbone |= {"num_distance_basis": 64, "num_experts": 32, "use_composition_embedding": True, "dataset_mapping": names}
    backbone |= {"otf_graph": True, "direct_forces": False, "regress_forces": True, "regress_stress": False}
    backbone |= {"always_use_pbc": False}
    head = {"module": f"{uma}.escn_moe.DatasetSpecificMoEWrapper", "dataset_mapping": names}
    head |= {"head_cls": f"{uma}.escn_md.MLP_EFS_Head", "head_kwargs": {"wrap_property": False}}
    model = {"_target_": "fairchem.core.models.base.HydraModel", "backbone": backbone, "heads": {"efs": head}}
    return model | {"otf_graph": True, "pass_through_head_outputs": True, "model_id": "random-1"}


UMA_ENERGY = {
    "_target_": "fairchem.core.units.mlip_unit.mlip_unit.Task",
    "name": "omat_energy",
    "level": "system",
    "property": "energy",
    "loss_fn": None,
    "out_spec": {"_target_": "fairchem.core.units.mlip_unit.mlip_unit.OutputSpec", "dim": [1], "dtype": "float32"},
    "normalizer": {"_target_": "fairchem.core.modules.normalization.normalizer.Normalizer", "mean": 0.0, "rmsd": 1.0},
    "datasets": ["omat"],
    "metrics": [],
}
"""The only task: forces are the energy's derivative, which fairchem calls an untrained one."""


def uma_settings(dtype=torch.float32, checkpointing=False, kernels="umas_fast_gpu"):
    """Fairchem's fastest settings at full float32 precision, but for its compiler: merged experts, Triton kernels."""
    from fairchem.core.units.mlip_unit.api.inference import InferenceSettings  # noqa: PLC0415

    return InferenceSettings(
        activation_checkpointing=checkpointing,
        merge_mole=True,
        execution_mode=kernels,
        base_precision_dtype=dtype,
        predict_untrained_forces={"omat"},
        auto_add_default_untrained_tasks=False,
    )


def uma(layers, dtype, checkpointing=False, kernels="umas_fast_gpu"):
    """UMA-S's sizes with random weights, and more layers than its 4."""
    from alchemi_models_uma import UMAWrapper  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "uma.pt"
        uma_checkpoint(path, layers)
        return UMAWrapper.from_checkpoint(path, settings=uma_settings(dtype, checkpointing, kernels), trust_pickle=True)


MODELS = {"lennard_jones": lennard_jones, "mace": mace, "sevennet": sevennet, "uma": uma}
PRELOAD = {
    "lennard_jones": [],
    "mace": ["alchemi_models_mace"],
    "sevennet": ["alchemi_models_sevennet"],
    "uma": ["alchemi_models_uma"],
}


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
