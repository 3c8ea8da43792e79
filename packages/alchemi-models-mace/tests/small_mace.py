"""A small MACE with random weights, real classes throughout, and a structure to try it on."""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from mace import modules  # isort: split

import numpy as np
import torch
from ase.build import bulk
from e3nn import o3


def small_mace(channels=4, interaction="RealAgnosticResidualInteractionBlock", scaled=True, **changes):
    torch.manual_seed(0)
    block = modules.interaction_classes[interaction]
    options = {
        "r_max": 4.5,
        "num_bessel": 8,
        "num_polynomial_cutoff": 6,
        "max_ell": 2,
        "interaction_cls": block,
        "interaction_cls_first": block,
        "num_interactions": 2,
        "num_elements": 2,
        "hidden_irreps": o3.Irreps(f"{channels}x0e+{channels}x1o"),
        "MLP_irreps": o3.Irreps("8x0e"),
        "gate": torch.nn.functional.silu,
        "atomic_energies": np.array([-1.0, -2.0]),
        "avg_num_neighbors": 20.0,
        "atomic_numbers": [8, 14],
        "correlation": 3,
        "radial_type": "bessel",
        "atomic_inter_scale": 1.3,
        "atomic_inter_shift": 0.1,
    }
    options |= changes
    if scaled:
        return modules.ScaleShiftMACE(**options).double()
    del options["atomic_inter_scale"], options["atomic_inter_shift"]
    return modules.MACE(**options).double()


def silica(repeats=1):
    """Silicon and oxygen at random on rattled diamond sites, strained: nothing is zero by symmetry."""
    atoms = bulk("Si", cubic=True) * (repeats, repeats, repeats)
    atoms.numbers = np.random.default_rng(0).choice([8, 14], len(atoms))
    atoms.set_cell(atoms.cell.array @ [[1.01, 0.01, 0], [0, 0.98, 0.02], [0, 0, 1.005]], scale_atoms=True)
    atoms.rattle(0.15, seed=1)
    return atoms
