"""A model's edge lists. They share their ghosts: the longest list is searched for, shorter ones are selected from it."""

import torch
from torch import Tensor

from alchemi_domain.derivatives import rows_times
from alchemi_spec import HasEdgeLists


def cutoffs(model: object) -> dict[str, float]:
    """The suffix of each of the model's edge lists and its longest edge in Å: "" for `edge_index`, then `HasEdgeLists`'."""
    more = model.edge_lists if isinstance(model, HasEdgeLists) else {}
    return {"": float(model.cutoff), **{f"_{name}": float(cutoff) for name, cutoff in more.items()}}  # type: ignore[attr-defined]


def lengths(edge_index: Tensor, shifts: Tensor, points: Tensor, batch: Tensor, cell: Tensor) -> Tensor:
    """The length (E,) of each edge in Å. `edge_index` (2, E) indexes the rows of `points` (n, 3) and of `batch` (n,)."""
    sender, receiver = edge_index
    lattice = rows_times(shifts, cell[batch[receiver]].to(shifts.dtype))
    length: Tensor = torch.linalg.vector_norm(points[sender] - points[receiver] + lattice, dim=-1)
    return length
