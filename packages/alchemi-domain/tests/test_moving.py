"""Batches that are divided among ranks and move: owners, migration, files, lists with a skin."""

from contextlib import ExitStack
from unittest.mock import patch

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from ase.units import fs
from toy import Masked, Toy, run, same_as_one_rank

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch
from alchemi_halo import HaloStrategy
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import InputError, NonFinitePosition

F64 = torch.float64


def silicon(repeats, amount=0.1):
    atoms = bulk("Si", cubic=True) * (repeats, repeats, repeats)
    atoms.rattle(amount, seed=1)
    return atoms


def domain_of(comm, atoms, model, skin, **config):
    config = DomainConfig(comm, **config)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    return Domain(DistributedModel(model, config), batch, skin)


def whole(domain, outputs=("energy", "forces")):
    """Energy, forces in the batch's order and stress, on every rank."""
    results = domain.evaluate(outputs)
    return results | {"forces": domain.batch.gather(results["forces"])}


def place(domain, positions):
    """Move atoms to `positions` (n_atoms, 3), whoever owns them."""
    domain.batch.positions.copy_(torch.as_tensor(positions)[domain.batch.ids])


def close(results, one, energy=1e-10, forces=1e-9, stress=1e-9):
    torch.testing.assert_close(results["energy"], one["energy"], rtol=energy, atol=0)
    torch.testing.assert_close(results["forces"], one["forces"], rtol=0, atol=forces)
    if "stress" in results:
        torch.testing.assert_close(results["stress"], one["stress"], rtol=0, atol=stress)


@ranks(1, 2)
@pytest.mark.parametrize("model", [Toy(cutoff=4.0), Masked(cutoff=4.0)], ids=["trimmed", "masked"])
def test_case_1_an_atom_that_has_crossed_a_wall_is_seen_from_both_sides(comm, model):
    x = np.array([18.5, 19.9, 22.0])
    atoms = Atoms("Ar3", np.stack([x, 0 * x + 6, 0 * x + 6], 1), cell=[40, 12, 12], pbc=True)
    domain = domain_of(comm, atoms, model, skin=1.0, strategy=HaloStrategy("grid", (comm.size, 1, 1)))
    sides = domain.batch.gather(torch.full_like(domain.batch.ids, comm.rank)).tolist()
    assert comm.size == 1 or sides == [0, 0, 1]
    close(whole(domain), run(Comm(), atoms, model))
    atoms.positions[1, 0] = 20.1
    place(domain, atoms.positions)
    assert comm.all_reduce(domain.list_margin(), "min") > 0
    close(whole(domain), run(Comm(), atoms, model))
    atoms.positions[1, 0] = 20.6
    place(domain, atoms.positions)
    assert comm.all_reduce(domain.list_margin(), "min") < 0
    domain.rebuild()
    sides = domain.batch.gather(torch.full_like(domain.batch.ids, comm.rank)).tolist()
    assert comm.size == 1 or sides == [0, 1, 1]
    close(whole(domain), run(Comm(), atoms, model))


@ranks(2, 4)
def test_case_2_a_cell_that_is_stretched_and_sheared_and_brought_back(comm):
    atoms, model, kept = silicon(4, 0.05), Toy(), []
    distributed = DistributedModel(model, DomainConfig(comm))
    start = atoms.cell.array.copy()
    for cell in (start, start * 1.02, start @ [[1, 0.05, 0], [0, 1, 0], [0, 0, 1]], start):
        atoms.set_cell(cell, scale_atoms=True)
        batch = ShardedBatch.scatter(Batch.from_ase(atoms), distributed.config)
        results = distributed(batch)
        kept.append(results | {"forces": batch.gather(results["forces"])})
        close(kept[-1], run(comm, atoms, Toy()), 1e-12, 1e-11, 1e-11)
    close(kept[-1], kept[0])


@ranks(1, 3)
def test_a_cell_may_change_in_place_as_far_as_the_skin_allows(comm):
    atoms, model = silicon(2), Masked(cutoff=4.0)
    domain = domain_of(comm, atoms, model, skin=1.0)
    for strain, holds in ((0.02, True), (-0.08, True), (-0.12, False)):
        moved = atoms.copy()
        moved.set_cell(atoms.cell.array * (1 + strain), scale_atoms=True)
        place(domain, moved.positions)
        domain.batch.cell.copy_(torch.from_numpy(moved.cell.array))
        assert (comm.all_reduce(domain.list_margin(), "min") > 0) == holds
        if not holds:
            domain.rebuild()
        close(whole(domain, ("energy", "forces", "stress")), run(Comm(), moved, model))


def strained_silicon():
    atoms = silicon(4, 0.05)
    strain = np.array([[0.01, 0.01, 0], [0.01, -0.02, 0], [0, 0, 0.005]])
    atoms.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
    return atoms


def test_case_3_stress_is_the_energys_derivative():
    atoms, h = strained_silicon(), 1e-5
    stress = run(Comm(), atoms, Toy())["stress"][0]
    for i, j in [(0, 0), (1, 1), (2, 2), (1, 2), (0, 2), (0, 1)]:
        energies = []
        for step in (h, -h):
            strain, moved = np.zeros((3, 3)), atoms.copy()
            strain[i, j] += step / 2
            strain[j, i] += step / 2
            moved.set_cell(atoms.cell.array @ (np.eye(3) + strain), scale_atoms=True)
            energies.append(run(Comm(), moved, Toy())["energy"].item())
        assert abs(stress[i, j].item() - (energies[0] - energies[1]) / (2 * h * atoms.get_volume())) < 1e-8


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("grid", ["bisection", "long", "flat"])
def test_case_3_one_stress_on_any_grid_of_ranks(comm, grid):
    shape = {"long": (comm.size, 1, 1), "flat": (1, 2, comm.size // 2) if comm.size % 2 == 0 else (1, 1, comm.size)}.get(grid)
    config = DomainConfig(comm, HaloStrategy() if shape is None else HaloStrategy("grid", shape))
    batch = ShardedBatch.scatter(Batch.from_ase(strained_silicon()), config)
    results = DistributedModel(Toy(), config)(batch)
    close(results | {"forces": batch.gather(results["forces"])}, run(Comm(), strained_silicon(), Toy()))


@ranks(1, 2)
def test_case_11_far_from_the_origin(comm):
    water = molecule("H2O", cell=[4000.0] * 3, pbc=True)
    water.positions += [500.3, 500.7, 500.1]
    near = same_as_one_rank(comm, water, Toy())
    water.positions += 1000.0
    far = same_as_one_rank(comm, water, Toy())
    close(far, near, 1e-10, 1e-10)
    mixed = run(comm, water, Toy().float())
    assert (mixed["forces"] - near["forces"]).abs().max() < 1e-5
    low = Batch.from_ase(molecule("H2O"), dtype=torch.float32)
    assert (run(comm, low, Toy())["forces"] - near["forces"]).abs().max() < 1e-4  # float32 positions hold no more


def three_boxes():
    boxes = [silicon(1), molecule("CH3CH2OH"), bulk("Cu", a=3.6, cubic=True) * (3, 1, 1)]
    for k, box in enumerate(boxes):
        box.info.update(charge=k - 1.0, spin=k + 1)
    return boxes


@ranks(1, 2, 3)
def test_case_18_every_field_survives_partition_and_migration(comm):
    before = Batch.from_ase(three_boxes())
    n = len(before.positions)
    fields = {"site": torch.arange(n, dtype=torch.int16), "flag": torch.arange(n) % 3 == 0, "tensor": torch.rand(n, 3, 3)}
    before = Batch(
        *(getattr(before, f) for f in ("positions", "atomic_numbers", "batch", "cell", "pbc")), fields, before.per_system
    )
    given = (before, DomainConfig(comm), {"velocities": torch.rand(n, 3, dtype=F64)})
    velocities = comm.broadcast_object(given[2]["velocities"])
    fields, before = comm.broadcast_object((fields, before))
    batch = ShardedBatch.scatter(before, given[1], {"velocities": velocities})
    jump = torch.randn(n, 3, dtype=F64, generator=torch.Generator().manual_seed(0)) * 4
    batch.positions.add_(jump[batch.ids])
    owned = batch.ids
    batch = batch.migrate()
    assert comm.size == 1 or any(comm.gather_objects(not torch.equal(owned, batch.ids)))
    assert torch.equal(batch.gather(batch.positions), before.positions + jump)
    for name, value in fields.items():
        assert batch.per_atom[name].dtype == value.dtype and torch.equal(batch.gather(batch.per_atom[name]), value)
    assert torch.equal(batch.gather(batch.extra_fields["velocities"]), velocities)
    assert batch.per_system["charge"].tolist() == [-1, 0, 1] and batch.per_system["spin"].tolist() == [1, 2, 3]
    assert torch.equal(batch.gather(batch.atomic_numbers), before.atomic_numbers)


@ranks(1, 2, 3)
def test_rows_from_anywhere_become_a_batch(comm):
    atoms = silicon(2)
    everything = Batch.from_ase(atoms)
    mine = torch.randperm(64, generator=torch.Generator().manual_seed(0))[comm.rank :: comm.size]
    rows = Batch(
        everything.positions[mine], everything.atomic_numbers[mine], everything.batch[mine], everything.cell, everything.pbc
    )
    batch = ShardedBatch.from_owned(rows, mine, DomainConfig(comm))
    assert torch.equal(batch.gather(batch.positions), everything.positions) and len(batch.ids) <= 64 / comm.size + 1
    results = DistributedModel(Toy(), batch.config)(batch)
    close(results | {"forces": batch.gather(results["forces"])}, run(Comm(), atoms, Toy()))
    with pytest.raises(InputError, match="must be on one rank, once: the rows of 64"):
        ShardedBatch.from_owned(rows, mine * (mine != 63), DomainConfig(comm))
    a, b = mine.double(), mine + 100.0
    mixed = ShardedBatch.from_owned(rows, mine.int(), batch.config, {"a": a, "b": b} if comm.rank else {"b": b, "a": a})
    assert torch.equal(mixed.gather(mixed.extra_fields["b"]), mixed.gather(mixed.extra_fields["a"]) + 100)
    with pytest.raises(InputError, match="a of shape .* must have a row for each"):
        ShardedBatch.from_owned(rows, mine, batch.config, {"a": a[1:] if comm.rank == comm.size - 1 else a})


@ranks(2)
@pytest.mark.parametrize("other", ["cell", "a"])
def test_ranks_that_disagree_about_a_batch_are_told_so(comm, other):
    whole, mine = Batch.from_ase(silicon(1)), torch.arange(comm.rank, 8, 2)
    cell = whole.cell * (1.1 if comm.rank and other == "cell" else 1)
    rows = Batch(whole.positions[mine], whole.atomic_numbers[mine], whole.batch[mine], cell, whole.pbc)
    extra_fields = {"a": mine.float() if comm.rank and other == "a" else mine.double()}
    with pytest.raises(InputError, match=f"rank 1 has other {other} than rank 0"):
        ShardedBatch.from_owned(rows, mine, DomainConfig(comm), extra_fields)


@ranks(2)
def test_weights_stay_balanced_when_atoms_move(comm):
    batch = ShardedBatch.scatter(Batch.from_ase(silicon(3)), DomainConfig(comm))
    weights = torch.where(batch.positions[:, 0] < 6, 5.0, 1.0)
    batch = batch.repartition(weights)
    counts = comm.gather_objects(len(batch.ids))
    assert max(counts) > 1.5 * min(counts)
    domain = Domain(DistributedModel(Masked(cutoff=4.0), batch.config), batch)
    partition = domain.batch.partition
    domain.rebuild()
    assert comm.gather_objects(len(domain.batch.ids)) == counts and domain.batch.partition is partition
    domain.batch.positions.copy_(domain.batch.positions * 0.6)
    domain.rebuild()
    loads = comm.gather_objects(domain.batch.extra_fields["weight"].sum().item())
    assert domain.batch.partition is not partition and max(loads) < 1.1 * sum(loads) / 2


@ranks(3)
def test_gather_to_one_rank_and_in_stretches(comm):
    atoms = silicon(2)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms), DomainConfig(comm))
    here = batch.gather(batch.positions, dst=1)
    assert here.shape == ((64, 3) if comm.rank == 1 else (0, 3))
    assert comm.rank != 1 or torch.equal(here, torch.from_numpy(atoms.positions))
    first, (positions, ids) = batch.to_global_order(batch.positions, batch.ids)
    assert torch.equal(ids, torch.arange(first, first + len(ids))) and len(ids) in (21, 22)
    assert torch.equal(positions, torch.from_numpy(atoms.positions)[ids])


@ranks(1, 2, 4)
@pytest.mark.parametrize("name", ["frames.extxyz", "frames.traj"])
def test_a_frame_of_a_file_is_read_by_all_ranks(comm, name, tmp_path):
    frames = [silicon(1), molecule("H2O"), molecule("CH3CH2OH", cell=[9, 9, 9], pbc=[True, False, True])]
    frames[1].set_velocities(np.arange(9.0).reshape(3, 3))
    frames[2].info["charge"] = -1.0
    if comm.rank == 0:
        ase.io.write(tmp_path / name, frames, parallel=False)
    path = comm.broadcast_object(tmp_path / name)
    for index, atoms in ((0, frames[0]), (1, frames[1]), (-1, frames[2])):
        batch = ShardedBatch.from_file(path, DomainConfig(comm), index)
        assert torch.equal(batch.gather(batch.atomic_numbers), torch.from_numpy(atoms.numbers))
        torch.testing.assert_close(batch.gather(batch.positions), torch.from_numpy(atoms.positions), rtol=0, atol=1e-8)
        assert batch.pbc[0].tolist() == atoms.pbc.tolist()
        if index == 1:
            moving = batch.gather(batch.extra_fields["velocities"])
            torch.testing.assert_close(moving, torch.from_numpy(atoms.get_velocities() * fs), rtol=0, atol=1e-7)
    assert batch.per_system["charge"].tolist() == [-1.0]
    for bad, index in ((path, 3), (str(path) + "x", 0)):
        with pytest.raises(InputError, match=r"ASE cannot read .*frame"):
            ShardedBatch.from_file(bad, DomainConfig(comm), index)


@ranks(1, 3)
@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("2\nwater\nH 0 0 0\nH 0 0 1\nVEC1 5 0 0\nVEC2 0 6 0\nVEC3 0 0 7\n", None),
        ("0\nProperties=species:S:1:pos:R:3\n", "without atoms"),
        ("-3\nProperties=species:S:1:pos:R:3\nH 0 0 0\n", "ASE cannot read"),
        ("2\nProperties=species:S:1:pos:R:3\nH 0 0 0\n", "ASE cannot read"),
        ("1\nProperties=species:S:1:pos:R:3:move_mask:L:1\nH 0 0 0 F\n", "has FixAtoms"),
    ],
    ids=["vectors below", "no atoms", "fewer than none", "an atom missing", "a fixed atom"],
)
def test_files_that_are_special(comm, text, told, tmp_path):
    path = comm.broadcast_object(tmp_path / "it.xyz")
    if comm.rank == 0:
        path.write_text(text)
    if told is None:
        batch = ShardedBatch.from_file(path, DomainConfig(comm))
        assert batch.cell[0].diagonal().tolist() == [5, 6, 7] and batch.pbc.all() and batch.n_atoms == 2
    else:
        with pytest.raises(InputError, match=told):
            ShardedBatch.from_file(path, DomainConfig(comm), index=0)


@ranks(2)
def test_no_rank_parses_another_ranks_lines(comm, tmp_path):
    path = comm.broadcast_object(tmp_path / "many.xyz")
    if comm.rank == 0:
        ase.io.write(path, silicon(3), format="extxyz", parallel=False)
    read, seen = ase.io.read, []
    ase.io.read = lambda *a, **k: seen.append(read(*a, **k)) or seen[-1]
    try:
        batch = ShardedBatch.from_file(path, DomainConfig(comm))
    finally:
        ase.io.read = read
    assert batch.n_atoms == 216 and [len(a) for a in seen] == [108]


class TwoLists(Masked):
    """A short-ranged network and a pair term with a longer reach."""

    edge_lists = {"dispersion": 6.5}

    def forward(self, data, outputs=("energy", "forces", "stress")):
        short = super().forward(data, outputs)
        far = LennardJones(sigma=1.5, cutoff=6.5)(
            {**data, **{k: data[f"{k}_dispersion"] for k in ("edge_index", "edge_shifts")}}, outputs
        )
        return {name: short[name] + far[name] for name in outputs}


@ranks(1, 2, 3)
def test_one_partition_carries_an_edge_list_for_each_cutoff(comm):
    atoms = silicon(2)
    domain = domain_of(comm, atoms, TwoLists(cutoff=4.0), skin=0.0)
    total = sum(run(Comm(), atoms, m)["energy"] for m in (Masked(cutoff=4.0), LennardJones(sigma=1.5, cutoff=6.5)))
    results = whole(domain)
    torch.testing.assert_close(results["energy"], total, rtol=1e-10, atol=0)
    close(results, run(Comm(), atoms, TwoLists(cutoff=4.0)))
    short, far = (domain.data[name].shape[1] for name in ("edge_index", "edge_index_dispersion"))
    assert sum(comm.gather_objects(short)) < sum(comm.gather_objects(far)) / 2


@ranks(2)
def test_a_coordinate_that_went_nowhere_leaves_no_margin_and_is_one_error(comm):
    domain = domain_of(comm, silicon(2), Masked(), skin=0.5)
    if comm.rank == 1:
        domain.batch.positions[3, 1] = torch.nan
    lost = int(comm.gather_objects(domain.batch.ids.tolist())[1][3])
    assert not comm.all_reduce(domain.list_margin().nan_to_num(nan=-1.0), "min") >= 0
    with pytest.raises(NonFinitePosition, match=f"atom {lost} is at"):
        domain.rebuild()


@ranks(1, 2)
def test_a_step_between_rebuilds_is_one_exchange_of_positions_and_no_wait(comm):
    for model, more, reverses in ((LennardJones(cutoff=4.0), 0, 0), (Masked(cutoff=4.0), 3, 3)):
        domain = domain_of(comm, silicon(2), model, skin=0.5)
        domain.evaluate()
        with count_traffic(comm) as traffic:
            domain.batch.positions.add_(0.001)
            domain.list_margin()
            domain.evaluate()
        assert traffic.exchanges == (1 + more if comm.size > 1 else 0) and traffic.host_syncs == 0
        assert traffic.reverses == (reverses if comm.size > 1 else 0)


@ranks(2)
def test_a_rebuild_takes_ten_messages(comm):
    domain = domain_of(comm, silicon(2), LennardJones(cutoff=4.0), skin=0.5)
    with ExitStack() as patches:
        names = ("all_to_all", "all_gather", "all_reduce", "broadcast")
        way = type(comm.transport)
        counted = [patch.object(way, name, autospec=True, side_effect=getattr(way, name)) for name in names]
        sent = [patches.enter_context(each) for each in counted]
        domain.rebuild()
    assert sum(each.call_count for each in sent) == 10


def test_a_skin_that_is_no_length_is_refused():
    with pytest.raises(ValueError, match="a skin is a length"):
        domain_of(Comm(), silicon(1), Toy(), skin=-1.0)
