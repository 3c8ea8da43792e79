"""Bounds of groups of atoms, over all ranks."""

import torch
from torch import Tensor

from alchemi_shardtensor import Comm


def bounds_over_ranks(fractional: Tensor, group: Tensor, n_groups: int, comm: Comm) -> Tensor:
    """The lowest and highest coordinates (n_groups, 2, 3) of each `group` (n,) of atoms (n, 3) of all ranks, on the host.

    They are +inf and -inf for a group without atoms. Every rank must call it.
    """
    start = torch.full((n_groups, 3), -torch.inf, dtype=torch.float64, device=fractional.device)
    index = group[:, None].expand_as(fractional)
    ends = torch.stack([start.scatter_reduce(0, index, sign * fractional, "amax") for sign in (-1, 1)], dim=1)
    ends = comm.all_reduce(ends.cpu(), "max")
    return torch.stack([-ends[:, 0], ends[:, 1]], dim=1)
