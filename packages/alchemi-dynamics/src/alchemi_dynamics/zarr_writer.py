"""Trajectories in zarr, for systems that do not fit on one rank: each rank writes its own chunks."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import zarr
from torch import Tensor

from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_dynamics.background import Background
from alchemi_dynamics.parameters import one_of
from alchemi_dynamics.simulation import Simulation
from alchemi_dynamics.snapshot import Array, on_host, time_of
from alchemi_dynamics.writers import Writer
from alchemi_spec import InputError

PER_ATOM = ("positions", "velocities", "forces")
FIXED = ("numbers", "batch", "masses", "pbc")
UNITS = {
    "positions": "Å",
    "velocities": "Å/fs",
    "forces": "eV/Å",
    "energy": "eV",
    "stress": "eV/Å^3",
    "cell": "Å",
    "time": "fs",
}
MAX_CHUNK_ATOMS = 2**18
"""3 MB of float32."""
FRAMES_PER_CHUNK = 256
"""Of fields that have a few numbers for each frame."""
UNBOUNDED = 2**48
"""Number of frames, more than any run will write."""


class ZarrWriter(Writer):
    """A hook that writes to `path` (.zarr) each `every` steps. No rank holds all atoms.

    `positions`, `velocities`, `forces` (frames, n_atoms, 3) of `dtype`; `energy` (frames, B), `cell` and `stress` (frames, B,
    3, 3), `step` and `time` (frames,) fs; `numbers`, `batch`, `masses` (n_atoms,) and `pbc` (B, 3). Units
    are alchemi's, and are in the group's attributes. A chunk is a block of consecutive atoms of one frame, and one rank writes
    it. A frame becomes visible to readers when every rank has written its chunks: one call later, or on closing. While a run
    goes on, the length of `step` is the number of complete frames.

    `after`: the step of the checkpoint from which the run continues, as for `TrajectoryWriter`.
    """

    def __init__(
        self,
        path: str | Path,
        every: int = 100,
        after: int | None = None,
        dtype: Literal["float32", "float64"] = "float32",
    ) -> None:
        super().__init__(path, every, after)
        one_of("dtype", dtype, ("float32", "float64"))
        if self.path.suffix != ".zarr":
            raise InputError(f"a zarr trajectory is a folder whose name ends in .zarr, which {path} does not.")
        self.dtype = dtype

    def _begin(self, simulation: Simulation) -> None:
        batch, comm = simulation.domain.batch, self._comm
        kept = self.after if self.after is not None and self.path.exists() else None
        with comm.agreement():
            if comm.rank == 0:
                self._create(simulation) if kept is None else self._truncate(batch, kept)
        self._group = group = zarr.open_group(self.path, mode="r+")
        self._kept, self._queued = _array(group, "step").shape[0], 0
        self._chunk = _array(group, "positions").chunks[1]
        self._arrays = {name: _unbounded(_array(group, name)) for name, _ in group.arrays() if name not in FIXED}
        if kept is None:
            self._write_fixed(batch)

    def _write_fixed(self, batch: ShardedBatch) -> None:
        first, fixed = batch.to_global_order(batch.atomic_numbers, batch.batch, batch.extra_fields["masses"], unit=self._chunk)
        for name, rows in zip(FIXED, fixed, strict=False):
            if len(rows):
                _array(self._group, name)[first : first + len(rows)] = rows.cpu().numpy()

    def _create(self, simulation: Simulation) -> None:
        """Create an empty group. Rank 0 calls it."""
        if self.path.exists() and not (self.path / "zarr.json").exists():
            raise InputError(f"{self.path} exists and is not a zarr group: give the trajectory another name, or move it.")
        state, n = simulation.state, simulation.domain.batch.n_atoms
        group = zarr.open_group(self.path, mode="w", attributes={"units": UNITS, "made_by": "alchemi"})
        chunk = min(-(-n // self._comm.size), MAX_CHUNK_ATOMS)
        for name in PER_ATOM:
            group.create_array(name, shape=(0, n, 3), chunks=(1, chunk, 3), dtype=self.dtype)
        for name, value in _per_frame(simulation).items():
            chunks, dtype = (FRAMES_PER_CHUNK, *value.shape), "int64" if name == "step" else "float64"
            group.create_array(name, shape=(0, *value.shape), chunks=chunks, dtype=dtype)
        for name, dtype in zip(FIXED, ("int64", "int64", "float64"), strict=False):
            group.create_array(name, shape=(n,), chunks=(chunk,), dtype=dtype)
        group.create_array("pbc", data=state.pbc.cpu().numpy())

    def _truncate(self, batch: ShardedBatch, after: int) -> None:
        """Remove the frames after step `after`. Rank 0 calls it."""
        group = zarr.open_group(self.path, mode="r+")
        _, n, _ = _array(group, "positions").shape
        if n != batch.n_atoms:
            raise InputError(f"{self.path} has {n} atoms, but the batch has {batch.n_atoms}: give it another name.")
        kept = int((np.asarray(_array(group, "step")[:]) <= after).sum())
        _resize(group, kept)

    def _enqueue(self, simulation: Simulation, thread: Background) -> None:
        batch, state = simulation.domain.batch, simulation.state
        written = -int(self._comm.all_reduce(torch.tensor(-thread.done), "max"))
        rows = [getattr(state, name).to(getattr(torch, self.dtype)) for name in PER_ATOM]
        first, mine = batch.to_global_order(*rows, unit=self._chunk)
        per_frame = _per_frame(simulation) if self._comm.rank == 0 else {}
        copy, frame, visible = on_host([*mine, *per_frame.values()]), self._kept + self._queued, self._kept + written
        thread.put(lambda: self._write(frame, first, dict(zip([*PER_ATOM, *per_frame], copy(), strict=True)), visible))
        self._queued += 1

    def _write(self, frame: int, first: int, values: Mapping[str, Array], visible: int) -> None:
        for name in self._arrays.keys() & values.keys():
            array, new = self._arrays[name], values[name]
            if name not in PER_ATOM:
                array[frame] = new
            elif len(new):
                array[frame, first : first + len(new)] = new
        if self._comm.rank == 0:
            _resize(self._group, visible)

    def _complete(self) -> None:
        with self._comm.agreement():
            if self._comm.rank == 0:
                _resize(self._group, self._kept + self._queued)


def _per_frame(simulation: Simulation) -> dict[str, Tensor]:
    """The fields that have a few numbers for each frame, as they are now."""
    state, time = simulation.state, time_of(simulation)
    stress = {} if state.stress is None else {"stress": state.stress}
    fields = {"energy": state.energy, "cell": state.cell, **stress}
    labels = {"step": torch.tensor(state.step), "time": torch.tensor(torch.nan if time is None else time, dtype=torch.float64)}
    return {name: value.detach().clone() for name, value in fields.items()} | labels


def _array(group: zarr.Group, name: str) -> zarr.Array[Any]:
    array = group[name]
    assert isinstance(array, zarr.Array)
    return array


def _unbounded(array: zarr.Array[Any]) -> zarr.Array[Any]:
    """The array as a writer sees it, with room for frames that are not visible to readers yet."""
    metadata = array.metadata.update_shape((UNBOUNDED, *array.shape[1:]))
    return zarr.Array(zarr.AsyncArray(metadata, array.store_path))


def _resize(group: zarr.Group, frames: int) -> None:
    """Make this many frames visible. `step`, by whose length readers count, is never longer than the other arrays."""
    names = sorted({name for name, _ in group.arrays()} - set(FIXED), key=lambda name: name == "step")
    for name in names if frames > _array(group, "step").shape[0] else reversed(names):
        array = _array(group, name)
        if array.shape[0] != frames:
            array.resize((frames, *array.shape[1:]))
