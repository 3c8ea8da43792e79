"""Lennard-Jones in one pass over the list, for argon-like systems."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from alchemi_kernels import FullList, lennard_jones
from alchemi_shardtensor import PADDED, STALE, ShardTensor, plain, tag, to_local_ids
from alchemi_spec import SPEC_LJ_HALO


class LennardJones(nn.Module):
    """4 ε ((σ/r)^12 - (σ/r)^6), switched to zero between 0.9 cutoff and cutoff with continuous second derivative.

    Defaults are argon's: σ = 3.4 Å, ε/k = 120 K (Rahman, Phys. Rev. 136 (1964) A405). All elements are alike.
    A receiver's own edges hold the whole force on it, so positions travel once and nothing is sent home.
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
        points, edge_index = _reached(data)
        shifts, cell, batch = plain(data["edge_shifts"]), data["cell"].to(points.dtype), data["batch"]
        edges = FullList(points, edge_index[0], edge_index[1], shifts, cell, plain(batch), len(batch))
        stressed = "stress" in outputs
        found = lennard_jones(edges, sigma=self.sigma, epsilon=self.epsilon, cutoff=self.cutoff, virial=stressed)
        results = {"forces": _as_rows_of(data["positions"], found.forces)}
        if "energy" in outputs:
            results["energy"] = _per_system(found.energies, batch, cell).to(self.dtype)
        if found.virials is not None:
            volume = torch.linalg.det(cell).abs().clamp(min=1e-12)
            results["stress"] = _per_system(found.virials, batch, cell) / volume[:, None, None]
        return {name: results[name] for name in outputs}


def _reached(data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Positions of the rows that edges count, this rank's and its ghosts', and the edges (2, E); one exchange at most."""
    positions, edge_index = data["positions"], data["edge_index"]
    if isinstance(edge_index, ShardTensor) and edge_index.shard.storage.global_ids:
        routing, edge_index = to_local_ids(edge_index.shard, edge_index)
        return routing.with_ghosts(plain(positions)), edge_index
    points = positions[data["nodes"]] if "nodes" in data else positions
    return plain(points), plain(edge_index)


def _as_rows_of(x: Tensor, values: Tensor) -> Tensor:
    """The values (N, *F) as rows of what x's are; ghosts' are not what their owners have."""
    if not isinstance(x, ShardTensor):
        return values
    return tag(values, x.shard, STALE if x.rows is PADDED else x.rows)


def _per_system(values: Tensor, batch: Tensor, cell: Tensor) -> Tensor:
    """Sums (B, *F) of atoms' values (N, *F), in float64, over all ranks."""
    total = torch.zeros(len(cell), *values.shape[1:], dtype=torch.float64, device=values.device)
    return total.index_add_(0, batch, values.double())
