"""The fused Lennard-Jones kernel beside the same formulas in plain torch, on one list of argon with a skin.

    python kernels.py --atoms 97556 1000188 --tiles 4,32,4 4,64,4 8,32,8 --out results/kernels.json

Means of `--steps` calls that follow each other, ended by one synchronisation. `gb_per_s` counts what must be read and written
once: senders, shifts, points, where each atom's edges begin, results; not the points' many readings, which caches serve, nor
the search for those beginnings. `per_system_ms`: summing atoms' energies and virials over the system, after the kernel. On the
CPU only the plain form is timed.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from common import argon, write_report

from alchemi_dist import Batch, Comm, DistributedModel, DomainConfig, LennardJones, ShardedBatch
from alchemi_kernels import FullList, lennard_jones
from alchemi_kernels.lennard_jones_torch import lennard_jones_in_torch


def listed(atoms, model, skin, device):
    """The list that the kernel's forms share."""
    config = DomainConfig(Comm(device=torch.device(device)))
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    names = ("positions", "edge_index", "edge_shifts", "cell", "batch")
    data = DistributedModel(model, config).prepare(batch, skin=skin)
    points, edge_index, shifts, cell, systems = (data[name].as_subclass(torch.Tensor) for name in names)
    return FullList(points, *edge_index, shifts, cell, systems, len(points))


def milliseconds(function, steps, device):
    """Of one call, after two that are not counted."""
    for call in range(steps + 2):
        if call == 2:
            settle(device)
            start = time.perf_counter()
        function()
    settle(device)
    return (time.perf_counter() - start) * 1e3 / steps


def settle(device):
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def counted_bytes(given, found):
    """What is read and written at least once."""
    points, sender, _, shifts, _, batch, n = given
    starts = 2 * 8 * n  # read as the end of one atom and the beginning of the next
    return sum(t.nbytes for t in (points, sender, shifts, batch, *found) if t is not None) + starts


def forms(device, tiles):
    """Each form's name and function of (given, constants, virial)."""
    plain = {"torch": lambda given, constants, virial: lennard_jones_in_torch(given, *constants.values(), virial)}
    if device == "cpu":
        return plain
    from alchemi_kernels import lennard_jones_triton  # noqa: PLC0415  torch on the CPU comes without Triton

    made = {
        f"triton {','.join(map(str, tile))}": lambda given, constants, virial, tile=tile: lennard_jones_triton.lennard_jones(
            given, *constants.values(), virial, tile
        )
        for tile in [lennard_jones_triton.Tile(*tile) for tile in tiles] or [lennard_jones_triton.TILE]
    }
    return {
        **plain,
        "lennard_jones": lambda given, constants, virial: lennard_jones(given, **constants, virial=virial),
        **made,
    }


def parity(found, expected):
    """The largest difference of each field, over its largest value."""
    pairs = {
        name: (getattr(found, name), getattr(expected, name)) for name in found._fields if getattr(found, name) is not None
    }
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in pairs.items()}


def measured(name, function, given, constants, virial, expected, options):
    """One row: times, rates, and how far the numbers are from plain torch's in float64."""
    found = function(given, constants, virial)
    ms = milliseconds(lambda: function(given, constants, virial), options.steps, options.device)
    edges, batch = len(given.sender), given.batch
    values = found.energies if found.virials is None else torch.cat([found.energies[:, None], found.virials.flatten(1)], 1)
    total = values.new_zeros(1, *values.shape[1:])
    summed = milliseconds(lambda: total.zero_().index_add_(0, batch, values), options.steps, options.device)
    return {
        "form": name,
        "dtype": str(constants["sigma"].dtype).removeprefix("torch."),
        "virial": virial,
        "device": options.device,
        "atoms": given.n,
        "edges": edges,
        "ms": round(ms, 4),
        "per_system_ms": round(summed, 4),
        "gb_per_s": round(counted_bytes(given, found) / ms * 1e-6, 1),
        "edges_per_s": round(edges / ms * 1e3),
        "parity": parity(found, expected),
    }


def parsed():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--atoms", type=int, nargs="+", default=[97556])
    parser.add_argument(
        "--tiles", type=lambda t: tuple(map(int, t.split(","))), nargs="*", default=[], help="atoms,lanes,warps"
    )
    parser.add_argument("--skin", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main():
    """Measure and report what the arguments ask for."""
    options, rows, model = parsed(), [], LennardJones()
    for n_atoms in options.atoms:
        given = listed(argon(n_atoms), model, options.skin, options.device)
        exact = {"sigma": model.sigma, "epsilon": model.epsilon, "cutoff": model.cutoff}
        expected = lennard_jones_in_torch(given, *exact.values(), True)
        for dtype in (torch.float64, torch.float32):
            constants = exact | {name: exact[name].to(dtype) for name in ("sigma", "epsilon")}
            for virial in (False, True):
                for name, function in forms(options.device, options.tiles).items():
                    rows.append(measured(name, function, given, constants, virial, expected, options))
                    print(json.dumps(rows[-1]), flush=True)
    if options.out:
        write_report(options.out, options.device, rows)


if __name__ == "__main__":
    main()
