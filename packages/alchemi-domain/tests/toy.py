"""A three-layer message-passing model, cutoff 5 Å, smooth envelope, float64: small, and as demanding as real ones."""

import torch
from torch import nn

from alchemi_domain import Batch, DistributedModel, ShardedBatch, differentiate
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_spec import SPEC_MPNN_HALO


# docs/model.md shows the code up to "end of docs"
class Toy(nn.Module):
    distribution_spec = SPEC_MPNN_HALO
    elements = frozenset({1, 6, 8, 14, 18, 29})

    def __init__(self, cutoff=5.0, width=8, layers=3):
        super().__init__()
        self.cutoff, g = cutoff, torch.Generator().manual_seed(0)
        new = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=g)  # noqa: E731
        self.register_buffer("embedding", new(119, width))
        self.register_buffer("radial", new(layers, width, width) / width)
        self.register_buffer("mix", new(layers, width, width) / width**0.5)
        self.register_buffer("readout", new(width))

    @property
    def dtype(self):
        return self.embedding.dtype

    def forward(self, data, outputs=("energy", "forces", "stress")):
        sender, receiver = data["edge_index"]
        batch = data["batch"]

        def energy(positions, cell):
            lattice = torch.einsum("ei,eij->ej", data["edge_shifts"], cell[batch[receiver]])
            vectors = positions[sender] - positions[receiver] + lattice
            r = vectors.norm(dim=-1, keepdim=True)
            x = self.scaled(r)
            envelope = 1 - 10 * x**3 + 15 * x**4 - 6 * x**5
            waves = torch.sin(torch.pi * x * torch.arange(1, 9)) / r * envelope
            h = self.embedding[data["atomic_numbers"]]
            for radial, mix in zip(self.radial, self.mix, strict=True):
                messages = h[sender] * (waves.to(self.dtype) @ radial) * (1 + 0.1 * vectors[:, 2:3].to(self.dtype) ** 2)
                h = h + torch.tanh(torch.zeros_like(h).index_add_(0, receiver, messages) @ mix)
            return torch.zeros(len(cell), dtype=self.dtype).index_add_(0, batch, h @ self.readout)

        return differentiate(energy, data, outputs)

    def scaled(self, r):
        return r / self.cutoff


# end of docs


class Masked(Toy):
    """Its envelope is zero beyond the cutoff, so that it may be passed a list with a skin as it is."""

    distribution_spec = SPEC_MPNN_HALO.replaced(ignores_longer_edges=True)

    def scaled(self, r):
        return (r / self.cutoff).clamp(max=1)


def run(comm, atoms, model, spec=None):
    """All results of an ASE structure (or several, or a Batch) on `comm`, forces in the whole's order."""
    config = DomainConfig(comm)
    whole = atoms if isinstance(atoms, Batch) else Batch.from_ase(atoms)
    batch = ShardedBatch.scatter(whole if comm.rank == 0 else None, config)
    results = DistributedModel(model, config, spec)(batch)
    results["forces"] = batch.gather(results["forces"])
    return results


def same_as_one_rank(comm, atoms, model, energy=1e-10, forces=1e-9, stress=1e-9, spec=None):
    """Assert the bar of cases.md in float64; returns the results."""
    shared, one = run(comm, atoms, model, spec), run(Comm(), atoms, model)
    assert shared.keys() == one.keys()
    for name, tolerance in (("energy", energy), ("forces", forces), ("stress", stress)):
        if name in one:
            gap = (shared[name] - one[name]).abs()
            gap = gap / one[name].abs().clamp(min=1e-30) if name == "energy" else gap
            assert gap.max() < tolerance, f"{name} {gap.max()}"
            assert shared[name].isfinite().all()
    return shared
