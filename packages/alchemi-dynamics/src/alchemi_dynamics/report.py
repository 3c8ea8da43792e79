"""Reports: the numbers by which a run is monitored, the same on every rank."""

import csv
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Self, TextIO

import torch
from ase.units import GPa
from torch import Tensor

from alchemi_dynamics.parameters import at_least_one
from alchemi_dynamics.simulation import Simulation
from alchemi_dynamics.snapshot import time_of
from alchemi_spec import InputError

COLUMNS = ("potential", "kinetic", "total", "temperature", "pressure", "volume", "drift", "max_force")
"""The fields of a report that are computed for each system."""


@dataclass(frozen=True)
class Report:
    """One system at one step. Quantities that are not available are None.

    There is no time in a relaxation, no pressure without a stress, and no rate in the first report.
    `time` ps; energies eV; `temperature` K; `pressure` GPa, compression positive, with the kinetic part; `volume` Å^3; `drift`
    eV per atom, of the conserved quantity since this run began; `max_force` eV/Å; `ns_per_day` and `steps_per_s` since the
    previous report.
    """

    step: int
    system: int
    time: float | None
    potential: float
    kinetic: float
    total: float
    temperature: float
    pressure: float | None
    volume: float | None
    drift: float
    max_force: float
    steps_per_s: float | None
    ns_per_day: float | None


class Thermo:
    """A hook that makes a `Report` of each system each `every` steps, in `reports`; with `log`, rank 0 writes them as CSV.

    `after`: the step of the checkpoint from which the run continues. Rows of `log` up to it are kept, later rows are removed.
    A report needs four reductions.
    """

    def __init__(self, every: int = 100, log: str | Path | None = None, after: int | None = None) -> None:
        self.every, self.log, self.after = at_least_one("every", every), None if log is None else Path(log), after
        self.reports: list[Report] = []
        self._reference: Tensor | None = None
        self._before: tuple[int, float] | None = None
        self._file: TextIO | None = None

    def begin(self, simulation: Simulation) -> None:
        """Measure drift and time from now on. Every rank must call it. The first report calls it."""
        state = simulation.state
        self._reference = simulation.integrator.conserved(state).clone()
        self._atoms = state.total(torch.ones_like(state.masses))
        self._before = state.step, time.perf_counter()

    def __call__(self, simulation: Simulation) -> None:
        """Make a report of each system. Every rank must call it."""
        if self._reference is None:
            self.begin(simulation)
        rows = self._measure(simulation)
        self.reports += rows
        if self.log is not None:
            with simulation.state.comm.agreement():
                if simulation.state.comm.rank == 0:
                    self._write(rows)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """The hook itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def _measure(self, simulation: Simulation) -> list[Report]:
        state, fs = simulation.state, time_of(simulation)
        without = simulation.domain.batch.why_no_stress()
        rates = self._rates(simulation)
        picoseconds = None if fs is None else fs / 1000
        made = []
        for system, row in enumerate(self._columns(simulation).tolist()):
            values: dict[str, float | None] = dict(zip(COLUMNS, row, strict=True))
            if without[system]:
                values["pressure"] = values["volume"] = None
            if state.stress is None:
                values["pressure"] = None
            made.append(Report(state.step, system, picoseconds, **values, **rates))  # type: ignore[arg-type]
        return made

    def _columns(self, simulation: Simulation) -> Tensor:
        """The values (B, 8) of `COLUMNS`."""
        state = simulation.state
        twice, volume = _trace(state.kinetic_tensor()), state.volume()
        stress = torch.zeros_like(twice) if state.stress is None else _trace(state.stress)
        assert self._reference is not None
        drift = (simulation.integrator.conserved(state) - self._reference) / self._atoms
        force = state.largest(torch.linalg.vector_norm(state.forces, dim=-1))
        energies = state.energy, twice / 2, state.energy + twice / 2, state.temperature(twice / 2)
        return torch.stack([*energies, (twice / volume - stress) / 3 / GPa, volume, drift, force], 1)

    def _rates(self, simulation: Simulation) -> dict[str, float | None]:
        """Steps per second and ns per day since the previous report, by the slowest rank's clock."""
        state, now = simulation.state, time.perf_counter()
        step, before = self._before or (state.step, now)
        seconds = float(state.comm.all_reduce(torch.tensor(now - before, dtype=torch.float64), "max"))
        self._before = state.step, now
        if state.step == step or seconds <= 0:
            return {"steps_per_s": None, "ns_per_day": None}
        rate = (state.step - step) / seconds
        passed = time_of(simulation)
        per_day = None if passed is None else rate * passed / state.step * 86400e-6
        return {"steps_per_s": rate, "ns_per_day": per_day}

    def _write(self, rows: list[Report]) -> None:
        """Append to the file. Rank 0 calls it."""
        if self._file is None:
            assert self.log is not None
            self._file = open_log(self.log, self.after)
        writer = csv.writer(self._file)
        writer.writerows([["" if value is None else value for value in asdict(row).values()] for row in rows])
        self._file.flush()


def open_log(path: Path, after: int | None) -> TextIO:
    """Open a CSV file with its header, and with the rows of an earlier run up to step `after`.

    Raises:
        InputError: for a file with another header.

    """
    names = [field.name for field in fields(Report)]
    kept: list[list[str]] = []
    if after is not None and path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            header, *kept = list(csv.reader(file)) or [names]
        if header != names:
            raise InputError(f"{path} has the columns {', '.join(header)}, which are not those of a log: use another name.")
        kept = [row for row in kept if len(row) == len(names) and int(row[0]) <= after]
    file = path.open("w", newline="", encoding="utf-8")
    csv.writer(file).writerows([names, *kept])
    return file


def _trace(tensors: Tensor) -> Tensor:
    """(B, 3, 3) -> (B,)."""
    return tensors.diagonal(dim1=1, dim2=2).sum(-1)
