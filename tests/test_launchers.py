"""The command line under a launcher of ranks."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples" / "data"


def test_under_mpiexec():
    """Without a process group, and with ASE's own use of MPI kept out of ours."""
    mpiexec = [str(Path(sys.executable).parent / "mpiexec"), "-n", "2", sys.executable, "-m", "mpi4py"]
    command = ["-m", "alchemi_dist.cli", "evaluate", str(EXAMPLES / "copper.extxyz"), "--model", "lj", "--check", "--json", "-"]
    done = subprocess.run([*mpiexec, *command], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["ranks"][0]["owned"]) == 2
