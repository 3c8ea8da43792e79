"""UMA, and other models under graph partition, on 1 to 4 ranks against one. The bars are relative: weights are random."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from fairchem.core.units.mlip_unit.api.inference import InferenceSettings
from parity import check, evaluate
from small_mace import silica as quartz
from small_mace import small_mace
from small_uma import DIRECT, in_chunks, small_uma
from typer.testing import CliRunner
from uma_builds_its_own import UMABuildsItsOwn

from alchemi_dist import Batch, Comm, DistributedModel, Domain, DomainConfig, ShardedBatch
from alchemi_dist.cli import app
from alchemi_dynamics import NVE, Simulation, thermalize
from alchemi_models_mace import MACEWrapper
from alchemi_models_uma import UMAWrapper
from alchemi_shardtensor.capture import WARMUP_CALLS
from alchemi_shardtensor.testing import count_traffic
from alchemi_spec import SPEC_MPNN_GP, DistributionSpec, GraphParallelPolicy, InputError, StrategyKind

F64 = torch.float64
MERGED = InferenceSettings(activation_checkpointing=False, base_precision_dtype=F64, merge_mole=True)
CHUNKED = InferenceSettings(activation_checkpointing=True, base_precision_dtype=F64)


def silica(n=1, seed=0, **info):
    atoms = bulk("Si", cubic=True) * (n, n, 1)
    atoms.rattle(0.15, seed=1)
    atoms.numbers = np.random.default_rng(seed).choice([8, 14], len(atoms))
    atoms.info |= info
    return atoms


ISOLATED = Atoms("OSi", [[0, 0, 0], [0, 0, 20]])
MOLECULE = Atoms("SiO2", [[0, 0, 0], [1.6, 0, 0], [-1.5, 0.6, 0]], cell=[9, 9, 9], pbc=[True, False, True])
STRUCTURES = {
    "crystal": silica(2),
    "smaller than twice the cutoff": silica(),
    "charged": silica(1, charge=1, spin=2),
    "isolated atoms": ISOLATED,
    "one rank without edges": Atoms("SiOOSiOO", [[0, 0, 0], [1.6, 0, 0], [0, 1.6, 0], [0, 0, 30], [0, 30, 0], [30, 0, 0]]),
    "one atom": Atoms("O", cell=[20] * 3, pbc=True),
    "a batch of three": [silica(), ISOLATED, silica(1, seed=3, charge=-2, spin=3)],
    "a batch of two, one a slab": [MOLECULE, silica()],
}
MODELS = {
    "mixture": lambda: UMAWrapper(small_uma(), "omat"),
    "mixture in chunks": lambda: in_chunks(UMAWrapper(small_uma(activation_checkpointing=True), "omat", CHUNKED), 50),
    "direct": lambda: UMAWrapper(small_uma(mixture=False, direct_forces=True, regress_stress=False, heads=DIRECT), "omat"),
    "deep": lambda: UMAWrapper(small_uma(mixture=False, num_layers=6, lmax=4, mmax=2), "omat"),
    "balanced channels": lambda: UMAWrapper(
        small_uma(mixture=False, charge_balanced_channels=[0, 1], spin_balanced_channels=[2]), "omol"
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_uma_on_many_ranks_is_that_on_one(rank_pool, name):
    model = MODELS[name]()
    deep, few = name in ("deep", "mixture in chunks"), ("smaller than twice the cutoff", "one rank without edges")
    structures = {k: v for k, v in STRUCTURES.items() if not deep or k in few}
    one = rank_pool(4).run(evaluate, model, structures, ranks=1)[0]
    for n_ranks in (2, 4) if deep else (2, 3, 4):
        for strategy in ("halo", "graph"):
            for found in rank_pool(4).run(evaluate, model, structures, strategy, ranks=n_ranks, timeout=240):
                check(found, one)


@pytest.mark.parametrize("collective", ["exchange", "all_gather"])
def test_both_ways_to_bring_rows_give_the_same(rank_pool, collective):
    policy = DistributionSpec(policy=GraphParallelPolicy(collective=collective))
    structures = {name: STRUCTURES[name] for name in ("crystal", "a batch of three", "isolated atoms")}
    for model in (MODELS["mixture"](), MACEWrapper(small_mace().requires_grad_(False)).double()):
        one = evaluate(Comm(), model, structures)
        spec = SPEC_MPNN_GP.replaced(distribution=policy)
        for found in rank_pool(4).run(evaluate, model, structures, "graph-index", spec, ranks=3):
            check(found, one)


def traffic_of(comm, model, atoms, strategy, collective):
    """Of an evaluation: rows that travel, exchanges, reverses; how many rows this rank owns and reads, and its layers' rows."""
    config = DomainConfig(comm, strategy)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    spec = SPEC_MPNN_GP.replaced(distribution=DistributionSpec(policy=GraphParallelPolicy(collective=collective)))
    distributed = DistributedModel(model, config, spec)
    data, rows = distributed.prepare(batch), []
    for block in model.backbone.blocks:
        block.atom_wise.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    distributed.compute(data, batch, ("energy",))
    with count_traffic(comm) as traffic:
        distributed.compute(data, batch, ("energy", "forces"))
    routing = data["positions"].shard.routing
    return traffic, routing.n_owned, routing.n_ghost, sum(routing.send_splits), rows, routing.gather_row is not None


def test_the_routed_exchange_moves_the_rows_that_are_read_and_activations_span_owned_rows(rank_pool):
    model, width = MODELS["mixture"](), 9 * 8
    chain = Atoms("OSi" * 20, [[1.7 * i, 0, 0] for i in range(40)])
    per_rank = rank_pool(4).run(traffic_of, model, chain, "graph", "exchange", ranks=4)
    for traffic, owned, ghosts, sent, rows, gathered in per_rank:
        assert (owned, set(rows), gathered) == (10, {10}, False) and ghosts in (2, 4)
        assert (traffic.exchanges, traffic.reverses) == (3, 3)  # positions, and two layers: there and back
        assert traffic.bytes == (sent + ghosts) * 8 * (3 + 2 * width)
    dense = rank_pool(4).run(traffic_of, model, silica(), "graph", "auto", ranks=4)
    assert all(gathered and set(rows) == {owned} for _, owned, *_, rows, gathered in dense)


def captured(comm, model, atoms, strategy):
    config = DomainConfig(comm, strategy, compile="capture")
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    policy = DistributionSpec(policy=GraphParallelPolicy(collective="exchange"))
    spec = model.distribution_spec().replaced(distribution=policy) if strategy == "graph" else None
    domain = Domain(DistributedModel(model, config, spec), batch, skin=0.4)
    for _ in range(WARMUP_CALLS + 1):
        results = domain.evaluate(("energy", "forces", "stress"))
    return domain.why_eager, results | {"forces": domain.batch.gather(results["forces"])}


@pytest.mark.parametrize("merged", [True, False])
def test_captured_steps_of_uma_equal_eager_ones(rank_pool, merged):
    model = UMAWrapper(small_uma(mixture=merged), "omat", MERGED)
    one = evaluate(Comm(), model, {"crystal": STRUCTURES["crystal"]})
    for strategy in ("halo", "graph"):
        for reason, results in rank_pool(4).run(captured, model, STRUCTURES["crystal"], strategy, ranks=2):
            assert reason is None
            check({"crystal": results}, one)


def refused(comm, model):
    config = DomainConfig(comm, "graph")
    distributed = DistributedModel(model, config)
    distributed(ShardedBatch.scatter(Batch.from_ase(silica()), config))
    for atoms, what in ((silica(1, seed=5), "composition"), (silica(1, charge=1), "charge")):
        with pytest.raises(InputError, match=what):
            distributed.prepare(ShardedBatch.scatter(Batch.from_ase(atoms), config))


def test_systems_that_experts_were_not_merged_for_are_refused_on_every_rank(rank_pool):
    rank_pool(4).run(refused, UMAWrapper(small_uma(), "omat", MERGED), ranks=3)


@pytest.mark.parametrize("frames", [silica(2), [silica(), silica(2, seed=3)]], ids=["crystal", "batch of two"])
def test_fairchems_own_backbone_finds_its_edges_itself(rank_pool, frames):
    whole = Batch.from_ase(frames)
    fields = {name: getattr(whole, name) for name in ("positions", "atomic_numbers", "batch", "cell", "pbc")}
    model = UMABuildsItsOwn()
    one = {"batch": model(fields)}
    for n_ranks in (1, 2, 4):
        for found in rank_pool(4).run(evaluate, model, {"batch": frames}, "graph", ranks=n_ranks):
            check(found, one)


def moved(comm, model, strategy):
    """Positions of hot silica after 10 steps under a thin skin; whether its atoms stayed on their ranks."""
    config = DomainConfig(comm, strategy)
    batch = ShardedBatch.scatter(Batch.from_ase(quartz()) if comm.rank == 0 else None, config)
    simulation = Simulation(Domain(DistributedModel(model, config), batch, 0.1), NVE(2.0))
    thermalize(simulation.state, 1500.0, seed=2)
    before = simulation.state.ids.clone()
    simulation.run(10)
    assert simulation.rebuilds > 1
    return simulation.domain.batch.gather(simulation.state.positions), torch.equal(before, simulation.state.ids)


def test_a_trajectory_under_graph_partition_is_that_of_one_rank(rank_pool):
    merged = UMAWrapper(small_uma(), "omat", MERGED)
    for model in (MODELS["mixture"](), merged, MACEWrapper(small_mace().requires_grad_(False)).double()):
        expected, _ = moved(Comm(), model, "halo")
        for positions, stayed in rank_pool(4).run(moved, model, "graph", ranks=3, timeout=240):
            torch.testing.assert_close(positions, expected, rtol=0, atol=1e-10)
            assert stayed


def test_the_command_line_takes_a_strategy(tmp_path):
    structure = tmp_path / "argon.extxyz"
    bulk("Ar", "fcc", a=5.3, cubic=True).repeat(2).write(structure)
    for strategy in (StrategyKind.GRAPH_PARTITION, "graph-index"):
        arguments = ["evaluate", str(structure), "--model", "lj", "--ranks", "2", "--check", "--strategy", strategy]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0 and "passed" in result.output, result.output
