"""Settings of a run of molecular dynamics or of a relaxation, checked when they are made."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated, Literal, Self

from ase.units import GPa
from pydantic import Field, model_validator

from alchemi_domain.registry import find_strategy
from alchemi_domain.settings import Argument, FilePath, ModelSettings, Option
from alchemi_dynamics.fire import FIRE
from alchemi_dynamics.integrator import Integrator
from alchemi_dynamics.parameters import one_of
from alchemi_dynamics.structure_file import check_writable
from alchemi_dynamics.writers import opener
from alchemi_shardtensor.transport import MODES
from alchemi_spec import InputError

ENSEMBLES = "alchemi.ensembles"
"""The entry points of ensembles: functions of `MDSettings` that return an `Integrator`."""
Count = Annotated[int, Field(ge=1)]
Every = Annotated[Count, Option("Number of steps between reports and trajectory frames.")]


class Settings(ModelSettings, ABC):
    """Settings that molecular dynamics and relaxation have in common."""

    file: FilePath | None = None
    index: Annotated[int, Option("Which frame of FILE to start from.")] = -1
    steps: Count = 1000
    every: Every = 100
    pressure: Annotated[float, Option("External pressure. Compression is positive.", unit="GPa")] = 0.0
    skin: Annotated[
        float,
        Option("Distance added to the cutoff of neighbour lists. A larger skin means fewer rebuilds.", unit="Å"),
        Field(ge=0),
    ] = 0.5
    compile: Annotated[
        str, Option("How to run steps: as CUDA graphs (capture), compiled (inductor), or neither (off). auto: capture on CUDA.")
    ] = "auto"
    traj: Annotated[FilePath | None, Option("Write a trajectory: .extxyz, .traj, or .zarr for large systems.")] = None
    log: Annotated[FilePath | None, Option("Write the reports as CSV.")] = None
    out: Annotated[FilePath | None, Option("Write the last structure, in any format that ASE writes.")] = None

    @abstractmethod
    def integrator(self) -> Integrator:
        """The integrator that moves the atoms."""

    @model_validator(mode="after")
    def _validate(self) -> Self:
        self._check()
        self.integrator()
        return self

    def _check(self) -> None:
        find_strategy(self.strategy)
        one_of("compile", self.compile, MODES)
        if self.traj is not None and self.traj.suffix != ".zarr":
            opener(self.traj)
        if self.out is not None:
            check_writable(self.out)


class MDSettings(Settings):
    """Settings of molecular dynamics."""

    file: Annotated[
        FilePath | None, Argument("File with the structure, in any format that ASE reads. Not read with --restart.")
    ] = None
    ensemble: Annotated[str, Option("Ensemble to sample. nvt and npt use Nosé-Hoover chains.", entry_points=ENSEMBLES)] = "nve"
    temperature: Annotated[
        float | None,
        Option("Temperature of the thermostat. Velocities are drawn at this temperature if FILE has none.", unit="K"),
        Field(gt=0),
    ] = None
    timestep: Annotated[float, Option("Time step.", unit="fs")] = 1.0
    steps: Annotated[Count, Option("Total number of steps, counting those before a restart.")] = 1000
    friction: Annotated[float, Option("Friction of the Langevin thermostat.", unit="1/fs")] = 0.01
    damping: Annotated[float, Option("Damping time of the nvt and npt thermostats.", unit="fs")] = 100.0
    pressure_damping: Annotated[float, Option("Damping time of the npt barostat.", unit="fs")] = 1000.0
    cell: Annotated[
        Literal["isotropic", "full"],
        Option("Which parts of the cell the npt barostat may change: the volume, or all lengths and angles."),
    ] = "isotropic"
    seed: Annotated[int, Option("Seed of drawn velocities and of Langevin noise.")] = 0
    stress: Annotated[bool, Option("Compute the stress in ensembles other than npt.")] = False
    checkpoint: Annotated[FilePath | None, Option("Folder in which to keep the latest checkpoint.")] = None
    checkpoint_every: Annotated[Count, Option("Number of steps between checkpoints.")] = 1000
    restart: Annotated[FilePath | None, Option("Continue from this checkpoint, on any number of ranks.")] = None

    def integrator(self) -> Integrator:
        """The integrator of the ensemble."""
        return find_ensemble(self.ensemble)(self)

    def _check(self) -> None:
        super()._check()
        if self.file is None and self.restart is None:
            raise InputError("there is nothing to start from: give a FILE, or --restart CHECKPOINT.")


class RelaxSettings(Settings):
    """Settings of a relaxation by FIRE."""

    file: Annotated[FilePath, Argument("File with the structure, in any format that ASE reads.")]
    fmax: Annotated[float, Option("Stop when every force (and cell force) is below this.", unit="eV/Å")] = 0.05
    steps: Annotated[Count, Option("Largest number of steps.")] = 1000
    cell: Annotated[
        Literal[None, "isotropic", "full"],
        Option("Which parts of the cell to relax with the atoms: none, the volume, or all lengths and angles."),
    ] = None
    every: Every = 10

    def integrator(self) -> FIRE:
        """The optimizer."""
        return FIRE(self.fmax, self.cell, self.pressure * GPa)


def find_ensemble(name: str) -> Callable[[MDSettings], Integrator]:
    """The function behind an ensemble's name, from the entry points `alchemi.ensembles`.

    Raises:
        ValueError: listing the installed ensembles.

    """
    installed = entry_points(group=ENSEMBLES)
    one_of("ensemble", name, tuple(sorted(installed.names)))
    function: Callable[[MDSettings], Integrator] = installed[name].load()
    return function
