"""The command line as a person and as a program use it."""

import json
import subprocess
import sys

import ase.io
import numpy as np
import pytest
from test_evaluation import write_frames
from typer.testing import CliRunner

import alchemi_dist.cli
from alchemi_dist.cli import app


@pytest.fixture
def frames(tmp_path):
    return write_frames(tmp_path / "argon.extxyz")


def call(*arguments, code=0):
    result = CliRunner().invoke(app, ["evaluate", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_several_frames_on_two_ranks_as_json_and_extxyz(frames, tmp_path):
    file, out, report = tmp_path / "argon.extxyz", tmp_path / "out.extxyz", tmp_path / "report.json"
    result = call(file, "--model", "lj", "--ranks", 2, "--check", "--out", out, "--json", report)
    assert "passed" in result.output and "rank 1: 16 atoms" in result.output
    found, written = json.loads(report.read_text()), ase.io.read(out, ":")
    assert found["n_atoms"] == [32, 32, 32, 2] and found["model"] == "lj"
    assert [len(s) if s else s for s in found["stress"]] == [6, 6, 6, None]
    assert found["stress_reason"] == [None, None, None, "it is not periodic"]
    assert all(sum(r["owned"]) == n for r, n in zip(found["ranks"], found["n_atoms"], strict=True))
    assert found["parity"].keys() == {"energy", "forces", "stress"} and max(found["parity"].values()) < 1e-9
    for before, after, energy, force in zip(frames, written, found["energy"], found["max_force"], strict=True):
        np.testing.assert_allclose(after.positions, before.positions, atol=1e-7)
        assert after.get_potential_energy() == pytest.approx(energy)
        assert np.linalg.norm(after.get_forces(), axis=1).max() == pytest.approx(force, abs=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["argon.extxyz", "out.extxyz", "report.json"]


def test_json_alone_on_standard_output(frames, tmp_path):
    result = call(tmp_path / "argon.extxyz", "--index", "-1", "--model", "lj", "--dtype", "float32", "--json", "-")
    assert json.loads(result.stdout)["n_atoms"] == [2]
    assert "float32" in result.stderr


def test_a_gap_over_the_tolerance_exits_with_1(frames, tmp_path, monkeypatch):
    def gaps(model, whole, results):
        return {"energy": 1e-3, "forces": 0.0}

    monkeypatch.setattr(sys.modules["alchemi_domain.evaluate"], "_parity", gaps)
    result = call(tmp_path / "argon.extxyz", "--model", "lj", "--check", code=1)
    assert "FAILED" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.xyz"], "ASE cannot read nowhere.xyz"),
        (["argon.extxyz", "--index", "7"], "ASE cannot read"),
        (["argon.extxyz", "--model", "argon"], "there is no model 'argon'"),
        (["argon.extxyz", "--model", "lj", "--device", "cuda", "--ranks", "2"], "no CUDA device"),
    ],
)
def test_bad_input_is_one_line_and_exits_with_2(frames, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in call(*arguments, code=2).output


def test_a_failure_leaves_no_half_written_file(frames, tmp_path):
    frames[2].positions[5] = np.nan
    ase.io.write(tmp_path / "broken.extxyz", frames)
    out = tmp_path / "out.extxyz"
    out.write_text("earlier results")
    result = call(tmp_path / "broken.extxyz", "--model", "lj", "--ranks", 2, "--out", out, code=2)
    assert "atom 5 is at [nan, nan, nan]" in result.output
    assert out.read_text() == "earlier results" and not list(tmp_path.glob("*.partial"))


def test_under_torchrun(frames, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [*torchrun, "-m", alchemi_dist.cli.__name__, "evaluate", str(tmp_path / "argon.extxyz")]
    done = subprocess.run([*command, "--model", "lj", "--check", "--json", "-"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ranks"][0]["owned"]) == 2
