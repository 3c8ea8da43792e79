"""Several edge lists over the same ghosts: the longest is searched for, the shorter ones are chosen from it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from alchemi_domain.derivatives import rows_times


def cutoffs(model: object) -> dict[str, float]:
    """The model's edge lists and the longest edge of each in Å: `edge_index`, and what it names in `edge_lists`.

    A model with `edge_lists = {"dispersion": 12.0}` is shown `edge_index_dispersion` and `edge_shifts_dispersion`, too.
    """
    more: Mapping[str, float] = getattr(model, "edge_lists", {})
    return {"": float(model.cutoff), **{f"_{name}": float(cutoff) for name, cutoff in more.items()}}  # type: ignore[attr-defined]


def lengths(edge_index: Tensor, shifts: Tensor, points: Tensor, batch: Tensor, cell: Tensor) -> Tensor:
    """How long each edge is (E,) in Å; `edge_index` (2, E) counts the rows of `points` (n, 3) and their systems (n,)."""
    sender, receiver = edge_index
    lattice = rows_times(shifts, cell[batch[receiver]].to(shifts.dtype))
    length: Tensor = torch.linalg.vector_norm(points[sender] - points[receiver] + lattice, dim=-1)
    return length
