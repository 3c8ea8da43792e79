"""A message-passing model that insists on finding its edges in `forward`, from all positions, cells larger than its cutoff."""

import torch
from torch import nn

from alchemi_spec import DistributionSpec, GraphParallelPolicy, MethodAdapter, MLIPSpec

CUTOFF = 3.0


class BuildsItsOwn(nn.Module):
    cutoff, elements, dtype = CUTOFF, None, torch.float64

    def build(self, positions, cell, natoms):
        """All pairs under the minimum image, and their vectors: differentiable."""
        starts = natoms.cumsum(0) - natoms
        index, vectors = [], []
        for system, (first, n) in enumerate(zip(starts.tolist(), natoms.tolist(), strict=True)):
            x = positions[first : first + n]
            d = x[None] - x[:, None]
            d = d - torch.round(d.detach() @ torch.linalg.inv(cell[system].detach())) @ cell[system]
            r, s = ((d.norm(dim=-1) < CUTOFF) & ~torch.eye(n, dtype=torch.bool)).nonzero().unbind(1)
            index.append(torch.stack([s, r]) + first)
            vectors.append(d[r, s])
        return {"edge_index": torch.cat(index, dim=1), "edge_vectors": torch.cat(vectors)}

    def forward(self, data, outputs=("energy", "forces")):
        positions, numbers, batch = data["positions"].detach().requires_grad_(), data["atomic_numbers"], data["batch"]
        natoms = torch.zeros(len(data["cell"]), dtype=torch.long).index_add_(0, batch, torch.ones_like(numbers))
        graph = self.build(positions, data["cell"], natoms.as_subclass(torch.Tensor))
        sender, receiver = graph["edge_index"]
        distance = graph["edge_vectors"].norm(dim=-1, keepdim=True)
        envelope = (1 - distance / CUTOFF) ** 3
        h = torch.sin(numbers.double()[:, None] * torch.tensor([0.3, 0.7], dtype=torch.float64))
        for _ in range(2):
            message = torch.tanh(h[sender] + 0.3 * h[receiver]) * envelope
            h = h + torch.zeros_like(h).index_add_(0, receiver, message)
        energy = torch.zeros(len(data["cell"]), dtype=torch.float64).index_add_(0, batch, h.square().sum(1))
        results = {"energy": energy.detach()}
        if "forces" in outputs:
            results["forces"] = -torch.autograd.grad(energy.sum(), positions)[0]
        return results


BuildsItsOwn.distribution_spec = MLIPSpec(
    name="builds_its_own",
    distribution=DistributionSpec(
        policy=GraphParallelPolicy(geometry="replicated"),
        helpers=(MethodAdapter(BuildsItsOwn, "build", "alchemi_graphpart:keep_owned"),),
    ),
    output_kinds={"energy": "per_graph", "forces": "per_node"},
)
