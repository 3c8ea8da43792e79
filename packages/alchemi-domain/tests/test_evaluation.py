import os
import pickle

import ase.io
import pytest
import torch
from ase import Atoms
from ase.build import bulk
from toy import Toy

from alchemi_domain import Batch, DistributedModel, ShardedBatch, load_model
from alchemi_domain.evaluate import within_tolerance
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import DomainConfig
from alchemi_shardtensor.testing import ranks
from alchemi_spec import InputError, InvalidCell, MissingHandler, Model, SpecError


def test_models_fulfil_the_contract():
    assert isinstance(LennardJones(), Model) and isinstance(Toy(), Model)


def test_a_batch_survives_the_way_from_and_to_ase():
    frames = [bulk("Cu"), Atoms("Ar2", [[0, 0, 0], [0, 0, 4]])]
    back = Batch.from_ase(frames).to_ase()
    for before, after in zip(frames, back, strict=True):
        assert (before.positions == after.positions).all() and (before.numbers == after.numbers).all()
        assert (before.cell.array == after.cell.array).all() and (before.pbc == after.pbc).all()


def test_fields_that_do_not_fit_together_are_refused():
    batch = Batch.from_ase(bulk("Cu"))
    with pytest.raises(InputError, match=r"cell has shape \(3, 3\)"):
        Batch(batch.positions, batch.atomic_numbers, batch.batch, batch.cell[0], batch.pbc)
    with pytest.raises(InputError, match="beyond the 1 cells"):
        Batch(batch.positions, batch.atomic_numbers, batch.batch + 1, batch.cell, batch.pbc)
    broken = Batch.from_ase(bulk("Cu")).cell * torch.nan
    with pytest.raises(InvalidCell, match="nan or infinite"):
        Batch(batch.positions, batch.atomic_numbers, batch.batch, broken, batch.pbc & False)
    with pytest.raises(InputError, match="at least one"):
        Batch.from_ase([])


@ranks(1, 3)
def test_every_atom_is_owned_once_and_gathered_in_its_place(comm):
    atoms = bulk("Si", cubic=True) * (2, 2, 2)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, DomainConfig(comm))
    assert torch.equal(batch.gather(batch.positions), torch.from_numpy(atoms.positions))
    assert batch.n_atoms == 64 and sum(comm.gather_objects(len(batch.ids))) == 64


@ranks(2)
def test_what_rank_0_cannot_scatter_is_an_error_on_every_rank(comm):
    with pytest.raises(InputError, match="rank 0 scatters"):
        ShardedBatch.scatter(None, DomainConfig(comm))
    with pytest.raises(InputError, match="nothing is called 'nowhere'.*halo"):
        ShardedBatch.scatter(Batch.from_ase(bulk("Cu")), DomainConfig(comm, strategy="nowhere"))


@ranks(2)
def test_a_batch_of_other_ranks_is_refused(comm):
    batch = ShardedBatch.scatter(Batch.from_ase(bulk("Cu")), DomainConfig(comm))
    with pytest.raises(SpecError, match="one DomainConfig for both"):
        DistributedModel(Toy())(batch)


class Careless(Toy):
    """Sums over its atoms in a way that only one process gets right."""

    def forward(self, data, outputs):
        return {"energy": torch.stack([data["positions"][i].sum() for i in range(len(data["positions"]))]).sum().view(1)}


@ranks(1, 2)
def test_an_output_that_may_be_a_share_is_refused(comm):
    batch = ShardedBatch.scatter(Batch.from_ase(bulk("Cu", cubic=True)), DomainConfig(comm))
    with pytest.raises(MissingHandler, match="over a slice|energy should have system rows"):
        DistributedModel(Careless(), batch.config)(batch, ("energy",))


def test_an_unknown_output_is_refused():
    batch = ShardedBatch.scatter(Batch.from_ase(bulk("Cu")))
    with pytest.raises(SpecError, match="has no dipole"):
        DistributedModel(Toy(), batch.config)(batch, ("energy", "dipole"))


def count_and_make():
    with open(os.environ["ALCHEMI_TEST_LOADS"], "a") as log:
        log.write("x")
    return Toy()


def make_what_cannot_be_sent():
    model = count_and_make()
    model.unsendable = lambda: None
    return model


@ranks(1, 3)
@pytest.mark.parametrize(("factory", "loads"), [("count_and_make", 1), ("make_what_cannot_be_sent", None)])
def test_a_model_is_loaded_once_and_sent_or_else_by_each_rank(comm, factory, loads, tmp_path):
    os.environ["ALCHEMI_TEST_LOADS"] = str(tmp_path / "loads")
    model = load_model(f"test_evaluation:{factory}", comm)
    assert torch.equal(model.embedding, Toy().embedding)
    comm.gather_objects(None)
    assert len((tmp_path / "loads").read_text()) == (loads or comm.size)


@ranks(1, 2)
@pytest.mark.parametrize("name", ["argon", "no.such.module:model", "torch:no_such_factory"])
def test_an_unknown_model_is_one_error_on_every_rank(comm, name):
    with pytest.raises(InputError, match="installed|neither"):
        load_model(name, comm)


def test_a_model_may_be_given_arguments_by_name():
    assert isinstance(load_model("lj"), LennardJones)
    assert pickle.loads(pickle.dumps(load_model("lj"))).cutoff == 8.5


def test_a_gap_that_is_nan_is_not_within_tolerance():
    assert within_tolerance({"energy": 1e-11}, torch.float64)
    assert not within_tolerance({"energy": 1e-9}, torch.float64)
    assert not within_tolerance({"forces": float("nan")}, torch.float32)


def write_frames(path):
    frames = [bulk("Ar", "fcc", a=5.3, cubic=True) * (2, 2, 2) for _ in range(3)]
    for seed, frame in enumerate(frames):
        frame.rattle(0.1, seed=seed)
    frames.append(Atoms("Ar2", [[0, 0, 0], [3.8, 0, 0]]))
    ase.io.write(path, frames)
    return frames
