"""Energy, forces and stress of the frames of a file, on any number of ranks, with their parity against one rank."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import ase.io
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor, nn

from alchemi_domain.batch import Batch
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.settings import Argument, FilePath, ModelSettings, Option
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_spec import InputError

TOLERANCE = {
    torch.float64: {"energy": 1e-10, "forces": 1e-9, "stress": 1e-9},
    torch.float32: {"energy": 2e-6, "forces": 5e-6, "stress": 3e-5},
}
"""Largest differences between several ranks and one: energy relative, forces in eV/Å, stress in eV/Å^3.

Sums over ranks are added in another order, so results differ by round-off.
"""


class EvaluateSettings(ModelSettings):
    """An evaluation of the frames of a file."""

    file: Annotated[FilePath, Argument("File with the structures, in any format that ASE reads.")]
    index: Annotated[str, Option("Frames of FILE to evaluate, in ASE's notation. All of them are `:`.")] = ":"
    check: Annotated[
        bool, Option("Compare the results with those of one rank. Exit with 1 if they differ by more than the tolerance.")
    ] = False


@dataclass
class StructureResult:
    """Results of one structure, complete on rank 0. `stress` in ASE's Voigt order, or None and the reason."""

    atoms: Atoms
    energy: float
    max_force: float
    stress: list[float] | None
    stress_reason: str | None
    ranks: dict[str, list[int]]
    seconds: float
    parity: dict[str, float] | None


@dataclass
class EvaluationHeader:
    """What is known before the first result: the number of structures, and the floating-point type of the model."""

    n_frames: int
    dtype: torch.dtype


def evaluate(comm: Comm, settings: EvaluateSettings) -> Iterator[EvaluationHeader | StructureResult]:
    """Yield an `EvaluationHeader`, then a `StructureResult` for each frame. Rank 0 reads the file. Every rank must iterate."""
    config = DomainConfig(comm, settings.strategy)
    frames: list[Atoms] = []
    batches: list[Batch] = []
    with comm.agreement():
        if comm.rank == 0:
            frames = _read(settings)
            batches = [Batch.from_ase(atoms) for atoms in frames]
    potential = settings.load(comm)
    distributed = DistributedModel(potential, config)
    n_frames = comm.broadcast_object(len(frames))
    yield EvaluationHeader(n_frames, potential.dtype)  # type: ignore[arg-type]
    for i in range(n_frames):
        atoms, whole = (frames[i], batches[i]) if comm.rank == 0 else (None, None)
        yield _evaluate_one(distributed, atoms, whole, settings.check)


def _read(settings: EvaluateSettings) -> list[Atoms]:
    where = f"{settings.file} (frames {settings.index!r})"
    try:
        found = ase.io.read(settings.file, index=settings.index, parallel=False)
    except Exception as error:
        raise InputError(f"ASE cannot read {where}: {type(error).__name__}: {error}") from error
    frames = found if isinstance(found, list) else [found]
    if not frames or any(len(a) == 0 for a in frames):
        raise InputError(f"{where} has {'no frame' if not frames else 'a frame without atoms'}.")
    return frames


def _evaluate_one(model: DistributedModel, atoms: Atoms | None, whole: Batch | None, check: bool) -> StructureResult:
    comm = model.config.comm
    start = time.perf_counter()
    batch = ShardedBatch.scatter(whole, model.config)
    data = model.prepare(batch)
    results = model.compute(data, batch, ("energy", "forces", "stress"))
    results["forces"] = batch.gather(results["forces"])
    seconds = time.perf_counter() - start
    counts = (len(batch.ids), len(data["nodes"]) - len(batch.ids), data["edge_index"].shape[1] if "edge_index" in data else 0)
    owned, ghosts, edges = zip(*comm.gather_objects(counts), strict=True)
    ranks = {"owned": list(owned), "ghosts": list(ghosts), "edges": list(edges)}
    parity = _parity(model.model, whole, results) if check and whole is not None else None
    shown = Atoms() if atoms is None else atoms.copy()
    values: dict[str, Any] = {"energy": results["energy"].item(), "forces": results["forces"].double().cpu().numpy()}
    if "stress" in results:
        values["stress"] = full_3x3_to_voigt_6_stress(results["stress"][0].double().cpu().numpy())
    shown.calc = SinglePointCalculator(shown, **values)
    largest = results["forces"].norm(dim=-1).max().item()
    stress = values["stress"].tolist() if "stress" in values else None
    return StructureResult(shown, values["energy"], largest, stress, batch.why_no_stress()[0], ranks, seconds, parity)


def _parity(model: nn.Module, whole: Batch, results: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference between `results` and those of one rank, relative for the energy."""
    config = DomainConfig(Comm(device=results["energy"].device))
    one: dict[str, Any] = DistributedModel(model, config)(ShardedBatch.scatter(whole, config))
    gaps = {name: (one[name] - results[name]).abs().max().item() for name in one}
    gaps["energy"] /= max(abs(one["energy"].item()), 1e-30)
    return gaps


def within_tolerance(parity: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every difference is within `TOLERANCE` for this type. A nan is not."""
    return all(gap <= TOLERANCE[dtype][name] for name, gap in parity.items())
