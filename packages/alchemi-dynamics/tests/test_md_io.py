"""Trajectories, checkpoints and reports."""

import csv
import gc
import json
import pickle
import resource
import signal
import time

import ase.io
import numpy as np
import pytest
import torch
import zarr
from ase.build import bulk
from ase.units import GPa, fs

from alchemi_domain import Batch, DistributedModel, ShardedBatch
from alchemi_domain.domain import Domain
from alchemi_dynamics import NPT, NVE, Langevin, NoseHooverChain, Simulation, thermalize
from alchemi_dynamics.background import Background
from alchemi_dynamics.checkpoint import Checkpoint, load_checkpoint
from alchemi_dynamics.report import Thermo
from alchemi_dynamics.settings import MDSettings, RelaxSettings
from alchemi_dynamics.snapshot import Static, snapshot
from alchemi_dynamics.writers import TrajectoryWriter, XyzFile
from alchemi_dynamics.zarr_writer import ZarrWriter
from alchemi_models_classical import LennardJones
from alchemi_shardtensor import Comm, DomainConfig
from alchemi_shardtensor.testing import ranks
from alchemi_spec import InputError

EXACT = 1e-12
DECIMALS = 2e-10
"""Ten decimals are written, and the last may be rounded the other way."""
AHEAD = 1e-9
"""Å, after tens of steps from states that differ by round-off."""

# --- hot argon that crosses walls and outruns its lists within ten steps


def argon(size=(2, 2, 2), shift=0.0):
    atoms = bulk("Ar", a=5.3, cubic=True) * size
    atoms.rattle(0.05, seed=0)
    atoms.positions += shift
    return atoms


def prepared(comm, integrator, hooks=(), frames=None, fields=None, kelvin=300.0):
    """Every rank calls it; atoms are at `kelvin`."""
    whole = Batch.from_ase(argon() if frames is None else frames)
    whole = whole if fields is None else fields(whole)
    batch = ShardedBatch.scatter(whole if comm.rank == 0 else None, DomainConfig(comm))
    simulation = started(comm, batch, integrator, hooks)
    thermalize(simulation.state, kelvin, seed=1)
    return simulation


def started(comm, batch, integrator, hooks=()):
    return Simulation(Domain(DistributedModel(LennardJones(cutoff=6.0), batch.config), batch, skin=0.3), integrator, hooks)


def integrator(name):
    made = {
        "nve": lambda: NVE(4.0),
        "langevin": lambda: Langevin(4.0, 300.0, friction=0.02, seed=3),
        "nvt": lambda: NoseHooverChain(4.0, 300.0),
        "npt": lambda: NPT(4.0, 300.0, 0.1 * GPa, shape="full"),
    }
    return made[name]()


class Keep:
    """What was, on every rank."""

    def __init__(self, every=5):
        self.every, self.frames = every, {}

    def __call__(self, simulation):
        state, gather = simulation.state, simulation.domain.batch.gather
        whole = {name: gather(getattr(state, name)).numpy() for name in ("positions", "velocities", "forces")}
        stress = None if state.stress is None else state.stress[0].clone().numpy()
        self.frames[state.step] = {
            **whole,
            "energy": state.energy.item(),
            "cell": state.cell[0].clone().numpy(),
            "stress": stress,
        }


def writer(path, every=5, after=None):
    if path.suffix == ".zarr":
        return ZarrWriter(path, every, after, dtype="float64")
    return TrajectoryWriter(path, every, after)


def read(path):
    """{step: frame} of a trajectory of any format, and a check that no step is there twice."""
    frames = read_zarr(path) if path.suffix == ".zarr" else [read_ase(atoms) for atoms in ase.io.read(path, ":")]
    steps = [step for step, _ in frames]
    assert steps == sorted(set(steps))
    return dict(frames)


def read_ase(atoms):
    assert np.isclose(atoms.info["time"], 4.0 * atoms.info["step"])
    results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces(), "stress": None}
    if "stress" in atoms.calc.results:
        results["stress"] = atoms.get_stress(voigt=False)
    velocities = atoms.get_velocities() * fs
    return int(atoms.info["step"]), {
        "positions": atoms.positions,
        "velocities": velocities,
        "cell": atoms.cell.array,
        **results,
    }


def read_zarr(path):
    group = zarr.open_group(path, mode="r")
    names = [name for name in ("positions", "velocities", "forces", "energy", "cell", "stress") if name in group]
    steps = group["step"][:]
    assert min(group[name].shape[0] for name in (*names, "time")) >= len(steps)
    first = {"energy", "cell", "stress"}
    return [
        (int(step), {"stress": None} | {name: group[name][i, 0] if name in first else group[name][i] for name in names})
        for i, step in enumerate(steps)
    ]


def rows_of(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def assert_same(one, other, tolerance):
    assert one.keys() == other.keys()
    for step in one:
        for name in ("positions", "velocities", "forces", "energy", "cell", "stress"):
            a, b = one[step][name], other[step][name]
            assert (a is None) == (b is None), name
            if a is not None:
                np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=f"{name} of step {step}")


# --- trajectories


@pytest.mark.parametrize("name", ["out.extxyz", "out.traj", "out.zarr"])
@ranks(1, 2, 3)
def test_a_trajectory_is_what_was_on_any_number_of_ranks(comm, tmp_path, name):
    path, keep, alone = tmp_path / name, Keep(), Keep()
    with writer(path) as hook:
        simulation = prepared(comm, integrator("npt"), [keep, hook])
        simulation.run(20)
    assert simulation.rebuilds > 0
    if comm.rank == 0:
        tolerance = DECIMALS if path.suffix == ".extxyz" else EXACT
        assert_same(read(path), keep.frames, tolerance)
        assert keep.frames.keys() == {0, 5, 10, 15, 20}
        with writer(tmp_path / f"alone.{name}") as hook:
            prepared(Comm(), integrator("npt"), [alone, hook]).run(20)
        assert_same(read(path), read(tmp_path / f"alone.{name}"), DECIMALS)


@ranks(2)
def test_a_reader_of_a_running_zarr_sees_complete_frames(comm, tmp_path):
    keep, seen = Keep(), []

    def look(simulation):
        if comm.rank == 0:
            seen.append(read(tmp_path / "out.zarr"))

    look.every = 5

    class Slow(ZarrWriter):
        def _write(self, *arguments):
            time.sleep(0.1 * comm.rank)
            super()._write(*arguments)

    with Slow(tmp_path / "out.zarr", 5, dtype="float64") as hook:
        prepared(comm, NVE(4.0), [keep, hook, look]).run(30)
    if comm.rank == 0:
        for frames in seen:
            assert_same(frames, {step: keep.frames[step] for step in frames}, EXACT)
        assert 2 <= len(seen[-1]) < 7  # two wait, one is being written, one is written and not visible
        assert zarr.open_group(tmp_path / "out.zarr")["positions"].chunks == (1, 16, 3)
        np.testing.assert_array_equal(zarr.open_group(tmp_path / "out.zarr")["numbers"][:], 18)
        assert_same(read(tmp_path / "out.zarr"), keep.frames, EXACT)


@ranks(2)
def test_float32_is_the_default_of_zarr_and_halves_it(comm, tmp_path):
    keep = Keep()
    with ZarrWriter(tmp_path / "out.zarr", every=5) as hook:
        prepared(comm, NVE(4.0), [keep, hook]).run(5)
    group = zarr.open_group(tmp_path / "out.zarr", mode="r")
    assert group["positions"].dtype == np.float32 and group["energy"].dtype == np.float64
    np.testing.assert_allclose(group["positions"][1], keep.frames[5]["positions"], atol=1e-6)


@ranks(2)
def test_each_of_several_systems_has_its_file(comm, tmp_path):
    frames, keep = [argon(), argon((1, 1, 2), 0.5)], Keep()
    frames[1].info["charge"] = 1.0
    with writer(tmp_path / "out.extxyz") as hook:
        prepared(comm, NVE(4.0), [hook], frames).run(5)
    if comm.rank == 0:
        first, second = (ase.io.read(tmp_path / f"out.{i}.extxyz", ":") for i in range(2))
        assert [len(a) for a in first + second] == [32, 32, 8, 8]
        assert second[1].info["charge"] == 1.0 and first[1].info["charge"] == 0.0
        assert not np.allclose(second[1].positions, frames[1].positions) and not keep.frames


def test_masses_that_are_not_the_elements_are_written(tmp_path):
    isotopes = torch.full((32,), 36.0, dtype=torch.float64)
    batch = ShardedBatch.scatter(Batch.from_ase(argon())).with_extra_fields(masses=isotopes)
    with writer(tmp_path / "out.extxyz") as hook:
        simulation = started(Comm(), batch, NVE(4.0), [hook])
        thermalize(simulation.state, 300.0, seed=1)
        simulation.start()
    atoms = ase.io.read(tmp_path / "out.extxyz")
    assert (atoms.get_masses() == 36.0).all()
    np.testing.assert_allclose(atoms.get_velocities() * fs, simulation.state.velocities.numpy(), atol=DECIMALS)


def test_another_suffix_is_refused():
    with pytest.raises(InputError, match=r"none of .extxyz, .xyz, .traj or .zarr"):
        TrajectoryWriter("out.dcd")
    with pytest.raises(InputError, match="ends in .zarr"):
        ZarrWriter("out.extxyz")


# --- failures


@ranks(1, 3)
def test_an_error_of_the_thread_reaches_every_rank(comm, tmp_path):
    path = tmp_path / "full.extxyz"
    if comm.rank == 0:
        path.symlink_to("/dev/full")
    simulation = prepared(comm, NVE(4.0), [TrajectoryWriter(path, every=1)])
    with pytest.raises(OSError, match="No space left") as raised:
        simulation.run(20)
    assert len(set(comm.gather_objects(str(raised.value)))) == 1
    assert len(set(comm.gather_objects(simulation.state.step))) == 1


@pytest.mark.parametrize("name", ["out.extxyz", "out.traj", "out.zarr"])
@ranks(2)
def test_a_path_that_cannot_be_written_is_an_error_before_the_first_step(comm, tmp_path, name):
    (tmp_path / "file").touch()
    hook = writer(tmp_path / "file" / name)
    simulation = prepared(comm, NVE(4.0), [hook])
    with pytest.raises(OSError):
        simulation.run(20)
    assert simulation.state.step == 0
    hook.close()


@ranks(2)
def test_an_error_at_the_last_frame_is_raised_on_closing(comm, tmp_path):
    path = tmp_path / "full.extxyz"
    if comm.rank == 0:
        path.symlink_to("/dev/full")
    hook = TrajectoryWriter(path, every=10)
    prepared(comm, NVE(4.0), [hook]).start()
    with pytest.raises(OSError, match="No space left"):
        hook.close()


@pytest.mark.parametrize("name", ["out.extxyz", "out.traj"])
@ranks(2)
def test_a_run_that_fails_leaves_whole_frames(comm, tmp_path, name):
    keep = Keep()

    def fail(simulation):
        if simulation.state.step == 12:
            raise RuntimeError("enough")

    fail.every = 4
    with pytest.raises(RuntimeError, match="enough"), writer(tmp_path / name) as hook:
        prepared(comm, NVE(4.0), [keep, hook, fail]).run(20)
    if comm.rank == 0:
        assert_same(read(tmp_path / name), keep.frames, DECIMALS)
        assert keep.frames.keys() == {0, 5, 10}


def test_an_interrupt_leaves_whole_frames(tmp_path):
    def interrupt(simulation):
        if simulation.state.step == 12:
            raise KeyboardInterrupt

    interrupt.every = 4
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "out.extxyz") as hook:
        prepared(Comm(), NVE(4.0), [hook, interrupt]).run(20)
    assert read(tmp_path / "out.extxyz").keys() == {0, 5, 10}


def test_half_a_frame_is_rolled_back(tmp_path):
    simulation = prepared(Comm(), NVE(4.0))
    simulation.start()
    (frame,) = snapshot(simulation, Static.gathered(simulation.domain.batch))()
    file = XyzFile(tmp_path / "out.extxyz", None)
    file.write(frame)
    size = (tmp_path / "out.extxyz").stat().st_size
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 5 // 2, before[1]))
        file.write(frame)
        with pytest.raises(OSError, match="too large"):
            file.write(frame)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert (tmp_path / "out.extxyz").stat().st_size == 2 * size
    file.close()


def test_the_thread_runs_its_tasks_in_order_until_one_fails():
    done, thread = [], Background()
    for i in range(5):
        thread.put(lambda i=i: done.append(10 // (3 - i)))
    thread.finish()
    assert done == [3, 5, 10] and thread.done == 3 and isinstance(thread.error, ZeroDivisionError)
    forgotten = Background()
    forgotten.put(lambda: done.append("kept"))
    del forgotten
    gc.collect()
    assert done[-1] == "kept"


# --- checkpoints


@pytest.mark.parametrize(
    ("ensemble", "name"),
    [("langevin", "out.extxyz"), ("langevin", "out.traj"), ("npt", "out.traj"), ("nvt", "out.zarr"), ("npt", "out.zarr")],
)
@ranks(3)
def test_a_restart_on_other_ranks_continues_the_same_trajectory(comm, tmp_path, ensemble, name):
    """Twelve steps on one rank, of which three are lost, go on on three; and the other way round; beside a run of one piece."""
    alone, together = (comm, Comm()) if ensemble == "npt" else (Comm(), comm)
    path, keep = tmp_path / name, Keep(3)
    if comm.rank == 0 or alone is comm:
        first = [writer(path, 3), Thermo(3, tmp_path / "log.csv"), Checkpoint(tmp_path / "check", 9)]
        prepared(alone, integrator(ensemble), first).run(12)
        first[0].close()
        first[1].close()
    comm.agree(None)
    if comm.rank == 0 or together is comm:
        batch, step, saved, _ = load_checkpoint(tmp_path / "check", DomainConfig(together))
        assert step == 9
        with writer(path, 3, after=step) as hook, Thermo(3, tmp_path / "log.csv", after=step) as thermo:
            simulation = started(together, batch, integrator(ensemble), [hook, thermo])
            simulation.resume(step, saved)
            simulation.run(21)
    if comm.rank == 0:
        prepared(Comm(), integrator(ensemble), [keep]).run(30)
        assert_same(read(path), keep.frames, AHEAD)
        rows = rows_of(tmp_path / "log.csv")
        assert [int(row["step"]) for row in rows] == sorted(keep.frames) == list(range(0, 31, 3))


@pytest.mark.parametrize("name", ["out.extxyz", "out.traj", "out.zarr"])
def test_frames_are_cut_wherever_the_checkpoint_was(tmp_path, name):
    path = tmp_path / name
    for after, last in ((None, 50), (33, 40), (0, 3), (None, 2), (-1, 1)):  # .traj has 42 frames to a table
        simulation = prepared(Comm(), NVE(1.0), frames=bulk("Ar", a=5.3, cubic=True))
        kept = [] if after is None else list(range(after + 1))
        with writer(path, 1, after) as hook:
            simulation.state.step = max(after or 0, 0)
            simulation.hooks.append(hook)
            if after is not None and after >= 0:
                simulation.resume(after, {})
            simulation.run(last - simulation.state.step)
        group = zarr.open_group(path, mode="r") if path.suffix == ".zarr" else None
        steps = group["step"][:] if group is not None else [a.info["step"] for a in ase.io.read(path, ":")]
        assert list(steps) == kept + [s for s in range(last + 1) if s not in kept], (after, last)


def test_half_a_frame_and_frames_of_others_at_a_restart(tmp_path):
    path = tmp_path / "out.extxyz"
    with writer(path) as hook:
        prepared(Comm(), NVE(4.0), [hook]).run(5)
    text = path.read_text()
    path.write_text(text + text[: len(text) // 4])
    XyzFile(path, after=5).close()
    assert path.read_text() == text
    ase.io.write(path, argon())
    with pytest.raises(InputError, match="says no step"):
        XyzFile(path, after=5)


@ranks(2)
def test_a_torn_checkpoint_leaves_the_one_before(comm, tmp_path):
    class Torn(Checkpoint):
        def _swap(self, folder, simulation):
            assert len(list(folder.iterdir())) == 3
            raise OSError("the plug was pulled")

    path, keep = tmp_path / "check", Keep()
    simulation = prepared(comm, NVE(4.0), [keep, Checkpoint(path, 5)])
    simulation.run(5)
    with pytest.raises(OSError, match="plug"):
        Torn(path, 5).write(simulation)
    batch, step, _, _ = load_checkpoint(path, DomainConfig(comm))
    assert step == 5
    np.testing.assert_array_equal(batch.gather(batch.positions), keep.frames[5]["positions"])
    np.testing.assert_array_equal(batch.gather(batch.extra_fields["velocities"]), keep.frames[5]["velocities"])
    comm.agree(None)
    assert len(list(path.glob("step-*"))) == 2
    comm.agree(None)
    simulation.run(5)
    assert [p.name.split("-")[1] for p in path.glob("step-*")] == ["10"]


def with_fields(whole):
    n = torch.arange(32)
    per_atom = {
        "tag": n.to(torch.int8),
        "hidden": torch.stack([n / 3, n / 7], 1).to(torch.bfloat16),
        "fixed": n % 3 == 0,
        "phase": torch.polar(torch.ones(32), n.float()),
    }
    per_system = {"charge": torch.tensor([2.0]), "spin": torch.tensor([3]), "name": torch.tensor([[7, 8]], dtype=torch.int16)}
    return Batch(whole.positions, whole.atomic_numbers, whole.batch, whole.cell, whole.pbc, per_atom, per_system)


@ranks(2)
def test_every_field_survives_in_its_dtype(comm, tmp_path):
    hooks = [Checkpoint(tmp_path / "check", 20, {"note": "mine"})]
    simulation = prepared(comm, integrator("nvt"), hooks, fields=with_fields)
    simulation.run(20)
    comm.agree(None)
    batch, step, saved, index = load_checkpoint(tmp_path / "check")  # each rank alone
    expected = with_fields(Batch.from_ase(argon()))
    assert step == 20 and index["settings"] == {"note": "mine"}
    for before, after in ((expected.per_atom, batch.per_atom), (expected.per_system, batch.per_system)):
        assert before.keys() == after.keys()
        assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(batch.ids, torch.arange(32)) and batch.extra_fields.keys() == {"velocities", "masses"}
    now = simulation.integrator.state_dict()
    assert saved.keys() == now.keys() and all(torch.equal(saved[name], now[name]) for name in saved)


def test_more_ranks_than_wrote_or_fewer_atoms_than_ranks(rank_pool, tmp_path):
    simulation = prepared(Comm(), NVE(1.0), [Checkpoint(tmp_path / "check", 1)], frames=bulk("Ar", a=5.3))
    simulation.run(1)
    counts = rank_pool(3).run(owned_of, tmp_path / "check", ranks=3)
    assert sorted(counts) == [0, 0, 1]


def owned_of(comm, path):
    return len(load_checkpoint(path, DomainConfig(comm))[0].ids)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    (tmp_path / "file").write_text("something else")
    with pytest.raises(InputError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    with pytest.raises(InputError, match="is no checkpoint: give"):
        prepared(Comm(), NVE(4.0), [Checkpoint(tmp_path, 1)]).run(1)
    prepared(Comm(), NVE(4.0), [Checkpoint(tmp_path / "new" / "check", 1)]).run(1)
    (part,) = (tmp_path / "new" / "check").glob("*/atoms.00000.pt")
    part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(InputError, match="damaged"):
        load_checkpoint(tmp_path / "new" / "check")


# --- reports


@ranks(1, 3)
def test_reports_are_the_same_on_every_rank_and_ases(comm, tmp_path):
    with Thermo(5, tmp_path / "log.csv") as thermo, writer(tmp_path / "out.traj") as hook:
        prepared(comm, integrator("npt"), [thermo, hook]).run(10)
    assert len(set(map(str, comm.gather_objects(thermo.reports)))) == 1
    if comm.rank == 0:
        for report, atoms in zip(thermo.reports, ase.io.read(tmp_path / "out.traj", ":"), strict=True):
            assert report.time == pytest.approx(atoms.info["time"] / 1000)
            assert report.kinetic == pytest.approx(atoms.get_kinetic_energy())
            assert report.total == pytest.approx(atoms.get_total_energy())
            assert report.temperature * (3 * 32 - 3) == pytest.approx(atoms.get_temperature() * 3 * 32)
            assert report.pressure * GPa == pytest.approx(-atoms.get_stress(include_ideal_gas=True)[:3].mean())
            assert report.volume == pytest.approx(atoms.get_volume())
            assert report.max_force == pytest.approx(np.linalg.norm(atoms.get_forces(), axis=1).max())
        last = thermo.reports[-1]
        assert thermo.reports[0].drift == 0 and 0 < abs(last.drift) < 1e-4
        assert last.ns_per_day == pytest.approx(last.steps_per_s * 4.0 * 86400e-6)
        row = rows_of(tmp_path / "log.csv")[-1]
        assert float(row["pressure"]) == last.pressure and int(row["step"]) == 10


def test_quantities_that_are_not_available_are_none():
    thermo, free = Thermo(1), argon((1, 1, 1))
    free.pbc = False
    prepared(Comm(), NVE(1.0), [thermo], frames=free).start()
    (report,) = thermo.reports
    assert report.pressure is report.volume is report.steps_per_s is None


def test_settings_are_refused_when_they_are_made():
    with pytest.raises(InputError, match="nothing is called 'grid'.*halo, halo-grid"):
        RelaxSettings(file="a.xyz", model="lj", strategy="grid")
    with pytest.raises(InputError, match="steps is 0"):
        MDSettings(file="a.xyz", model="lj", steps=0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stress": "False"}, "stress is 'False': it should be a valid boolean"),
        ({"stress": 0}, "stress is 0: it should be a valid boolean"),
        ({"steps": "10"}, "steps is '10': it should be a valid integer"),
        ({"steps": True}, "steps is True"),
        ({"timestep": "1"}, "timestep is '1' fs: it should be a valid number"),
        ({"temperature": float("nan")}, "temperature is nan K"),
        ({"skin": -1}, "skin is -1 Å"),
        ({"dtype": "float16"}, "dtype is 'float16': it should be 'float32' or 'float64'"),
        ({"compile": "fast"}, "compile is 'fast'"),
        ({"ensemble": "nph"}, "ensemble is 'nph'.*'langevin', 'npt', 'nve', 'nvt'"),
        ({"ensemble": "nvt"}, "needs a temperature"),
        ({"tempo": 3}, "there is no setting tempo"),
        ({"seed": "1", "index": 1.5}, "index is 1.5.*seed is '1'"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(given, message):
    with pytest.raises(InputError, match=message):
        MDSettings(file="a.xyz", **given)


def test_a_setting_that_is_missing_is_named():
    with pytest.raises(InputError, match="the setting file is missing"):
        RelaxSettings(model="lj")


def test_settings_are_values_that_survive_json_and_pickling():
    settings = MDSettings(file="a.xyz", model="lj", ensemble="npt", temperature=300, out="a.extxyz")
    assert pickle.loads(pickle.dumps(settings)) == settings == MDSettings(**json.loads(settings.model_dump_json()))
    assert isinstance(settings.integrator(), NPT) and settings.integrator().pressure.values == 0
