"""Trajectories in files that ASE reads, written by a thread while the simulation continues."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, Self

import numpy as np
from ase.data import chemical_symbols
from ase.io import ulm
from ase.io.trajectory import TrajectoryWriter as AseTrajectory

from alchemi_dynamics.background import Background
from alchemi_dynamics.parameters import at_least_one
from alchemi_dynamics.simulation import Simulation
from alchemi_dynamics.snapshot import Array, Frame, Static, snapshot
from alchemi_spec import InputError


class FrameFile(Protocol):
    """A file of frames that never holds part of a frame."""

    def write(self, frame: Frame) -> None:
        """Append a frame."""

    def close(self) -> None:
        """Close the file."""


class Writer:
    """A hook whose thread writes to `path` each `every` steps: the base of all formats.

    Every rank makes the same calls. An error in one rank's thread is raised on all ranks at the next call, or on closing.
    """

    def __init__(self, path: str | Path, every: int, after: int | None) -> None:
        self.path, self.every, self.after = Path(path), at_least_one("every", every), after
        self._thread: Background | None = None

    def __call__(self, simulation: Simulation) -> None:
        """Give the present frame to the thread. Every rank must call it.

        Raises:
            OSError, InputError: on every rank, if the file cannot be written.

        """
        self._comm = simulation.state.comm
        if self._thread is None:
            self._begin(simulation)
            self._thread = Background()
        self._comm.agree(self._thread.error)
        self._enqueue(simulation, self._thread)
        self.after = simulation.state.step

    def close(self) -> None:
        """Wait until all is written. Every rank must call it. An error on one rank is raised on all."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.finish()
            self._end()
            self._comm.agree(thread.error)
            self._complete()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close. After an error only this rank's files are closed, as the other ranks may not answer."""
        if kind is None:
            self.close()
        elif self._thread is not None:
            self._thread.finish()
            self._end()

    def _begin(self, simulation: Simulation) -> None:
        """Open the files, on all ranks together."""

    def _enqueue(self, simulation: Simulation, thread: Background) -> None:
        """Give the thread its task, on all ranks together."""

    def _end(self) -> None:
        """Close the files of this rank."""

    def _complete(self) -> None:
        """Finish after every rank's files are complete, on all ranks together."""


class TrajectoryWriter(Writer):
    """A hook that writes all atoms each `every` steps: extended xyz (.extxyz, .xyz) or ASE's .traj, by `path`'s suffix.

    A frame has positions, momenta, forces, energy, stress if the run has it, cell, `step` and `time` in fs, in ASE's units.
    Each of several systems has its own file: out.0.extxyz, out.1.extxyz. Rank 0 gathers the atoms and its thread writes them.
    The simulation waits only if two frames are queued already.

    `after`: the step of the checkpoint from which the run continues. Frames up to it are kept, later frames are removed.
    Without it an existing file is overwritten. `velocities=False` leaves momenta out.
    """

    def __init__(self, path: str | Path, every: int = 100, after: int | None = None, velocities: bool = True) -> None:
        super().__init__(path, every, after)
        self.velocities = velocities
        self._open = opener(self.path)
        self._files: list[FrameFile] = []

    def _begin(self, simulation: Simulation) -> None:
        self._static = Static.gathered(simulation.domain.batch)
        systems = len(simulation.state.cell)
        paths = [self.path] if systems == 1 else [numbered(self.path, i) for i in range(systems)]
        with self._comm.agreement():
            self._files = [self._open(path, self.after) for path in paths if self._comm.rank == 0]

    def _enqueue(self, simulation: Simulation, thread: Background) -> None:
        frames = snapshot(simulation, self._static, self.velocities)
        if self._comm.rank == 0:
            thread.put(lambda: self._write(frames))

    def _write(self, frames: Callable[[], list[Frame]]) -> None:
        for file, frame in zip(self._files, frames(), strict=True):
            file.write(frame)

    def _end(self) -> None:
        while self._files:
            self._files.pop().close()


def opener(path: Path) -> Callable[[Path, int | None], FrameFile]:
    """The class that opens a file with this suffix.

    Raises:
        InputError: listing the known suffixes.

    """
    formats: dict[str, Callable[[Path, int | None], FrameFile]] = {".extxyz": XyzFile, ".xyz": XyzFile, ".traj": TrajFile}
    if path.suffix not in formats:
        raise InputError(f"the suffix of a trajectory gives its format, and {path} has none of {', '.join(formats)} or .zarr.")
    return formats[path.suffix]


def numbered(path: Path, system: int) -> Path:
    """The path for one of several systems."""
    return path.with_name(f"{path.stem}.{system}{path.suffix}")


class XyzFile:
    """Extended xyz. Each frame is one write, and a failed write is rolled back."""

    def __init__(self, path: Path, after: int | None) -> None:
        kept = 0 if after is None or not path.exists() else xyz_end(path, after)
        self._file = path.open("r+b" if kept else "wb", buffering=0)
        self._end = self._file.truncate(self._file.seek(kept)) if kept else 0

    def write(self, frame: Frame) -> None:
        """Append a frame, or leave the file as it was."""
        text = memoryview(xyz_text(frame).encode())
        try:
            while text:
                text = text[self._file.write(text) :]
        except OSError:
            self._roll_back()
            raise
        self._end = self._file.tell()

    def _roll_back(self) -> None:
        if self._file.seekable() and os.fstat(self._file.fileno()).st_size > self._end:
            self._file.truncate(self._end)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def xyz_text(frame: Frame) -> str:
    """A frame as extended xyz that ASE reads, with ten decimals."""
    columns: list[tuple[str, Array]] = [("pos:R:3", frame.positions), ("forces:R:3", frame.forces)]
    if frame.momenta is not None:
        columns.insert(1, ("momenta:R:3", frame.momenta))
    if frame.has_custom_masses:
        columns.append(("masses:R:1", frame.masses[:, None]))
    rows = np.concatenate([values for _, values in columns], 1)
    line = "%-2s" + " %.10f" * rows.shape[1] + "\n"
    symbols = [chemical_symbols[z] for z in frame.numbers]
    body = "".join(line % (symbol, *row) for symbol, row in zip(symbols, rows.tolist(), strict=True))
    return f"{len(symbols)}\n{_xyz_comment(frame, [name for name, _ in columns])}\n{body}"


def _xyz_comment(frame: Frame, columns: list[str]) -> str:
    words = [f"Properties={':'.join(['species:S:1', *columns])}", f"energy={frame.energy!r}"]
    if frame.cell.any():
        words.insert(0, f'Lattice="{_joined(frame.cell)}"')
    if frame.stress is not None:
        words.append(f'stress="{_joined(frame.stress)}"')
    words += [f"{name}={value!r}" for name, value in frame.labels.items()]
    return " ".join([*words, f'pbc="{" ".join("FT"[int(p)] for p in frame.pbc)}"'])


def _joined(values: Array) -> str:
    return " ".join(repr(x) for x in values.ravel().tolist())


def xyz_end(path: Path, after: int) -> int:
    """The byte at which the complete frames up to step `after` end.

    Raises:
        InputError: for frames without a step.

    """
    with path.open("rb") as file:
        while True:
            start = file.tell()
            step = _next_step(file, path)
            if step is None or step > after:
                return start


def _next_step(file: BinaryIO, path: Path) -> int | None:
    """Read a frame and return its step, or None if there is no further frame, or only part of one."""
    count, comment = file.readline(), file.readline()
    if not comment.endswith(b"\n"):
        return None
    found = re.search(rb"\bstep=(\d+)", comment)
    if found is None or not count.strip().isdigit():
        raise InputError(f"a frame of {path} says no step, so the run cannot continue it: give the run another file.")
    complete = all(file.readline().endswith(b"\n") for _ in range(int(count)))
    return int(found[1]) if complete else None


class TrajFile:
    """ASE's .traj, which counts a frame when it is complete."""

    def __init__(self, path: Path, after: int | None) -> None:
        kept = after is not None and path.exists() and truncate_traj(path, after)
        self._file = AseTrajectory(path, "a" if kept else "w", master=True)

    def write(self, frame: Frame) -> None:
        """Append a frame."""
        self._file.write(frame.to_ase())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def truncate_traj(path: Path, after: int) -> int:
    """Remove the frames after step `after`, and return the number of those that are kept.

    Raises:
        InputError: for frames without a step.

    """
    with ulm.open(path) as reader:
        steps = [reader[i].asdict().get("info", {}).get("step") for i in range(len(reader))]
    if None in steps:
        raise InputError(f"a frame of {path} says no step, so the run cannot continue it: give the run another file.")
    kept = next((i for i, step in enumerate(steps) if step > after), len(steps))
    if 0 < kept < len(steps):
        with path.open("r+b") as file:
            *_, table, starts = ulm.read_header(file)
            slots = next(ulm.N1**i for i in range(64) if ulm.N1**i >= len(starts))
            end = max(table + 8 * slots, _traj_end(file, int(starts[kept - 1])))
            file.seek(32)
            file.write(np.int64(kept).tobytes())
            file.truncate(end)
    return kept


def _traj_end(file: BinaryIO, start: int) -> int:
    """The byte at which the frame ends whose description begins at `start`."""
    file.seek(start)
    return start + 8 + int.from_bytes(file.read(8), "little")
