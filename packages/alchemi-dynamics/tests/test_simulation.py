"""Whole trajectories on many ranks against one process."""

import numpy as np
import pytest
import torch
from ase.build import bulk
from ase.units import GPa
from toy import Masked, run

from alchemi_domain import Batch, DistributedModel, Domain, ShardedBatch
from alchemi_dynamics import FIRE, NPT, NVE, Langevin, NoseHooverChain, Simulation, thermalize
from alchemi_dynamics.state import AMU_A2_PER_FS2
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import InputError, NonFinitePosition

ARGON = LennardJones(cutoff=5.0)


def argon(repeats=(3, 3, 3), a=5.4, shear=0.0, amount=0.1):
    atoms = bulk("Ar", "fcc", a=a, cubic=True) * repeats
    atoms.set_cell(atoms.cell.array @ [[1, 0, 0], [shear, 1, 0], [0, shear, 1]], scale_atoms=True)
    atoms.rattle(amount, seed=1)
    return atoms


def simulation(comm, atoms, model, integrator, skin=0.8, temperature=None, drift=(0, 0, 0), **more):
    config = DomainConfig(comm)
    batch = ShardedBatch.scatter(Batch.from_ase(atoms) if comm.rank == 0 else None, config)
    found = Simulation(Domain(DistributedModel(model, config), batch, skin), integrator, **more)
    if temperature:
        thermalize(found.state, temperature, seed=3)
    found.state.velocities += torch.tensor(drift, dtype=torch.float64)
    return found


def gathered(found, name):
    return found.domain.batch.gather(getattr(found.state, name))


class Compare:
    """After each evaluation: this rank count's forces beside those of one process with new lists."""

    def __init__(self, atoms, model):
        self.atoms, self.model, self.gaps, self.simulation = atoms.copy(), model, {}, None

    def __call__(self, state):
        batch = self.simulation.domain.batch
        positions, forces = (batch.gather(t, dst=0) for t in (state.positions, state.forces))
        if state.comm.rank == 0:
            self.atoms.positions = positions.numpy()
            self.atoms.set_cell(state.cell[0].numpy())
            one = run(Comm(), self.atoms, self.model)
            self.gaps[state.step] = (one["forces"] - forces).abs().max().item()


def compared(comm, atoms, model, integrator, steps, **more):
    compare = Compare(atoms, model)
    found = compare.simulation = simulation(comm, atoms, model, integrator, forces=[compare], **more)
    owners, before = [found.domain.batch.ids.tolist()], gathered(found, "velocities")
    found.run(steps)
    owners.append(found.domain.batch.ids.tolist())
    if comm.rank == 0:
        assert len(compare.gaps) == steps + 1
    return found, max(compare.gaps.values(), default=0.0), owners[0] != owners[1], before


def momentum(found, velocities):
    masses = gathered(found, "masses")
    return (masses[:, None] * velocities).sum(0)


MODELS = {"lj": (ARGON, 1e-10), "mpnn": (Masked(cutoff=4.0, layers=2).float(), 1e-5)}


def forced_crossings(comm, name, shear, steps):
    """Fast atoms, and all of them drift through walls and periodic faces: every step's forces are one process's."""
    model, tolerance = MODELS[name]
    atoms = argon(shear=shear, repeats=(3, 3, 2))
    drift = (0.02, -0.013, 0.017)
    found, gap, migrated, before = compared(comm, atoms, model, NVE(4.0), steps, temperature=300.0, drift=drift)
    assert gap < tolerance, gap
    assert found.rebuilds > steps / 60 and (migrated or comm.size == 1)
    if name == "lj":
        torch.testing.assert_close(momentum(found, gathered(found, "velocities")), momentum(found, before), rtol=0, atol=1e-9)
    moved = (gathered(found, "positions") - torch.from_numpy(atoms.positions)).abs()
    assert moved.amax() > min(0.03 * 4 * steps / 3, 2.0)


@ranks(2, 3)
@pytest.mark.parametrize("shear", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_every_steps_forces_are_one_processes(comm, name, shear):
    forced_crossings(comm, name, shear, 80)


@pytest.mark.long
@ranks(2, 3, 4, timeout=1200)
@pytest.mark.parametrize("shear", [0.0, 0.3])
@pytest.mark.parametrize("name", MODELS)
def test_two_thousand_steps_forces_are_one_processes(comm, name, shear):
    forced_crossings(comm, name, shear, 2000)


@ranks(1, 2)
def test_a_block_of_steps_waits_for_nothing_but_its_end(comm):
    found = simulation(comm, argon(), ARGON, NVE(2.0), temperature=40.0)
    found.run(1)
    assert found._n_speculative == 8
    with count_traffic(comm) as traffic:
        assert found._speculative_steps(8)
    assert traffic.exchanges == (8 if comm.size > 1 else 0) and traffic.reverses == traffic.host_syncs == 0
    assert traffic.reductions == 8 + 1  # the energy's sum; the list margin once


@ranks(1, 3)
def test_steps_that_outlive_the_lists_are_rolled_back(comm):
    """A field that sets in makes atoms faster than their speeds foretold."""

    def field(state):
        state.forces[:, 0] += 40.0 * (state.step > 10)
        state.forces[state.ids == 5, 1] += 60.0 * (state.step > 10)

    careful, bold = (simulation(comm, argon(), ARGON, Langevin(2.0, 40.0), temperature=40.0, forces=[field]) for _ in range(2))
    for _ in range(24):
        careful._n_speculative = 0
        careful.run(1)
    bold.run(24)
    assert bold.rolled_back > 0 and careful.rolled_back == 0
    for name in ("positions", "velocities"):
        torch.testing.assert_close(gathered(bold, name), gathered(careful, name), rtol=0, atol=1e-9)
    torch.testing.assert_close(bold.integrator.heat, careful.integrator.heat, rtol=1e-12, atol=1e-12)


@ranks(2, 3)
def test_npt_with_a_changing_cell_equals_one_process(comm):
    make = lambda: NPT(4.0, 60.0, pressure=1.5 * GPa, damping=50.0, pressure_damping=120.0, shape="full")  # noqa: E731
    atoms = argon(repeats=(2, 2, 3), shear=0.05)
    found, volume, widest = simulation(comm, atoms, ARGON, make(), temperature=60.0), atoms.get_volume(), 0.0
    one = simulation(Comm(), atoms, ARGON, make(), temperature=60.0) if comm.rank == 0 else None
    for _ in range(10):
        found.run(20)
        positions = gathered(found, "positions")
        widest = max(widest, abs(found.state.volume().item() / volume - 1))
        if comm.rank == 0:
            one.run(20)
            torch.testing.assert_close(found.state.cell, one.state.cell, rtol=0, atol=1e-7)
            torch.testing.assert_close(positions, one.state.positions, rtol=0, atol=1e-7)
            torch.testing.assert_close(found.state.stress, one.state.stress, rtol=0, atol=1e-9)
    assert widest > 0.02 and found.rebuilds > 2


@ranks(1, 2)
@pytest.mark.parametrize("make", [lambda: NVE(2.0), lambda: NPT(4.0, 20.0, pressure=0.5 * GPa, pressure_damping=100.0)])
def test_few_steps_are_rolled_back(comm, make):
    """Speeds foretell neither a field that sets in nor a cell that shrinks: blocks get shorter, then longer again."""

    def field(state):
        state.forces[:, 0] += torch.where(state.ids % 2 == 0, 0.05, -0.05) * (state.step > 20)

    found = simulation(comm, argon((2, 2, 2)), ARGON, make(), temperature=0.01, forces=[field])
    found.run(100)
    assert found.rolled_back <= 100


@ranks(2)
def test_dynamics_leave_the_users_batch_as_it_is(comm):
    whole, config = Batch.from_ase(argon((2, 2, 2))), DomainConfig(comm)
    before = whole.cell.clone(), whole.positions.clone()
    batch = ShardedBatch.scatter(whole, config)
    integrator = NPT(4.0, 90.0, pressure=1.0 * GPa, pressure_damping=100.0)
    found = Simulation(Domain(DistributedModel(ARGON, config), batch), integrator)
    found.run(20)
    assert not torch.equal(found.state.cell, before[0])
    assert torch.equal(whole.cell, before[0]) and torch.equal(whole.positions, before[1])


class Stumbling(LennardJones):
    """Fails once."""

    fails = True

    def forward(self, data, outputs=("energy", "forces", "stress")):
        if self.fails:
            self.fails = False
            raise RuntimeError("stumbled")
        return super().forward(data, ("energy", "forces", "stress"))


def test_a_run_that_could_not_begin_may_be_tried_again():
    """Its model returns a stress that nobody asked for, too."""
    first, other = (simulation(Comm(), argon((2, 2, 2)), model, NVE(2.0)) for model in (Stumbling(cutoff=5.0), ARGON))
    with pytest.raises(RuntimeError, match="stumbled"):
        first.run(3)
    first.run(3)
    other.run(3)
    torch.testing.assert_close(first.state.positions, other.state.positions, rtol=0, atol=1e-12)


@ranks(1, 2)
def test_a_domain_that_another_simulation_has_moved_is_refused(comm):
    first = simulation(comm, argon((2, 2, 2)), ARGON, NVE(4.0), skin=0.1, temperature=100.0)
    first.run(2)
    second = Simulation(first.domain, NVE(4.0))
    second.run(30)
    assert second.rebuilds > 0
    with pytest.raises(InputError, match="another simulation"):
        first.run(1)


@ranks(1, 2)
def test_grad_modes_of_the_caller_change_nothing(comm):
    plain, quiet = (simulation(comm, argon((2, 2, 2)), ARGON, NVE(4.0), skin=0.1, temperature=100.0) for _ in range(2))
    plain.run(12)
    with torch.inference_mode():
        quiet.run(12)
        forces = quiet.domain.model(quiet.domain.batch)["forces"]
    assert quiet.rebuilds > 0 and torch.equal(quiet.state.positions, plain.state.positions)
    torch.testing.assert_close(forces, plain.state.forces, rtol=0, atol=1e-12)


def test_a_bias_may_be_the_gradient_of_an_energy():
    def restraint(state):
        x = state.positions.detach().requires_grad_()
        state.forces -= torch.autograd.grad((0.3 * (x - 1).square()).sum(), x, create_graph=True)[0]

    def same(state):
        state.forces -= 0.6 * (state.positions - 1)

    found, other = (simulation(Comm(), argon((2, 2, 2)), ARGON, NVE(2.0), forces=[f]) for f in (restraint, same))
    for one in (found, other):
        one.run(5)
    assert not found.state.velocities.requires_grad
    torch.testing.assert_close(found.state.positions, other.state.positions, rtol=0, atol=1e-12)


def temperatures(comm, integrator, steps, atoms):
    found, curve = simulation(comm, atoms, ARGON, integrator, temperature=90.0), []
    for _ in range(steps):
        found.run(1)
        curve.append(found.state.temperature().item())
        assert found.state.velocities.abs().amin(0).min() > 0 if len(found.state.ids) else True
    return torch.tensor(curve)


def baths():
    return NoseHooverChain(4.0, 90.0, damping=100.0), Langevin(4.0, 90.0, friction=0.02, seed=7)


@ranks(2, 3)
def test_case_5_one_temperature_curve_whatever_the_number_of_ranks(comm):
    for many, one in zip(baths(), baths(), strict=True):
        curves = [temperatures(by, bath, 20, argon((5, 5, 5))) for by, bath in ((comm, many), (Comm(), one))]
        torch.testing.assert_close(*curves, rtol=1e-8, atol=0)


@pytest.mark.long
@ranks(1, 2, 3, timeout=1200)
def test_case_5_a_thousand_steps(comm):
    for bath in baths():
        curve = temperatures(comm, bath, 1000, argon((5, 5, 5)))
        assert abs(curve[300:].mean().item() - 90.0) < 4.0


class Clamp:
    """No force is larger than `most`; it sees owned atoms with their whole forces."""

    def __init__(self, most):
        self.most, self.seen = most, []

    def __call__(self, state):
        self.seen.append(state.forces.clone())
        norms = state.forces.norm(dim=-1, keepdim=True)
        state.forces *= (self.most / norms.clamp(min=1e-12)).clamp(max=1)


@ranks(1, 2, 3)
def test_case_20_a_relaxation_ends_for_all_ranks_at_once(comm):
    """Only the atoms of one corner are far from their places, so some ranks' atoms have no forces long before others'."""
    atoms = argon(repeats=(4, 2, 2), amount=0.0)
    atoms.positions[:6] += np.random.default_rng(0).normal(0, 0.25, (6, 3))
    clamp = Clamp(0.05)
    fire = FIRE(fmax=1e-4)
    found = simulation(comm, atoms, ARGON, fire, forces=[clamp])
    assert found.run(400, until=fire.converged)
    steps = comm.gather_objects(found.state.step)
    assert len(set(steps)) == 1 and 10 < steps[0] < 400
    assert found.state.largest(found.state.forces.norm(dim=-1)).max() < 1e-4 and (found.state.velocities == 0).all()
    one = simulation(Comm(), atoms, ARGON, FIRE(fmax=1e-4), forces=[Clamp(0.05)])
    one.run(400, until=one.integrator.converged)
    assert one.state.step == steps[0]
    torch.testing.assert_close(gathered(found, "positions"), one.state.positions, rtol=0, atol=1e-9)
    start = run(Comm(), atoms, ARGON)["forces"]
    assert start.norm(dim=-1).max() > 0.05
    ids = simulation(comm, atoms, ARGON, FIRE()).domain.batch.ids
    torch.testing.assert_close(clamp.seen[0], start[ids], rtol=0, atol=1e-11)


@ranks(1, 2)
def test_a_cell_is_relaxed_with_its_atoms(comm):
    atoms = argon(repeats=(2, 2, 2), a=5.0, shear=0.05, amount=0.05)
    fire = FIRE(fmax=1e-4, cell="full")
    found = simulation(comm, atoms, LennardJones(cutoff=6.5), fire, skin=0.5)
    assert found.run(600, until=fire.converged)
    assert found.state.stress.abs().max() < 1e-5 and found.rebuilds > 0


@ranks(1, 2)
def test_a_batch_of_systems_moves_as_each_alone(comm):
    boxes = [argon((2, 2, 2)), argon((2, 2, 2), a=5.6, shear=0.2), argon((1, 2, 2), a=5.3)]
    temperature = torch.tensor([60.0, 90.0, 120.0], dtype=torch.float64)
    found = simulation(comm, boxes, ARGON, NoseHooverChain(4.0, temperature))
    velocities = torch.cat(
        [torch.from_numpy(np.random.default_rng(k).normal(0, 0.002, (len(b), 3))) for k, b in enumerate(boxes)]
    )
    found.state.velocities.copy_(velocities[found.state.ids])
    found.run(20)
    positions, start = gathered(found, "positions"), 0
    for k, box in enumerate(boxes):
        alone = simulation(Comm(), box, ARGON, NoseHooverChain(4.0, temperature[k]))
        alone.state.velocities.copy_(velocities[start : start + len(box)])
        alone.run(20)
        torch.testing.assert_close(positions[start : start + len(box)], alone.state.positions, rtol=0, atol=1e-9)
        start += len(box)


@ranks(4)
def test_three_atoms_move_on_four_ranks(comm):
    atoms = argon((1, 1, 1))[:3]
    found, one = (simulation(by, atoms, ARGON, Langevin(2.0, 300.0), skin=0.2, temperature=300.0) for by in (comm, Comm()))
    for system in (found, one):
        system.run(30)
    assert 0 in comm.gather_objects(len(found.state.ids)) and found.rebuilds == one.rebuilds > 0
    torch.testing.assert_close(gathered(found, "positions"), one.state.positions, rtol=0, atol=1e-10)


@ranks(1, 2)
def test_an_atom_that_explodes_is_one_error_on_every_rank(comm):
    def explode(state):
        state.forces[state.ids == 9] += torch.nan if state.step == 6 else 0.0

    found = simulation(comm, argon(), ARGON, NVE(2.0), forces=[explode], temperature=20.0)
    with pytest.raises(NonFinitePosition, match="atom 9 is at"):
        found.run(30)
    assert found.state.step == 6
    last = simulation(comm, argon(), ARGON, NVE(2.0), forces=[explode], temperature=20.0)
    with pytest.raises(NonFinitePosition, match=r"force on atom 9 is .*nan.* after step 6"):
        last.run(6)


def test_positions_of_float32_are_refused():
    config = DomainConfig()
    batch = ShardedBatch.scatter(Batch.from_ase(argon(), dtype=torch.float32), config)
    with pytest.raises(InputError, match="positions move in float64"):
        Simulation(Domain(DistributedModel(ARGON, config), batch), NVE(1.0))


@ranks(2)
def test_hooks_are_called_at_their_steps_on_every_rank(comm):
    class Count:
        every = 5

        def __init__(self):
            self.steps = []

        def __call__(self, found):
            kinetic = found.state.kinetic_energy().item()
            assert (
                kinetic
                == found.state.total(0.5 * AMU_A2_PER_FS2 * found.state.masses * found.state.velocities.square().sum(-1)).item()
            )
            self.steps.append(found.state.step)

    count = Count()
    found = simulation(comm, argon(), ARGON, NVE(2.0), hooks=[count], temperature=20.0)
    found.run(12)
    found.run(4)
    assert count.steps == [0, 5, 10, 15]
