"""Molecular dynamics and relaxation of a file's structure, as the command line runs them, on any number of ranks."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import ase.io
import torch
from ase.io.formats import UnknownFileTypeError, filetype, ioformats
from ase.units import GPa
from torch import Tensor

from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.domain import Domain
from alchemi_domain.registry import find_strategy, load_model
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dynamics.fire import FIRE
from alchemi_dynamics.integrator import Integrator
from alchemi_dynamics.langevin import Langevin
from alchemi_dynamics.nose_hoover import NoseHooverChain
from alchemi_dynamics.npt import NPT
from alchemi_dynamics.nve import NVE
from alchemi_dynamics.parameters import at_least_one, one_of, positive
from alchemi_dynamics.report import Report, Thermo
from alchemi_dynamics.simulation import Hook, Simulation
from alchemi_dynamics.snapshot import Frame, Static, snapshot
from alchemi_dynamics.state import State
from alchemi_dynamics.velocities import thermalize
from alchemi_dynamics.writers import TrajectoryWriter, Writer, opener, xyz_text
from alchemi_dynamics.zarr_writer import ZarrWriter
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.transport import MODES
from alchemi_spec import InputError

PHYSICS = ("model", "dtype", "ensemble", "temperature", "pressure", "cell", "timestep", "friction", "damping", "seed")
"""Settings that make a trajectory; a change of one of them at a restart is told."""


@dataclass(frozen=True, kw_only=True)
class Settings(ABC):
    """What both kinds of runs are told: files, model, and how it is spread.

    `skin` Å; `pressure` GPa, compression positive; `every` how many steps apart reports and frames are.
    """

    file: str | None
    model: str
    index: int = -1
    dtype: Literal["float32", "float64"] | None = None
    steps: int = 1000
    pressure: float = 0.0
    skin: float = 0.5
    strategy: str = "halo"
    compile: str = "auto"
    trust_pickle: bool = False
    traj: str | None = None
    every: int = 100
    log: str | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            InputError: saying which setting, and what to write instead.

        """
        try:
            self._check()
            self.integrator()
        except InputError:
            raise
        except ValueError as error:
            raise InputError(str(error)) from error

    @abstractmethod
    def integrator(self) -> Integrator:
        """What moves the atoms."""

    def _check(self) -> None:
        at_least_one("steps", self.steps)
        at_least_one("every", self.every)
        one_of("dtype", self.dtype, (None, "float32", "float64"))
        find_strategy(self.strategy)
        one_of("compile", self.compile, MODES)
        if not self.skin >= 0:
            raise InputError(f"skin is {self.skin} Å, a length that is added to the cutoff: use 0 or more.")
        if self.traj is not None and Path(self.traj).suffix != ".zarr":
            opener(Path(self.traj))
        if self.out is not None:
            _check_format(self.out)


@dataclass(frozen=True, kw_only=True)
class MDSettings(Settings):
    """A run of `steps` steps of `timestep` fs in all, those before a restart included.

    `temperature` K of the bath and, where the file has no velocities, of these; `friction` 1/fs (langevin), `damping` and
    `pressure_damping` fs (nvt, npt), `cell` isotropic or full (npt). `restart`: a checkpoint to go on from, instead of `file`.
    `stress`: compute it for the reports and the trajectory in other ensembles than npt, too.
    """

    ensemble: Literal["nve", "langevin", "nvt", "npt"] = "nve"
    temperature: float | None = None
    timestep: float = 1.0
    friction: float = 0.01
    damping: float = 100.0
    pressure_damping: float = 1000.0
    cell: Literal["isotropic", "full"] = "isotropic"
    seed: int = 0
    stress: bool = False
    checkpoint: str | None = None
    checkpoint_every: int = 1000
    restart: str | None = None

    def integrator(self) -> Integrator:
        """The ensemble."""
        kelvin, step = 0.0 if self.temperature is None else self.temperature, self.timestep
        if self.ensemble == "nve":
            return NVE(step)
        if self.ensemble == "langevin":
            return Langevin(step, kelvin, self.friction, self.seed)
        if self.ensemble == "nvt":
            return NoseHooverChain(step, kelvin, self.damping)
        return NPT(step, kelvin, self.pressure * GPa, self.damping, self.pressure_damping, self.cell)

    def _check(self) -> None:
        super()._check()
        one_of("ensemble", self.ensemble, ("nve", "langevin", "nvt", "npt"))
        at_least_one("checkpoint_every", self.checkpoint_every)
        if self.file is None and self.restart is None:
            raise InputError("there is nothing to start from: give a FILE, or --restart CHECKPOINT.")
        if self.temperature is None and self.ensemble != "nve":
            raise InputError(f"the ensemble {self.ensemble} needs a temperature in K: give for example --temperature 300.")
        if self.temperature is not None:
            positive("temperature", self.temperature, "K", 300.0)


@dataclass(frozen=True, kw_only=True)
class RelaxSettings(Settings):
    """A relaxation by FIRE, at most `steps` steps, until no force is above `fmax` eV/Å; of the `cell`, too, if it is given."""

    fmax: float = 0.05
    every: int = 10
    cell: Literal["isotropic", "full"] | None = None

    def integrator(self) -> FIRE:
        """The optimizer."""
        return FIRE(self.fmax, self.cell, self.pressure * GPa)


@dataclass(frozen=True)
class Job:
    """What is known before the first step. `changed`: settings that differ from the checkpoint's, as lines to show."""

    n_atoms: int
    first: int
    last: int
    dtype: torch.dtype
    ranks: int
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Done:
    """How a run ended. `converged`: of a relaxation, None otherwise; `why_no_stress`: a reason, or None if there is stress."""

    step: int
    seconds: float
    rebuilds: int
    converged: bool | None = None
    why_no_stress: str | None = None


def molecular_dynamics(comm: Comm, settings: MDSettings) -> Iterator[Job | Report | Done]:
    """A `Job`, then a `Report` each `every` steps and at the end, then `Done`. Every rank must iterate."""
    config, model = _prepared(comm, settings)
    batch, step, saved, index = _start(settings, config)
    with ExitStack() as closing:
        thermo, writers = _observers(settings, step, closing)
        kept = [] if settings.checkpoint is None else [_checkpoint(settings, settings.checkpoint)]
        domain = Domain(model, batch, settings.skin)
        simulation = Simulation(domain, settings.integrator(), [thermo, *writers, *kept])
        _ask_for_stress(simulation, settings.stress)
        yield Job(batch.n_atoms, step or 0, settings.steps, _dtype(model), comm.size, _changes(settings, index))
        if step is not None:
            simulation.resume(step, saved)
            thermo.begin(simulation)
        elif "velocities" not in batch.extra_fields and settings.temperature is not None:
            thermalize(simulation.state, settings.temperature, settings.seed)
        started = time.perf_counter()
        yield from _advance(simulation, thermo, settings)
        _call_at_the_end(simulation, kept)
        done = _done(simulation, settings, started)
    yield done


def relaxation(comm: Comm, settings: RelaxSettings) -> Iterator[Job | Report | Done]:
    """A `Job`, then a `Report` each `every` steps and at the end, then `Done`. Every rank must iterate."""
    config, model = _prepared(comm, settings)
    assert settings.file is not None
    batch = ShardedBatch.from_file(settings.file, config, settings.index)
    with ExitStack() as closing:
        thermo, writers = _observers(settings, None, closing)
        optimizer = settings.integrator()
        simulation = Simulation(Domain(model, batch, settings.skin), optimizer, [thermo, *writers])
        yield Job(batch.n_atoms, 0, settings.steps, _dtype(model), comm.size)
        started = time.perf_counter()
        yield from _advance(simulation, thermo, settings, optimizer.converged)
        _call_at_the_end(simulation, writers)
        done = _done(simulation, settings, started, bool(optimizer.converged(simulation.state).all()))
    yield done


def _prepared(comm: Comm, settings: Settings) -> tuple[DomainConfig, DistributedModel]:
    potential = load_model(settings.model, comm, trust_pickle=settings.trust_pickle)
    potential = potential if settings.dtype is None else potential.to(getattr(torch, settings.dtype))
    config = DomainConfig(comm, settings.strategy, settings.compile)  # type: ignore[arg-type]
    return config, DistributedModel(potential, config)


def _dtype(model: DistributedModel) -> torch.dtype:
    return model.model.dtype  # type: ignore[return-value]


def _start(settings: MDSettings, config: DomainConfig) -> tuple[ShardedBatch, int | None, dict[str, Tensor], dict[str, Any]]:
    """The structure and, at a restart, the step, the integrator's state and the checkpoint's index."""
    if settings.restart is None:
        assert settings.file is not None
        return ShardedBatch.from_file(settings.file, config, settings.index), None, {}, {}
    batch, step, saved, index = load_checkpoint(settings.restart, config)
    before = index["settings"].get("ensemble", settings.ensemble)
    if before != settings.ensemble:
        raise InputError(
            f"{settings.restart} is of the ensemble {before}: go on with it, or start {settings.ensemble} from a file."
        )
    if step >= settings.steps:
        raise InputError(f"{settings.restart} is at step {step}, and the run ends at {settings.steps}: give more --steps.")
    return batch, step, saved, index


def _changes(settings: MDSettings, index: dict[str, Any]) -> tuple[str, ...]:
    before = index.get("settings", {})
    now = asdict(settings)
    return tuple(f"{name}: {before[name]} -> {now[name]}" for name in PHYSICS if name in before and before[name] != now[name])


def _observers(settings: Settings, after: int | None, closing: ExitStack) -> tuple[Thermo, list[Writer]]:
    """The hooks that write, which are closed by `closing`."""
    thermo = closing.enter_context(Thermo(settings.every, settings.log, after))
    if settings.traj is None:
        return thermo, []
    if Path(settings.traj).suffix == ".zarr":
        writer: Writer = ZarrWriter(settings.traj, settings.every, after)
    else:
        writer = TrajectoryWriter(settings.traj, settings.every, after, velocities=isinstance(settings, MDSettings))
    return thermo, [closing.enter_context(writer)]


def _checkpoint(settings: MDSettings, path: str) -> Checkpoint:
    return Checkpoint(path, settings.checkpoint_every, asdict(settings))


def _call_at_the_end(simulation: Simulation, hooks: Sequence[Hook]) -> None:
    """Those that were not called after the last step, as it is no multiple of theirs."""
    for hook in hooks:
        if simulation.state.step % hook.every:
            hook(simulation)


def _ask_for_stress(simulation: Simulation, wanted: bool) -> None:
    if wanted and "stress" in simulation.domain.model.spec.output_kinds:
        simulation.integrator.outputs = ("energy", "forces", "stress")


def _advance(
    simulation: Simulation, thermo: Thermo, settings: Settings, until: Callable[[State], Tensor] | None = None
) -> Iterator[Report]:
    """Step, and show reports as they come, until the last step or until all systems are there."""
    state, told, over = simulation.state, 0, False
    simulation.start()
    while state.step < settings.steps and not over:
        yield from thermo.reports[told:]
        told = len(thermo.reports)
        steps = min(settings.every - state.step % settings.every, settings.steps - state.step)
        over = simulation.run(steps, until)
    _call_at_the_end(simulation, [thermo])
    yield from thermo.reports[told:]


def _done(simulation: Simulation, settings: Settings, started: float, converged: bool | None = None) -> Done:
    seconds = time.perf_counter() - started
    if settings.out is not None:
        write_structure(simulation, Path(settings.out), velocities=converged is None)
    reason = simulation.domain.batch.why_no_stress()[0]
    return Done(simulation.state.step, seconds, simulation.rebuilds, converged, reason)


def write_structure(simulation: Simulation, path: Path, velocities: bool = True) -> None:
    """The whole system in a file that takes its name when it is whole, in the format of its suffix. Every rank must call it.

    Raises:
        OSError: on every rank.

    """
    comm = simulation.state.comm
    frames = snapshot(simulation, Static.gathered(simulation.domain.batch), velocities)
    with comm.agreement():
        if comm.rank == 0:
            partial = path.with_name(f"{path.stem}.partial{path.suffix}")
            try:
                _write_whole(partial, frames())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


def _write_whole(path: Path, frames: Sequence[Frame]) -> None:
    if path.suffix in (".extxyz", ".xyz"):
        path.write_text("".join(map(xyz_text, frames)), encoding="utf-8")
    else:
        ase.io.write(path, [frame.to_ase() for frame in frames], parallel=False)


def _check_format(out: str) -> None:
    """That ASE can write such a file, and where it is to go."""
    path = Path(out)
    try:
        known = ioformats.get(filetype(path.name, read=False))
    except UnknownFileTypeError:
        known = None
    if known is None or not known.can_write:
        raise InputError(f"ASE cannot write a file called {path.name}: use for example the suffix .extxyz.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {path.parent}.")
