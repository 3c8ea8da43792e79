"""Plan partitions: ghosts, bytes and imbalance for 1e6 to 1e9 atoms on 8 to 4,096 ranks, as a table, JSON and a plot.

    python benchmarks/plan.py --out benchmarks/results/plan.json --plot docs/plan.svg
    python benchmarks/plan.py --agreement     # compare plans with partitions of real atoms

As for silica with MACE: reach 6.5 Å, 0.05 atoms/Å^3, two layers of 128 numbers in float32.
"""

import argparse
import json
import platform
import time
from pathlib import Path

import ase.io
import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

from alchemi_halo import Density, HaloStrategy, plan
from alchemi_kernels import LatticeFrames, neighbour_list
from alchemi_shardtensor import Comm

REACH, PER_VOLUME, THICKNESS = 6.5, 0.05, 100.0
LAYERS, WIDTH, ITEMSIZE = 2, 128, 4
ATOMS = [10**6, 10**7, 10**8, 10**9]
RANKS = [2**k for k in range(3, 13)]
ALL, NONE = (True, True, True), (False, False, False)
QUARTZ = Path(__file__).parents[1] / "examples/data/quartz.extxyz"
COLOURS = ["#7aa6c2", "#3f7cac", "#1f4e79", "#0b2545"]
N = 20_000


def slab(n):
    """A slab 100 Å thick, open along its normal."""
    side = (n / PER_VOLUME / THICKNESS) ** 0.5
    return Density.uniform(n, np.diag([side, side, THICKNESS]), (True, True, False))


SHAPES = {
    "uniform": lambda n: Density.uniform(n, np.eye(3) * (n / PER_VOLUME) ** (1 / 3)),
    "slab": slab,
    "cluster": lambda n: Density.cluster(n, PER_VOLUME),
}


def planned(shape, method, n_atoms, n_ranks):
    """One row of the report."""
    density, start = SHAPES[shape](n_atoms), time.perf_counter()
    made = plan(density, n_ranks, REACH, method=method)
    return {
        "shape": shape,
        "method": method,
        "atoms": n_atoms,
        "ranks": n_ranks,
        "ghost_ratio": round(made.ghost_ratio, 4),
        "ghosts_mean": round(made.ghosts.mean()),
        "ghosts_max": round(made.ghosts.max()),
        "neighbours_mean": round(made.neighbours.mean(), 2),
        "neighbours_max": int(made.neighbours.max()),
        "messages_max": int(made.messages(LAYERS).max()),
        "megabytes_max": round(made.bytes(LAYERS, WIDTH, ITEMSIZE).max() / 1e6, 3),
        "imbalance": round(made.imbalance, 4),
        "seconds": round(time.perf_counter() - start, 3),
    }


def random_atoms(shape, g):
    """Positions, cell, pbc and density of 20,000 atoms at random positions."""
    side = (N / PER_VOLUME) ** (1 / 3)
    cell = {"triclinic": np.array([[1, 0, 0], [0.6, 1, 0], [0.5, 0.4, 1]]), "slab": np.diag([1.5, 1.3, 1])}.get(
        shape, np.eye(3)
    ) * side
    x = g.random((N, 3))
    if shape == "cluster":
        x = g.normal(size=(N, 3))
        x *= (3 * N / (4 * np.pi * PER_VOLUME) * g.random((N, 1))) ** (1 / 3) / np.linalg.norm(x, axis=1)[:, None]
        return x, np.eye(3), NONE, Density.cluster(N, PER_VOLUME)
    if shape == "slab":
        return x * [1, 1, 0.4] @ cell, cell, ALL, Density.slab(N, cell, filled=0.4)
    if shape == "step":
        cell = np.diag([1.2, 1.0, 0.9]) * side
        x = x * [0.5, 1, 1] + np.where(np.arange(N) < N * 10 // 11, 0, 0.5)[:, None] * [1, 0, 0]
        return x @ cell, cell, ALL, Density.step(N, cell)
    return x @ cell, cell, ALL, Density.uniform(N, cell)


def quartz(g):
    """19,440 atoms of alpha-quartz, rattled by 0.05 Å, and the density that its 243-atom file gives."""
    unit = ase.io.read(QUARTZ)
    atoms = unit * (4, 5, 4)
    x = atoms.positions + 0.05 * g.normal(size=atoms.positions.shape)
    return x, atoms.cell.array, ALL, Density.of(unit.positions, unit.cell.array, ALL, (4, 5, 4))


def real(x, cell, pbc, n_ranks, pairs):
    """Owned atoms, ghosts and neighbour ranks of each rank, from every pair of atoms within reach and its owners."""
    one = torch.tensor(x), torch.zeros(len(x), dtype=torch.long), torch.tensor(cell)[None], torch.tensor(pbc)[None]
    owner = HaloStrategy().partition(*one, Comm(), n_ranks=n_ranks).owners(*one).numpy()
    away = owner[pairs[0]] != owner[pairs[1]]
    reader, atom = np.unique(np.stack([owner[pairs[0][away]], pairs[1][away]]), axis=1)
    peers = np.unique(np.stack([reader, owner[atom]]), axis=1)[0]
    return [np.bincount(rows, minlength=n_ranks) for rows in (owner, reader, peers)]


def agreement(name, make, seeds, reach):
    """Compare plans with partitions of real atoms on 2 to 16 ranks."""
    ghosts, most, peers, owned = [], [], [], []
    for seed in range(seeds):
        x, cell, pbc, density = make(np.random.default_rng(seed))
        frames = LatticeFrames.of(torch.tensor(cell)[None], torch.tensor(pbc)[None])
        found = neighbour_list(torch.tensor(x), torch.arange(len(x)), frames.vectors[0], frames.periodic[0], reach)
        pairs = [ids.numpy() for ids in found[:2]]
        for n_ranks in (2, 3, 4, 5, 7, 8, 12, 13, 16):
            has, reads, talks = real(x, cell, pbc, n_ranks, pairs)
            made = plan(density, n_ranks, reach)
            ghosts.append(made.ghosts.sum() / reads.sum() - 1)
            most.append(made.ghosts.max() / reads.max() - 1)
            peers.append(made.neighbours.mean() - talks.mean())
            owned.append(np.abs(made.owned / has - 1).max())
    gaps = {"ghosts": ghosts, "ghosts_of_the_largest": most, "peers": peers, "owned": owned}
    summary = {key: {"mean": round(float(np.mean(v)), 4), "worst": round(float(max(v, key=abs)), 4)} for key, v in gaps.items()}
    print(name, *(f"{key} {v['mean']:+.3f} (worst {v['worst']:+.3f})" for key, v in summary.items()), sep="  ", flush=True)
    return {"system": name, "reach": reach, "plans": len(ghosts), **summary}


def agreements(seeds):
    """Planned over real values, minus one, for all shapes."""
    shapes = ("uniform", "triclinic", "slab", "cluster", "step")
    rows = [agreement(s, lambda g, s=s: random_atoms(s, g), seeds, REACH) for s in shapes]
    return rows + [agreement(f"alpha-quartz, reach {reach} Å", quartz, 1, reach) for reach in (5.0, 6.5, 8.0)]


def plot(rows, path):
    """Plot ghosts, bytes and imbalance against ranks, with a column for each shape."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "alchemi", "font.size": 9, "font.family": "sans-serif"})
    figure = Figure(figsize=(9, 7.2), layout="constrained")
    panels = figure.subplots(3, 3, sharex=True, sharey="row")
    keys = (("ghost_ratio", "ghosts / owned"), ("megabytes_max", "MB per step, largest rank"), ("imbalance", "imbalance"))
    for column, shape in enumerate(SHAPES):
        panels[0, column].set_title({"slab": "slab, 100 Å thick"}.get(shape, shape))
        panels[2, column].set_xlabel("ranks")
        for row, (key, _) in enumerate(keys):
            lines(panels[row, column], [r for r in rows if r["shape"] == shape], key)
    for row, (_, label) in enumerate(keys):
        panels[row, 0].set_ylabel(label)
    panels[0, 0].legend(frameon=False, fontsize=8)
    panels[2, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def lines(panel, rows, key):
    """Draw a line for each number of atoms. The imbalance is the same for all, so it has a line for each method."""
    panel.set_xscale("log", base=2)
    panel.set_xticks([8, 64, 512, 4096], ["8", "64", "512", "4,096"])
    panel.grid(alpha=0.3, linewidth=0.5)
    panel.minorticks_off()
    if key == "imbalance":
        panel.set_ylim(0.9, 2.1)
        for method, style in (("grid", "--"), ("bisection", "-")):
            some = [r for r in rows if r["atoms"] == ATOMS[-1] and r["method"] == method]
            panel.plot([r["ranks"] for r in some], [r[key] for r in some], style, color="#b5532a", label=method)
        return
    panel.set_yscale("log")
    panel.minorticks_off()
    for atoms, colour in zip(ATOMS, COLOURS, strict=True):
        some = [r for r in rows if r["atoms"] == atoms and r["method"] == "bisection"]
        panel.plot([r["ranks"] for r in some], [r[key] for r in some], color=colour, label=f"{atoms:,} atoms")


def main():
    """Plan, report, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument(
        "--agreement", action="store_true", help="Also compare plans with partitions of real atoms; takes a minute."
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [planned(s, m, n, r) for s in SHAPES for m in ("bisection", "grid") for n in ATOMS for r in RANKS]
    for row in rows:
        if row["ranks"] in (8, 64, 512, 4096) and row["method"] == "bisection":
            print(
                *(
                    f"{row[key]:>12}"
                    for key in ("shape", "atoms", "ranks", "ghost_ratio", "megabytes_max", "imbalance", "seconds")
                )
            )
    report = {
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "reach": REACH,
        "atoms_per_volume": PER_VOLUME,
        "layers": LAYERS,
        "width": WIDTH,
        "itemsize": ITEMSIZE,
        "agreement": agreements(options.seeds) if options.agreement else [],
        "rows": rows,
    }
    if options.out:
        lists = {key: report.pop(key) for key in ("agreement", "rows")}
        inner = [f' "{key}": [\n  ' + ",\n  ".join(map(json.dumps, some)) + "\n ]" for key, some in lists.items()]
        head = json.dumps(report, indent=1).removesuffix("\n}")
        options.out.write_text(",\n".join([head, *inner]) + "\n}\n", encoding="utf-8")
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    main()
