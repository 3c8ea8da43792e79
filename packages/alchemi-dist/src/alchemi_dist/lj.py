"""Lennard-Jones in plain torch, for argon-like systems."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from alchemi_dist.strain import differentiate
from alchemi_spec import SPEC_LJ_HALO


class LennardJones(nn.Module):
    """4 ε ((σ/r)^12 - (σ/r)^6), switched to zero between 0.9 cutoff and cutoff with continuous second derivative.

    Defaults are argon's: σ = 3.4 Å, ε/k = 120 K (Rahman, Phys. Rev. 136 (1964) A405). All elements are alike.
    """

    sigma: Tensor
    epsilon: Tensor
    distribution_spec = SPEC_LJ_HALO.replaced(ignores_longer_edges=True)
    elements = None

    def __init__(self, sigma: float = 3.4, epsilon: float = 0.010341, cutoff: float = 8.5) -> None:
        """`sigma` and `cutoff` in Å, `epsilon` in eV."""
        super().__init__()
        self.cutoff = float(cutoff)
        self.register_buffer("sigma", torch.tensor(float(sigma), dtype=torch.float64))
        self.register_buffer("epsilon", torch.tensor(float(epsilon), dtype=torch.float64))

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of the arithmetic."""
        return self.epsilon.dtype

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ("energy", "forces", "stress")) -> dict[str, Tensor]:
        """Energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3, those of `outputs`."""
        sender, receiver = data["edge_index"]
        batch = data["batch"]

        def energy(positions: Tensor, cell: Tensor) -> Tensor:
            lattice = torch.einsum("ei,eij->ej", data["edge_shifts"].to(cell.dtype), cell[batch[receiver]])
            r = torch.linalg.vector_norm(positions[sender] - positions[receiver] + lattice, dim=-1).to(self.dtype)
            x = ((r / self.cutoff - 0.9) / 0.1).clamp(0, 1)
            switch = 1 - x**3 * (10 - 15 * x + 6 * x**2)
            power6 = (self.sigma / r) ** 6
            pair = 2 * self.epsilon * (power6**2 - power6) * switch  # half for each of the two directions
            atomic = torch.zeros(len(positions), dtype=self.dtype, device=r.device).index_add_(0, receiver, pair)
            return torch.zeros(len(cell), dtype=self.dtype, device=r.device).index_add_(0, batch, atomic)

        return differentiate(energy, data, outputs)
