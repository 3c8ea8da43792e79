"""State: the atoms and cells that move, and the sums over all ranks that integrators and reports read."""

from dataclasses import dataclass
from typing import Any

import torch
from ase.units import fs, kB
from torch import Tensor

from alchemi_domain.atom_buffers import AtomBuffers
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import Comm

AMU_A2_PER_FS2: float = fs**-2
"""eV in 1 amu Å^2/fs^2: ASE's unit of time is Å sqrt(amu/eV)."""
BOLTZMANN: float = kB
"""eV/K."""
PARTIAL_SUMS = 32
"""How many partial sums each system has on the way: on CUDA, additions to one address wait for each other."""
EXTRA_FIELDS = ("velocities", "masses")
"""The fields of a state that are extra fields of its batch."""


class _InBuffers:
    """A field that the atom buffers own. Read it or change it in place; to assign to it is to copy into it."""

    name: str

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, state: "State", owner: type | None = None) -> Tensor:
        rows = state.rows
        field: Any = rows.extra_fields[self.name] if self.name in EXTRA_FIELDS else getattr(rows, self.name)
        return field  # type: ignore[no-any-return]

    def __set__(self, state: "State", value: Tensor) -> None:
        owned = self.__get__(state)
        if value is not owned:  # as it is after `state.velocities += ...`
            with torch.inference_mode(False), torch.no_grad():
                owned.copy_(value)


@dataclass(eq=False)
class State:
    """B systems in motion, of which this rank holds n atoms; changed in place. All on one device, all floats float64.

    `positions` (n, 3) Å, never wrapped; `velocities` (n, 3) Å/fs; `masses` (n,) amu; `batch` (n,) each atom's system; `ids`
    (n,) its row in the whole batch; `cell` (B, 3, 3) Å and `pbc` (B, 3) of all systems: these are views of `atoms`, and
    assigning to one copies into it. `forces` (n, 3) eV/Å, `energy` (B,) eV and `stress` (B, 3, 3) eV/Å^3 (None if it is not
    computed) belong to these positions. `freedom` (B,): the degrees of freedom that hold kinetic energy. `step`: how many steps
    have been made. `with_padding`: n counts the padding atoms of `atoms` as well. An integrator of captured steps sees them;
    they have infinite masses, and no sum counts them.
    """

    atoms: AtomBuffers
    forces: Tensor
    energy: Tensor
    freedom: Tensor
    stress: Tensor | None = None
    step: int = 0
    with_padding: bool = False

    positions = _InBuffers()
    velocities = _InBuffers()
    masses = _InBuffers()
    batch = _InBuffers()
    ids = _InBuffers()
    cell = _InBuffers()
    pbc = _InBuffers()

    @classmethod
    def of(cls, atoms: AtomBuffers, conserves_momentum: bool = True) -> "State":
        """A state of these atoms, which have velocities and masses. Forces are not known yet. Every rank must call it."""
        zeros = torch.zeros(len(atoms.real.cell), dtype=torch.float64, device=atoms.real.comm.device)
        state = cls(atoms, torch.zeros_like(atoms.real.positions), zeros, zeros)
        state.freedom = state.degrees_of_freedom(conserves_momentum)
        return state

    @property
    def rows(self) -> ShardedBatch:
        """The view of `atoms` that this state reads."""
        return self.atoms.moving if self.with_padding else self.atoms.real

    @property
    def comm(self) -> Comm:
        """The ranks that hold the atoms."""
        return self.atoms.real.comm

    @property
    def _sum_index(self) -> Tensor:
        """Each atom's system in sums; B for a padding atom, which belongs to none."""
        return self.atoms.all_rows.batch if self.with_padding else self.batch

    def degrees_of_freedom(self, conserves_momentum: bool) -> Tensor:
        """(B,): 3N, less 3 if the centre of mass stays at rest; at least 1, so that a single atom has a temperature."""
        atoms = self.total(torch.ones_like(self.masses))
        return (3 * atoms - 3 * conserves_momentum).clamp(min=1)

    def total(self, values: Tensor) -> Tensor:
        """Per-atom values (n, *F) -> their sum for each system (B, *F), the same on every rank. No host synchronisation."""
        part = torch.arange(len(values), device=values.device) % PARTIAL_SUMS
        sums = values.new_zeros((len(self.cell) + 1) * PARTIAL_SUMS, *values.shape[1:])
        sums.index_add_(0, self._sum_index * PARTIAL_SUMS + part, values)
        return self.comm.all_reduce(sums.view(-1, PARTIAL_SUMS, *values.shape[1:]).sum(1, dtype=values.dtype)[:-1])

    def largest(self, values: Tensor) -> Tensor:
        """Per-atom values (n,), not negative -> their maximum in each system (B,), the same on every rank; 0 without atoms."""
        start = values.new_zeros(len(self.cell) + 1)
        return self.comm.all_reduce(start.scatter_reduce(0, self._sum_index, values, "amax")[:-1], "max")

    def kinetic_energy(self) -> Tensor:
        """(B,) eV."""
        return self.total(0.5 * AMU_A2_PER_FS2 * self.masses * self.velocities.square().sum(-1))

    def kinetic_tensor(self) -> Tensor:
        """Σ m v v^T (B, 3, 3) eV: its trace is twice the kinetic energy."""
        momenta = AMU_A2_PER_FS2 * self.masses[:, None] * self.velocities
        return self.total(momenta[:, :, None] * self.velocities[:, None, :])

    def temperature(self, kinetic_energy: Tensor | None = None) -> Tensor:
        """(B,) K, of the kinetic energy (B,) eV, which is computed if it is not given."""
        kinetic = self.kinetic_energy() if kinetic_energy is None else kinetic_energy
        return 2 * kinetic / (BOLTZMANN * self.freedom)

    def volume(self) -> Tensor:
        """(B,) Å^3. It is meaningless for a system without a cell."""
        return self.cell.det().abs()

    def acceleration(self) -> Tensor:
        """(n, 3) Å/fs^2."""
        return self.forces / (AMU_A2_PER_FS2 * self.masses[:, None])
