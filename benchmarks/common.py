"""What the benchmarks share: structures, models, and the report of the machine."""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from mace import modules  # isort: split

import argparse
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
from e3nn import o3

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


def argon(n_atoms):
    """Fcc argon at its density near 87 K (a = 5.4 Å), rattled by 0.1 Å."""
    repeats = max(1, round((n_atoms / 4) ** (1 / 3)))
    atoms = bulk("Ar", "fcc", a=5.4, cubic=True) * (repeats, repeats, repeats)
    atoms.rattle(0.1, seed=3)
    return atoms


def arguments(description):
    """What `halo.py` and `md.py` both ask for."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["lj", "mace"], default="lj")
    parser.add_argument("--atoms", type=int, nargs="+", default=[4000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--skin", type=float, default=1.0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path)
    return parser


def synchronize(comm):
    """Wait for the device, if it is one."""
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)


def write_report(path, device, rows):
    """The rows, with machine and versions, as JSON."""
    report = {
        "machine": torch.cuda.get_device_name(0) if device == "cuda" else platform.processor() or platform.machine(),
        "gpus": torch.cuda.device_count(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES if installed(name)},
        "date": time.strftime("%Y-%m-%d"),
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def installed(name):
    """Whether a distribution is there."""
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False
