"""For models that build their graph themselves, from all positions: what they build is cut down to this rank's share."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from alchemi_shardtensor import BOTH, EDGE, GLOBAL, NODES, Shard, ShardTensor, plain, tag
from alchemi_spec import MissingHandler


def keep_owned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`original(*args, **kwargs)`, a builder of edges, of which those of this rank's receivers are kept, and tagged.

    It sees plain tensors. What it returns is a dict with `edge_index` (2, E), or that and more in a tuple; further tensors
    with E rows are per edge. Receivers are the second row. Without a `ShardTensor` among its arguments it is left alone.

    Raises:
        MissingHandler: where it returns no `edge_index`.

    """
    found = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, ShardTensor) and a.rows is GLOBAL]
    if not found:
        return original(*args, **kwargs)
    args, kwargs = tree_map(lambda a: plain(a) if isinstance(a, ShardTensor) else a, (args, kwargs))
    built, shard = original(*args, **kwargs), found[0].shard
    edge_index = built.get("edge_index") if isinstance(built, Mapping) else built[0] if isinstance(built, tuple) else built
    if not isinstance(edge_index, Tensor) or edge_index.shape[:1] != (2,):
        raise MissingHandler(
            f"a builder of edges returned {type(built).__name__} without an edge_index (2, E).\n"
            f"Have it return one, first of a tuple or under that name in a dict, or write a replacement of its own."
        )
    mine = (shard.owners.rank[edge_index[1]] == shard.comm.rank).nonzero().flatten()
    if isinstance(built, Mapping):
        return type(built)({name: _kept(value, edge_index, mine, shard) for name, value in built.items()})  # type: ignore[call-arg]
    many = tuple(_kept(value, edge_index, mine, shard) for value in (built if isinstance(built, tuple) else (built,)))
    return many if isinstance(built, tuple) else many[0]


def _kept(value: Any, edge_index: Tensor, mine: Tensor, shard: Shard) -> Any:
    """What is kept of what has a row for each edge; anything else as it is."""
    if value is edge_index:
        return tag(edge_index[:, mine], shard, None, NODES, BOTH)
    if isinstance(value, Tensor) and value.ndim and len(value) == edge_index.shape[1]:
        return tag(value[mine], shard, EDGE)
    return value
