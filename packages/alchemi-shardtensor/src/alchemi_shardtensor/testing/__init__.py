"""A test kit for multi-rank code, for our own tests and for vendors': `@ranks(1, 2, 3)`, `adjoint_gap`, `count_traffic`."""

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

from alchemi_shardtensor.comm import Comm, Traffic

EXACT = 1e-12
"""Round-off of float64 sums in another order."""
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
        test(comm=comm, **kwargs)


def adjoint_gap(function: Callable[[Tensor], Tensor], x: Tensor, comm: Comm) -> float:
    """|<v, f(x)> - <f*(v), x>| over all ranks, relative to the products, for a linear `function` and a random v."""
    x = x.detach().requires_grad_()
    y = function(x)
    v = torch.randn_like(y)
    (back,) = torch.autograd.grad(y, x, v)
    products = torch.stack([(v * y).sum(), (back * x).sum(), (v * y).abs().sum()]).detach()
    forward, adjoint, scale = comm.all_reduce(products).tolist()
    return abs(forward - adjoint) / max(scale, 1.0)  # type: ignore[no-any-return]


@contextmanager
def count_traffic(comm: Comm) -> Iterator[Traffic]:
    """Count what this rank sends inside the block; the numbers are there after it."""
    before, counted = asdict(comm.traffic), Traffic()
    yield counted
    for name, value in asdict(comm.traffic).items():
        setattr(counted, name, value - before[name])
