"""Relaxation to the nearest minimum of energy or enthalpy."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from ase.units import fs
from torch import Tensor

from alchemi_dynamics.cells import coordinates
from alchemi_dynamics.parameters import at_least_one, positive, restore
from alchemi_dynamics.state import AMU_A2_PER_FS2, State

SAVED = ("timesteps", "alpha", "downhill", "largest", "products", "cell_velocities")


@dataclass(frozen=True)
class Pace:
    """How FIRE hurries: ASE's numbers, times in fs for masses of 1 amu, lengths in Å."""

    timestep: float = 0.1 / fs
    longest_timestep: float = 1.0 / fs
    longest_step: float = 0.2
    patience: int = 5
    faster: float = 1.1
    slower: float = 0.5
    alpha: float = 0.1
    alpha_decay: float = 0.99

    def __post_init__(self) -> None:
        for name in ("timestep", "longest_timestep"):
            positive(name, getattr(self, name), "fs", 1.0)
        positive("longest_step", self.longest_step, "Å", 0.2)
        at_least_one("patience", self.patience)
        for name, low, high in (("faster", 1.0, 10.0), ("slower", 0.0, 1.0), ("alpha", 0.0, 1.0), ("alpha_decay", 0.0, 1.0)):
            value = getattr(self, name)
            if not low < value < high:
                raise ValueError(f"{name} is {value}, and has to be between {low} and {high}. Leave it out for ASE's.")


class FIRE:
    """FIRE (Bitzek et al., PRL 97 (2006) 170201), step by step that of ase.optimize.FIRE; every system has its own pace.

    A system moves until its largest force is below `fmax` eV/Å, then it stands still while others go on. `cell`: None keeps
    it, "isotropic" and "full" relax it with the atoms under `pressure` eV/Å^3 (compression positive) in the coordinates of
    ASE's FrechetCellFilter, whose cell rows count as forces in `fmax`. All masses are 1 amu; `state.velocities` are FIRE's,
    Å/fs, zero when it has arrived. Two reductions in a step: one for three scalar products, one for the largest force.
    """

    conserves_momentum = False
    timestep: None = None
    timesteps: Tensor
    """(B,) fs, of each system's next step."""
    alpha: Tensor
    """(B,) how much of the velocity is turned into the direction of the force."""
    downhill: Tensor
    """(B,) steps since the power was last negative."""
    largest: Tensor
    """(B,) eV/Å, the largest force on an atom or a cell row."""
    products: Tensor
    """(3, B): v·v, v·f, f·f."""
    cell_velocities: Tensor
    """(B, 3, 3) Å/fs."""

    def __init__(
        self, fmax: float = 0.05, cell: str | None = None, pressure: float | Tensor = 0.0, pace: Pace | None = None
    ) -> None:
        self.fmax = positive("fmax", fmax, "eV/Å", 0.05)
        self.coordinates = coordinates(cell, pressure)
        self.outputs: tuple[str, ...] = ("energy", "forces") if cell is None else ("energy", "forces", "stress")
        self.pace = Pace() if pace is None else pace

    def start(self, state: State) -> None:
        """At rest."""
        self.coordinates.start(state)
        state.velocities.zero_()
        self.timesteps = torch.full_like(state.energy, self.pace.timestep)
        self.alpha = torch.full_like(state.energy, self.pace.alpha)
        self.downhill = torch.zeros_like(state.energy)
        self.cell_velocities = torch.zeros_like(state.cell)
        atoms, cells = self.coordinates.forces(state)
        self.products = self._products(state, atoms, cells)
        self.largest = self._largest(state, atoms, cells)

    def first_half(self, state: State) -> None:
        """A kick and a drift, no longer than the longest step."""
        moving = self.largest >= self.fmax
        time = torch.where(moving, self.timesteps, 0.0)
        kick = time / AMU_A2_PER_FS2
        atoms, cells = self.coordinates.forces(state)
        state.velocities += kick[state.batch, None] * atoms
        self.cell_velocities += kick[:, None, None] * cells
        vv, vf, ff = self.products
        length = time * (vv + 2 * kick * vf + kick.square() * ff).sqrt()
        stride = time * (self.pace.longest_step / length).clamp(max=1.0)
        step, cell_step = stride[state.batch, None] * state.velocities, stride[:, None, None] * self.cell_velocities
        self.coordinates.move(state, step, cell_step, moving)

    def second_half(self, state: State) -> None:
        """Downhill: turn the velocities towards the forces, and hurry. Uphill: stop, and take smaller steps."""
        atoms, cells = self.coordinates.forces(state)
        vv, vf, ff = self._products(state, atoms, cells)
        keep = torch.where(vf > 0, 1 - self.alpha, 0.0)
        turn = torch.where(vf > 0, self.alpha * (vv / ff).sqrt(), 0.0)
        state.velocities.mul_(keep[state.batch, None]).add_(turn[state.batch, None] * atoms)
        self.cell_velocities.mul_(keep[:, None, None]).add_(turn[:, None, None] * cells)
        turned = keep.square() * vv + 2 * keep * turn * vf + turn.square() * ff
        self.products.copy_(torch.stack([turned, keep * vf + turn * ff, ff]))
        self._set_pace(vf > 0)
        self.largest.copy_(self._largest(state, atoms, cells))
        moving = self.largest >= self.fmax
        state.velocities *= moving[state.batch, None]
        self.cell_velocities *= moving[:, None, None]

    def _set_pace(self, down: Tensor) -> None:
        hurry = down & (self.downhill > self.pace.patience)
        faster = (self.timesteps * self.pace.faster).clamp(max=self.pace.longest_timestep)
        slower = self.timesteps * self.pace.slower
        self.timesteps.copy_(torch.where(hurry, faster, torch.where(down, self.timesteps, slower)))
        lower = torch.where(hurry, self.alpha * self.pace.alpha_decay, self.alpha)
        self.alpha.copy_(torch.where(down, lower, self.pace.alpha))
        self.downhill.copy_(torch.where(down, self.downhill + 1, 0.0))

    def _products(self, state: State, atoms: Tensor, cells: Tensor) -> Tensor:
        """v·v, v·f, f·f over atoms and cell rows (3, B)."""
        v, w = state.velocities, self.cell_velocities
        pairs = torch.stack([v * v, v * atoms, atoms * atoms], 1).sum(-1)
        return (state.total(pairs) + torch.stack([w * w, w * cells, cells * cells], 1).sum((-2, -1))).T

    def _largest(self, state: State, atoms: Tensor, cells: Tensor) -> Tensor:
        return torch.maximum(state.largest(atoms.norm(dim=-1)), cells.norm(dim=-1).amax(-1))

    def converged(self, state: State, fmax: float | None = None) -> Tensor:  # noqa: ARG002
        """(B,) bool, the same on every rank: the largest force of the last evaluation is below `fmax`, or FIRE's own."""
        return self.largest < (self.fmax if fmax is None else fmax)

    def conserved(self, state: State) -> Tensor:
        """What is made as small as possible: the energy (B,) eV, or with a cell that moves the enthalpy."""
        return self.coordinates.energy(state)

    def state_dict(self) -> dict[str, Tensor]:
        """Pace, scalar products and cell coordinates."""
        return {name: getattr(self, name).clone() for name in SAVED} | self.coordinates.state_dict()

    def load_state_dict(self, saved: Mapping[str, Tensor]) -> None:
        """What `state_dict` gave, on the state's device."""
        restore(self, {name: saved[name] for name in SAVED})
        self.coordinates.load_state_dict(saved)
