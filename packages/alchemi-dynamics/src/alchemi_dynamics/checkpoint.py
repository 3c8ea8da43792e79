"""Checkpoints: the complete state of a run, written by all ranks and read by any number of ranks."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alchemi_domain.batch import Batch
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_dynamics.parameters import at_least_one
from alchemi_dynamics.simulation import Simulation
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_spec import InputError

VERSION = 1
INDEX = "checkpoint.json"
"""The file that names the folder with the data. Replacing it makes a new checkpoint the current one."""
ATOMS = "atoms"
BASIC = ("positions", "atomic_numbers", "batch")


class Checkpoint:
    """A hook that keeps the latest complete state in the folder `path`, each `every` steps except step 0.

    Each rank writes a block of the atoms in the batch's order: positions, velocities, masses and every other field, in its
    dtype. Rank 0 writes the cells and the integrator. `path/checkpoint.json`, which names the data, is replaced when all data
    is on the disk. So a complete checkpoint exists whenever a run stops: the last one, or the one before. `settings`, of
    JSON's types, are stored with it.
    """

    def __init__(self, path: str | Path, every: int = 1000, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.every, self.settings = Path(path), at_least_one("every", every), dict(settings or {})

    def __call__(self, simulation: Simulation) -> None:
        """Write a checkpoint. Every rank must call it.

        Raises:
            OSError, InputError: on every rank. The previous checkpoint is unchanged.

        """
        if simulation.state.step > 0:
            self.write(simulation)

    def write(self, simulation: Simulation) -> None:
        """Write a checkpoint now, at any step. Every rank must call it."""
        comm, batch = simulation.state.comm, simulation.domain.batch
        folder = _new_folder(self.path, simulation.state.step, comm)
        _, block = batch.to_global_order(*_per_atom(batch).values())
        with comm.agreement():
            _save(dict(zip(_per_atom(batch), block, strict=True)), _part(folder, comm.rank))
            if comm.rank == 0:
                _save({**_systems(batch), "integrator": simulation.integrator.state_dict()}, folder / "systems.pt")
        with comm.agreement():
            if comm.rank == 0:
                self._swap(folder, simulation)

    def _swap(self, folder: Path, simulation: Simulation) -> None:
        """Make `folder` the current checkpoint, and remove the others. Rank 0 calls it."""
        comm, n = simulation.state.comm, simulation.domain.batch.n_atoms
        index = {
            "version": VERSION,
            "folder": folder.name,
            "step": simulation.state.step,
            "n_atoms": n,
            "starts": [rank * n // comm.size for rank in range(comm.size + 1)],
            "settings": self.settings,
        }
        _replace(self.path / INDEX, json.dumps(index, indent=2))
        for other in self.path.glob("step-*"):
            if other != folder:
                shutil.rmtree(other)


def load_checkpoint(
    path: str | Path, config: DomainConfig | None = None
) -> tuple[ShardedBatch, int, dict[str, Tensor], dict[str, Any]]:
    """Read the batch, the step, the integrator's state and the index, in which `settings` are those of the run.

    Any number of ranks can read it; each rank reads a block of the atoms. Every rank must call it.

    Raises:
        InputError: on every rank, where there is no checkpoint or it is damaged.

    """
    config = config or DomainConfig()
    comm, folder = config.comm, Path(path)
    index: dict[str, Any] = {}
    with comm.agreement():
        index = _read_index(folder) if comm.rank == 0 else {}
    index = comm.broadcast_object(index)
    with comm.agreement():
        rows, ids, extra_fields, integrator = _read_part(folder / index["folder"], index, comm)
    batch = ShardedBatch.from_owned(rows, ids, config, extra_fields)
    return batch, index["step"], {name: value.to(comm.device) for name, value in integrator.items()}, index


def _per_atom(batch: ShardedBatch) -> dict[str, Tensor]:
    """Every field of this rank's atoms, under a unique name."""
    basic = {name: getattr(batch, name) for name in BASIC}
    levels = {"per_atom": batch.per_atom, "carried": batch.extra_fields}  # as the files of version 1 name them
    return basic | {f"{level}/{name}": value for level, fields in levels.items() for name, value in fields.items()}


def _systems(batch: ShardedBatch) -> dict[str, Any]:
    return {"cell": batch.cell, "pbc": batch.pbc, "per_system": dict(batch.per_system)}


def _part(folder: Path, rank: int) -> Path:
    return folder / f"{ATOMS}.{rank:05d}.pt"


def _new_folder(path: Path, step: int, comm: Comm) -> Path:
    """Create a new folder inside the checkpoint's. Every rank gets the same path."""
    folder = ""
    with comm.agreement():
        if comm.rank == 0:
            if path.exists() and not (path / INDEX).exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(f"{path} exists and is no checkpoint: give the checkpoint another name, or move it.")
            path.mkdir(parents=True, exist_ok=True)
            folder = tempfile.mkdtemp(prefix=f"step-{step}-", dir=path)
    return Path(comm.broadcast_object(folder))


def _save(fields: Mapping[str, Any], path: Path) -> None:
    """Write to a file, which is on the disk when this returns."""
    with path.open("wb") as file:
        torch.save(_on_host(fields), file)
        file.flush()
        os.fsync(file.fileno())


def _on_host(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Copies on the host that own no more memory than their values, with any nesting."""
    return {
        name: _on_host(value) if isinstance(value, Mapping) else value.detach().cpu().clone() for name, value in fields.items()
    }


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read_index(path: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a checkpoint: {type(error).__name__}: {error}") from error
    if index.get("version") != VERSION:
        raise InputError(
            f"{path} is a checkpoint of version {index.get('version')}, and this version of alchemi reads version {VERSION}."
        )
    return index


def _read_part(
    folder: Path, index: Mapping[str, Any], comm: Comm
) -> tuple[Batch, Tensor, dict[str, Tensor], dict[str, Tensor]]:
    n = index["n_atoms"]
    first, last = (rank * n // comm.size for rank in (comm.rank, comm.rank + 1))
    try:
        parts = list(_blocks(folder, index["starts"], first, last))
        systems = torch.load(folder / "systems.pt", map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"the checkpoint in {folder} is damaged: {type(error).__name__}: {error}") from error
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    per_atom, extra_fields = _level(rows, "per_atom"), _level(rows, "carried")
    atoms = rows["positions"], rows["atomic_numbers"], rows["batch"]
    batch = Batch(*atoms, systems["cell"], systems["pbc"], per_atom, systems["per_system"])
    return batch, torch.arange(first, last), extra_fields, systems["integrator"]


def _level(rows: Mapping[str, Tensor], level: str) -> dict[str, Tensor]:
    """The fields of one level, under their original names."""
    return {name.removeprefix(f"{level}/"): rows[name] for name in rows if name.startswith(f"{level}/")}


def _blocks(folder: Path, starts: list[int], first: int, last: int) -> Iterator[dict[str, Tensor]]:
    """Atoms `first` to `last` from the files that hold them. The first file is always read, for the names of the fields."""
    for rank, (start, end) in enumerate(pairwise(starts)):
        if max(first, start) < min(last, end) or rank == 0:
            part = torch.load(_part(folder, rank), map_location="cpu", mmap=True, weights_only=True)
            here = slice(max(first - start, 0), max(last - start, 0))
            yield {name: value[here].clone() for name, value in part.items()}
