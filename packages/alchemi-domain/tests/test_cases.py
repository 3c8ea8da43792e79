"""Cases of shared/cases.md: inputs that broke other programs. Numbers are theirs."""

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, fcc111, molecule
from toy import Toy, run, same_as_one_rank

from alchemi_domain import Batch, DistributedModel, ShardedBatch
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import NonFinitePosition, UnsupportedElement


def prepared(comm, atoms, model):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    distributed = DistributedModel(model, config)
    return distributed, batch, distributed.prepare(batch)


def n_edges(comm, atoms, model):
    return sum(comm.gather_objects(prepared(comm, atoms, model)[2]["edge_index"].shape[1]))


@ranks(1, 2)
def test_case_6_one_atom_and_its_supercells_have_one_energy_per_atom(comm):
    cell, toy = bulk("Cu", a=3.6), Toy(cutoff=6.0)
    assert n_edges(comm, cell, toy) == 78
    energies = [same_as_one_rank(comm, cell * (n, n, n), toy)["energy"].item() / n**3 for n in (1, 2, 4)]
    assert max(energies) - min(energies) < 1e-9


@ranks(12, timeout=240)
def test_case_6_slabs_thinner_than_the_cutoff(comm):
    rng = np.random.default_rng(0)
    grid = np.stack(np.meshgrid(*[np.arange(n) for n in (3, 3, 24)], indexing="ij"), -1).reshape(-1, 3)
    atoms = Atoms("Si216", grid * [8 / 3, 8 / 3, 2.5] + rng.normal(0, 0.1, (216, 3)), cell=[8, 8, 60], pbc=True)
    same_as_one_rank(comm, atoms, Toy(cutoff=6.0))


def cluster(n):
    rng = np.random.default_rng(n)
    return Atoms("Ar" * n, rng.uniform(0, 3.0 * n ** (1 / 3), (n, 3)) + 2.5 * np.arange(n)[:, None] % 5)


CASE_7 = {
    "slab": fcc111("Cu", (4, 4, 4), a=3.6, vacuum=30.0),
    "3 atoms": cluster(3),
    "9 atoms": cluster(9),
    "pair": Atoms("Ar2", [[0, 0, 0], [20, 0, 0]]),
    "one apart": Atoms("Ar9", [*cluster(8).positions, [100, 0, 0]]),
    "one atom": Atoms("Ar"),
}


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASE_7)
def test_case_7_ranks_without_atoms_or_edges(comm, name):
    results = same_as_one_rank(comm, CASE_7[name], Toy())
    if name in ("pair", "one atom"):
        n = len(CASE_7[name])
        single = run(Comm(), Atoms("Ar"), Toy())
        assert (results["forces"] == 0).all()
        torch.testing.assert_close(results["energy"], n * single["energy"])
    if name == "one apart":
        assert (results["forces"][-1] == 0).all()


@ranks(1, 2, 3, 4)
def test_case_8_sheared_copper_has_1506_edges(comm):
    atoms = bulk("Cu", cubic=True, a=3.6) * (2, 2, 2)
    atoms.set_cell(atoms.cell.array @ [[1, 0, 0], [0.9, 1, 0], [0.8, 0.7, 1]], scale_atoms=True)
    atoms.rattle(0.1, seed=1)
    assert n_edges(comm, atoms, Toy()) == 1506
    same_as_one_rank(comm, atoms, Toy())


@ranks(1, 2, 3, 4)
def test_case_8_random_cells(comm):
    for seed in range(6):
        rng = np.random.default_rng(seed)
        cell = rng.normal(0, 1, (3, 3)) + 5 * np.eye(3) * rng.choice([-1, 1])
        n = int(rng.integers(1, 41))
        atoms = Atoms("Si" * n, rng.uniform(-2, 3, (n, 3)) @ cell, cell=cell, pbc=rng.random(3) < 0.6)
        same_as_one_rank(comm, atoms, Toy(cutoff=4.0), forces=1e-8, stress=1e-8)  # random atoms sit 0.1 Å apart


@ranks(1, 2, 3)
def test_case_9_molecules_without_a_cell(comm):
    water, ethanol = molecule("H2O"), molecule("CH3CH2OH", cell=[1, 1, 1], pbc=False)
    near, far = (same_as_one_rank(comm, a, Toy()) for a in (water, Atoms(water, positions=water.positions + 1e4)))
    assert "stress" not in near and "stress" not in far
    torch.testing.assert_close(near["energy"], far["energy"], rtol=1e-10, atol=0)
    assert n_edges(comm, ethanol, Toy()) == 72
    bare = run(comm, molecule("CH3CH2OH"), Toy())
    torch.testing.assert_close(same_as_one_rank(comm, ethanol, Toy())["energy"], bare["energy"], rtol=1e-12, atol=0)


def test_case_9_the_reason_is_told():
    batch = ShardedBatch.scatter(Batch.from_ase([molecule("H2O"), bulk("Cu"), Atoms("Ar", cell=[5, 0, 0], pbc=[1, 0, 0])]))
    assert batch.why_no_stress() == ["it is not periodic", None, "its cell has no volume"]
    results = DistributedModel(Toy(), batch.config)(batch)
    assert (results["stress"][[0, 2]] == 0).all() and (results["stress"][1] != 0).any()


@ranks(1, 2, 3)
@pytest.mark.parametrize(("number", "told"), [(26, r"is Fe \(atomic number 26\)"), (0, r"is no element \(atomic number 0\)")])
def test_case_12_an_unknown_element_is_one_error_on_every_rank(comm, number, told):
    atoms = bulk("Si", cubic=True) * (2, 2, 2)
    config = DomainConfig(comm)
    owners = comm.gather_objects(ShardedBatch.scatter(Batch.from_ase(atoms), config).ids.tolist())
    index = owners[-1][3]
    atoms.numbers[index] = number
    with pytest.raises(UnsupportedElement, match=rf"atom {index} {told}.*\n.*H, C, O, Si, Ar, Cu"):
        run(comm, atoms, Toy())


@ranks(1, 2, 3)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e12])
def test_case_13_a_coordinate_that_is_no_place_is_one_error_on_every_rank(comm, value):
    atoms = bulk("Si", cubic=True) * (2, 2, 2)
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), config)
    index = comm.gather_objects(batch.ids.tolist())[-1][3]
    if comm.rank == comm.size - 1:
        batch.positions[3, 1] = value
    with pytest.raises(NonFinitePosition, match=f"atom {index} is at"):
        DistributedModel(Toy(), config)(batch)
    atoms.positions[index, 1] = value
    with pytest.raises(NonFinitePosition, match=f"atom {index} is at"):
        run(comm, atoms, Toy())


@ranks(1, 2, 3)
def test_a_batch_of_three_boxes_equals_three_single_runs(comm):
    boxes = [bulk("Si", cubic=True) * (1, 1, 2), molecule("CH3CH2OH"), bulk("Cu", a=3.6, cubic=True) * (2, 1, 1)]
    for seed, box in enumerate(boxes):
        box.rattle(0.1, seed=seed)
    together = same_as_one_rank(comm, boxes, Toy())
    single = [run(Comm(), box, Toy()) for box in boxes]
    torch.testing.assert_close(together["energy"], torch.cat([s["energy"] for s in single]), rtol=1e-12, atol=0)
    torch.testing.assert_close(together["forces"], torch.cat([s["forces"] for s in single]), rtol=0, atol=1e-11)


@ranks(1, 2, 3)
def test_a_model_of_three_layers_exchanges_positions_and_two_gradients_worth_of_features(comm):
    """One exchange of positions and one for each layer; the first layer's features do not depend on positions, so their
    gradients do not travel."""
    atoms = bulk("Si", cubic=True) * (2, 2, 2)
    model, batch, data = prepared(comm, atoms, Toy())
    with count_traffic(comm) as traffic:
        model.compute(data, batch, ("energy", "forces", "stress"))
    shared = comm.size > 1
    assert (traffic.exchanges, traffic.reverses) == ((4, 3) if shared else (0, 0))
    with count_traffic(comm) as traffic:
        model.compute(data, batch, ("energy",))
    assert (traffic.exchanges, traffic.reverses, traffic.reductions) == (4 if shared else 0, 0, 1)


@ranks(1, 2)
@pytest.mark.parametrize("model", [Toy(), LennardJones(sigma=2.2, epsilon=0.1, cutoff=5.0)], ids=["toy", "lj"])
def test_forces_and_stress_are_the_energys_derivatives(comm, model):
    atoms = bulk("Si", cubic=True)
    atoms.set_cell(atoms.cell.array @ [[1.01, 0.01, 0], [0, 0.98, 0.02], [0, 0, 1.005]], scale_atoms=True)
    atoms.rattle(0.1, seed=2)
    results, h = run(comm, atoms, model), 1e-5

    def energy(positions=None, strain=None):
        moved = atoms.copy()
        if positions is not None:
            moved.positions += positions
        if strain is not None:
            moved.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
        return run(comm, moved, model)["energy"].item()

    for atom, axis in [(0, 0), (3, 1), (7, 2)]:
        step = np.zeros((8, 3))
        step[atom, axis] = h
        slope = (energy(step) - energy(-step)) / (2 * h)
        assert abs(results["forces"][atom, axis].item() + slope) < 1e-7
    for i, j in [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]:
        strain = np.zeros((3, 3))
        strain[i, j] += h / 2
        strain[j, i] += h / 2
        slope = (energy(strain=strain) - energy(strain=-strain)) / (2 * h)
        assert abs(results["stress"][0, i, j].item() - slope / atoms.get_volume()) < 1e-8
