"""The structure at the end of a run, in one file of any format that ASE writes."""

from collections.abc import Sequence
from pathlib import Path

import ase.io
from ase.io.formats import UnknownFileTypeError, filetype, ioformats

from alchemi_dynamics.simulation import Simulation
from alchemi_dynamics.snapshot import Frame, Static, snapshot
from alchemi_dynamics.writers import xyz_text
from alchemi_spec import InputError


def write_structure(simulation: Simulation, path: Path, velocities: bool = True) -> None:
    """Write all atoms to one file, in the format of its suffix. Every rank must call it.

    The file gets its name when it is complete.

    Raises:
        OSError: on every rank.

    """
    comm = simulation.state.comm
    frames = snapshot(simulation, Static.gathered(simulation.domain.batch), velocities)
    with comm.agreement():
        if comm.rank == 0:
            partial = path.with_name(f"{path.stem}.partial{path.suffix}")
            try:
                _write(partial, frames())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


def _write(path: Path, frames: Sequence[Frame]) -> None:
    if path.suffix in (".extxyz", ".xyz"):
        path.write_text("".join(map(xyz_text, frames)), encoding="utf-8")
    else:
        ase.io.write(path, [frame.to_ase() for frame in frames], parallel=False)


def check_writable(path: Path) -> None:
    """Refuse a format that ASE cannot write, and a folder that does not exist.

    Raises:
        InputError: saying which.

    """
    try:
        known = ioformats.get(filetype(path.name, read=False))
    except UnknownFileTypeError:
        known = None
    if known is None or not known.can_write:
        raise InputError(f"ASE cannot write a file called {path.name}: use for example the suffix .extxyz.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
