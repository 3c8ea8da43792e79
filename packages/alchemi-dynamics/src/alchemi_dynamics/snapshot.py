"""All atoms of a running simulation on rank 0, in ASE's units, for writers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_masses
from ase.stress import full_3x3_to_voigt_6_stress
from ase.units import fs
from torch import Tensor

from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_dynamics.simulation import Simulation

Array = np.ndarray[Any, Any]


def time_of(simulation: Simulation) -> float | None:
    """The time in fs, or None where a step has no time, as in a relaxation."""
    timestep = simulation.integrator.timestep
    return None if timestep is None else simulation.state.step * timestep


def on_host(tensors: Sequence[Tensor]) -> Callable[[], list[Array]]:
    """Return a function that waits for the tensors' present values and copies them to the host. Another thread may call it."""
    ready = torch.cuda.Event() if any(t.is_cuda for t in tensors) else None
    if ready is not None:
        ready.record()

    def copy() -> list[Array]:
        if ready is not None:
            ready.synchronize()
        return [t.detach().cpu().numpy() for t in tensors]

    return copy


@dataclass(frozen=True, eq=False)
class Static:
    """Fields that do not change during a run: element numbers, systems and masses (N,), pbc (B, 3), charge and spin."""

    numbers: Array
    batch: Array
    masses: Array
    pbc: Array
    info: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def gathered(cls, batch: ShardedBatch) -> "Static":
        """All atoms on rank 0, and none on the other ranks. Every rank must call it."""
        fields = batch.atomic_numbers, batch.batch, batch.extra_fields["masses"]
        numbers, systems, masses = (batch.gather(f, dst=0).cpu().numpy() for f in fields)
        names = [name for name in ("charge", "spin") if name in batch.per_system]
        info = [{name: batch.per_system[name][b].item() for name in names} for b in range(len(batch.cell))]
        return cls(numbers, systems, masses, batch.pbc.cpu().numpy(), info)


@dataclass(frozen=True, eq=False)
class Frame:
    """One system at one step: positions Å, velocities Å/fs or None, forces eV/Å, energy eV, stress eV/Å^3 or None."""

    step: int
    time: float | None
    numbers: Array
    masses: Array
    positions: Array
    velocities: Array | None
    forces: Array
    energy: float
    stress: Array | None
    cell: Array
    pbc: Array
    info: dict[str, Any]

    @property
    def momenta(self) -> Array | None:
        """Momenta in ASE's unit, amu Å / (Å sqrt(amu/eV)), or None."""
        return None if self.velocities is None else self.masses[:, None] * self.velocities / fs

    @property
    def has_custom_masses(self) -> bool:
        """Whether masses differ from those of the elements."""
        return not np.array_equal(self.masses, atomic_masses[self.numbers])

    @property
    def labels(self) -> dict[str, Any]:
        """Step, time in fs, and fields of the system such as charge."""
        return {"step": self.step, **({} if self.time is None else {"time": self.time}), **self.info}

    def to_ase(self) -> Atoms:
        """A structure of ASE, with energy, forces and stress in a calculator."""
        masses = self.masses if self.has_custom_masses else None
        cell, momenta = self.cell, self.momenta
        atoms = Atoms(self.numbers, self.positions, masses=masses, cell=cell, pbc=self.pbc, info=self.labels)
        if momenta is not None:
            atoms.set_momenta(momenta)
        results: dict[str, Any] = {"energy": self.energy, "forces": self.forces}
        if self.stress is not None:
            results["stress"] = full_3x3_to_voigt_6_stress(self.stress)
        atoms.calc = SinglePointCalculator(atoms, **results)
        return atoms


def snapshot(simulation: Simulation, static: Static, velocities: bool = True) -> Callable[[], list[Frame]]:
    """Return a function that makes a frame for each system, which rank 0's thread calls.

    Sends two messages. Every rank must call it.
    """
    state, batch, time = simulation.state, simulation.domain.batch, time_of(simulation)
    moving = [state.positions, state.forces] + [state.velocities] * velocities
    rows = batch.gather(torch.cat(moving, 1), dst=0)
    stress = [] if state.stress is None else [state.stress.clone()]
    host = on_host([rows, state.cell.clone(), state.energy.clone(), *stress])
    without = [reason is not None for reason in batch.why_no_stress()]

    def frames(step: int = state.step) -> list[Frame]:
        rows, cell, energy, *stress = host()
        split = np.split(rows, rows.shape[1] // 3, axis=1)
        made = []
        for b in range(len(cell)):
            of = static.batch == b
            positions, forces, *moving = (part[of] for part in split)
            tensor = stress[0][b] if stress and not without[b] else None
            atoms = step, time, static.numbers[of], static.masses[of], positions, moving[0] if moving else None, forces
            made.append(Frame(*atoms, float(energy[b]), tensor, cell[b], static.pbc[b], static.info[b]))
        return made

    return frames
