"""Energy, forces and stress of the frames of a file, on any number of ranks, with their parity against one rank."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ase.io
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress
from torch import Tensor, nn

from alchemi_domain.batch import Batch
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.registry import load_model
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_spec import InputError

TOLERANCE = {
    torch.float64: {"energy": 1e-10, "forces": 1e-9, "stress": 1e-9},
    torch.float32: {"energy": 2e-6, "forces": 5e-6, "stress": 3e-5},
}
"""Energy relative; forces in eV/Å, stress in eV/Å^3. Sums in another order differ by round-off, nothing more."""


@dataclass
class Frame:
    """One structure's results, as rank 0 has them. Stress in ASE's Voigt order, or None and the reason."""

    atoms: Atoms
    energy: float
    max_force: float
    stress: list[float] | None
    stress_reason: str | None
    ranks: dict[str, list[int]]
    seconds: float
    parity: dict[str, float] | None


@dataclass
class Job:
    """What is known before the first frame: how many frames there are, and the model's type of numbers."""

    n_frames: int
    dtype: torch.dtype


def evaluate(
    comm: Comm,
    file: str,
    index: str,
    model: str,
    dtype: torch.dtype | None,
    check: bool,
    trust_pickle: bool,
    strategy: str = "halo",
) -> Iterator[Job | Frame]:
    """A `Job`, then a `Frame` for each; the file is read by rank 0. Every rank must iterate."""
    config = DomainConfig(comm, strategy)
    frames: list[Atoms] = []
    batches: list[Batch] = []
    with comm.agreement():
        if comm.rank == 0:
            frames = _read(file, index)
            batches = [Batch.from_ase(atoms) for atoms in frames]
    potential = load_model(model, comm, trust_pickle=trust_pickle)
    potential = potential.to(dtype) if dtype is not None else potential
    kind: torch.dtype = potential.dtype  # type: ignore[assignment]
    distributed = DistributedModel(potential, config)
    n_frames = comm.broadcast_object(len(frames))
    yield Job(n_frames, kind)
    for i in range(n_frames):
        atoms, whole = (frames[i], batches[i]) if comm.rank == 0 else (None, None)
        yield _evaluate_one(distributed, atoms, whole, check)


def _read(file: str, index: str) -> list[Atoms]:
    try:
        found = ase.io.read(file, index=index, parallel=False)
    except Exception as error:
        raise InputError(f"ASE cannot read {file} (frames {index!r}): {type(error).__name__}: {error}") from error
    frames = found if isinstance(found, list) else [found]
    if not frames or any(len(a) == 0 for a in frames):
        raise InputError(f"{file} (frames {index!r}) has {'no frame' if not frames else 'a frame without atoms'}.")
    return frames


def _evaluate_one(model: DistributedModel, atoms: Atoms | None, whole: Batch | None, check: bool) -> Frame:
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
    return Frame(shown, values["energy"], largest, stress, batch.why_no_stress()[0], ranks, seconds, parity)


def _parity(model: nn.Module, whole: Batch, results: dict[str, Tensor]) -> dict[str, float]:
    """How far `results` are from one rank's: energy relative, forces and stress the largest difference."""
    config = DomainConfig(Comm(device=results["energy"].device))
    one: dict[str, Any] = DistributedModel(model, config)(ShardedBatch.scatter(whole, config))
    gaps = {name: (one[name] - results[name]).abs().max().item() for name in one}
    gaps["energy"] /= max(abs(one["energy"].item()), 1e-30)
    return gaps


def within_tolerance(parity: dict[str, float], dtype: torch.dtype) -> bool:
    """Whether every gap is round-off for this type of numbers; nan is not."""
    return all(gap <= TOLERANCE[dtype][name] for name, gap in parity.items())
