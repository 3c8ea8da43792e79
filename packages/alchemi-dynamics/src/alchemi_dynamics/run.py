"""Run molecular dynamics or a relaxation of a file's structure, on any number of ranks, as the command line does."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.domain import Domain
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dynamics.report import Report, Thermo
from alchemi_dynamics.settings import MDSettings, RelaxSettings, Settings
from alchemi_dynamics.simulation import Hook, Simulation
from alchemi_dynamics.state import State
from alchemi_dynamics.structure_file import write_structure
from alchemi_dynamics.velocities import thermalize
from alchemi_dynamics.writers import TrajectoryWriter, Writer
from alchemi_dynamics.zarr_writer import ZarrWriter
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_spec import InputError

PHYSICS = ("model", "dtype", "ensemble", "temperature", "pressure", "cell", "timestep", "friction", "damping", "seed")
"""Settings that determine the trajectory. A restart reports which of them differ from the checkpoint's."""


@dataclass(frozen=True)
class RunHeader:
    """What is known before the first step. `changed`: settings that differ from the checkpoint's, one line each."""

    n_atoms: int
    first: int
    last: int
    dtype: torch.dtype
    ranks: int
    changed: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunSummary:
    """How a run ended. `converged`: None unless it was a relaxation. `why_no_stress`: a reason, or None if there is stress."""

    step: int
    seconds: float
    rebuilds: int
    converged: bool | None = None
    why_no_stress: str | None = None


def molecular_dynamics(comm: Comm, settings: MDSettings) -> Iterator[RunHeader | Report | RunSummary]:
    """Yield a `RunHeader`, a `Report` each `every` steps and at the end, and a `RunSummary`. Every rank must iterate."""
    config, model = _load(comm, settings)
    batch, step, saved, index = _start(settings, config)
    with ExitStack() as closing:
        thermo, writers = _observers(settings, step, closing)
        checkpoints = _checkpoints(settings)
        domain = Domain(model, batch, settings.skin)
        simulation = Simulation(domain, settings.integrator(), [thermo, *writers, *checkpoints])
        _request_stress(simulation, settings.stress)
        yield RunHeader(batch.n_atoms, step or 0, settings.steps, _dtype(model), comm.size, _changes(settings, index))
        if step is not None:
            simulation.resume(step, saved)
            thermo.begin(simulation)
        elif "velocities" not in batch.extra_fields and settings.temperature is not None:
            thermalize(simulation.state, settings.temperature, settings.seed)
        started = time.perf_counter()
        yield from _advance(simulation, thermo, settings)
        _call_at_the_end(simulation, checkpoints)
        summary = _finish(simulation, settings, started)
    yield summary


def relaxation(comm: Comm, settings: RelaxSettings) -> Iterator[RunHeader | Report | RunSummary]:
    """Yield a `RunHeader`, a `Report` each `every` steps and at the end, and a `RunSummary`. Every rank must iterate."""
    config, model = _load(comm, settings)
    batch = ShardedBatch.from_file(settings.file, config, settings.index)
    with ExitStack() as closing:
        thermo, writers = _observers(settings, None, closing)
        optimizer = settings.integrator()
        simulation = Simulation(Domain(model, batch, settings.skin), optimizer, [thermo, *writers])
        yield RunHeader(batch.n_atoms, 0, settings.steps, _dtype(model), comm.size)
        started = time.perf_counter()
        yield from _advance(simulation, thermo, settings, optimizer.converged)
        _call_at_the_end(simulation, writers)
        summary = _finish(simulation, settings, started, bool(optimizer.converged(simulation.state).all()))
    yield summary


def _load(comm: Comm, settings: Settings) -> tuple[DomainConfig, DistributedModel]:
    model = settings.load(comm)
    config = DomainConfig(comm, settings.strategy, settings.compile)  # type: ignore[arg-type]
    return config, DistributedModel(model, config)


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
            f"{settings.restart} is of the ensemble {before}: continue with it, or start {settings.ensemble} from a file."
        )
    if step >= settings.steps:
        raise InputError(f"{settings.restart} is at step {step}, and the run ends at {settings.steps}: give more --steps.")
    return batch, step, saved, index


def _changes(settings: MDSettings, index: dict[str, Any]) -> tuple[str, ...]:
    before, now = index.get("settings", {}), settings.model_dump(mode="json")
    return tuple(f"{name}: {before[name]} -> {now[name]}" for name in PHYSICS if name in before and before[name] != now[name])


def _observers(settings: Settings, after: int | None, closing: ExitStack) -> tuple[Thermo, list[Writer]]:
    """The hooks that write reports and the trajectory. `closing` closes them."""
    thermo = closing.enter_context(Thermo(settings.every, settings.log, after))
    writers = [] if settings.traj is None else [_writer(settings, settings.traj, after)]
    return thermo, [closing.enter_context(writer) for writer in writers]


def _writer(settings: Settings, path: Path, after: int | None) -> Writer:
    if path.suffix == ".zarr":
        return ZarrWriter(path, settings.every, after)
    return TrajectoryWriter(path, settings.every, after, velocities=isinstance(settings, MDSettings))


def _checkpoints(settings: MDSettings) -> list[Checkpoint]:
    """One hook, or none."""
    if settings.checkpoint is None:
        return []
    return [Checkpoint(settings.checkpoint, settings.checkpoint_every, settings.model_dump(mode="json"))]


def _call_at_the_end(simulation: Simulation, hooks: Sequence[Hook]) -> None:
    """Call the hooks that the last step did not call, because it is not a multiple of their `every`."""
    for hook in hooks:
        if simulation.state.step % hook.every:
            hook(simulation)


def _request_stress(simulation: Simulation, wanted: bool) -> None:
    if wanted and "stress" in simulation.domain.model.spec.output_kinds:
        simulation.integrator.outputs = ("energy", "forces", "stress")


def _advance(
    simulation: Simulation, thermo: Thermo, settings: Settings, until: Callable[[State], Tensor] | None = None
) -> Iterator[Report]:
    """Step to the last step, or until `until` holds in every system. Yield each report when it is made."""
    state, yielded, over = simulation.state, 0, False
    simulation.start()
    while state.step < settings.steps and not over:
        yield from thermo.reports[yielded:]
        yielded = len(thermo.reports)
        steps = min(settings.every - state.step % settings.every, settings.steps - state.step)
        over = simulation.run(steps, until)
    _call_at_the_end(simulation, [thermo])
    yield from thermo.reports[yielded:]


def _finish(simulation: Simulation, settings: Settings, started: float, converged: bool | None = None) -> RunSummary:
    seconds = time.perf_counter() - started
    if settings.out is not None:
        write_structure(simulation, settings.out, velocities=converged is None)
    reason = simulation.domain.batch.why_no_stress()[0]
    return RunSummary(simulation.state.step, seconds, simulation.rebuilds, converged, reason)
