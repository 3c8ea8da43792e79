"""Ranks as worker processes of this one, kept between calls; the same function runs under torchrun and mpiexec."""

import importlib
import inspect
import io
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist

from alchemi_shardtensor.transport.comm import Comm
from alchemi_spec import RankFailure

GRACE_S = 3.0
"""How long the other ranks may take to report an error of their own before they are stopped."""
PRELOADED = ("torch", "torch.distributed", "torch.fx.experimental.symbolic_shapes", "alchemi_shardtensor")
"""Imported once, before the ranks are forked; the third is what `autograd.grad` imports at its first call."""
MPIEXEC = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
"""How many ranks mpiexec started, as MPICH (and Intel MPI) and Open MPI say it."""


class RankPool:
    """`size` ranks as processes of this machine. `run(function, *args)` calls `function(comm, *args)` on each.

    The processes stay for the next call and are stopped by `close` or the end of a `with`. On the CPU they talk through
    gloo; on CUDA through NCCL where each has a device of its own, else through the host.
    """

    def __init__(self, size: int, device: Literal["cpu", "cuda"] = "cpu", preload: Sequence[str] = ()) -> None:
        """Prepare `size` ranks on `device`; they start at the first call. `preload`: modules to import before forking."""
        if size < 1:
            raise ValueError(f"a pool has at least one rank, not {size}")
        _require(device)
        self.size, self.device, self.preload = size, device, tuple(preload)
        self._workers: list[tuple[Any, Connection]] = []
        self._busy = False
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, ranks: int | None = None, timeout: float | None = None, **kwargs: Any
    ) -> list[Any]:
        """What `function(comm, *args, **kwargs)` returned on each of `ranks` (default all) ranks.

        Raises:
            Exception: what the first failing rank raised, with its traceback as a note; the others are stopped.
            RankFailure: where a rank died, or no answer came within `timeout` seconds.

        """
        results: dict[int, Any] = {}
        for kind, rank, value in self._call(function, args, kwargs, ranks, timeout):
            if kind == "result":
                results[rank] = value
        return [results[rank] for rank in sorted(results)]

    def stream(self, function: Callable[..., Iterator[Any]], *args: Any, **kwargs: Any) -> Iterator[Any]:
        """What the generator `function(comm, *args, **kwargs)` yields on rank 0, as it comes; all ranks run it."""
        for kind, _, value in self._call(function, args, kwargs, None, None):
            if kind == "item":
                yield value

    def close(self) -> None:
        """Let the ranks end."""
        self._stop(wait_s=5.0)

    def _stop(self, wait_s: float) -> None:
        for _, connection in self._workers:
            connection.close()
        for process, _ in self._workers:
            process.join(wait_s)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()

    def __enter__(self) -> "RankPool":
        """The pool itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the ranks."""
        self.close()

    def _context(self) -> Any:
        """Processes are forked, unless a module of `preload` has initialised CUDA, which does not survive that."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, *self.preload])
        if self.device == "cpu":
            return context
        ours, theirs = context.Pipe()
        probe = context.Process(target=_tell_whether_cuda_is_lost, args=(theirs,), daemon=True)
        probe.start()
        lost = ours.recv()
        probe.join()
        return multiprocessing.get_context("spawn") if lost else context

    def _start(self) -> None:
        context = self._context()
        self._folder = tempfile.TemporaryDirectory(prefix="alchemi-", ignore_cleanup_errors=True)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            job = (rank, self.size, self.device, f"file://{self._folder.name}/store", theirs)
            process = context.Process(target=_serve, args=job, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def _call(
        self, function: Any, args: Any, kwargs: Any, ranks: int | None, timeout: float | None
    ) -> Iterator[tuple[str, int, Any]]:
        ranks = self.size if ranks is None else ranks
        if not 1 <= ranks <= self.size:
            raise ValueError(f"this pool has {self.size} ranks, not {ranks}")
        if self._busy:
            raise RuntimeError("this pool is still streaming: exhaust or close the stream first, or use another pool")
        if not self._workers:
            self._start()
        self._busy = True
        job = _pickled((ranks, function, args, kwargs))
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        try:
            for connection in list(waiting):
                connection.send_bytes(job)
            yield from self._answers(waiting, ranks, timeout)
        finally:
            self._busy = False
            if waiting or any(not process.is_alive() for process, _ in self._workers):
                self._stop(wait_s=0.0)

    def _answers(self, waiting: dict[Any, int], ranks: int, timeout: float | None) -> Iterator[tuple[str, int, Any]]:
        """Answers as they come, each rank taken out of `waiting` with its last one."""
        deadline = None if timeout is None else time.monotonic() + timeout
        first: Exception | None = None
        while waiting:
            ready: list[Any] = wait(list(waiting), None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                kind, value = self._receive(connection, rank, ranks)
                if kind != "item":
                    del waiting[connection]
                if kind == "error":
                    first = first or value
                    deadline = time.monotonic() + GRACE_S
                elif first is None and rank < ranks:
                    yield kind, rank, value
        if first is not None:
            raise first
        if waiting:
            silent = ", ".join(str(rank) for rank in sorted(waiting.values()))
            raise RankFailure(
                f"no answer from rank {silent} of {ranks} within {timeout} s: a collective that not all ranks entered?"
            )

    def _receive(self, connection: Connection, rank: int, ranks: int) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._workers[rank][0].join(1.0)
            code = self._workers[rank][0].exitcode
            hint = "; a script that makes a pool needs `if __name__ == '__main__':` around it" if code == 1 else ""
            return "error", RankFailure(f"rank {rank} of {ranks} died with exit code {code}{hint}")
        return kind, value


class _Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:  # torch.ops, which cloudpickle does not know
            return importlib.import_module, (obj.__name__,)
        return super().reducer_override(obj)


def _pickled(job: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(job)
    return buffer.getvalue()


def comm_from_environment(device: Literal["cpu", "cuda"] = "cpu") -> Comm:
    """The ranks that torchrun (WORLD_SIZE, ...) or mpiexec started, or a world of one without either.

    For MPI start `mpiexec -n 4 python -m mpi4py script.py`: without `-m mpi4py` the others wait for ever for one that failed.

    Raises:
        ValueError: for CUDA where there is none.
        ImportError: under mpiexec without mpi4py, which the extra `mpi` brings.
        RankFailure: under an mpiexec that is not of the MPI library that mpi4py has loaded.

    """
    _require(device)
    if "WORLD_SIZE" in os.environ:
        if not dist.is_initialized():
            dist.init_process_group(_backend(device, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
        return Comm(dist.group.WORLD, _device(device, int(os.environ.get("LOCAL_RANK", "0"))))
    for name in MPIEXEC:
        if name in os.environ:
            return _mpi_comm(device, int(os.environ[name]))
    return Comm(None, torch.device(device))


def _mpi_comm(device: str, started: int) -> Comm:
    try:
        mpi = importlib.import_module("alchemi_shardtensor.transport.mpi")
    except ImportError as error:
        raise ImportError(
            f"mpiexec has started {started} ranks, but mpi4py is not installed: pip install 'alchemi-shardtensor[mpi]'"
        ) from error
    comm: Comm = mpi.mpi_comm(device=_device(device, mpi.local_rank()))
    if comm.size != started:
        raise RankFailure(
            f"mpiexec has started {started} ranks, but mpi4py's MPI library finds {comm.size}: "
            f"use the mpiexec of that library, which is {mpi.MPI.get_vendor()[0]}"
        )
    return comm


def _require(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device 'cuda' was asked for, but torch finds no CUDA device on this machine: use 'cpu'")


def _backend(device: str, local_ranks: int) -> str:
    own_device = device == "cuda" and torch.cuda.device_count() >= local_ranks
    return "cpu:gloo,cuda:nccl" if own_device else "gloo"


def _device(kind: str, local_rank: int) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _tell_whether_cuda_is_lost(connection: Connection) -> None:
    connection.send(torch.cuda._is_in_bad_fork())


def _serve(rank: int, size: int, kind: str, store: str, connection: Connection) -> None:
    """A worker: join the others, then run what is sent until the connection closes."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    device = _device(kind, rank)
    dist.init_process_group(_backend(kind, size), init_method=store, rank=rank, world_size=size)
    groups: dict[int, Any] = {size: dist.group.WORLD}
    while True:
        try:
            job = connection.recv_bytes()
        except (EOFError, OSError):
            dist.destroy_process_group()
            return
        try:
            ranks, function, args, kwargs = pickle.loads(job)
            if ranks not in groups:
                groups[ranks] = dist.new_group(list(range(ranks)))
            result = None
            if rank < ranks:
                result = function(Comm(groups[ranks], device), *args, **kwargs)
                if inspect.isgenerator(result):
                    _send_items(result, connection if rank == 0 else None)
                    result = None
            answer = cloudpickle.dumps(("result", result))
        except Exception as error:
            answer = cloudpickle.dumps(("error", _noted(error, rank, size)))
        try:
            connection.send_bytes(answer)
        except OSError:  # the parent has closed the connection
            return


def _send_items(items: Iterator[Any], connection: Connection | None) -> None:
    for item in items:
        if connection is not None:
            connection.send_bytes(cloudpickle.dumps(("item", item)))


def _noted(error: Exception, rank: int, size: int) -> Exception:
    """The error with the rank's traceback as a note, or its text where it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        error = RankFailure(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__cause__ = error.__context__ = None
    if not getattr(error, "__notes__", None):
        error.add_note(f"on rank {rank} of {size}:\n{trace}")
    return error
