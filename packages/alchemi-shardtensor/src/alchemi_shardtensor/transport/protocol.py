"""The transport of tensors between ranks: the protocol, and torch's process groups behind it. `mpi.py` is the other one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

Reduction = Literal["sum", "max", "min"]
OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Transport(Protocol):
    """Collectives on contiguous tensors, not bool, that are where `carrier` says. Every rank must call them."""

    @property
    def rank(self) -> int:
        """The rank's place among them."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def carrier(self, device: torch.device, /) -> torch.device:
        """The device that tensors of `device` have to be on to be sent."""

    def all_to_all(self, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Rows (sum(send), *F), grouped by destination -> `out` (sum(receive), *F), grouped by source."""

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        """(*F), of one shape on all ranks -> `out` (size, *F)."""

    def all_reduce(self, t: Tensor, op: Reduction) -> None:
        """(*F) on each rank -> their `op`, in place on every rank."""

    def broadcast(self, t: Tensor, source: int) -> None:
        """`source`'s (*F) -> `t` (*F) on every rank."""


@dataclass(frozen=True)
class GroupTransport:
    """The collectives of a process group; `device` serves the host's tensors where the group carries CUDA's alone.

    While make_fx traces, they are torch's functional collectives, which a compiler keeps, and in their order.
    """

    group: dist.ProcessGroup
    device: torch.device

    @property
    def rank(self) -> int:
        """The rank's place in the group."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """The ranks of the group."""
        return dist.get_world_size(self.group)

    def carrier(self, device: torch.device, /) -> torch.device:
        """NCCL carries CUDA tensors and gloo the host's; `cpu:gloo,cuda:nccl` carries both."""
        config = dist.get_backend_config(self.group)
        if device.type == "cuda" and "cuda:nccl" not in config:
            return torch.device("cpu")
        if device.type == "cpu" and "cpu:" not in config:
            return self.device
        return device

    def all_to_all(self, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Any number of rows from each rank to each."""
        if get_proxy_mode() is not None:
            self._traced(out, "all_to_all_single", rows, list(receive), list(send))
        else:
            dist.all_to_all_single(out, rows, list(receive), list(send), group=self.group)

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        """One tensor of each rank on every rank."""
        if get_proxy_mode() is not None:
            self._traced(out, "all_gather_into_tensor", t[None], self.size)
        else:
            dist.all_gather(list(out.unbind(0)), t, group=self.group)

    def all_reduce(self, t: Tensor, op: Reduction) -> None:
        """In the tensor's own type."""
        if get_proxy_mode() is not None:
            self._traced(t, "all_reduce", t, op)
        else:
            dist.all_reduce(t, OPERATIONS[op], group=self.group)

    def broadcast(self, t: Tensor, source: int) -> None:
        """From the group's rank `source`."""
        dist.broadcast(t, group_src=source, group=self.group)

    def _traced(self, out: Tensor, name: str, *args: Any) -> None:
        functional = torch.ops._c10d_functional
        out.copy_(functional.wait_tensor(getattr(functional, name)(*args, self.group.group_name)))
