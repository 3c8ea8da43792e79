"""What changes under a graph partition while atoms move: who reads what, and how it is fetched."""

import torch
from ase import Atoms
from toy import Toy

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import ranks

SPARSE, DENSE, APART = 2.0, 0.35, 40.0


def chain(spacing):
    return torch.arange(24, dtype=torch.float64)[:, None] * torch.tensor([spacing, 0.1, 0.05], dtype=torch.float64)


def domain_of(comm, mode):
    config = DomainConfig(comm, "graph", compile=mode)
    atoms = Atoms("SiO" * 12, chain(SPARSE).numpy())
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    return Domain(DistributedModel(Toy(), config), batch, 0.2)


def at(domain, positions):
    """Energy and forces there, with rebuilt lists."""
    domain.batch.positions.copy_(positions[domain.batch.ids])
    domain.rebuild()
    results = domain.evaluate()
    return results["energy"], domain.batch.gather(results["forces"])


@ranks(2)
def test_a_captured_domain_whose_atoms_come_close_goes_on_by_an_all_gather_and_is_right(comm):
    captured, alone = domain_of(comm, "capture"), domain_of(Comm(), "off")
    assert captured.buffers is not None and captured.why_eager is None
    for spacing in (SPARSE, DENSE, SPARSE):
        for found, expected in zip(at(captured, chain(spacing)), at(alone, chain(spacing)), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert captured.buffers is None and "all-gather" in captured.why_eager


@ranks(2)
def test_buffers_made_while_no_ghost_is_read_serve_when_some_are(comm):
    captured, alone = domain_of(comm, "capture"), domain_of(Comm(), "off")
    far = chain(SPARSE) + (torch.arange(24) >= 12).double()[:, None] * APART
    for positions in (far, chain(SPARSE), far, chain(0.9 * SPARSE)):
        for found, expected in zip(at(captured, positions), at(alone, positions), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert captured.why_eager is None
