"""Edges that a model finds itself, on replicated positions, against one process and a finite difference."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from builds_its_own import BuildsItsOwn

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch
from alchemi_dynamics import NVE, Simulation, thermalize
from alchemi_graphpart import keep_owned
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import ranks
from alchemi_spec import MissingHandler


def silicon(n, seed=0):
    atoms = bulk("Si", cubic=True) * (n, 2, 2)
    atoms.rattle(0.1, seed=seed)
    atoms.numbers = np.random.default_rng(seed).choice([8, 14], len(atoms))
    return atoms


def evaluate(comm, frames, strategy="graph"):
    config = DomainConfig(comm, strategy)
    batch = ShardedBatch.scatter(Batch.from_ase(frames) if comm.rank == 0 else None, config)
    results = DistributedModel(BuildsItsOwn(), config)(batch)
    return results["energy"], batch.gather(results["forces"])


def by_itself(frames):
    """Without any of ours: the model on a plain dict."""
    whole = Batch.from_ase(frames)
    fields = {name: getattr(whole, name) for name in ("positions", "atomic_numbers", "batch", "cell")}
    results = BuildsItsOwn()(fields)
    return results["energy"], results["forces"]


@ranks(1, 2, 4)
def test_a_model_that_builds_its_own_graph_gives_what_it_gives_by_itself(comm):
    for frames in (silicon(2), [silicon(2), silicon(3, seed=1)]):
        for strategy in ("graph", "graph-index", "halo"):
            for found, expected in zip(evaluate(comm, frames, strategy), by_itself(frames), strict=True):
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-11)


@ranks(2)
def test_each_rank_keeps_the_edges_of_its_own_receivers(comm):
    config = DomainConfig(comm, "graph")
    batch = ShardedBatch.scatter(Batch.from_ase(silicon(2)), config)
    distributed = DistributedModel(BuildsItsOwn(), config)
    model = distributed.model
    whole = model.build(Batch.from_ase(silicon(2)).positions, batch.cell, torch.tensor([64]))
    data = distributed.prepare(batch)
    built = keep_owned(model.build, data["positions"], batch.cell, torch.tensor([64]))
    kept = built["edge_index"].as_subclass(torch.Tensor)
    assert set(kept[1].tolist()) <= set(batch.ids.tolist()) and len(built["edge_vectors"]) == kept.shape[1]
    assert sum(comm.gather_objects(kept.shape[1])) == whole["edge_index"].shape[1]


@ranks(2)
def test_its_trajectory_is_that_of_one_rank(comm):
    def moved(among):
        config = DomainConfig(among, "graph")
        batch = ShardedBatch.scatter(Batch.from_ase(silicon(2)) if among.rank == 0 else None, config)
        simulation = Simulation(Domain(DistributedModel(BuildsItsOwn(), config), batch, 0.3), NVE(1.0))
        thermalize(simulation.state, 300.0, seed=1)
        simulation.run(10)
        return simulation.domain.batch.gather(simulation.state.positions)

    torch.testing.assert_close(moved(comm), moved(Comm()), rtol=0, atol=1e-10)


@ranks(1)
def test_a_builder_without_an_edge_index_is_refused(comm):
    data = DistributedModel(BuildsItsOwn())(ShardedBatch.scatter(Batch.from_ase(silicon(2))))
    assert keep_owned(lambda x: x, data["energy"]) is data["energy"]
    positions = DistributedModel(BuildsItsOwn()).prepare(ShardedBatch.scatter(Batch.from_ase(silicon(2))))["positions"]
    with pytest.raises(MissingHandler, match="without an edge_index"):
        keep_owned(lambda x: {"edges": x}, positions)
