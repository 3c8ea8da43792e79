"""Relaxation to the nearest minimum of energy or enthalpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from ase.units import fs
from torch import Tensor

from alchemi_dynamics.cells import coordinates
from alchemi_dynamics.parameters import at_least_one, positive, restore
from alchemi_dynamics.state import AMU_A2_PER_FS2, State

FACTORS = (("timestep_grow", 1.0, 10.0), ("timestep_shrink", 0.0, 1.0), ("alpha", 0.0, 1.0), ("alpha_shrink", 0.0, 1.0))
"""Parameters without a unit, and the limits that they must be between."""
SAVED = ("timesteps", "alpha", "downhill", "largest", "products", "cell_velocities")


@dataclass(frozen=True)
class FIREParameters:
    """Parameters of FIRE with ASE's defaults: times in fs for masses of 1 amu, lengths in Å."""

    timestep: float = 0.1 / fs
    max_timestep: float = 1.0 / fs
    max_step: float = 0.2
    delay_steps: int = 5
    timestep_grow: float = 1.1
    timestep_shrink: float = 0.5
    alpha: float = 0.1
    alpha_shrink: float = 0.99

    def __post_init__(self) -> None:
        for name in ("timestep", "max_timestep"):
            positive(name, getattr(self, name), "fs", 1.0)
        positive("max_step", self.max_step, "Å", 0.2)
        at_least_one("delay_steps", self.delay_steps)
        for name, low, high in FACTORS:
            value = getattr(self, name)
            if not low < value < high:
                raise ValueError(
                    f"{name} is {value}, and has to be between {low} and {high}. Leave it out to use ASE's default."
                )


class FIRE:
    """FIRE (Bitzek et al., PRL 97 (2006) 170201), step by step as in ase.optimize.FIRE. Each system has its own time step.

    A system moves until its largest force is below `fmax` eV/Å, and stands still while other systems continue. `cell`: None
    keeps the cell; "isotropic" and "full" relax it with the atoms under `pressure` eV/Å^3 (compression positive), in the
    coordinates of ASE's FrechetCellFilter, whose cell rows count as forces for `fmax`. All masses are 1 amu.
    `state.velocities` are FIRE's in Å/fs, and zero in converged systems. A step has two reductions: one for three scalar
    products, one for the largest force.
    """

    conserves_momentum = False
    timestep: None = None
    timesteps: Tensor
    """(B,) fs, of each system's next step."""
    alpha: Tensor
    """(B,) the part of the velocity that is turned into the direction of the force."""
    downhill: Tensor
    """(B,) number of steps since the power was last negative."""
    largest: Tensor
    """(B,) eV/Å, the largest force on an atom or a cell row."""
    products: Tensor
    """(3, B): v·v, v·f, f·f."""
    cell_velocities: Tensor
    """(B, 3, 3) Å/fs."""

    def __init__(
        self,
        fmax: float = 0.05,
        cell: str | None = None,
        pressure: float | Tensor = 0.0,
        parameters: FIREParameters | None = None,
    ) -> None:
        self.fmax = positive("fmax", fmax, "eV/Å", 0.05)
        self.coordinates = coordinates(cell, pressure)
        self.outputs: tuple[str, ...] = ("energy", "forces") if cell is None else ("energy", "forces", "stress")
        self.parameters = FIREParameters() if parameters is None else parameters

    def start(self, state: State) -> None:
        """Start at rest."""
        self.coordinates.start(state)
        state.velocities.zero_()
        self.timesteps = torch.full_like(state.energy, self.parameters.timestep)
        self.alpha = torch.full_like(state.energy, self.parameters.alpha)
        self.downhill = torch.zeros_like(state.energy)
        self.cell_velocities = torch.zeros_like(state.cell)
        atoms, cells = self.coordinates.forces(state)
        self.products = self._products(state, atoms, cells)
        self.largest = self._largest(state, atoms, cells)

    def first_half(self, state: State) -> None:
        """A kick and a drift, scaled down to at most `max_step`."""
        moving = self.largest >= self.fmax
        time = torch.where(moving, self.timesteps, 0.0)
        kick = time / AMU_A2_PER_FS2
        atoms, cells = self.coordinates.forces(state)
        state.velocities += kick[state.batch, None] * atoms
        self.cell_velocities += kick[:, None, None] * cells
        vv, vf, ff = self.products
        length = time * (vv + 2 * kick * vf + kick.square() * ff).sqrt()
        stride = time * (self.parameters.max_step / length).clamp(max=1.0)
        step, cell_step = stride[state.batch, None] * state.velocities, stride[:, None, None] * self.cell_velocities
        self.coordinates.move(state, step, cell_step, moving)

    def second_half(self, state: State) -> None:
        """Downhill: turn the velocities towards the forces, and take longer steps. Uphill: stop, and take shorter steps."""
        atoms, cells = self.coordinates.forces(state)
        vv, vf, ff = self._products(state, atoms, cells)
        keep = torch.where(vf > 0, 1 - self.alpha, 0.0)
        turn = torch.where(vf > 0, self.alpha * (vv / ff).sqrt(), 0.0)
        state.velocities.mul_(keep[state.batch, None]).add_(turn[state.batch, None] * atoms)
        self.cell_velocities.mul_(keep[:, None, None]).add_(turn[:, None, None] * cells)
        turned = keep.square() * vv + 2 * keep * turn * vf + turn.square() * ff
        self.products.copy_(torch.stack([turned, keep * vf + turn * ff, ff]))
        self._adapt(vf > 0)
        self.largest.copy_(self._largest(state, atoms, cells))
        moving = self.largest >= self.fmax
        state.velocities *= moving[state.batch, None]
        self.cell_velocities *= moving[:, None, None]

    def _adapt(self, down: Tensor) -> None:
        """Change time step and alpha of each system, which went downhill or not (B,)."""
        grow = down & (self.downhill > self.parameters.delay_steps)
        longer = (self.timesteps * self.parameters.timestep_grow).clamp(max=self.parameters.max_timestep)
        shorter = self.timesteps * self.parameters.timestep_shrink
        self.timesteps.copy_(torch.where(grow, longer, torch.where(down, self.timesteps, shorter)))
        lower = torch.where(grow, self.alpha * self.parameters.alpha_shrink, self.alpha)
        self.alpha.copy_(torch.where(down, lower, self.parameters.alpha))
        self.downhill.copy_(torch.where(down, self.downhill + 1, 0.0))

    def _products(self, state: State, atoms: Tensor, cells: Tensor) -> Tensor:
        """v·v, v·f, f·f over atoms and cell rows (3, B)."""
        v, w = state.velocities, self.cell_velocities
        pairs = torch.stack([v * v, v * atoms, atoms * atoms], 1).sum(-1)
        return (state.total(pairs) + torch.stack([w * w, w * cells, cells * cells], 1).sum((-2, -1))).T

    def _largest(self, state: State, atoms: Tensor, cells: Tensor) -> Tensor:
        return torch.maximum(state.largest(atoms.norm(dim=-1)), cells.norm(dim=-1).amax(-1))

    def converged(self, state: State, fmax: float | None = None) -> Tensor:  # noqa: ARG002
        """Whether the largest force is below `fmax`, by default FIRE's own: (B,) bool, the same on every rank."""
        return self.largest < (self.fmax if fmax is None else fmax)

    def conserved(self, state: State) -> Tensor:
        """The quantity that is minimised: the energy (B,) eV, or the enthalpy if the cell is relaxed."""
        return self.coordinates.energy(state)

    def state_dict(self) -> dict[str, Tensor]:
        """Time steps, scalar products and cell coordinates."""
        return {name: getattr(self, name).clone() for name in SAVED} | self.coordinates.state_dict()

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned, on the state's device."""
        restore(self, {name: saved[name] for name in SAVED})
        self.coordinates.load_state_dict(saved)
