"""What moves: this rank's atoms, every system's cell, and the sums over all ranks that integrators and loggers read."""

from dataclasses import dataclass

import torch
from ase.units import fs, kB
from torch import Tensor

from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import Comm

AMU_A2_PER_FS2: float = fs**-2
"""eV in 1 amu Å^2/fs^2: ASE's unit of time is Å sqrt(amu/eV)."""
BOLTZMANN: float = kB
"""eV/K."""
APART = 32
"""In so many places each system's sum is made on the way, since on CUDA what is added to one place waits in line."""


@dataclass(eq=False)
class State:
    """B systems in motion, of which this rank holds n atoms; changed in place. All on one device, all floats float64.

    `positions` (n, 3) Å, never wrapped; `velocities` (n, 3) Å/fs; `masses` (n,) amu; `batch` (n,) each atom's system; `ids`
    (n,) its row in the whole batch; `cell` (B, 3, 3) Å and `pbc` (B, 3) of all systems; `forces` (n, 3) eV/Å, `energy` (B,)
    eV and `stress` (B, 3, 3) eV/Å^3 (None where it was not asked for) at these positions; `freedom` (B,) the degrees of
    freedom that hold kinetic energy; `step` how many steps have been made. `counted` (n,): each atom's system in sums, B for a
    dead atom that belongs to none (see `Room`); None where all are alive.
    """

    comm: Comm
    positions: Tensor
    velocities: Tensor
    masses: Tensor
    batch: Tensor
    ids: Tensor
    cell: Tensor
    pbc: Tensor
    forces: Tensor
    energy: Tensor
    freedom: Tensor
    stress: Tensor | None = None
    step: int = 0
    counted: Tensor | None = None

    @classmethod
    def of(cls, batch: ShardedBatch, conserves_momentum: bool = True) -> "State":
        """The atoms of `batch`, which carries velocities and masses; its very tensors. Forces are not known yet.

        Every rank must call it.
        """
        n, zeros = len(batch.cell), torch.zeros_like(batch.positions)
        none = torch.zeros(n, dtype=torch.float64, device=batch.comm.device)
        moving = batch.carried["velocities"], batch.carried["masses"]
        where = batch.batch, batch.ids, batch.cell, batch.pbc
        state = cls(batch.comm, batch.positions, *moving, *where, zeros, none, none)
        state.freedom = state.degrees_of_freedom(conserves_momentum)
        return state

    def adopt(self, batch: ShardedBatch) -> None:
        """Hold the same systems' `batch` after its atoms have changed ranks; forces are to be evaluated."""
        self.positions, self.batch, self.ids = batch.positions, batch.batch, batch.ids
        self.velocities, self.masses = batch.carried["velocities"], batch.carried["masses"]
        self.cell, self.pbc = batch.cell, batch.pbc

    def degrees_of_freedom(self, conserves_momentum: bool) -> Tensor:
        """(B,): 3N, less 3 where the centre of mass stays at rest; at least 1, for temperatures of single atoms."""
        atoms = self.total(torch.ones_like(self.masses))
        return (3 * atoms - 3 * conserves_momentum).clamp(min=1)

    def total(self, values: Tensor) -> Tensor:
        """Per-atom values (n, *F) -> their sum for each system (B, *F), the same on every rank. No host synchronisation."""
        index = self.batch if self.counted is None else self.counted
        apart = torch.arange(len(values), device=values.device) % APART
        sums = values.new_zeros((len(self.cell) + 1) * APART, *values.shape[1:]).index_add_(0, index * APART + apart, values)
        return self.comm.all_reduce(sums.view(-1, APART, *values.shape[1:]).sum(1, dtype=values.dtype)[:-1])

    def largest(self, values: Tensor) -> Tensor:
        """Per-atom values (n,), not negative -> their maximum in each system (B,), the same on every rank; 0 without atoms."""
        index = self.batch if self.counted is None else self.counted
        start = values.new_zeros(len(self.cell) + 1)
        return self.comm.all_reduce(start.scatter_reduce(0, index, values, "amax")[:-1], "max")

    def kinetic_energy(self) -> Tensor:
        """(B,) eV."""
        return self.total(0.5 * AMU_A2_PER_FS2 * self.masses * self.velocities.square().sum(-1))

    def kinetic_tensor(self) -> Tensor:
        """Σ m v v^T (B, 3, 3) eV: its trace is twice the kinetic energy."""
        momenta = AMU_A2_PER_FS2 * self.masses[:, None] * self.velocities
        return self.total(momenta[:, :, None] * self.velocities[:, None, :])

    def temperature(self, kinetic_energy: Tensor | None = None) -> Tensor:
        """(B,) K, of the kinetic energy (B,) eV, which is reduced here if it is not given."""
        kinetic = self.kinetic_energy() if kinetic_energy is None else kinetic_energy
        return 2 * kinetic / (BOLTZMANN * self.freedom)

    def volume(self) -> Tensor:
        """(B,) Å^3; where a system has none it is not to be read."""
        return self.cell.det().abs()

    def acceleration(self) -> Tensor:
        """(n, 3) Å/fs^2."""
        return self.forces / (AMU_A2_PER_FS2 * self.masses[:, None])
