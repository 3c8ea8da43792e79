"""A test kit for multi-rank code, for our own tests and for vendors'.

`@ranks(1, 2, 3)` runs a test on so many ranks; `adjoint_gap` and `as_one` check derivatives; `count_traffic` counts.
"""

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor

from alchemi_shardtensor.capture.host_sync import HostSyncDetector
from alchemi_shardtensor.transport import Comm, Traffic

EXACT = 1e-12
"""Round-off of float64 sums in another order."""
FP32 = 2e-6
"""Round-off of float32 sums in another order, relative to what is summed."""
ADJOINT = 1e-12
"""Relative gap of the two inner products in float64."""


def ranks(*sizes: int, timeout: float = 120.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on each number of gloo ranks; it receives its rank's `comm` and everything else as usual.

    All tests share one pool of workers. The first failing rank's error is the test's, the others are stopped.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        cloudpickle.register_pickle_by_value(sys.modules[test.__module__])
        named = [p for p in inspect.signature(test).parameters.values() if p.name != "comm"]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        extra = [inspect.Parameter(name, kind) for name in ("n_ranks", "rank_pool")]

        @functools.wraps(test)
        def run(n_ranks: int, rank_pool: Any, **kwargs: Any) -> None:
            filters = list(warnings.filters)
            rank_pool(n_ranks).run(_with_filters, test, filters, ranks=n_ranks, timeout=timeout, **kwargs)

        run.__signature__ = inspect.Signature([*extra, *named])  # type: ignore[attr-defined]
        del run.__wrapped__
        parametrized: Callable[..., None] = pytest.mark.parametrize("n_ranks", sizes, ids=lambda n: f"{n}ranks")(run)
        return parametrized

    return decorate


def _with_filters(comm: Comm, test: Callable[..., None], filters: list[Any], **kwargs: Any) -> None:
    """Warnings are treated on every rank as pytest was told to treat them."""
    with warnings.catch_warnings():
        warnings.filters[:] = filters  # type: ignore[index]
        warnings.simplefilter("default", append=True)
        try:
            test(comm=comm, **kwargs)
        except pytest.fail.Exception as failure:  # no Exception, so that a rank would die of it
            raise AssertionError(str(failure)) from None


def adjoint_gap(function: Callable[[Tensor], Tensor], x: Tensor, comm: Comm) -> float:
    """|<v, f(x)> - <f*(v), x>| over all ranks, relative to the products, for a linear `function` and a random v."""
    x = x.detach().requires_grad_()
    y = function(x)
    v = torch.randn_like(y)
    (back,) = torch.autograd.grad(y, x, v)
    products = torch.stack([(v * y).sum(), (back * x).sum(), (v * y).abs().sum()]).detach()
    forward, adjoint, scale = comm.all_reduce(products).tolist()
    return abs(forward - adjoint) / max(scale, 1.0)  # type: ignore[no-any-return]


def as_one(function: Callable[..., Tensor], comm: Comm) -> Callable[..., Tensor]:
    """A function of the ranks together, of replicated inputs and result, as `torch.autograd.gradcheck` wants it.

    Inside `function` gradients of replicated values are partial; outside they are whole and the same on every rank, for
    derivatives of any order.
    """

    def one(*inputs: Tensor) -> Tensor:
        inside = [Enter.apply(x, comm) for x in inputs]  # type: ignore[no-untyped-call]
        return Leave.apply(function(*inside), comm)  # type: ignore[no-any-return,no-untyped-call]

    return one


class Enter(torch.autograd.Function):
    """x, once -> x on every rank. Adjoint: the ranks' parts, added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        """Copy it."""
        ctx.comm = comm
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add up the ranks' parts."""
        return Gather.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class Gather(torch.autograd.Function):
    """A part on every rank -> their sum, once. Adjoint: Enter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, comm: Comm) -> Tensor:
        """Add up the ranks' parts."""
        ctx.comm = comm
        return comm.all_reduce(part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Copy the gradient to every rank."""
        return Enter.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class Leave(torch.autograd.Function):
    """A replicated value -> rank 0's, once. Adjoint: to rank 0 alone."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, comm: Comm) -> Tensor:
        """Take rank 0's value on every rank."""
        ctx.comm = comm
        return comm.all_reduce(y * (comm.rank == 0))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Give the gradient to rank 0 alone."""
        return Seed.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


class Seed(torch.autograd.Function):
    """v, once -> v on rank 0 and nothing elsewhere. Adjoint: Leave."""

    @staticmethod
    def forward(ctx: Any, v: Tensor, comm: Comm) -> Tensor:
        """Keep v on rank 0 alone."""
        ctx.comm = comm
        return v * (comm.rank == 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Take rank 0's gradient."""
        return Leave.apply(grad, ctx.comm), None  # type: ignore[no-untyped-call]


@contextmanager
def count_traffic(comm: Comm) -> Iterator[Traffic]:
    """Count what this rank sends inside the block, and its host syncs; the numbers are there after it.

    Host syncs are counted on the CPU too, where nothing waits, so that a test without a GPU finds them: `item`, `bool`,
    `nonzero`, boolean masks, `unique` and the like. `tolist` and `numpy` are seen on CUDA only.
    """
    before, counted = asdict(comm.traffic), Traffic()
    with HostSyncDetector() as syncs:
        yield counted
    counted.host_syncs = len(syncs.found)
    for name, value in asdict(comm.traffic).items():
        setattr(counted, name, getattr(counted, name) + value - before[name])
