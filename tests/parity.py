"""Structures on any number of ranks, and how far their results may be from one rank's."""

from alchemi_dist import Batch, DistributedModel, DomainConfig, ShardedBatch

PARITY = 1e-10
"""Relative to the largest of the values, in float64."""


def evaluate(comm, model, structures, strategy="halo", spec=None):
    """Results of each structure, forces in the whole's order."""
    config = DomainConfig(comm, strategy)
    distributed, results = DistributedModel(model, config, spec), {}
    for name, atoms in structures.items():
        batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
        results[name] = distributed(batch)
        results[name]["forces"] = batch.gather(results[name]["forces"])
    return results


def check(found, expected):
    assert found.keys() == expected.keys()
    for structure, values in expected.items():
        assert found[structure].keys() == values.keys()
        for key, value in values.items():
            gap = (found[structure][key] - value).abs().max()
            assert gap <= PARITY * max(value.abs().max(), 1e-3), f"{structure}: {key} {gap:.1e}"
