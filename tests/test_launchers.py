"""The command line under a launcher of ranks."""

import json
import subprocess
import sys
from pathlib import Path

import ase.io
import numpy as np
from ase.build import bulk
from typer.testing import CliRunner

from alchemi_dist.cli import app

EXAMPLES = Path(__file__).parent.parent / "examples" / "data"
MPIEXEC = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "mpi4py", "-m", "alchemi_dist.cli"]


def under_mpiexec(*command):
    done = subprocess.run([*MPIEXEC, *map(str, command)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_under_mpiexec():
    """Without a process group, and with ASE's own use of MPI kept out of ours."""
    told = under_mpiexec("evaluate", EXAMPLES / "copper.extxyz", "--model", "lj", "--check", "--json", "-")
    assert len(json.loads(told)["ranks"][0]["owned"]) == 2


def test_dynamics_under_mpiexec(tmp_path):
    """Each rank reads, and one writes, with ASE: alone."""
    ase.io.write(tmp_path / "argon.extxyz", bulk("Ar", a=5.4, cubic=True) * (3, 3, 3))
    command = [
        "md",
        tmp_path / "argon.extxyz",
        "--model",
        "lj",
        "--steps",
        6,
        "--every",
        3,
        "--temperature",
        60,
        "--timestep",
        4,
    ]
    under_mpiexec(*command, "--traj", tmp_path / "two.traj", "--checkpoint", tmp_path / "ck", "--out", tmp_path / "last.cif")
    one = CliRunner().invoke(app, [*map(str, command), "--traj", str(tmp_path / "one.traj")])
    assert one.exit_code == 0, one.output
    frames = [ase.io.read(tmp_path / f"{ranks}.traj", ":") for ranks in ("one", "two")]
    assert [len(f) for f in frames] == [3, 3]
    for a, b in zip(*frames, strict=True):
        np.testing.assert_allclose(b.positions, a.positions, rtol=0, atol=1e-9)
        np.testing.assert_allclose(b.get_forces(), a.get_forces(), rtol=0, atol=1e-9)
    assert len(ase.io.read(tmp_path / "last.cif")) == 108 and (tmp_path / "ck" / "checkpoint.json").exists()
