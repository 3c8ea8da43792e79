"""Steps that are repeated on the same tensors: recorded in a CUDA graph, exchanges included, and replayed."""

import traceback
from collections.abc import Callable
from dataclasses import astuple
from typing import Generic, TypeVar

import torch

from alchemi_shardtensor.capture.host_sync import HostSyncDetector, source_line
from alchemi_shardtensor.transport import Comm, Traffic

T = TypeVar("T")
WARMUP_CALLS = 5
"""Eager calls before a graph is recorded, for TorchScript's profiling; the last is searched for host syncs."""


class SideStream:
    """A side stream and a memory pool for captured steps, which share them, as they run one after another."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_cuda = device, device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.on_cuda else None
        self.pool = torch.cuda.graph_pool_handle() if self.on_cuda else None

    def __call__(self, step: Callable[[], T]) -> T:
        """Run a step on the side stream, after the work on the current one and before what follows there."""
        if self.stream is None:
            return step()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            results = step()
        current.wait_stream(self.stream)
        return results

    def record(self, step: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of the step, which is not run."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            results = step()
        return graph, results


class CapturedStep(Generic[T]):
    """`step()`, which reads and writes tensors that keep their addresses. Every rank must call it.

    The first calls are eager. The last of them is searched for what cannot be captured; if something is found, `why_not` names
    it on every rank, and all calls stay eager. Otherwise, on CUDA, the calls after them replay one graph, and what is returned
    is the same tensors each time, overwritten by the next call of any step on the same `side`. On the CPU there are no graphs.
    """

    def __init__(self, step: Callable[[], T], comm: Comm, side: SideStream) -> None:
        self.step, self.comm, self.side = step, comm, side
        self.calls = 0
        self.why_not: str | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self._results: T
        self._sent = Traffic()

    def __call__(self) -> T:
        """Make the step."""
        if self.graph is None:
            return self._eager()
        self.graph.replay()
        _add(self.comm.traffic, self._sent)
        return self._results

    def _eager(self) -> T:
        self.calls += 1
        if self.why_not is not None:
            return self.step()
        if self.calls == WARMUP_CALLS:
            return self._searched()
        if self.calls > WARMUP_CALLS and self.side.on_cuda:
            self._record()
            return self()
        return self.side(self.step)

    def _searched(self) -> T:
        with HostSyncDetector() as syncs:
            results = self.side(self.step)
        found = self.comm.gather_objects(syncs.found[:1])
        self.why_not = next((f"it synchronises with the host: {first}" for rank in found for first in rank), None)
        return results

    def _record(self) -> None:
        before, graph, error = astuple(self.comm.traffic), None, None
        try:
            graph, self._results = self.side.record(self.step)
        except Exception as caught:  # what cannot be captured is torch's to know
            frames = [frame for frame, _ in traceback.walk_tb(caught.__traceback__)]
            error = f"{type(caught).__name__} {source_line(frames[-1])}: {(str(caught).splitlines() or [''])[0]}"
        self._sent = Traffic(*(a - b for a, b in zip(astuple(self.comm.traffic), before, strict=True)))
        _add(self.comm.traffic, self._sent, -1)
        self.why_not = next((e for e in self.comm.gather_objects(error) if e is not None), None)
        self.graph = graph if self.why_not is None else None


def _add(traffic: Traffic, sent: Traffic, times: int = 1) -> None:
    for name, n in vars(sent).items():
        setattr(traffic, name, getattr(traffic, name) + times * n)
