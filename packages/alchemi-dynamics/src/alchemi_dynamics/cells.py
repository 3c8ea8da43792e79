"""Coordinates in which a relaxation moves: those of the atoms, with or without the cell."""

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
    """Coordinates of an optimizer, in Å: atoms (n, 3), and three more rows for each system's cell (B, 3, 3)."""

    def start(self, state: State) -> None:
        """Prepare for the first step."""

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """Forces on atoms (n, 3) and cells (B, 3, 3), in eV/Å."""

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:
        """Move by steps (n, 3) and (B, 3, 3) Å. Steps are zero in systems that are not `moving` (B,)."""

    def energy(self, state: State) -> Tensor:
        """The energy (B,) eV of which the forces are the negative gradient."""

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""


class FixedCell:
    """The positions of the atoms. The cell's rows stay zero."""

    def start(self, state: State) -> None:
        """Nothing has to be prepared."""

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """Forces on the atoms, and zeros for the cells."""
        return state.forces, torch.zeros_like(state.cell)

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:  # noqa: ARG002
        """Move the atoms by steps (n, 3) Å."""
        state.positions += atoms

    def energy(self, state: State) -> Tensor:
        """The potential energy (B,) eV."""
        return state.energy

    def state_dict(self) -> dict[str, Tensor]:
        """No tensors."""
        return {}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Nothing has to be restored."""


class FrechetCell:
    """Positions in the undeformed cell, and N log F of the deformation F, with cell = reference @ F^T.

    They are those of ASE's FrechetCellFilter (Tadmor et al., Phys. Rev. B 59 (1999) 235, with the exponential map).
    `shape`: "isotropic" or "full". `pressure`: external pressure in eV/Å^3, compression positive, a number or (B,).
    """

    reference: Tensor
    """(B, 3, 3) Å, the cells at the start."""
    logarithm: Tensor
    """(B, 3, 3), log F."""
    atoms: Tensor
    """(B,), the number N of atoms, which scales forces on the cell to the size of those on atoms."""

    def __init__(self, shape: str, pressure: float | Tensor) -> None:
        self.pressure = PerSystem("pressure", pressure, "eV/Å^3")
        self.allowed = isotropic if shape == "isotropic" else symmetric

    def start(self, state: State) -> None:
        """Take the present cell as the reference."""
        require_volume(state, "A relaxation of the cell")
        self.reference, self.logarithm = state.cell.clone(), torch.zeros_like(state.cell)
        self.atoms = state.total(torch.ones_like(state.masses)).clamp(min=1)

    def forces(self, state: State) -> tuple[Tensor, Tensor]:
        """Forces on atoms times F, and the negative gradient of the enthalpy in log F, divided by N."""
        assert state.stress is not None
        excess = self.allowed(state.stress) + on_diagonal(self.pressure.on(state))
        gradient = -state.volume()[:, None, None] * excess @ exponential(-self.logarithm).mT
        cells = derivative_of_exponential(self.logarithm.mT, gradient) / self.atoms[:, None, None]
        return rows_times(state.forces, exponential(self.logarithm)[state.batch]), cells

    def move(self, state: State, atoms: Tensor, cells: Tensor, moving: Tensor) -> None:
        """Move by steps (n, 3) and (B, 3, 3) Å. Systems that are not `moving` keep their values to the last bit."""
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
        """Reference cell, deformation and number of atoms."""
        return {name: getattr(self, name).clone() for name in ("reference", "logarithm", "atoms")}

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on the state's device."""
        restore(self, {name: saved[name] for name in ("reference", "logarithm", "atoms")})


def coordinates(cell: str | None, pressure: float | Tensor) -> Coordinates:
    """Coordinates for a `cell` that is fixed (None), or relaxed ("isotropic" or "full")."""
    one_of("cell", cell, (None, "isotropic", "full"))
    return FixedCell() if cell is None else FrechetCell(cell, pressure)
