"""The command `alchemi plan [FILE]`: plan a partition without making it."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import ase.io
import numpy as np
import torch
import typer
from ase import Atoms
from rich.console import Console
from rich.table import Table

from alchemi_dist.cli.launch import one_line_errors
from alchemi_halo import Density, plan
from alchemi_kernels import LatticeFrames
from alchemi_spec import InputError

THICKNESS = 100.0
"""The thickness of a slab in Å."""


class Shape(StrEnum):
    """The shape of the system if no file is given."""

    cube = "cube"
    slab = "slab"
    cluster = "cluster"


class Method(StrEnum):
    """How space is divided among ranks."""

    bisection = "bisection"
    grid = "grid"


class FeatureType(StrEnum):
    """The type of the features that are exchanged."""

    float32 = "float32"
    float64 = "float64"
    bfloat16 = "bfloat16"


ITEMSIZE = {FeatureType.bfloat16: 2, FeatureType.float32: 4, FeatureType.float64: 8}


@dataclass(frozen=True)
class Row:
    """One plan in numbers: means and maxima over ranks. `bytes` and `messages` are per step, of the rank with the most."""

    atoms: int
    ranks: int
    owned_mean: float
    owned_max: float
    imbalance: float
    ghosts_mean: float
    ghosts_max: float
    ghost_ratio: float
    neighbours_mean: float
    neighbours_max: int
    messages: int
    bytes: float


def plan_command(
    file: Annotated[Path | None, typer.Argument(help="A structure to repeat, in any format that ASE reads.")] = None,
    atoms: Annotated[
        str, typer.Option(help="Numbers of atoms, with commas. FILE is repeated to at least so many.")
    ] = "1e6,1e7,1e8,1e9",
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, with commas.")] = "8,64,512,4096",
    cutoff: Annotated[float, typer.Option(min=0, help="Cutoff of the model in Å.")] = 6.0,
    skin: Annotated[float, typer.Option(min=0, help="Skin of the neighbour list in Å, added to the cutoff.")] = 0.5,
    density: Annotated[float, typer.Option(help="Density in atoms per Å^3. Not used with FILE.")] = 0.05,
    shape: Annotated[Shape, typer.Option(help="Shape of the system; a slab is 100 Å thick. Not used with FILE.")] = Shape.cube,
    layers: Annotated[int, typer.Option(min=0, help="Number of layers that exchange features.")] = 2,
    width: Annotated[int, typer.Option(min=0, help="How many numbers per atom a layer exchanges.")] = 128,
    dtype: Annotated[FeatureType, typer.Option(help="Type of the features. Positions are in float64.")] = FeatureType.float32,
    method: Annotated[Method, typer.Option(help="Recursive bisection, or a grid of equal boxes.")] = Method.bisection,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the table as JSON to this file, or to standard output with -.")
    ] = None,
) -> None:
    """Plan a partition without making it: ghosts, bytes, messages and imbalance."""
    console = Console(stderr=str(json_path) == "-")
    with one_line_errors(console):
        make = _shaped(shape, density) if file is None else _repeated(file)
        sizes, worlds = _numbers(atoms, "--atoms"), _numbers(ranks, "--ranks")
        rows = [_row(d, n, cutoff + skin, method, layers, width, ITEMSIZE[dtype]) for d in map(make, sizes) for n in worlds]
    system = f"{shape}, {density:g} atoms/Å³" if file is None else f"{file.name}, repeated"
    console.print(_table(rows, f"{system}; reach {cutoff + skin:g} Å; {layers} layers of {width} {dtype}; {method}"))
    if json_path is not None:
        text = json.dumps([asdict(row) for row in rows], indent=2) + "\n"
        sys.stdout.write(text) if str(json_path) == "-" else json_path.write_text(text, encoding="utf-8")


def _numbers(text: str, option: str) -> list[int]:
    """The whole numbers in a list such as `1e6,1e7`."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(1 <= n < 2**53 and n == int(n) for n in numbers):
        raise InputError(f"{option} {text}: write whole numbers of 1 or more, separated by commas, such as 1e6,1e7.")
    return [int(n) for n in numbers]


def _shaped(shape: Shape, per_volume: float) -> Callable[[int], Density]:
    """A function from the number of atoms to the density of a shape."""
    if not 0 < per_volume < np.inf:
        raise InputError(f"--density {per_volume:g}: give a finite number of atoms per Å^3, more than 0.")

    def make(n: int) -> Density:
        if shape is Shape.cluster:
            return Density.cluster(n, per_volume)
        if shape is Shape.slab:
            side = (n / per_volume / THICKNESS) ** 0.5
            return Density.uniform(n, np.diag([side, side, THICKNESS]), (True, True, False))
        return Density.uniform(n, np.eye(3) * (n / per_volume) ** (1 / 3))

    return make


def _repeated(file: Path) -> Callable[[int], Density]:
    """A function from the number of atoms to the density of the file's structure, repeated to at least so many."""
    unit = _read(file)
    return lambda n: Density.of(unit.positions, unit.cell.array, unit.pbc, _repeats(unit, n))


def _read(file: Path) -> Atoms:
    """Read the last structure of a file."""
    try:
        unit = ase.io.read(file, parallel=False)
    except OSError:
        raise
    except Exception as error:
        raise InputError(f"ASE cannot read {file}: {type(error).__name__}: {error}") from error
    if not len(unit):
        raise InputError(f"{file} holds no atoms.")
    return unit


def _repeats(unit: Atoms, n_atoms: int) -> tuple[int, int, int]:
    """Repeats along each periodic vector that give at least `n_atoms`, with sides as equal as possible."""
    repeats, missing = [1, 1, 1], n_atoms / len(unit)
    if missing > 1 and not unit.pbc.any():
        raise InputError(
            f"these {len(unit)} atoms are not periodic, so they cannot be repeated to {n_atoms}: give --atoms {len(unit)}."
        )
    cell, pbc = torch.tensor(unit.cell.array), torch.tensor(unit.pbc)
    heights = LatticeFrames.of(cell[None], pbc[None]).heights[0].numpy()
    axes = sorted(np.flatnonzero(unit.pbc).tolist(), key=lambda axis: -heights[axis])
    for k, axis in enumerate(axes):
        side = (missing * heights[axes[k:]].prod()) ** (1 / len(axes[k:]))
        last = axis == axes[-1]
        repeats[axis] = max(1, int(np.ceil(missing - 1e-9) if last else np.rint(side / heights[axis])))
        missing /= repeats[axis]
    return repeats[0], repeats[1], repeats[2]


def _row(density: Density, n_ranks: int, reach: float, method: Method, layers: int, width: int, itemsize: int) -> Row:
    """Plan one case, and summarise it."""
    made = plan(density, n_ranks, reach, method=method.value)
    return Row(
        atoms=made.n_atoms,
        ranks=made.n_ranks,
        owned_mean=float(made.owned.mean()),
        owned_max=float(made.owned.max()),
        imbalance=made.imbalance,
        ghosts_mean=float(made.ghosts.mean()),
        ghosts_max=float(made.ghosts.max()),
        ghost_ratio=made.ghost_ratio,
        neighbours_mean=float(made.neighbours.mean()),
        neighbours_max=int(made.neighbours.max()),
        messages=int(made.messages(layers).max()),
        bytes=float(made.bytes(layers, width, itemsize).max()),
    )


def _table(rows: list[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", caption="most: the rank with the most", caption_justify="left")
    ghosts = "ghosts\n/rank", "most", "ghosts\n/owned"
    for name in ("atoms", "ranks", "atoms\n/rank", *ghosts, "peers", "MB/step\nmost", "imba-\nlance"):
        table.add_column(name, justify="right")
    for row in rows:
        counts = (_short(n) for n in (row.owned_mean, row.ghosts_mean, row.ghosts_max))
        rest = f"{row.ghost_ratio:.3f}", f"{row.neighbours_mean:.1f}", f"{row.bytes / 1e6:,.1f}", f"{row.imbalance:.3f}"
        table.add_row(_short(row.atoms), str(row.ranks), *counts, *rest)
    return table


def _short(number: float) -> str:
    """The number with four digits, and k for thousands, M for millions, G for billions."""
    size, unit = next(((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if number >= size), (1, ""))
    return f"{number / size:.4g}{unit}"
