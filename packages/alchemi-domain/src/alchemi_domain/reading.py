"""One frame of a file onto many ranks, so that none has to hold it all."""

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
"""Some atoms of a batch, and what is carried with them."""


def read_rows(path: str | Path, index: int, comm: Comm) -> tuple[Batch, Tensor, dict[str, Tensor]]:
    """A share of frame `index`'s atoms, their ids (n,), and the file's `velocities` (n, 3) Å/fs and `masses` (n,) amu.

    The frame is dealt out in stretches. Every rank must call it.

    Raises:
        InputError: on every rank, where there is no such frame, it has no atoms or constraints, or it cannot be read.

    """
    dealt = _Dealt.of(path, index, comm)
    rows: Rows | None = None
    with comm.agreement():
        if dealt is None and comm.rank == 0:
            rows = rows_of(_read(path, index))
        elif dealt is not None and dealt.count:
            rows = rows_of(_parsed(dealt, path))
    systems = comm.broadcast_object(None if rows is None else without_atoms(rows))
    batch, carried = rows or systems
    first = 0 if dealt is None else dealt.first
    return batch, torch.arange(first, first + len(batch.positions)), carried


def rows_of(atoms: Atoms) -> Rows:
    """A structure of ASE's and, if it has them, its velocities and its masses.

    Raises:
        InputError: where it has no atoms, or constraints, which nobody would keep.

    """
    if not len(atoms):
        raise InputError("there is a frame without atoms.")
    if atoms.constraints:
        raise InputError(
            f"the structure has {', '.join(type(c).__name__ for c in atoms.constraints)}, which dynamics here would not keep.\n"
            f"Remove the constraints; or hold atoms by a function of `forces` that sets their forces to zero."
        )
    found = {"momenta": ("velocities", lambda: atoms.get_velocities() * fs), "masses": ("masses", atoms.get_masses)}
    carried = {name: torch.from_numpy(read()) for key, (name, read) in found.items() if atoms.has(key)}
    return Batch.from_ase(atoms), carried


def without_atoms(rows: Rows) -> Rows:
    """The systems, and none of the atoms."""
    batch, carried = rows
    none = {name: getattr(batch, name)[:0].clone() for name in ("positions", "atomic_numbers", "batch")}
    per_atom = {name: value[:0].clone() for name, value in batch.per_atom.items()}
    return replace(batch, **none, per_atom=per_atom), {name: value[:0].clone() for name, value in carried.items()}


@dataclass
class _Dealt:
    """A rank's stretch of an xyz frame: `count` lines from atom `first` on, and the line above them all."""

    first: int
    count: int
    comment: bytes
    lines: bytes = b""

    @classmethod
    def of(cls, path: str | Path, index: int, comm: Comm) -> "_Dealt | None":
        """A rank's own; None where the file is none that can be dealt out. Rank 0 reads, a stretch at a time."""
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
    """Rank 0's bytes, on rank `to`."""
    wire = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
    size = int(comm.all_gather(torch.tensor(len(block)))[0])
    send = [len(block) if comm.rank == 0 and rank == to else 0 for rank in range(comm.size)]
    receive = [size if comm.rank == to and rank == 0 else 0 for rank in range(comm.size)]
    return comm.all_to_all(wire, send, receive).numpy().tobytes()


def _frame(path: str | Path, index: int) -> tuple[Iterator[bytes], int, bytes] | None:
    """The lines of an extxyz frame's atoms, as they are read, how many there are, and the line above them.

    None for another format, also that of xyz files without a list of columns: ASE reads it whole, or says what is wrong.
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
    """A file's lines from frame `index` on."""
    with Path(path).open("rb") as file:
        starts = list(_starts(file, index))
        file.seek(starts[index])
        with suppress(OSError):  # the atoms are fewer then than they should be, and are refused
            yield from iter(file.readline, b"")


def _starts(file: BinaryIO, index: int) -> Iterator[int]:
    """Where each frame begins, as far as `index` if that is counted from the front."""
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


def _parsed(dealt: _Dealt, path: str | Path) -> Atoms:
    text = b"%d\n%b%b" % (dealt.count, dealt.comment, dealt.lines)
    try:
        return ase.io.read(io.StringIO(text.decode()), format="extxyz", parallel=False)
    except Exception as error:
        raise InputError(f"ASE cannot read the atoms of {path}: {type(error).__name__}: {error}") from error
