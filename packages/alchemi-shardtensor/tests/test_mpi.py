"""pytest starts this file again as the script of each rank: one job for all checks, as every rank imports torch anew."""

import importlib
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from graphs import RandomGraph

from alchemi_shardtensor import comm_from_environment
from alchemi_shardtensor.testing import ADJOINT, adjoint_gap
from alchemi_spec import RankFailure

SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
EVERY = [torch.bool, torch.uint8, *SIGNED, *FLOATS, *COMPLEX]


def mpiexec(n, *arguments):
    """This file as a script on n ranks, under the mpiexec of this environment."""
    launcher = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(n), sys.executable, "-m", "mpi4py"]
    command = [*launcher, __file__, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def same(found, expected):
    assert found.dtype == expected.dtype and torch.equal(found, expected), f"{found} is not {expected}"


def check_all_to_all(comm, dtype, features):
    """Rank r sends rank d r * (d + 1) rows full of 10 r + d, and gets them back: rank 0 first gives and then takes none."""

    def rows(source, destination):
        value = (10 * source + destination) % 2 if dtype == torch.bool else 10 * source + destination
        return torch.full((source * (destination + 1), *features), value).to(dtype)

    everyone = range(comm.size)
    sent = [rows(comm.rank, d) for d in everyone]
    due = [rows(s, comm.rank) for s in everyone]
    send, receive = tuple(map(len, sent)), tuple(map(len, due))
    same(comm.all_to_all(torch.cat(sent), send, receive), torch.cat(due))
    same(comm.all_to_all(torch.cat(due), receive, send), torch.cat(sent))


def check_gathers(comm, dtype):
    everyone = range(comm.size)
    same(comm.all_gather(torch.tensor(comm.rank).to(dtype)), torch.arange(comm.size).to(dtype))
    same(comm.all_gather(torch.empty(0, 2, dtype=dtype)), torch.empty(comm.size, 0, 2, dtype=dtype))
    rows = [torch.full((r, 2), r).to(dtype) for r in everyone]
    same(comm.all_gather_rows(rows[comm.rank]), torch.cat(rows))


def check_all_reduce(comm, dtype):
    """Rank r has [r, r + 1], and minus that where there is a sign."""
    last, sign = comm.size - 1, 1 if dtype in (torch.bool, torch.uint8) else -1
    x = (sign * torch.tensor([comm.rank, comm.rank + 1])).to(dtype)
    kept = x.clone()
    total = torch.tensor([sum(range(comm.size)), sum(range(comm.size + 1))])
    same(comm.all_reduce(x), (sign * total).to(dtype))
    same(comm.all_reduce(x[0]), (sign * total[0]).to(dtype))
    same(comm.all_reduce(x[:0]), x[:0])
    if not dtype.is_complex:
        low, high = torch.tensor([0, 1]).to(dtype), (sign * torch.tensor([last, last + 1])).to(dtype)
        same(comm.all_reduce(x, "max"), high if sign > 0 else -low)
        same(comm.all_reduce(x, "min"), low if sign > 0 else high)
    same(x, kept)


def check_conjugates(comm):
    x = torch.tensor([1 + 2j])
    same(comm.all_gather(x.conj())[-1], torch.tensor([1 - 2j]))
    same(comm.all_reduce(x.conj().imag), torch.tensor([-2.0 * comm.size]))


def check_objects(comm):
    assert comm.gather_objects({"rank": "x" * comm.rank}) == [{"rank": "x" * r} for r in range(comm.size)]
    for source in range(comm.size):
        assert comm.broadcast_object("y" * (comm.rank + 1), source) == "y" * (source + 1)


def check_agreement(comm):
    comm.agree(None)
    with pytest.raises(ValueError, match="^atom 7"):
        comm.agree(ValueError("atom 7") if comm.rank == comm.size - 1 else None)


def check_adjoints(comm, owners):
    routing = RandomGraph(comm, owners=owners).routing
    for features in [(), (4,), (0,)]:
        owned = torch.randn(routing.n_owned, *features, dtype=torch.float64)
        ghosts = torch.randn(routing.n_ghost, *features, dtype=torch.float64)
        assert adjoint_gap(routing.exchange, owned, comm) < ADJOINT
        assert adjoint_gap(routing.reverse, ghosts, comm) < ADJOINT


def check_everything(comm):
    """On all three ranks, then on two of them and on the third alone."""
    mpi = importlib.import_module("alchemi_shardtensor.transport.mpi")
    check_on(comm)
    check_on(mpi.mpi_comm(mpi.MPI.COMM_WORLD.Split(comm.rank // 2)))


def check_on(comm):
    for dtype in EVERY:
        for features in [(), (2, 3), (0,)]:
            check_all_to_all(comm, dtype, features)
        check_gathers(comm, dtype)
        check_all_reduce(comm, dtype)
    check_conjugates(comm)
    check_objects(comm)
    check_agreement(comm)
    for owners in [None, [0] * 23]:
        check_adjoints(comm, owners)


def fail_on_the_last(comm):
    if comm.rank == comm.size - 1:
        raise ZeroDivisionError(time.time())
    comm.all_reduce(torch.zeros(1))


def test_collectives_and_their_adjoints():
    ended = mpiexec(3, "check_everything")
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.split()) == ["0/3", "1/3", "2/3"]


def test_a_failing_rank_ends_the_job():
    ended = mpiexec(2, "fail_on_the_last")
    assert ended.returncode != 0 and ended.stdout == "", ended.stderr
    failed_at = re.search(r"ZeroDivisionError: ([\d.]+)", ended.stderr)
    assert failed_at is not None, ended.stderr
    assert time.time() - float(failed_at[1]) < 10


def test_mpiexec_without_mpi4py_says_what_to_install(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delitem(sys.modules, "alchemi_shardtensor.transport.mpi", raising=False)
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(ImportError, match=r"pip install 'alchemi-shardtensor\[mpi\]'"):
        comm_from_environment()


@pytest.mark.filterwarnings("ignore:suspicious MPI execution environment:RuntimeWarning")
def test_the_mpiexec_of_another_library_is_refused(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RankFailure, match="started 2 ranks, but mpi4py's MPI library finds 1: .* MPICH"):
        comm_from_environment()


if __name__ == "__main__":
    comm = comm_from_environment()
    globals()[sys.argv[1]](comm)
    sys.stdout.write(f"{comm.rank}/{comm.size}\n")
