"""The commands `md` and `relax` as a person uses them."""

import csv
import json

import ase.io
import numpy as np
import pytest
import typer
from ase import optimize
from ase.build import bulk
from ase.calculators.calculator import Calculator, all_changes
from ase.filters import FrechetCellFilter
from ase.stress import full_3x3_to_voigt_6_stress
from typer.testing import CliRunner

from alchemi_dist import Batch, DistributedModel, LennardJones, ShardedBatch
from alchemi_dist.cli import app
from alchemi_dist.cli.md import md_command
from alchemi_dist.cli.options import command
from alchemi_domain.evaluate import EvaluateSettings
from alchemi_domain.settings import Argument, option_of
from alchemi_dynamics.settings import MDSettings, RelaxSettings

EXACT = 1e-12


def argon():
    """Hot argon that crosses walls and outruns its lists within ten steps."""
    atoms = bulk("Ar", a=5.3, cubic=True) * (2, 2, 2)
    atoms.rattle(0.05, seed=0)
    return atoms


def call(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ase.io.write(tmp_path / "argon.extxyz", argon())
    return tmp_path / "argon.extxyz"


def test_md_on_two_ranks_and_on_from_its_checkpoint(file, tmp_path):
    run = ["md", "--model", "lj", "--ensemble", "langevin", "--temperature", 200, "--timestep", 4, "--every", 10, "--skin", 0.3]
    common = [*run, "--traj", "out.extxyz", "--log", "log.csv", "--checkpoint", "check", "--checkpoint-every", 20]
    call(*common, file, "--ranks", 2, "--steps", 30, "--json", "first.json")
    index = json.loads((tmp_path / "check" / "checkpoint.json").read_text())
    assert index["step"] == 30 and index["settings"]["ensemble"] == "langevin"
    output = call(*common, "--restart", "check", "--steps", 45, "--out", "last.extxyz", "--seed", 1).output
    assert "seed: 0 -> 1" in output and "steps 30 to 45" in output and "step 45: " in output
    steps = [atoms.info["step"] for atoms in ase.io.read("out.extxyz", ":")]
    assert steps == [0, 10, 20, 30, 40]
    assert [row["step"] for row in csv.DictReader((tmp_path / "log.csv").read_text().splitlines())] == [
        str(s) for s in (*steps, 45)
    ]
    report = json.loads((tmp_path / "first.json").read_text())
    assert [r["step"] for r in report["reports"]] == [0, 10, 20, 30] and report["settings"]["timestep"] == 4
    assert report["reports"][0]["temperature"] == pytest.approx(200 * 96 / (96 - 0), rel=0.1)
    last = ase.io.read("last.extxyz")
    assert last.info["step"] == 45 and np.abs(last.get_momenta()).max() > 0
    assert "is at step 45" in call(*common, "--restart", "check", "--steps", 45, code=2).output
    other = call("md", "--model", "lj", "--restart", "check", "--steps", 50, code=2).output
    assert "is of the ensemble langevin" in other
    assert not list(tmp_path.glob("*partial*"))


def test_velocities_of_the_file_are_kept_and_drawn_where_it_has_none(file, tmp_path):
    call("md", file, "--model", "lj", "--steps", 1, "--temperature", 50, "--every", 1, "--traj", "drawn.traj")
    drawn = ase.io.read("drawn.traj", 0)
    assert drawn.get_temperature() * 96 / 93 == pytest.approx(50)
    call(
        "md",
        "drawn.traj",
        "--index",
        0,
        "--model",
        "lj",
        "--steps",
        1,
        "--temperature",
        90,
        "--every",
        1,
        "--traj",
        "kept.traj",
    )
    np.testing.assert_allclose(ase.io.read("kept.traj", 0).get_momenta(), drawn.get_momenta(), atol=EXACT)


class Ours(Calculator):
    implemented_properties = ["energy", "free_energy", "forces", "stress"]

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        super().calculate(atoms, properties, system_changes)
        results = DistributedModel(LennardJones())(ShardedBatch.scatter(Batch.from_ase(atoms)))
        energy = results["energy"].item()
        stress = full_3x3_to_voigt_6_stress(results["stress"][0].numpy())
        self.results = {"energy": energy, "free_energy": energy, "forces": results["forces"].numpy(), "stress": stress}


@pytest.mark.parametrize("cell", ["none", "full"])
def test_relax_goes_where_ases_fire_goes(file, tmp_path, cell):
    options = ["--fmax", 1e-3, "--cell", cell, "--ranks", 1 + (cell == "full"), "--out", "out.traj", "--json", "-"]
    done = json.loads(call("relax", file, "--model", "lj", *options, "--traj", "way.extxyz").stdout)
    atoms = argon()
    atoms.calc = Ours()
    optimizer = optimize.FIRE(FrechetCellFilter(atoms) if cell == "full" else atoms, logfile=None)
    optimizer.run(fmax=1e-3, steps=1000)
    relaxed = ase.io.read("out.traj")
    assert done["converged"] and done["step"] == optimizer.nsteps
    assert relaxed.get_potential_energy() == pytest.approx(atoms.get_potential_energy(), abs=1e-9)
    np.testing.assert_allclose(relaxed.cell.array, atoms.cell.array, atol=1e-7)
    way = ase.io.read("way.extxyz", ":")
    assert way[-1].info["step"] == done["step"] and not way[-1].has("momenta") and "time" not in way[-1].info


def test_relax_that_does_not_get_there_exits_with_1(file):
    assert "not converged" in call("relax", file, "--model", "lj", "--fmax", 1e-6, "--steps", 3, code=1).output


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["md", "nowhere.extxyz"], "ASE cannot read nowhere.extxyz"),
        (["md"], "there is nothing to start from"),
        (["md", "argon.extxyz", "--ensemble", "nvt"], "needs a temperature"),
        (["md", "argon.extxyz", "--timestep", "-1"], "timestep is -1.0 fs"),
        (["md", "argon.extxyz", "--temperature", "-1"], "temperature is -1.0 K"),
        (["md", "argon.extxyz", "--traj", "out.dcd"], "gives its format"),
        (["md", "argon.extxyz", "--out", "nowhere/out.extxyz"], "there is no folder nowhere"),
        (["md", "argon.extxyz", "--out", "out.unknown"], "ASE cannot write"),
        (["md", "argon.extxyz", "--traj", "nowhere/out.extxyz"], "No such file"),
        (["md", "--restart", "argon.extxyz"], "is not a checkpoint"),
        (["relax", "argon.extxyz", "--fmax", "0"], "fmax is 0.0 eV/Å"),
        (["relax", "argon.extxyz", "--skin", "-1"], "skin is -1.0 Å"),
    ],
)
def test_bad_input_is_one_message_and_exits_with_2(file, arguments, output):
    assert output in call(*arguments, "--model", "lj", code=2).output


def test_bad_input_on_two_ranks_exits_with_2(file):
    free = argon()
    free.pbc = False
    ase.io.write("free.extxyz", free)
    output = call("md", "free.extxyz", "--model", "lj", "--ensemble", "npt", "--temperature", 20, "--ranks", 2, code=2).output
    assert "NPT changes the cell" in output


def test_an_ensemble_of_another_package_reaches_the_command_line(file, tmp_path, monkeypatch):
    (tmp_path / "theirs.py").write_text(
        "from alchemi_dist import NVE\n\ndef halved(settings):\n    return NVE(settings.timestep / 2)\n"
    )
    metadata = tmp_path / "theirs-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[alchemi.ensembles]\nhalved = theirs:halved\n")
    monkeypatch.syspath_prepend(tmp_path)
    app = typer.Typer()
    app.command()(command(md_command.__wrapped__))
    assert "halved" in CliRunner().invoke(app, ["--help"]).output
    options = ["--model", "lj", "--ensemble", "halved", "--timestep", "4", "--steps", "5", "--json", "out.json"]
    result = CliRunner().invoke(app, [str(file), *options])
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out.json").read_text())["reports"][-1]["time"] == pytest.approx(0.01)


@pytest.mark.parametrize(("verb", "kind"), [("md", MDSettings), ("relax", RelaxSettings), ("evaluate", EvaluateSettings)])
def test_every_setting_is_an_option_with_its_unit_and_default(verb, kind, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(call(verb, "--help").output.replace("│", " ").split())
    for name, field in kind.model_fields.items():
        option = option_of(kind, name)
        assert f"--{name.replace('_', '-')} " in shown or isinstance(option, Argument)
        assert " ".join(option.help.split()) in shown
        assert field.is_required() or field.default in (None, False) or f"[default: {field.default}]" in shown
