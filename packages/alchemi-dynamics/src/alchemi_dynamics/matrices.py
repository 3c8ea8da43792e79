"""Functions of small matrices, one for each system, without host synchronisation, unlike torch.linalg's exp and eigh."""

import torch
from torch import Tensor


def exponential(a: Tensor) -> Tensor:
    """The exponential (B, k, k), to round-off for norms up to 2.

    A Taylor series of order 16 of a / 4, squared twice.
    """
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    scaled, result = a / 4, one
    for k in range(16, 0, -1):
        result = torch.baddbmm(one, scaled, result, alpha=1 / k)
    result = result @ result
    return result @ result


def exponential_and_mean(a: Tensor) -> tuple[Tensor, Tensor]:
    """exp(a) and the mean of exp(s a) over 0 < s < 1, which is (exp(a) - 1) / a, (B, k, k) both."""
    one = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    whole = exponential(_blocks(a, one, torch.zeros_like(a)))
    k = a.shape[-1]
    return whole[:, :k, :k], whole[:, :k, k:]


def derivative_of_exponential(a: Tensor, direction: Tensor) -> Tensor:
    """d/dt exp(a + t direction) at t = 0, (B, k, k) (Najfeld & Havel, Adv. Appl. Math. 16 (1995) 321)."""
    k = a.shape[-1]
    return exponential(_blocks(a, direction, a))[:, :k, k:]


def _blocks(a: Tensor, b: Tensor, d: Tensor) -> Tensor:
    """[[a, b], [0, d]]."""
    return torch.cat([torch.cat([a, b], -1), torch.cat([torch.zeros_like(a), d], -1)], -2)


def isotropic(a: Tensor) -> Tensor:
    """The mean of the diagonal, on the diagonal (B, 3, 3)."""
    return on_diagonal(trace(a) / 3)


def symmetric(a: Tensor) -> Tensor:
    """(a + a^T) / 2 (B, 3, 3)."""
    return 0.5 * (a + a.mT)


def trace(a: Tensor) -> Tensor:
    """(B, 3, 3) -> (B,)."""
    return a.diagonal(dim1=-2, dim2=-1).sum(-1)


def on_diagonal(values: Tensor) -> Tensor:
    """(B,) -> (B, 3, 3)."""
    return torch.diag_embed(values[:, None].expand(-1, 3))
