"""One frame of a file onto many ranks, so that none has to hold it all."""

import io
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import ase.io
import torch
from ase import Atoms
from ase.units import fs
from torch import Tensor

from alchemi_dist.batch import Batch
from alchemi_shardtensor import Comm
from alchemi_spec import InputError

Rows = tuple[Batch, dict[str, Tensor]]
"""Some atoms of a batch, and what is carried with them."""


def read_rows(path: str | Path, index: int, comm: Comm) -> tuple[Batch, Tensor, dict[str, Tensor]]:
    """A share of frame `index`'s atoms, their ids (n,), and the file's `velocities` (n, 3) Å/fs and `masses` (n,) amu.

    The frame is dealt out in stretches. Every rank must call it.

    Raises:
        InputError: on every rank, where there is no such frame or it cannot be read.

    """
    as_lines = Path(path).suffix in (".xyz", ".extxyz")
    block, first, error = (_dealt if as_lines else _whole)(path, index, comm)
    rows: Rows | None = None
    with comm.agreement():
        if error is not None:
            raise error
        rows = rows_of(_parsed(block, path)) if block else None
    systems = comm.broadcast_object(None if rows is None else without_atoms(rows))
    batch, carried = rows or systems
    return batch, torch.arange(first, first + len(batch.positions)), carried


def rows_of(atoms: Atoms) -> Rows:
    """A structure of ASE's and, if it has them, its velocities and its masses."""
    found = {"momenta": ("velocities", lambda: atoms.get_velocities() * fs), "masses": ("masses", atoms.get_masses)}
    carried = {name: torch.from_numpy(read()) for key, (name, read) in found.items() if atoms.has(key)}
    return Batch.from_ase(atoms), carried


def without_atoms(rows: Rows) -> Rows:
    """The systems, and none of the atoms."""
    batch, carried = rows
    none = {name: getattr(batch, name)[:0].clone() for name in ("positions", "atomic_numbers", "batch")}
    per_atom = {name: value[:0].clone() for name, value in batch.per_atom.items()}
    return replace(batch, **none, per_atom=per_atom), {name: value[:0].clone() for name, value in carried.items()}


def _whole(path: str | Path, index: int, comm: Comm) -> tuple[Atoms | None, int, Exception | None]:
    """The frame on rank 0."""
    try:
        return (ase.io.read(path, index=index, parallel=False) if comm.rank == 0 else None), 0, None
    except Exception as error:
        return None, 0, _unreadable(path, index, error)


def _dealt(path: str | Path, index: int, comm: Comm) -> tuple[bytes, int, Exception | None]:
    """Some of an xyz file's lines, below its first two: a file in itself."""
    lines: Iterator[bytes] = iter(())
    n, comment, error = 0, b"", None
    if comm.rank == 0:
        try:
            lines, n, comment = _frame(path, index)
        except Exception as caught:
            error = _unreadable(path, index, caught)
    n, comment = comm.broadcast_object((n, comment))
    ends = [-(-n * rank // comm.size) for rank in range(comm.size + 1)]  # rank 0 has some if there are any
    mine = b""
    for rank, count in enumerate(b - a for a, b in pairwise(ends)):
        block = b"".join(islice(lines, count)) if comm.rank == 0 else b""
        got = _sent(block, rank, comm)
        mine = got if rank == comm.rank else mine
    count = ends[comm.rank + 1] - ends[comm.rank]
    return (b"%d\n%b%b" % (count, comment, mine) if count else b""), ends[comm.rank], error


def _sent(block: bytes, to: int, comm: Comm) -> bytes:
    """Rank 0's bytes, on rank `to`."""
    wire = torch.frombuffer(bytearray(block), dtype=torch.uint8) if block else torch.empty(0, dtype=torch.uint8)
    size = int(comm.all_gather(torch.tensor(len(block)))[0])
    send = [len(block) if comm.rank == 0 and rank == to else 0 for rank in range(comm.size)]
    receive = [size if comm.rank == to and rank == 0 else 0 for rank in range(comm.size)]
    return comm.all_to_all(wire, send, receive).numpy().tobytes()


def _frame(path: str | Path, index: int) -> tuple[Iterator[bytes], int, bytes]:
    """The lines of a frame's atoms, as they are read, how many there are, and the line above them."""
    lines = _lines(path, index)
    return lines, int(next(lines)), next(lines)


def _lines(path: str | Path, index: int) -> Iterator[bytes]:
    """A file's lines from frame `index` on."""
    with Path(path).open("rb") as file:
        starts = list(_starts(file, index))
        file.seek(starts[index])
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


def _parsed(block: Atoms | bytes, path: str | Path) -> Atoms:
    if isinstance(block, Atoms):
        return block
    try:
        return ase.io.read(io.StringIO(block.decode()), format="extxyz")
    except Exception as error:
        raise InputError(f"ASE cannot read the atoms of {path}: {type(error).__name__}: {error}") from error


def _unreadable(path: str | Path, index: int, error: Exception) -> InputError:
    return InputError(f"ASE cannot read {path} (frame {index}): {type(error).__name__}: {error}")
