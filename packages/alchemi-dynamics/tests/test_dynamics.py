from dataclasses import replace

import numpy as np
import pytest
import torch
from ase import Atoms, optimize, units
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.filters import FrechetCellFilter
from ase.md.nose_hoover_chain import MTKNPT, IsotropicMTKNPT, NoseHooverChainNVT
from ase.md.verlet import VelocityVerlet
from scipy.linalg import expm_frechet

from alchemi_domain import AtomBuffers, ShardedBatch
from alchemi_dynamics import (
    FIRE,
    NPT,
    NVE,
    FIREParameters,
    Langevin,
    NoseHooverChain,
    State,
    maxwell_boltzmann,
    normal,
    remove_drift,
    rescale,
    thermalize,
)
from alchemi_dynamics.chain import Chain
from alchemi_dynamics.matrices import derivative_of_exponential, exponential, exponential_and_mean
from alchemi_dynamics.noise import philox
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import count_traffic, ranks
from alchemi_spec import InputError

SAME = 1e-10
"""Two float64 programs of one algorithm, Å or Å/fs, after tens of steps."""
GPA = units.GPa


# --- a fluid of argon, small enough for all pairs with all 27 images; the cutoff is within half a step of the smallest cell


def argon_energy(positions, cell, cutoff=5.0):
    """Lennard-Jones with a polynomial envelope, all pairs of (n, 3) in (3, 3), self-images too."""
    images = torch.cartesian_prod(*[torch.arange(-1.0, 2.0, dtype=torch.float64)] * 3) @ cell
    vectors = positions[:, None, None] - positions[None, :, None] + images
    squares = vectors.square().sum(-1)
    squares = torch.where(squares < 1e-6, 2 * cutoff**2, squares)
    power6 = 3.4**6 / squares**3
    inside = (1 - squares / cutoff**2).clamp(min=0)
    return (2 * 0.010341 * (power6**2 - power6) * inside**3 * 4).sum()


def argon(positions, cell):
    """Energy, forces (n, 3) and stress (3, 3) by strain."""
    x, strain = positions.detach().requires_grad_(), torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    whole = torch.eye(3, dtype=torch.float64) + (strain + strain.T) / 2
    energy = argon_energy(x @ whole, cell @ whole)
    gradient, virial = torch.autograd.grad(energy, [x, strain])
    return energy.detach(), -gradient, virial / cell.det().abs()


class Argon(Calculator):
    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        energy, forces, stress = argon(torch.tensor(atoms.positions), torch.tensor(atoms.cell.array))
        voigt = stress.numpy()[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]]
        self.results = {"energy": energy.item(), "free_energy": energy.item(), "forces": forces.numpy(), "stress": voigt}


def evaluate_argon(state):
    for i in range(len(state.cell)):
        mine = state.batch == i
        state.energy[i], state.forces[mine], state.stress[i] = argon(state.positions[mine], state.cell[i])


def fluid(size=(2, 1, 1), seed=0, sheared=False, kelvin=60.0, lattice=5.3):
    atoms = bulk("Ar", a=lattice, cubic=True) * size
    atoms.rattle(0.1, seed=seed)
    if sheared:
        atoms.set_cell(atoms.cell.array @ (np.eye(3) + np.array([[0, 0.05, -0.03], [0, 0, 0.04], [0, 0, 0]])), scale_atoms=True)
    atoms.set_masses(np.where(np.arange(len(atoms)) % 2, 39.948, 20.18))
    speeds = np.random.default_rng(seed).normal(size=(len(atoms), 3)) * np.sqrt(units.kB * kelvin / atoms.get_masses()[:, None])
    atoms.set_velocities(speeds - atoms.get_masses() @ speeds / atoms.get_masses().sum())
    atoms.calc = Argon()
    return atoms


def state_of(*frames, evaluate=evaluate_argon):
    """As ASE counts: 3N degrees of freedom."""
    counts = torch.tensor([len(a) for a in frames])
    join = lambda values: torch.from_numpy(np.concatenate(values))  # noqa: E731
    batch = ShardedBatch(
        DomainConfig(),
        positions=join([a.positions for a in frames]),
        atomic_numbers=join([a.numbers for a in frames]),
        batch=torch.arange(len(frames)).repeat_interleave(counts),
        ids=torch.arange(int(counts.sum())),
        cell=torch.from_numpy(np.stack([a.cell.array for a in frames])),
        pbc=torch.from_numpy(np.stack([a.pbc for a in frames])),
        n_atoms=int(counts.sum()),
        extra_fields={
            "velocities": join([a.get_velocities() * units.fs for a in frames]),
            "masses": join([a.get_masses() for a in frames]),
        },
    )
    state = State(
        AtomBuffers(batch),
        forces=torch.zeros(int(counts.sum()), 3, dtype=torch.float64),
        energy=torch.zeros(len(frames), dtype=torch.float64),
        freedom=3.0 * counts.double(),
        stress=torch.zeros(len(frames), 3, 3, dtype=torch.float64),
    )
    evaluate(state)
    return state


def step(state, integrator, steps, evaluate=evaluate_argon, after=lambda: None):
    for _ in range(steps):
        integrator.first_half(state)
        evaluate(state)
        integrator.second_half(state)
        state.step += 1
        after()
    return state


def go(state, integrator, steps, evaluate=evaluate_argon, after=lambda: None):
    integrator.start(state)
    return step(state, integrator, steps, evaluate, after)


def gap_to(atoms, state):
    """Largest difference of positions Å, velocities Å/fs and cell Å to an ASE structure."""
    pairs = [(state.positions, atoms.positions), (state.velocities, atoms.get_velocities() * units.fs)]
    return max(np.abs(ours.numpy() - theirs).max() for ours, theirs in [*pairs, (state.cell[0], atoms.cell.array)])


def spread_of(values):
    return (torch.stack(values).amax(0) - torch.stack(values).amin(0)).max().item()


# --- noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_random123s_known_answers(counter, key, words):
    read = lambda text: [int(word, 16) for word in text.split()]  # noqa: E731
    got = philox(tuple(torch.tensor([word] * 3) for word in read(counter)), tuple(read(key)))
    assert [word.tolist() for word in got] == [[word] * 3 for word in read(words)]


def test_noise_is_standard_normal_and_independent_of_everything_it_is_keyed_by():
    ids = torch.arange(50_000) + 2**33
    draws = {
        "first": normal(7, 5, ids),
        "next step": normal(7, 6, ids),
        "late step": normal(7, 5 + 2**32, ids),
        "seed": normal(8, 5, ids),
        "high seed": normal(7 + 2**32, 5, ids),
        "stream": normal(7, 5, ids, stream=1),
        "other ids": normal(7, 5, ids - 2**33),
    }
    columns = torch.cat(list(draws.values()), 1)
    correlation = columns.T @ columns / len(ids)
    assert (correlation - torch.eye(21)).abs().max() < 5 * 2**0.5 / len(ids) ** 0.5
    assert columns.mean(0).abs().max() < 5 / len(ids) ** 0.5
    assert abs(columns.pow(4).mean() - 3) < 5 * (96 / columns.numel()) ** 0.5
    assert abs(columns.pow(3).mean()) < 5 * (15 / columns.numel()) ** 0.5
    assert columns.abs().max() > 4.5


def test_noise_of_an_atom_does_not_depend_on_who_else_is_there():
    ids = torch.randperm(1000)
    mine = ids % 3 == 1
    assert torch.equal(normal(3, 11, ids)[mine], normal(3, 11, ids[mine]))
    assert torch.equal(normal(3, 11, ids)[:, :2], normal(3, 11, ids, columns=2))
    assert torch.equal(normal(3, 11, ids, columns=5)[:, :3], normal(3, torch.tensor(11), ids))
    assert normal(3, 11, ids[:0]).shape == (0, 3)


# --- small matrices


def test_matrix_functions_equal_scipys():
    a, e = 0.7 * torch.randn(2, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    grown, mean = exponential_and_mean(a)
    for i in range(4):
        theirs, derivative = map(torch.from_numpy, expm_frechet(a[i].numpy(), e[i].numpy()))
        assert (exponential(a)[i] - theirs).abs().max() < 1e-13
        assert (grown[i] - theirs).abs().max() < 1e-13
        assert (derivative_of_exponential(a, e)[i] - derivative).abs().max() < 1e-13
    assert (a @ mean - (grown - torch.eye(3))).abs().max() < 1e-13


# --- against ASE, step by step


def test_nve_equals_ases_velocity_verlet():
    atoms = fluid()
    state = state_of(atoms)
    energies = []
    nve = NVE(2.0)
    go(state, nve, 50, after=lambda: energies.append(nve.conserved(state)))
    VelocityVerlet(atoms, 2.0 * units.fs).run(50)
    assert gap_to(atoms, state) < SAME
    assert abs(atoms.get_total_energy() - energies[-1].item()) < SAME
    assert 0 < spread_of(energies) < 2e-4
    assert (state.masses @ state.velocities).norm() < 1e-12


@pytest.fixture
def without_yoshida(monkeypatch):
    """ASE's thermostat steps of second order, as ours."""
    monkeypatch.setattr("ase.md.nose_hoover_chain.FOURTH_ORDER_COEFFS", [1.0])


@pytest.mark.parametrize(("chain", "loops"), [(3, 1), (1, 2)])
def test_nose_hoover_chains_equal_ases(without_yoshida, chain, loops):
    atoms = fluid(kelvin=90)
    state, nvt = state_of(atoms), NoseHooverChain(2.0, 50.0, 25.0, chain, loops)
    ase = NoseHooverChainNVT(atoms, 2.0 * units.fs, 50.0, 25.0 * units.fs, tchain=chain, tloop=loops)
    go(state, nvt, 50)
    ase.run(50)
    assert gap_to(atoms, state) < SAME
    assert abs(nvt.conserved(state).item() - ase.get_conserved_energy()) < SAME
    assert nvt.chain.positions.abs().max() > 0.1
    assert (state.masses @ state.velocities).norm() < 1e-12


@pytest.mark.parametrize(("shape", "theirs", "freedom"), [("isotropic", IsotropicMTKNPT, 1), ("full", MTKNPT, 6)])
def test_npt_equals_ases(without_yoshida, shape, theirs, freedom):
    """With the degrees of freedom of a cell that does not turn: ASE heats its barostat as if there were 9 of them."""
    atoms = fluid(sheared=True)
    state = state_of(atoms)
    npt = NPT(2.0, 60.0, 0.3 * GPA, 50.0, 150.0, shape)
    ase = theirs(atoms, 2.0 * units.fs, 60.0, 0.3 * GPA, 50.0 * units.fs, 150.0 * units.fs)
    ase._barostat._cell_dof = freedom
    ase._barostat._R[0] = freedom * ase._barostat._R[1]
    go(state, npt, 50)
    before = atoms.cell.volume
    ase.run(50)
    assert abs(atoms.cell.volume / before - 1) > 0.02
    assert gap_to(atoms, state) < SAME
    assert abs(npt.conserved(state).item() - ase.get_conserved_energy()) < SAME
    assert (state.masses @ state.velocities).norm() < 1e-12


def steps_of(optimizer, atoms, fmax, steps):
    path = []
    optimizer.attach(lambda: path.append((atoms.positions.copy(), atoms.cell.array.copy())))
    optimizer.run(fmax=fmax, steps=steps)
    return path


@pytest.mark.parametrize("rattle", [0.1, 0.5])
def test_fire_equals_ases_step_by_step(rattle):
    atoms = fluid((1, 1, 1))
    atoms.rattle(rattle, seed=3)
    state, fire, path = state_of(atoms), FIRE(fmax=1e-3), []
    path.append(state.positions.numpy().copy())
    fire.start(state)
    while not fire.converged(state).all() and len(path) < 200:
        step(state, fire, 1, after=lambda: path.append(state.positions.numpy().copy()))
    theirs = steps_of(optimize.FIRE(atoms, logfile=None), atoms, 1e-3, 199)
    assert len(path) == len(theirs) and 20 < len(path) < 200
    assert max(np.abs(ours - ase).max() for ours, (ase, _) in zip(path, theirs, strict=True)) < SAME


@pytest.mark.parametrize(("cell", "hydrostatic"), [("isotropic", True), ("full", False)])
def test_fire_with_the_cell_equals_ases_filter_step_by_step(cell, hydrostatic):
    atoms = fluid((1, 1, 1), sheared=True, lattice=5.6)
    state, fire, path = state_of(atoms), FIRE(fmax=2e-3, cell=cell, pressure=0.2 * GPA), []
    path.append((state.positions.numpy().copy(), state.cell[0].numpy().copy()))
    fire.start(state)
    while not fire.converged(state).all() and len(path) < 200:
        step(state, fire, 1, after=lambda: path.append((state.positions.numpy().copy(), state.cell[0].numpy().copy())))
    relaxed = FrechetCellFilter(atoms, hydrostatic_strain=hydrostatic, scalar_pressure=0.2 * GPA)
    theirs = steps_of(optimize.FIRE(relaxed, logfile=None), atoms, 2e-3, 199)
    assert len(path) == len(theirs) and 20 < len(path) < 200
    for ours, ase in zip(path, theirs, strict=True):
        assert np.abs(ours[0] - ase[0]).max() < SAME and np.abs(ours[1] - ase[1]).max() < SAME
    assert abs(np.linalg.det(path[-1][1]) / np.linalg.det(path[0][1]) - 1) > 0.02
    assert abs(fire.conserved(state).item() - relaxed.get_potential_energy()) < SAME


# --- what exact integration keeps


@pytest.mark.parametrize(
    "make",
    [
        lambda dt: NoseHooverChain(dt, 60.0, 50.0),
        lambda dt: NPT(dt, 60.0, 0.3 * GPA, 50.0, 200.0),
        lambda dt: NPT(dt, 60.0, 0.3 * GPA, 50.0, 200.0, "full"),
        lambda dt: NVE(dt),
    ],
    ids=["nvt", "npt", "npt full", "nve"],
)
def test_conserved_quantities_are_kept_to_second_order_in_the_time_step(make):
    drifts = []
    for dt, steps in ((4.0, 25), (2.0, 50)):
        state, kept, integrator = state_of(fluid((1, 1, 1), sheared=True)), [], make(dt)
        integrator.start(state)
        kept.append(integrator.conserved(state))
        step(state, integrator, steps, after=lambda kept=kept, i=integrator, s=state: kept.append(i.conserved(s)))
        drifts.append(spread_of(kept))
        assert abs(state.energy.item() + state.kinetic_energy().item() - kept[0].item()) < 1.0
    assert 3.2 < drifts[0] / drifts[1] < 5.0
    assert drifts[1] < 1e-3


def test_the_cell_of_npt_never_turns():
    """Its strain rate is symmetric, also where a model's stress is not."""
    state, npt = state_of(fluid(sheared=True)), NPT(2.0, 60.0, 0.3 * GPA, 50.0, 150.0, "full")

    def crooked(state):
        evaluate_argon(state)
        state.stress[:, 0, 1] += 0.01

    go(state, npt, 10, evaluate=crooked)
    assert npt.rate.abs().max() > 1e-6 and (npt.rate - npt.rate.mT).abs().max() < 1e-18


def test_langevin_without_noise_to_speak_of_is_nve_and_its_heat_is_counted():
    """Total energy changes by eV, what is conserved by the time step's error only."""
    state, langevin, kept, total = state_of(fluid(kelvin=200)), Langevin(2.0, 10.0, 0.02, seed=4), [], []
    langevin.start(state)

    def note():
        kept.append(langevin.conserved(state))
        total.append(state.energy + state.kinetic_energy())

    step(state, langevin, 60, after=note)
    assert spread_of(total) > 0.05 and spread_of(kept) < 2e-3
    slow, free = state_of(fluid()), state_of(fluid())
    go(slow, Langevin(2.0, 60.0, 1e-12), 20)
    go(free, NVE(2.0), 20)
    assert (slow.positions - free.positions).abs().max() < 1e-4


# --- statistics


def springs(state, stiffness=1.0):
    """Every atom on a spring to the origin (eV/Å^2), in systems of any cell."""
    state.energy.copy_(state.total(0.5 * stiffness * state.positions.square().sum(-1)))
    state.forces.copy_(-stiffness * state.positions)


def crystal(n=200, systems=1, kelvin=0.0, seed=0):
    """Einstein crystals, alike but for the ids."""
    one = Atoms(f"Ar{n}", positions=np.zeros((n, 3)), cell=[10.0] * 3, pbc=True)
    state = state_of(*[one] * systems, evaluate=springs)
    if kelvin:
        thermalize(state, kelvin, seed)
    return state


def test_langevin_gives_every_atom_its_share():
    """BAOAB is exact for the positions of a harmonic system at any time step; at this one, kinetic energies are 9 % low."""
    state = crystal(400, systems=2)
    omega = (1 / (state.masses[0].item() * units.fs**-2)) ** 0.5
    dt, kelvin, squares, speeds = 0.6 / omega, torch.tensor([300.0, 100.0]), [], []

    def note():
        squares.append(state.total(state.positions.square()).mean(-1) / 400)
        speeds.append(state.temperature())

    langevin = Langevin(dt, kelvin, friction=0.5 * omega, seed=1)
    go(state, langevin, 100, evaluate=springs)
    step(state, langevin, 500, evaluate=springs, after=note)
    expected = units.kB * kelvin
    assert (torch.stack(squares).mean(0) / expected - 1).abs().max() < 0.01
    assert (torch.stack(speeds).mean(0) / kelvin - (1 - 0.6**2 / 4)).abs().max() < 0.01


def test_a_thermostat_holds_the_temperature():
    """d(rate)/dt = (T / target - 1) / τ^2: over a run the mean temperature is off by what the rate has gained, and that is
    bounded."""
    state, temperature_ratio = state_of(fluid(kelvin=90)), []
    nvt = NoseHooverChain(2.0, 40.0, 25.0, chain=1)
    go(state, nvt, 400, after=lambda: temperature_ratio.append(state.temperature().item() / 40.0))
    excess = np.mean(temperature_ratio) - 1
    assert abs(excess - nvt.chain.rates.item() * 25.0**2 / 800.0) < 3e-3
    assert abs(excess) < 0.05 and np.std(temperature_ratio) > 0.1


@pytest.mark.parametrize(("freedom", "start"), [(3e8, 2.0), (3e5, 10.0)])
def test_a_chain_survives_many_atoms_far_from_their_temperature(freedom, start):
    chain, temperature_ratio = Chain("damping", 100.0, 3, 1), torch.tensor([start], dtype=torch.float64)
    chain.start(temperature_ratio)
    for _ in range(1000):
        temperature_ratio = temperature_ratio * chain.advance(temperature_ratio, freedom, 1.0).square()
    assert 0.8 < temperature_ratio.item() < 1.1


def test_velocities_are_maxwells():
    n, kelvin = 30_000, torch.tensor([300.0, 50.0], dtype=torch.float64)
    batch, masses = torch.arange(2).repeat_interleave(n), torch.full((2 * n,), 39.948, dtype=torch.float64)
    v = maxwell_boltzmann(torch.arange(2 * n), masses, batch, kelvin, seed=1)
    for i, t in enumerate(kelvin):
        scaled = v[batch == i] * (masses[0] * units.fs**-2 / (units.kB * t)).sqrt()
        assert scaled.mean(0).abs().max() < 5 / n**0.5
        assert (scaled.square().mean(0) - 1).abs().max() < 5 * (2 / n) ** 0.5
        assert abs(scaled.pow(4).mean() - 3) < 5 * (96 / (3 * n)) ** 0.5
    assert not torch.equal(v, maxwell_boltzmann(torch.arange(2 * n), masses, batch, kelvin, seed=2))


def test_thermalized_systems_rest_as_a_whole_and_have_their_temperature():
    state = state_of(fluid(), fluid((1, 1, 1), seed=5))
    state.freedom = state.degrees_of_freedom(conserves_momentum=True)
    assert state.freedom.tolist() == [21.0, 9.0]
    assert state.degrees_of_freedom(conserves_momentum=False).tolist() == [24.0, 12.0]
    thermalize(state, torch.tensor([80.0, 30.0]), seed=3)
    assert (state.temperature() / torch.tensor([80.0, 30.0]) - 1).abs().max() < 1e-12
    assert state.total(state.masses[:, None] * state.velocities).abs().max() < 1e-12
    state.velocities += 1.0
    remove_drift(state)
    rescale(state, torch.tensor([5.0, 6.0]))
    assert state.total(state.masses[:, None] * state.velocities).abs().max() < 1e-12
    assert (state.temperature() / torch.tensor([5.0, 6.0]) - 1).abs().max() < 1e-12
    alone = crystal(1)
    thermalize(alone, 300.0, seed=0)
    assert alone.velocities.abs().max() == 0


# --- ranks


def own_of(state, comm):
    """This rank's atoms of a whole: two of three ranks have some, the third has none."""
    mine = state.ids % min(comm.size, 2) == comm.rank
    batch = replace(state.rows.with_row_fields(lambda _, rows: rows[mine]), config=DomainConfig(comm))
    whole = {name: getattr(state, name).clone() for name in ("energy", "freedom", "stress")}
    return State(AtomBuffers(batch.with_system_fields(torch.clone)), forces=state.forces[mine], **whole)


MAKERS = {
    "nve": lambda: NVE(2.0),
    "langevin": lambda: Langevin(2.0, torch.tensor([300.0, 50.0]), 0.01, seed=2),
    "nvt": lambda: NoseHooverChain(2.0, torch.tensor([300.0, 50.0]), 20.0),
    "npt": lambda: NPT(2.0, 300.0, torch.tensor([0.001, 0.002]), 20.0, 60.0),
    "npt full": lambda: NPT(2.0, 300.0, 0.001, 20.0, 60.0, "full"),
    "fire": lambda: FIRE(1e-3),
    "fire cell": lambda: FIRE(1e-3, "full", torch.tensor([-0.01, 0.01])),
}
REDUCTIONS = {"nve": 0, "langevin": 1, "nvt": 2, "npt": 2, "npt full": 2, "fire": 2, "fire cell": 2}


def quiet_springs(state):
    """Forces alone, with no reduction, so that only the integrator's are counted."""
    state.forces.copy_(-state.positions)


def warm_crystal():
    state = crystal(8, systems=2, kelvin=100.0)
    state.positions += 0.3 * normal(9, 0, state.ids)
    state.cell[1] += 0.5 * torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    springs(state)
    return state


@ranks(1, 2, 3)
def test_trajectories_do_not_depend_on_the_number_of_ranks(comm):
    """Each ensemble, a rank without atoms too; all ranks know the same, bit by bit; and no step waits for the device."""
    for name, make in MAKERS.items():
        whole, shared = warm_crystal(), own_of(warm_crystal(), comm)
        one, mine = make(), make()
        go(whole, one, 10, evaluate=springs)
        mine.start(shared)
        step(shared, mine, 8, evaluate=quiet_springs)
        with count_traffic(comm) as traffic:
            step(shared, mine, 2, evaluate=quiet_springs)
        springs(shared)
        assert traffic.reductions == 2 * REDUCTIONS[name] and traffic.host_syncs == 0, name
        for field in ("positions", "velocities"):
            assert len(shared.ids) == 0 or (getattr(shared, field) - getattr(whole, field)[shared.ids]).abs().max() < SAME, name
        assert (shared.cell - whole.cell).abs().max() < SAME
        assert (mine.conserved(shared) - one.conserved(whole)).abs().max() < SAME
        known = {"cell": shared.cell, "conserved": mine.conserved(shared), **mine.state_dict()}
        for theirs in comm.gather_objects(known):
            assert all(torch.equal(known[key], theirs[key]) for key in known), name


@ranks(2)
def test_velocities_do_not_depend_on_the_number_of_ranks(comm):
    whole, shared = crystal(9, systems=2, kelvin=120.0), own_of(crystal(9, systems=2), comm)
    thermalize(shared, 120.0, seed=0)
    assert shared.velocities.abs().max() > 0
    assert (shared.velocities - whole.velocities[shared.ids]).abs().max() < 1e-14


# --- batches, restarts


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "langevin"])
def test_every_system_of_a_batch_moves_as_if_it_were_alone(name):
    make = {
        "nvt": lambda t: NoseHooverChain(2.0, t, 25.0),
        "npt": lambda t: NPT(2.0, t, 0.002, 25.0, 150.0),
        "npt full": lambda t: NPT(2.0, t, 0.002, 25.0, 150.0, "full"),
    }.get(name, lambda t: MAKERS[name]())
    if name == "fire cell":
        make = lambda t: FIRE(1e-3, "full", 0.001)  # noqa: E731
    frames = [fluid((1, 1, 1)), fluid((2, 1, 1), seed=1, sheared=True), fluid((1, 1, 1), seed=2, kelvin=20)]
    kelvin = torch.tensor([60.0, 30.0, 90.0])
    batch = go(state_of(*frames), make(kelvin), 12)
    for i, frame in enumerate(frames):
        alone, mine = go(state_of(frame), make(kelvin[i].item()), 12), batch.batch == i
        assert (batch.positions[mine] - alone.positions).abs().max() < SAME
        assert (batch.velocities[mine] - alone.velocities).abs().max() < SAME
        assert (batch.cell[i] - alone.cell[0]).abs().max() < SAME


@pytest.mark.parametrize("cell", [None, "full"])
def test_a_relaxed_system_stands_still_while_others_go_on(cell):
    quick, slow = fluid((1, 1, 1)), fluid((1, 1, 1), seed=2)
    slow.rattle(0.3, seed=4)
    state, fire = state_of(quick, slow), FIRE(1e-2, cell, 0.001)
    fire.start(state)
    while not fire.converged(state)[0] and state.step < 200:
        step(state, fire, 1)
    assert fire.converged(state).tolist() == [True, False] and fire.converged(state, 1e9).all()
    before = state.positions.clone(), state.cell.clone()
    step(state, fire, 5)
    assert torch.equal(state.positions[:4], before[0][:4]) and torch.equal(state.cell[0], before[1][0])
    assert (state.positions[4:] - before[0][4:]).abs().max() > 1e-4


@pytest.mark.parametrize("name", MAKERS)
def test_a_restart_goes_on_bit_by_bit(name):
    straight = go(warm_crystal(), MAKERS[name](), 20, evaluate=springs)
    state, first = warm_crystal(), MAKERS[name]()
    go(state, first, 10, evaluate=springs)
    saved, second = first.state_dict(), MAKERS[name]()
    step(own_of(state, Comm()), first, 3, evaluate=springs)
    second.load_state_dict(saved)
    step(state, second, 10, evaluate=springs)
    assert torch.equal(state.positions, straight.positions) and torch.equal(state.velocities, straight.velocities)
    assert torch.equal(state.cell, straight.cell)
    assert state.step == straight.step == 20


# --- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NVE(0.0), "timestep is 0.0 fs"),
        (lambda: NVE(float("nan")), "timestep is nan fs"),
        (lambda: Langevin(1.0, -5.0, 0.01), "temperature is -5.0 K"),
        (lambda: Langevin(1.0, 300.0, -0.01), "friction is -0.01 1/fs"),
        (lambda: Langevin(1.0, torch.tensor([300.0, torch.inf]), 0.01), "inf"),
        (lambda: Langevin(1.0, torch.ones(2, 2), 0.01), r"shape \(2, 2\)"),
        (lambda: NoseHooverChain(1.0, 300.0, 0.0), "damping is 0.0 fs"),
        (lambda: NoseHooverChain(1.0, 300.0, 100.0, chain=0), "chain is 0"),
        (lambda: NoseHooverChain(1.0, 300.0, 100.0, loops=1.5), "loops is 1.5"),
        (lambda: NPT(1.0, 300.0, float("nan")), "pressure is nan eV/Å"),
        (lambda: NPT(1.0, 300.0, 0.0, shape="orthorhombic"), "'isotropic', 'full'"),
        (lambda: NPT(1.0, 300.0, 0.0, pressure_damping=-1.0), "pressure_damping is -1.0 fs"),
        (lambda: FIRE(0.0), "fmax is 0.0"),
        (lambda: FIRE(0.05, cell="hexagonal"), "None, 'isotropic', 'full'"),
        (lambda: FIREParameters(timestep_shrink=1.5), "timestep_shrink is 1.5"),
        (lambda: FIREParameters(max_step=-0.2), "max_step is -0.2"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [lambda: NPT(1.0, 300.0), lambda: FIRE(cell="full")], ids=["npt", "fire"])
def test_a_cell_without_a_volume_cannot_move(make):
    slab = fluid()
    slab.pbc = [True, True, False]
    with pytest.raises(InputError, match=r"system 1 has pbc \[True, True, False\]"):
        make().start(state_of(fluid(), slab))
    state = state_of(fluid())
    state.stress = None
    with pytest.raises(InputError, match="needs the stress"):
        make().start(state)


def test_as_many_temperatures_as_systems():
    state = state_of(fluid(), fluid())
    with pytest.raises(ValueError, match="3 values for 2 systems"):
        go(state, Langevin(1.0, torch.tensor([1.0, 2.0, 3.0]), 0.01), 1)
