"""`Comm`: the ranks, and every collective between them. Without a process group it is a world of one."""

import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alchemi_shardtensor.transport.protocol import GroupTransport, Reduction, Transport
from alchemi_spec import AlchemiError, RankFailure


@dataclass
class Traffic:
    """What a rank has sent: calls of each kind, and the bytes of its own rows in exchanges and reverses.

    `messages`: to how many peers these went. `host_syncs`: how many host syncs there were, where `testing.count_traffic`
    counts them. `tracked`: collectives that a backward pass has to repeat.
    """

    exchanges: int = 0
    reverses: int = 0
    reductions: int = 0
    bytes: int = 0
    messages: int = 0
    host_syncs: int = 0
    tracked: int = 0


@dataclass(frozen=True, eq=False)
class Comm:
    """The ranks, the number of this one, and the device it computes on. `Comm()` is a world of one.

    `group`: a process group, or another transport (`mpi_comm` makes one over MPI).
    """

    group: dist.ProcessGroup | Transport | None = None
    device: torch.device = field(default=torch.device("cpu"))
    rank: int = field(init=False, default=0)
    size: int = field(init=False, default=1)
    traffic: Traffic = field(init=False, default_factory=Traffic)
    transport: Transport | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        group = self.group
        transport = GroupTransport(group, self.device) if isinstance(group, dist.ProcessGroup) else group
        if transport is not None:
            object.__setattr__(self, "transport", transport)
            object.__setattr__(self, "rank", transport.rank)
            object.__setattr__(self, "size", transport.size)

    def all_to_all(self, rows: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Rows (sum(send), *F), grouped by destination -> rows (sum(receive), *F), grouped by source."""
        if self.transport is None:
            return rows
        wire = _outbound(rows, self.transport)
        got = wire.new_empty(sum(receive), *wire.shape[1:])
        self.transport.all_to_all(got, wire, receive, send)
        return _inbound(got, rows)

    def all_gather(self, t: Tensor) -> Tensor:
        """(*F), of one shape on all ranks -> (size, *F)."""
        if self.transport is None:
            return t[None]
        wire = _outbound(t, self.transport)
        got = wire.new_empty(self.size, *wire.shape)
        self.transport.all_gather(got, wire)
        return _inbound(got, t)

    def all_gather_rows(self, rows: Tensor, counts: list[int] | None = None) -> Tensor:
        """(n_r, *F) with its own n_r on each rank -> (sum of n_r, *F), in the order of ranks; `counts`: all n_r, if known."""
        counts = self.all_gather(torch.tensor(len(rows))).tolist() if counts is None else counts
        return self.all_to_all(rows.repeat(self.size, *[1] * (rows.ndim - 1)), [len(rows)] * self.size, counts)

    def all_reduce(self, t: Tensor, op: Reduction = "sum") -> Tensor:
        """(*F) on each rank -> their sum (or `op`) on every rank, in a new tensor. A sum of bools is true where any is."""
        self.traffic.reductions += 1
        if self.transport is None:
            return t.clone()
        wire = _outbound(t, self.transport)
        wire = wire.clone() if wire.data_ptr() == t.data_ptr() else wire  # it is overwritten
        self.transport.all_reduce(wire, "max" if t.dtype == torch.bool and op == "sum" else op)
        return _inbound(wire, t)

    def gather_objects(self, value: Any) -> list[Any]:
        """One picklable value of each rank, on every rank."""
        if self.transport is None:
            return [value]
        blob = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = self.all_gather(torch.tensor(len(blob))).tolist()
        return [pickle.loads(part.numpy().tobytes()) for part in self.all_gather_rows(blob, sizes).split(sizes)]

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """`source`'s picklable value, on every rank; what the others pass is ignored."""
        if self.transport is None:
            return value
        blob = torch.frombuffer(bytearray(pickle.dumps(value if self.rank == source else None)), dtype=torch.uint8)
        size = int(self.all_gather(torch.tensor(len(blob)))[source])
        blob = _outbound(blob if self.rank == source else blob.new_empty(size), self.transport)
        self.transport.broadcast(blob, source)
        return value if self.rank == source else pickle.loads(blob.cpu().numpy().tobytes())

    def agree(self, error: Exception | None) -> None:
        """Raise the lowest rank's error on every rank, or return on every rank."""
        if not self.all_gather(torch.tensor(error is not None)).any():
            return
        errors = self.gather_objects(None if error is None else _picklable(error, self.rank))
        raised = next((e for e in errors if e is not None), None)
        if raised is not None:
            raise raised from error

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """An error inside the block is raised on every rank at its end. The block must hold no collective."""
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        self.agree(error)


def _outbound(t: Tensor, transport: Transport) -> Tensor:
    """The tensor as the transport can send it: contiguous, not bool, on the host if it has to be."""
    t = t.view(torch.uint8) if t.dtype == torch.bool else t
    return t.detach().to(transport.carrier(t.device)).resolve_conj().resolve_neg().contiguous()


def _inbound(t: Tensor, like: Tensor) -> Tensor:
    t = t.to(like.device)
    return t.view(torch.bool) if like.dtype == torch.bool else t


def _picklable(error: Exception, rank: int) -> Exception:
    """The error itself if it is ours or plain; otherwise its text, with the rank it came from."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if isinstance(error, AlchemiError) or str(copy) == str(error):
            copy.__notes__ = [f"raised on rank {rank}:\n" + "".join(traceback.format_exception(error))]
            return copy  # type: ignore[no-any-return]
    except Exception:
        pass
    return RankFailure(f"rank {rank} failed: {type(error).__name__}: {error}")
