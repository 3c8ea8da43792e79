"""A model under every specification: its inputs differ, its outputs do not."""

import json

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from torch import Tensor
from toy import Toy, run, same_as_one_rank

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import Comm, DomainConfig, Edges, to_local_ids
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import (
    SPEC_DFTD3_HALO,
    SPEC_LJ_HALO,
    SPEC_MPNN_GP,
    SPEC_MPNN_HALO,
    SPEC_UMA_HALO,
    DistributionSpec,
    GraphParallelPolicy,
    HaloStoragePolicy,
    LocalPolicy,
    MissingHandler,
    MLIPSpec,
    OutputKind,
    ShardedStoragePolicy,
    SpecError,
)


def spec_of(policy, **fields):
    return MLIPSpec(name="test", distribution=DistributionSpec(policy=policy), **fields)


DEEP = HaloStoragePolicy(layout="padded", depth=3, scatter="local", gather="local")
SPECS = {
    "mpnn": SPEC_MPNN_HALO,
    "uma": SPEC_UMA_HALO,
    "padded": SPEC_LJ_HALO,
    "three cutoffs deep": spec_of(DEEP),
    "with D3 in a pipeline": SPEC_MPNN_HALO | SPEC_DFTD3_HALO,
    "sharded": spec_of(ShardedStoragePolicy()),
    "graph parallel": SPEC_MPNN_GP,
    "exchanged": spec_of(GraphParallelPolicy(collective="exchange")),
    "gathered": spec_of(GraphParallelPolicy(collective="all_gather")),
    "local": spec_of(LocalPolicy()),
}
SILICON = bulk("Si", cubic=True) * (2, 2, 1)
SILICON.rattle(0.1, seed=3)
STRUCTURES = {
    "batch": [SILICON, molecule("CH3CH2OH"), fcc111("Cu", (2, 2, 3), a=3.6, vacuum=10.0), Atoms("Ar")],
    "3 atoms": Atoms("Ar3", [[0, 0, 0], [3, 0, 0], [0, 3.5, 0]]),
}


@ranks(1, 3)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", SPECS)
def test_a_network_equals_one_rank_under_every_specification(comm, name, structure):
    same_as_one_rank(comm, STRUCTURES[structure], Toy(), spec=SPECS[name])


@ranks(1, 2)
@pytest.mark.parametrize("name", SPECS)
def test_lennard_jones_equals_one_rank_under_every_specification(comm, name):
    atoms = bulk("Ar", cubic=True, a=5.3) * (2, 2, 2)
    atoms.rattle(0.1, seed=1)
    same_as_one_rank(comm, atoms, LennardJones(cutoff=6.0), spec=SPECS[name])


@ranks(1, 3)
@pytest.mark.parametrize("name", SPECS)
def test_edges_come_in_the_order_of_receivers_under_every_specification(comm, name):
    """What fused kernels find an atom's edges by."""
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(STRUCTURES["batch"]), config)
    data = DistributedModel(Toy(), config, SPECS[name]).prepare(batch, skin=0.5)
    _, local = to_local_ids(data["edge_index"].shard, data["edge_index"])
    assert (local.as_subclass(Tensor)[1].diff() >= 0).all()


@ranks(2)
@pytest.mark.parametrize("name", ["mpnn", "padded", "sharded", "graph parallel"])
def test_lennard_jones_exchanges_positions_once_and_sends_nothing_home(comm, name):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase([SILICON, Atoms("Ar"), bulk("Ar", a=5.3)]), config)
    domain = Domain(DistributedModel(LennardJones(cutoff=4.0).float(), config, SPECS[name]), batch, skin=0.0)
    domain.evaluate()  # global ids are looked up once
    domain.batch.positions.add_(0.001)
    with count_traffic(comm) as traffic:
        results = domain.evaluate(("energy", "forces", "stress"))
    assert (traffic.exchanges, traffic.reverses, traffic.reductions) == (1, 0, 2)
    assert [results[name].dtype for name in ("energy", "forces")] == [torch.float32, torch.float64]


@ranks(3)
@pytest.mark.parametrize("name", SPECS)
def test_atoms_may_move_under_every_specification(comm, name):
    """Under a skin, the list trimmed at each step; then past it, with new owners."""
    config, atoms, g = DomainConfig(comm), SILICON.copy(), np.random.default_rng(0)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    domain = Domain(DistributedModel(Toy(cutoff=4.0), config, SPECS[name]), batch, skin=0.8)
    for reach in (0.2, 2.0):
        atoms.positions += g.uniform(-reach, reach, (len(atoms), 3)) / 3**0.5
        domain.batch.positions.copy_(torch.from_numpy(atoms.positions)[domain.batch.ids])
        if comm.all_reduce(domain.list_margin(), "min") < 0:
            domain.rebuild()
        results, one = domain.evaluate(), run(Comm(), atoms, Toy(cutoff=4.0))
        torch.testing.assert_close(results["energy"], one["energy"], rtol=1e-10, atol=0)
        torch.testing.assert_close(domain.batch.gather(results["forces"]), one["forces"], rtol=1e-10, atol=1e-9)
    assert reach == 2.0 and domain.list_margin() == 0.8


@ranks(2)
def test_a_band_as_deep_as_the_network_needs_no_exchange_between_layers(comm):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(SILICON), config)
    found = {}
    for name in ("padded", "three cutoffs deep"):
        model = DistributedModel(Toy(), config, SPECS[name])
        data = model.prepare(batch)
        with count_traffic(comm) as traffic:
            model.compute(data, batch, ("energy", "forces"))
        found[name] = traffic.exchanges, traffic.reverses
    assert found == {"padded": (2, 3), "three cutoffs deep": (0, 1)}


class Opaque(torch.nn.Module):
    """As a kernel writer's model is: plain tensors in and out, half of each pair's force added to the sender."""

    elements, dtype, cutoff = None, torch.float64, 6.0
    distribution_spec = SPEC_LJ_HALO.replaced(
        all_reduce_outputs={"energy"}, output_kinds={"energy": "per_graph", "forces": "per_node"}
    )

    def forward(self, data, outputs=("energy", "forces")):
        x, (sender, receiver), shifts, batch = (
            data[k].as_subclass(Tensor) for k in ("positions", "edge_index", "edge_shifts", "batch")
        )
        cell = data["cell"]
        vectors = x[sender] - x[receiver] + torch.einsum("ei,eij->ej", shifts, cell[batch[receiver]])
        r = vectors.norm(dim=1)
        energy, slope = (r - 6.0) ** 3 / 2, 3 * (r - 6.0) ** 2 / 2
        force = (slope / r)[:, None] * vectors
        total = torch.zeros(len(cell), dtype=x.dtype).index_add_(0, batch[receiver], energy)
        return {"energy": total, "forces": torch.zeros_like(x).index_add_(0, receiver, force).index_add_(0, sender, -force)}


@ranks(1, 2, 3)
def test_an_opaque_model_is_made_whole_by_what_its_specification_says(comm):
    atoms = bulk("Ar", cubic=True, a=5.3) * (2, 1, 1)
    atoms.rattle(0.1, seed=1)
    batch = [atoms, Atoms("Ar2", [[0, 0, 0], [0, 0, 4]])]
    same_as_one_rank(comm, batch, Opaque())
    silent = Opaque.distribution_spec.replaced(all_reduce_outputs=set())
    with pytest.raises(MissingHandler, match="energy is per_graph by its specification, but its rows are None"):
        run(comm, batch, Opaque(), silent)


class Direct(torch.nn.Module):
    """Forces without a gradient, made where tags are lost; and two outputs more, of other kinds."""

    elements, dtype, cutoff = None, torch.float64, 5.0
    kinds = {"energy": "unknown", "forces": "per_node", "charges": "unknown", "limit": OutputKind.GLOBAL}
    distribution_spec = SPEC_MPNN_HALO.replaced(output_kinds=kinds, owned_only_outputs={"forces"})

    def forward(self, data, outputs=("energy", "forces")):
        sender, receiver = data["edge_index"]
        x = data["positions"]
        lattice = torch.einsum("ei,eij->ej", data["edge_shifts"], data["cell"][data["batch"][receiver]])
        forces = torch.zeros_like(x).index_add_(0, receiver, (x[sender] - x[receiver] + lattice) / 10)
        charges = forces.norm(dim=1)
        energy = torch.zeros(len(data["cell"]), dtype=x.dtype).index_add_(0, data["batch"], charges)
        plain = torch.jit.trace(lambda t: t * 1, torch.ones(1))(forces)
        return {"energy": energy, "forces": plain, "charges": charges, "limit": torch.tensor(3.0)}


@ranks(1, 2, 3)
def test_outputs_of_every_kind(comm):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(SILICON), config)
    results = DistributedModel(Direct(), config)(batch, ("energy", "forces"))
    one = run(Comm(), SILICON, Direct())
    assert results["charges"].shape == (len(batch.ids),) and results["limit"] == 3
    for name in ("forces", "charges"):
        torch.testing.assert_close(batch.gather(results[name]), one[name], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(results["energy"], one["energy"], rtol=1e-12, atol=0)
    with pytest.raises(MissingHandler, match="forces is per_node by its specification, but its rows are None"):
        run(comm, SILICON, Direct(), Direct.distribution_spec.replaced(owned_only_outputs=set()))


class Short(Toy):
    """Makes a row too few."""

    def forward(self, data, outputs=("energy",)):
        total = torch.zeros(len(data["cell"]), dtype=self.dtype).index_add_(0, data["batch"], data["positions"][:, 0])
        return {"energy": total[1:]}


@ranks(1, 2)
def test_a_row_is_returned_for_each_structure(comm):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(STRUCTURES["batch"]), config)
    with pytest.raises(MissingHandler, match=r"energy has shape \(3,\), but there are 4 structures"):
        DistributedModel(Short(), config)(batch, ("energy",))


def strained_silicon(n=4):
    atoms = bulk("Si", cubic=True) * (n, n, n)
    atoms.rattle(0.05, seed=1)
    strain = np.array([[0.01, 0.01, 0], [0, -0.02, 0], [0, 0, 0.005]])
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


@ranks(1, 2, 3, 4)
def test_case_4_a_saved_specification_gives_the_same_numbers_in_another_process(comm, tmp_path):
    """Case 3 with it: Si512 rattled and strained, one stress, equal to the energy's slope in all six components."""
    path = tmp_path / f"spec{comm.rank}.json"
    atoms, h = strained_silicon(), 1e-4
    for name in ("padded", "mpnn"):
        SPECS[name].save(path)
        spec = MLIPSpec.load(path)
        assert spec == SPECS[name]
        results = run(comm, atoms, Toy(), spec)
        for got, direct in zip(results.values(), run(comm, atoms, Toy(), SPECS[name]).values(), strict=True):
            assert torch.equal(got, direct)
    same_as_one_rank(comm, atoms, Toy(), spec=spec)
    for i, j in [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]:
        energies = []
        for sign in (1, -1):
            strain, moved = np.zeros((3, 3)), atoms.copy()
            strain[i, j] += sign * h / 2
            strain[j, i] += sign * h / 2
            moved.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            energies.append(run(comm, moved, Toy(), spec)["energy"].item())
        slope = (energies[0] - energies[1]) / (2 * h) / atoms.get_volume()
        assert abs(results["stress"][0, i, j].item() - slope) < 1e-7


@ranks(1, 2)
def test_case_4_an_unknown_or_missing_key_is_named(comm, tmp_path):
    path = tmp_path / f"spec{comm.rank}.json"
    SPEC_MPNN_HALO.save(path)
    written = json.loads(path.read_text())
    for key, damaged in {
        "per_sistem_reduce: unknown": {**written, "distribution": {**written["distribution"], "per_sistem_reduce": True}},
        "missing output_kinds": {k: v for k, v in written.items() if k != "output_kinds"},
    }.items():
        path.write_text(json.dumps(damaged))
        with pytest.raises(SpecError, match=key):
            MLIPSpec.load(path)


@ranks(1, 2, 3)
def test_case_10_the_order_of_edges_changes_nothing_and_a_duplicate_is_refused(comm):
    """Shuffled, half of the list in the opposite order; and one edge twice, on the last rank only."""
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(SILICON), config)
    model = DistributedModel(Toy(), config)
    data = model.prepare(batch)
    routing, edge_index, shifts = (
        data["positions"].shard.routing,
        *(data[k].as_subclass(Tensor) for k in ("edge_index", "edge_shifts")),
    )
    expected = model(batch)
    n = edge_index.shape[1]
    half = torch.cat([torch.arange(n // 2).flip(0), torch.arange(n // 2, n)])
    for order in (torch.randperm(n), half):
        edges = Edges.of(routing, edge_index[:, order], shifts[order])
        assert (edges.edge_index[1].diff() >= 0).all()
        results = model.compute(model.prepare(batch, edges), batch, ("energy", "forces", "stress"))
        for name, value in results.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-11, atol=1e-11)
    twice = torch.arange(n) if comm.rank < comm.size - 1 else torch.cat([torch.arange(n), torch.tensor([5])])
    with pytest.raises(ValueError, match=f"rank {comm.size - 1}'s edge from .* is listed twice"):
        Edges.of(routing, edge_index[:, twice], shifts[twice])
    beyond = edge_index.clone()
    beyond[1, -1] += 10_000
    with pytest.raises(ValueError, match="names a row beyond"):
        Edges.of(routing, beyond, shifts)


class Charged(Toy):
    """The toy with charges equilibrated to each system's total, and a shift by its spin."""

    def forward(self, data, outputs=("energy", "forces", "stress")):
        results = super().forward(data, outputs)
        batch, x = data["batch"], data["atomic_numbers"].to(self.dtype) / 10
        n = len(data["cell"])
        total = torch.zeros(n, dtype=self.dtype).index_add_(0, batch, x * data["weights"])
        count = torch.zeros(n, dtype=self.dtype).index_add_(0, batch, torch.ones_like(x))
        charge = x * data["weights"] + ((data["charge"].to(self.dtype) - total) / count)[batch]
        coulomb = torch.zeros(n, dtype=self.dtype).index_add_(0, batch, charge**2)
        results["energy"] = results["energy"] + coulomb + 0.1 * data["spin"]
        return results


@ranks(1, 2, 3)
@pytest.mark.parametrize("name", ["mpnn", "padded", "sharded", "local"])
def test_case_18_boxes_of_different_size_charge_and_spin_equal_single_runs(comm, name):
    """With a per-atom field of the user's own."""
    boxes = [bulk("Si", cubic=True) * (1, 1, 2), molecule("CH3CH2OH"), bulk("Cu", a=3.6, cubic=True) * (2, 1, 1)]
    for seed, (box, charge, spin) in enumerate(zip(boxes, (0, -1, 2), (1, 2, 3), strict=True)):
        box.rattle(0.1, seed=seed)
        box.info |= {"charge": charge, "spin": spin}
    weights = [torch.rand(len(box), dtype=torch.float64, generator=torch.Generator().manual_seed(9)) for box in boxes]

    def batch_of(frames, weights):
        made = Batch.from_ase(frames)
        return Batch(*list(vars(made).values())[:5], {"weights": weights}, made.per_system)

    together = run(comm, batch_of(boxes, torch.cat(weights)), Charged(), SPECS[name])
    single = [run(Comm(), batch_of(box, w), Charged()) for box, w in zip(boxes, weights, strict=True)]
    torch.testing.assert_close(together["energy"], torch.cat([s["energy"] for s in single]), rtol=1e-12, atol=0)
    torch.testing.assert_close(together["forces"], torch.cat([s["forces"] for s in single]), rtol=0, atol=1e-11)


@ranks(1, 2)
def test_two_models_with_different_specifications_take_turns(comm):
    """In one process, step by step: each gives what it gives alone."""
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(SILICON), config)
    models = [
        DistributedModel(m, config, s)
        for m, s in ((Toy(), SPECS["mpnn"]), (Toy(cutoff=4.0, layers=2), SPECS["padded"]), (LennardJones(), None))
    ]
    alone = [model(batch) for model in models]
    prepared = [model.prepare(batch) for model in models]
    for _ in range(2):
        for model, data, expected in zip(models, prepared, alone, strict=True):
            results = model.compute(data, batch, tuple(expected))
            assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_charge_and_spin_survive_the_way_from_and_to_ase_and_wrong_fields_are_refused():
    frames = [Atoms("Ar", info={"charge": 1.0}), Atoms("Ar2", info={"spin": 3})]
    batch = Batch.from_ase(frames)
    assert batch.per_system["charge"].tolist() == [1, 0] and batch.per_system["spin"].tolist() == [1, 3]
    assert [a.info for a in batch.to_ase()] == [{"charge": 1.0, "spin": 1}, {"charge": 0.0, "spin": 3}]
    for level, rows in (("per_atom", 2), ("per_system", 3)):
        with pytest.raises(ValueError, match=f"{level} field 'q' of shape"):
            Batch(*list(vars(batch).values())[:5], **{level: {"q": torch.zeros(rows)}})
