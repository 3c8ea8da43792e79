"""Forces and stress of an energy that is written as a function of positions and cells."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def rows_times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Each row (n, 3) times a matrix of its own (n, 3, 3): elementwise, as a batch of tiny products is slow on CUDA."""
    return (rows[:, :, None] * matrices).sum(1)


def differentiate(
    energy: Callable[[Tensor, Tensor], Tensor], data: Mapping[str, Tensor], outputs: Sequence[str]
) -> dict[str, Tensor]:
    """Those of energy (B,), forces (N, 3) and stress (B, 3, 3) that `outputs` names, of `energy(positions, cell)`.

    Stress is dE/dstrain / V by straining positions and cells together (Knuth et al., Comput. Phys. Commun. 190 (2015)
    33), the symmetric part, tension positive. Where a cell has no volume its stress is not to be read.
    """
    positions, cell, batch = data["positions"].detach(), data["cell"].to(data["positions"].dtype), data["batch"]
    if "stress" not in outputs:
        positions.requires_grad_("forces" in outputs)
        total = energy(positions, cell)
        results = {"energy": total.detach()}
        if "forces" in outputs:
            results["forces"] = -torch.autograd.grad(total.sum(), positions)[0]
        return {name: results[name] for name in outputs}
    positions.requires_grad_()
    strain = torch.zeros_like(cell).requires_grad_()
    symmetric = (strain + strain.mT) / 2
    strained = positions + rows_times(positions, symmetric[batch])
    total = energy(strained, cell + cell @ symmetric)
    gradient, virial = torch.autograd.grad(total.sum(), [positions, strain])
    stress = virial / torch.linalg.det(cell).abs().clamp(min=1e-12)[:, None, None]
    results = {"energy": total.detach(), "forces": -gradient, "stress": stress}
    return {name: results[name] for name in outputs}
