"""ShardTensor: a torch.Tensor whose operations know that its rows are one rank's part."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.dispatch.registry import shard_of
from alchemi_shardtensor.rules.shard import Shard, tag
from alchemi_shardtensor.tag import OWNED, PADDED, STALE, Ends, PointsAt, Rows, TaggedTensor, find_tagged
from alchemi_shardtensor.transport import DomainConfig, Routing
from alchemi_spec import DistributionSpec, SpecError


class ShardTensor(TaggedTensor):
    """A tagged tensor. The storage is the plain tensor's.

    An operation that no handler of the shard's table takes is plain torch's, and the tag is propagated to where its rows are
    in the result.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Dispatch: the first handler of the shard's table whose predicate holds, else plain torch and tag propagation."""
        with torch._C.DisableTorchFunctionSubclass():
            if func in _WITHOUT_ROWS:
                return func(*args)
            sources: list[TaggedTensor] = []
            for a in args:
                kind = type(a)
                if kind is ShardTensor:
                    sources.append(a)
                elif kind is tuple or kind is list:
                    find_tagged(a, sources)
            if kwargs:
                find_tagged(kwargs.values(), sources)
            else:
                kwargs = {}
            if not sources:
                return func(*args, **kwargs)
            shard = sources[0].shard
            return shard.table.dispatch(func, shard, sources, args, kwargs)

    @classmethod
    def wrap(
        cls,
        t: Tensor,
        *,
        spec: DistributionSpec,
        meta: Routing,
        config: DomainConfig | None = None,
        n_systems: int = 1,
        rows: Rows | str | None = None,
        points_at: PointsAt | str | None = None,
        end: Ends = None,
    ) -> TaggedTensor:
        """`t` as a ShardTensor that shares its storage; `t` itself stays plain. Every rank must call it.

        `meta`: this rank's counts and routing; tensors wrapped with the same `spec`, `meta` and `n_systems` belong
        together. `config`: its ranks must be the routing's. `rows`: what dim 0 enumerates. `points_at`: what the values
        index; `end`: which end of the edges they name (`BOTH` for an edge_index).

        Raises:
            SpecError: for ranks that are not the routing's, an index that is not of integers, or rows that do not fit.

        """
        if config is not None and config.comm is not meta.comm:
            raise SpecError("this routing was made for other ranks than config's: make both with one Comm.")
        shard = shard_of(spec, meta, n_systems)
        what = None if rows is None else Rows(rows), None if points_at is None else PointsAt(points_at)
        _check_wrapped(t, shard, *what)
        return tag(t, shard, *what, end)


_GETTERS = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_leaf",
    "grad_fn",
    "layout",
    "is_cuda",
    "is_sparse",
)
_WITHOUT_ROWS = frozenset(
    [*(getattr(Tensor, name).__get__ for name in _GETTERS), Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point]
)
"""Asked often, and answered with no tensor."""


def _check_wrapped(t: Tensor, shard: Shard, rows: Rows | None, points_at: PointsAt | None) -> None:
    if points_at is not None and (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool):
        raise SpecError(f"a tensor of {t.dtype} cannot point at {points_at}: an index is of integers.")
    expected = {OWNED: shard.n_owned, PADDED: shard.n_owned + shard.n_ghost, STALE: shard.n_owned + shard.n_ghost}
    n = None if rows is None else expected.get(rows)
    if n is not None and t.shape[:1] != (n,):
        raise SpecError(f"{rows} rows are {n} on this rank, but the tensor's shape is {tuple(t.shape)}.")
