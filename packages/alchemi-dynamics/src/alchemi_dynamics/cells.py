"""What a relaxation moves beside the atoms: nothing, or the cell."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from alchemi_domain.derivatives import rows_times
from alchemi_dynamics.matrices import (
    derivative_of_exponential,
    exponential,
    isotropic,
    on_diagonal,
    symmetric,
)
from alchemi_dynamics.parameters import PerSystem, one_of, require_volume, restore
from alchemi_dynamics.state import State


class Coordinates(Protocol):
    """Atoms (n, 3) and three more rows for each system (B, 3, 3), in which an optimizer takes its steps, both in Å."""

    def start(self, state: State) -> None:
        """Once, before the first step."""

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """Of atoms (n, 3) and cells (B, 3, 3), eV/Å."""

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:
        """By steps (n, 3) and (B, 3, 3) Å, in the systems that are `moving` (B,); in the others the steps are zero."""

    def energy(self, state: State) -> Tensor:
        """(B,) eV, whose gradient the forces are."""

    def state_dict(self) -> dict[str, Tensor]:
        """For checkpoints."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave."""


class FixedCell:
    """The atoms' positions themselves; the other rows stay zero."""

    def start(self, state: State) -> None:
        """There is nothing to prepare."""

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """The forces, and none on the cells."""
        return state.forces, torch.zeros_like(state.cell)

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:  # noqa: ARG002
        """By steps (n, 3) Å."""
        state.positions += atoms

    def energy(self, state: State) -> Tensor:
        """(B,) eV."""
        return state.energy

    def state_dict(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Nothing."""


class FrechetCell:
    """Positions in the undeformed cell, and N log F of the deformation F, as ASE's FrechetCellFilter (Tadmor et al., Phys.
    Rev. B 59 (1999) 235, with the exponential map); cell = reference @ F^T.

    `shape`: "isotropic" or "full". `pressure` from outside in eV/Å^3, compression positive, a number or (B,).
    """

    reference: Tensor
    """(B, 3, 3) Å, the cells at the start."""
    logarithm: Tensor
    """(B, 3, 3), log F."""
    atoms: Tensor
    """(B,), their number N, which brings the cell's forces to the size of the atoms'."""

    def __init__(self, shape: str, pressure: float | Tensor) -> None:
        self.pressure = PerSystem("pressure", pressure, "eV/Å^3")
        self.allowed = isotropic if shape == "isotropic" else symmetric

    def start(self, state: State) -> None:
        """No deformation yet."""
        require_volume(state, "A relaxation of the cell")
        self.reference, self.logarithm = state.cell.clone(), torch.zeros_like(state.cell)
        self.atoms = state.total(torch.ones_like(state.masses)).clamp(min=1)

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """Those on atoms times F, and the gradient of the enthalpy in log F, over N."""
        assert state.stress is not None
        pull = self.allowed(state.stress) + on_diagonal(self.pressure.on(state))
        along = -state.volume()[:, None, None] * pull @ exponential(-self.logarithm).mT
        cells = derivative_of_exponential(self.logarithm.mT, along) / self.atoms[:, None, None]
        return rows_times(state.forces, exponential(self.logarithm)[state.batch]), cells

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:
        """By steps (n, 3) and (B, 3, 3) Å. What stands still is not rounded either."""
        undeformed = rows_times(state.positions, exponential(-self.logarithm).mT[state.batch])
        self.logarithm += cells / self.atoms[:, None, None]
        deformation = exponential(self.logarithm).mT
        moved = rows_times(undeformed + atoms, deformation[state.batch])
        state.positions.copy_(torch.where(moving[state.batch, None], moved, state.positions))
        state.cell.copy_(torch.where(moving[:, None, None], self.reference @ deformation, state.cell))

    def energy(self, state: State) -> Tensor:
        """The enthalpy (B,) eV."""
        return state.energy + self.pressure.on(state) * state.volume()

    def state_dict(self) -> dict[str, Tensor]:
        """Reference, deformation and number of atoms."""
        return {name: getattr(self, name).clone() for name in ("reference", "logarithm", "atoms")}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave, on the state's device."""
        restore(self, {name: saved[name] for name in ("reference", "logarithm", "atoms")})


def coordinates(cell: str | None, pressure: float | Tensor) -> Coordinates:
    """What `cell` names: None, "isotropic" or "full"."""
    one_of("cell", cell, (None, "isotropic", "full"))
    return FixedCell() if cell is None else FrechetCell(cell, pressure)
