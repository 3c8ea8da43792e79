"""Reads one frame of a file onto many ranks, so that no rank has to hold all of it."""

import io
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import ase.io
import torch
from ase import Atoms
from ase.units import fs
from torch import Tensor

from alchemi_domain.batch import Batch
from alchemi_shardtensor import Comm
from alchemi_spec import InputError

Rows = tuple[Batch, dict[str, Tensor]]
"""Some atoms of a batch, and their extra fields."""


def read_rows(path: str | Path, index: int, comm: Comm) -> tuple[Batch, Tensor, dict[str, Tensor]]:
    """Some atoms of frame `index`, their ids (n,), and the file's `velocities` (n, 3) Å/fs and `masses` (n,) amu.

    Each rank gets one slice of the frame. Every rank must call it.

    Raises:
        InputError: on every rank, if there is no such frame, it has no atoms, it has constraints, or it cannot be read.

    """
    part = _FileSlice.of(path, index, comm)
    rows: Rows | None = None
    with comm.agreement():
        if part is None and comm.rank == 0:
            rows = rows_of(_read(path, index))
        elif part is not None and part.count:
            rows = rows_of(_parsed(part, path))
    systems = comm.broadcast_object(None if rows is None else without_atoms(rows))
    batch, extra_fields = rows or systems
    first = 0 if part is None else part.first
    return batch, torch.arange(first, first + len(batch.positions)), extra_fields


def rows_of(atoms: Atoms) -> Rows:
    """An ASE structure as a batch and, if it has them, its velocities and its masses.

    Raises:
        InputError: if it has no atoms, or has constraints, which dynamics here would ignore.

    """
    if not len(atoms):
        raise InputError("the file has a frame without atoms.")
    if atoms.constraints:
        raise InputError(
            f"the structure has {', '.join(type(c).__name__ for c in atoms.constraints)}, which dynamics here would ignore.\n"
            f"Remove the constraints, or hold atoms by a function in `forces` that sets their forces to zero."
        )
    found = {"momenta": ("velocities", lambda: atoms.get_velocities() * fs), "masses": ("masses", atoms.get_masses)}
    extra_fields = {name: torch.from_numpy(read()) for key, (name, read) in found.items() if atoms.has(key)}
    return Batch.from_ase(atoms), extra_fields


def without_atoms(rows: Rows) -> Rows:
    """The same systems and fields, with no atoms."""
    batch, extra_fields = rows
    none = {name: getattr(batch, name)[:0].clone() for name in ("positions", "atomic_numbers", "batch")}
    per_atom = {name: value[:0].clone() for name, value in batch.per_atom.items()}
    return replace(batch, **none, per_atom=per_atom), {name: value[:0].clone() for name, value in extra_fields.items()}


@dataclass
class _FileSlice:
    """A rank's part of an xyz frame: the lines of `count` atoms from atom `first` on, and the frame's comment line."""

    first: int
    count: int
    comment: bytes
    lines: bytes = b""

    @classmethod
    def of(cls, path: str | Path, index: int, comm: Comm) -> "_FileSlice | None":
        """The part of this rank, which rank 0 reads and sends; None if the file's format cannot be cut into lines."""
        frame = _frame(path, index) if comm.rank == 0 else None
        found = comm.broadcast_object(None if frame is None else frame[1:])
        if found is None:
            return None
        n, comment = found
        ends = [-(-n * rank // comm.size) for rank in range(comm.size + 1)]  # rank 0 has some
        mine = cls(ends[comm.rank], ends[comm.rank + 1] - ends[comm.rank], comment)
        for rank, (start, end) in enumerate(pairwise(ends)):
            block = b"" if frame is None else b"".join(islice(frame[0], end - start))
            sent = _sent(block, rank, comm)
            mine.lines = sent if rank == comm.rank else mine.lines
        return mine


def _read(path: str | Path, index: int) -> Atoms:
    try:
        return ase.io.read(path, index=index, parallel=False)
    except Exception as error:
        raise InputError(f"ASE cannot read {path} (frame {index}): {type(error).__name__}: {error}") from error


def _sent(block: bytes, to: int, comm: Comm) -> bytes:
    """Send rank 0's bytes to rank `to`; the other ranks get none."""
    wire = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
    size = int(comm.all_gather(torch.tensor(len(block)))[0])
    send = [len(block) if comm.rank == 0 and rank == to else 0 for rank in range(comm.size)]
    receive = [size if comm.rank == to and rank == 0 else 0 for rank in range(comm.size)]
    return comm.all_to_all(wire, send, receive).numpy().tobytes()


def _frame(path: str | Path, index: int) -> tuple[Iterator[bytes], int, bytes] | None:
    """An iterator over the atoms' lines of an extxyz frame, their number, and the comment line.

    None for another format, and for xyz files whose comment lists no columns: ASE reads these, or says what is wrong.
    """
    if Path(path).suffix not in (".xyz", ".extxyz"):
        return None
    try:
        lines = _lines(path, index)
        n, comment = int(next(lines)), next(lines)
    except (ValueError, LookupError, OSError, StopIteration):
        return None
    return (lines, n, comment) if n > 0 and b"Properties=" in comment else None


def _lines(path: str | Path, index: int) -> Iterator[bytes]:
    """Read a file's lines from frame `index` on."""
    with Path(path).open("rb") as file:
        starts = list(_starts(file, index))
        file.seek(starts[index])
        with suppress(OSError):  # there are then too few lines, which is an error later
            yield from iter(file.readline, b"")


def _starts(file: BinaryIO, index: int) -> Iterator[int]:
    """The byte at which each frame begins; no further than frame `index` if that is not negative."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.strip():
            return
        yield start
        if index == 0:
            return
        index -= 1
        for _ in range(int(line) + 1):
            file.readline()


def _parsed(part: _FileSlice, path: str | Path) -> Atoms:
    text = b"%d\n%b%b" % (part.count, part.comment, part.lines)
    try:
        return ase.io.read(io.StringIO(text.decode()), format="extxyz", parallel=False)
    except Exception as error:
        raise InputError(f"ASE cannot read the atoms of {path}: {type(error).__name__}: {error}") from error
