"""Who sends which rows to whom, and the exchange over it with its adjoint. Frozen; made with the neighbour list."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from alchemi_shardtensor.comm import Comm


@dataclass(frozen=True, eq=False)
class Routing:
    """Which owned rows each peer reads as ghosts.

    `send`: rows of mine that others read, grouped by the rank they go to (`send_splits` of them to each); the same row
    may go to several. Ghosts arrive grouped by owner, `recv_splits` from each.
    """

    comm: Comm
    n_owned: int
    send: Tensor
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]

    @classmethod
    def alone(cls, n_owned: int, comm: Comm | None = None) -> "Routing":
        """A routing on which nobody reads anything of anybody."""
        comm = comm or Comm()
        nothing = (0,) * comm.size
        return cls(comm, n_owned, torch.empty(0, dtype=torch.long, device=comm.device), nothing, nothing)

    @property
    def n_ghost(self) -> int:
        """How many remote rows this rank reads."""
        return sum(self.recv_splits)

    def to(self, device: torch.device) -> "Routing":
        """The same routing for rows on `device`."""
        return replace(self, send=self.send.to(device))

    def exchange(self, owned: Tensor) -> Tensor:
        """Owned rows (n_owned, *F) -> ghost rows (n_ghost, *F). Adjoint: `reverse`. Every rank must call it."""
        if len(owned) != self.n_owned:
            raise ValueError(f"exchange takes this rank's {self.n_owned} owned rows, not {len(owned)}")
        return Exchange.apply(owned, self)  # type: ignore[no-any-return,no-untyped-call]

    def reverse(self, ghosts: Tensor) -> Tensor:
        """Ghost rows (n_ghost, *F) -> summed into owned rows (n_owned, *F). Adjoint: `exchange`. Every rank must call it."""
        if len(ghosts) != self.n_ghost:
            raise ValueError(f"reverse takes this rank's {self.n_ghost} ghost rows, not {len(ghosts)}")
        return Reverse.apply(ghosts, self)  # type: ignore[no-any-return,no-untyped-call]

    def padded(self, owned: Tensor) -> Tensor:
        """Owned rows (n_owned, *F) -> [owned | ghost] rows (n_owned + n_ghost, *F); alone, the owned rows are all."""
        return owned if self.comm.size == 1 else torch.cat([owned, self.exchange(owned)])

    def folded(self, both: Tensor) -> Tensor:
        """[owned | ghost] rows (n_owned + n_ghost, *F) -> owned rows (n_owned, *F), the ghosts' added by their owners."""
        return both if self.comm.size == 1 else both[: self.n_owned] + self.reverse(both[self.n_owned :])


class Edges(NamedTuple):
    """A rank's share of a graph: all edges of the nodes it owns, sorted by receiver, and the routing of its ghosts.

    `edge_index` (2, E): senders and receivers by local id. `shifts` (E, 3): whole-numbered S of the geometry
    x[sender] + S @ cell - x[receiver].
    """

    routing: Routing
    edge_index: Tensor
    shifts: Tensor


class Exchange(torch.autograd.Function):
    """Owned rows (n_owned, *F) -> ghost rows (n_ghost, *F). Adjoint: Reverse."""

    @staticmethod
    def forward(ctx: Any, owned: Tensor, routing: Routing) -> Tensor:
        """Send to each peer the rows that it reads."""
        ctx.routing = routing
        sent = owned.index_select(0, routing.send)
        routing.comm.traffic.exchanges += 1
        routing.comm.traffic.bytes += sent.nbytes
        return routing.comm.all_to_all(sent, routing.send_splits, routing.recv_splits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Ghost gradients go home."""
        return Reverse.apply(grad, ctx.routing), None  # type: ignore[no-untyped-call]


class Reverse(torch.autograd.Function):
    """Ghost rows (n_ghost, *F) -> summed into owned rows (n_owned, *F). Adjoint: Exchange."""

    @staticmethod
    def forward(ctx: Any, ghosts: Tensor, routing: Routing) -> Tensor:
        """Return to each owner its ghosts' rows and add them up there."""
        ctx.routing = routing
        routing.comm.traffic.reverses += 1
        routing.comm.traffic.bytes += ghosts.nbytes
        home = routing.comm.all_to_all(ghosts, routing.recv_splits, routing.send_splits)
        return home.new_zeros(routing.n_owned, *home.shape[1:]).index_add_(0, routing.send, home)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Each ghost's row has its owner's gradient."""
        return Exchange.apply(grad, ctx.routing), None  # type: ignore[no-untyped-call]


class SumOverRanks(torch.autograd.Function):
    """Partial sums (*F) -> their total (*F) on every rank. Gradients of replicated values are partial: self-adjoint."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Comm) -> Tensor:
        """Add up over ranks."""
        ctx.comm = comm
        return comm.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up the ranks' partial gradients."""
        return SumOverRanks.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


def sum_over_ranks(partial: Tensor, comm: Comm) -> Tensor:
    """Partial sums (*F) -> their total (*F) on every rank; differentiable, self-adjoint. Every rank must call it."""
    return SumOverRanks.apply(partial, comm)  # type: ignore[no-any-return,no-untyped-call]
