"""Collectives, each beside its adjoint, differentiable any number of times. Every rank must enter each.

The convention: the gradient of a replicated value is a partial sum; it is summed over ranks once, at the boundary.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from alchemi_shardtensor.transport.comm import Comm


class AllToAllRows(torch.autograd.Function):
    """Rows (sum(send), *F), grouped by destination -> (sum(receive), *F), grouped by source. Adjoint: the way back.

    Several fields of any dtypes are sent in one message.
    """

    @staticmethod
    def forward(ctx: Any, comm: Comm, send: Sequence[int], receive: Sequence[int], reverse: bool, *fields: Tensor) -> Any:
        """Send each peer its rows of all fields."""
        ctx.route = comm, receive, send, not reverse
        got = packed_all_to_all(comm, fields, send, receive)
        comm.traffic.exchanges += not reverse
        comm.traffic.reverses += reverse
        comm.traffic.bytes += sum(field.nbytes for field in fields)
        comm.traffic.messages += sum(n > 0 for rank, n in enumerate(send) if rank != comm.rank)
        comm.traffic.tracked += any(ctx.needs_input_grad)
        ctx.mark_non_differentiable(*(g for g in got if not _is_real(g)))
        return tuple(got)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Send the gradients that are wanted back, in one message."""
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[4:]) if needed]
        back = dict(zip(wanted, AllToAllRows.apply(*ctx.route, *(grads[i] for i in wanted)), strict=True))  # type: ignore[no-untyped-call]
        return (None, None, None, None, *(back.get(i) for i in range(len(grads))))


class PrefetchedGhosts(torch.autograd.Function):
    """Owned rows (n_owned, *F), and their ghosts (n_ghost, *F), fetched before -> ghosts. Adjoint: `routing.reverse`."""

    @staticmethod
    def forward(ctx: Any, owned: Tensor, ghosts: Tensor, routing: Any) -> Tensor:  # noqa: ARG004
        """Return the ghosts: nothing is sent."""
        ctx.routing = routing
        routing.comm.traffic.tracked += ctx.needs_input_grad[0]
        return ghosts.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Send the ghosts' gradients to their owners."""
        return ctx.routing.reverse(grad), None, None


def packed_all_to_all(comm: Comm, fields: Sequence[Tensor], send: Sequence[int], receive: Sequence[int]) -> list[Tensor]:
    """Several fields with the same rows in one message, as bytes; one alone as it is. Not differentiable."""
    if len(fields) == 1:
        return [comm.all_to_all(fields[0].detach(), send, receive)]
    wire = torch.cat([_as_bytes(field.detach()) for field in fields], dim=1)
    got = comm.all_to_all(wire, send, receive).split([_row_bytes(field) for field in fields], dim=1)
    return [_from_bytes(part, field) for part, field in zip(got, fields, strict=True)]


def _row_bytes(field: Tensor) -> int:
    return prod(field.shape[1:]) * field.element_size()


def _as_bytes(field: Tensor) -> Tensor:
    return field.contiguous().flatten().view(torch.uint8).reshape(len(field), _row_bytes(field))


def _from_bytes(part: Tensor, like: Tensor) -> Tensor:
    aligned = part.clone(memory_format=torch.contiguous_format).flatten()
    return aligned.view(like.dtype).reshape(len(part), *like.shape[1:])


def _is_real(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


class AllGather(torch.autograd.Function):
    """(*F), of one shape on all ranks -> (size, *F) on every rank. Adjoint: ReduceScatter."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, comm: Comm) -> Tensor:
        """Gather all ranks' tensors, in the order of ranks."""
        ctx.comm = comm
        comm.traffic.exchanges += 1
        comm.traffic.bytes += mine.nbytes
        comm.traffic.tracked += ctx.needs_input_grad[0]
        return comm.all_gather(mine.detach())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Sum each rank's part of the gradient over the ranks that hold some of it."""
        return ReduceScatter.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class ReduceScatter(torch.autograd.Function):
    """(size, *F): a part for each rank -> (*F): the sum of the parts that are for this one. Adjoint: AllGather."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, comm: Comm) -> Tensor:
        """Sum in the order of ranks, so that it does not depend on who is first."""
        ctx.comm = comm
        comm.traffic.reverses += 1
        comm.traffic.bytes += parts.nbytes
        comm.traffic.tracked += ctx.needs_input_grad[0]
        ones = [1] * comm.size
        return comm.all_to_all(parts.detach(), ones, ones).sum(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Gather all ranks' gradients."""
        return AllGather.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class SumOverRanks(torch.autograd.Function):
    """Partial sums (*F) -> their total (*F) on every rank. Gradients of replicated values are partial: self-adjoint."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Comm) -> Tensor:
        """Add up over ranks."""
        ctx.comm = comm
        comm.traffic.tracked += ctx.needs_input_grad[0]
        return comm.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up the ranks' partial gradients."""
        return SumOverRanks.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class ExtremeOverRanks(torch.autograd.Function):
    """(*F) on each rank -> the largest or smallest (*F) on every rank.

    Adjoint: the gradient, summed over ranks, goes to the ranks that hold the extreme, in equal parts.
    """

    @staticmethod
    def forward(ctx: Any, mine: Tensor, comm: Comm, op: Literal["max", "min"]) -> Tensor:
        """Compare over ranks."""
        extreme = comm.all_reduce(mine, op)
        ctx.comm, ctx.weight = comm, None
        if ctx.needs_input_grad[0]:
            comm.traffic.tracked += 1
            holds = (mine == extreme).to(mine.dtype)
            ctx.weight = holds / comm.all_reduce(holds).clamp(min=1)
        return extreme

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Send the gradient to the ranks that hold the extreme."""
        return sum_over_ranks(grad, ctx.comm) * ctx.weight, None, None


def sum_over_ranks(partial: Tensor, comm: Comm) -> Tensor:
    """Partial sums (*F) -> their total (*F) on every rank; differentiable, self-adjoint."""
    return SumOverRanks.apply(partial, comm)  # type: ignore[no-any-return,no-untyped-call]


def max_over_ranks(mine: Tensor, comm: Comm) -> Tensor:
    """(*F) on each rank -> the largest (*F) on every rank; its gradient goes to the ranks that hold it, in equal parts."""
    return ExtremeOverRanks.apply(mine, comm, "max")  # type: ignore[no-any-return,no-untyped-call]


def min_over_ranks(mine: Tensor, comm: Comm) -> Tensor:
    """(*F) on each rank -> the smallest (*F) on every rank; its gradient goes to the ranks that hold it, in equal parts."""
    return ExtremeOverRanks.apply(mine, comm, "min")  # type: ignore[no-any-return,no-untyped-call]


def all_gather_rows(rows: Tensor, counts: Sequence[int], comm: Comm) -> Tensor:
    """(counts[rank], *F) -> (sum(counts), *F) on every rank, in the order of ranks. Adjoint: `reduce_scatter_rows`."""
    widest = max(counts)
    even = torch.cat([rows, rows.new_zeros(widest - len(rows), *rows.shape[1:])])
    every: Tensor = AllGather.apply(even, comm)  # type: ignore[no-untyped-call]
    return torch.cat([part[:n] for part, n in zip(every.unbind(0), counts, strict=True)])


def reduce_scatter_rows(partial: Tensor, counts: Sequence[int], comm: Comm) -> Tensor:
    """Partial sums (sum(counts), *F) -> this rank's totals (counts[rank], *F). Adjoint: `all_gather_rows`."""
    widest = max(counts)
    parts = [
        torch.cat([part, part.new_zeros(widest - n, *part.shape[1:])])
        for part, n in zip(partial.split(list(counts)), counts, strict=True)
    ]
    mine: Tensor = ReduceScatter.apply(torch.stack(parts), comm)  # type: ignore[no-untyped-call]
    return mine[: counts[comm.rank]]
