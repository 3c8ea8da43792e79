"""For models that build their graph themselves, from all positions: what they build is cut down to this rank's share."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from alchemi_shardtensor import BOTH, EDGE, GLOBAL, NODES, Shard, ShardTensor, plain, tag
from alchemi_spec import MissingHandler


def keep_owned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`original(*args, **kwargs)`, a builder of edges, of which those of this rank's receivers are kept, and tagged.

    It sees copies of its arguments with plain tensors, and returns a dict with `edge_index` (2, E), receivers second, and what
    is per edge under other names that begin with `edge`; or `edge_index` alone; or a tuple of it and more, of which what has E
    rows is per edge. Without a `ShardTensor` among its arguments it is left alone.

    Raises:
        MissingHandler: where it returns no `edge_index`, or is not shown the positions of all atoms.

    """
    tagged = list(_tensors((args, kwargs)))
    if not tagged:
        return original(*args, **kwargs)
    shard = tagged[0].shard
    if not any(t.rows is GLOBAL for t in tagged):
        raise MissingHandler(
            "a builder of edges was shown this rank's atoms alone.\n"
            'Give the model GraphParallelPolicy(geometry="replicated"), under which positions are all atoms\'.'
        )
    built = original(*_changed(args, _untagged), **_changed(kwargs, _untagged))
    edge_index = built.get("edge_index") if isinstance(built, Mapping) else built[0] if isinstance(built, tuple) else built
    if not isinstance(edge_index, Tensor) or edge_index.shape[:1] != (2,):
        raise MissingHandler(
            f"a builder of edges returned {type(built).__name__} without an edge_index (2, E).\n"
            f"Have it return one, first of a tuple or under that name in a dict, or write a replacement of its own."
        )
    mine = (shard.owners.rank[edge_index[1]] == shard.comm.rank).nonzero().flatten()

    def kept(value: Any) -> Any:
        return _kept(value, edge_index, mine, shard)

    if isinstance(built, Mapping):
        return _filled(built, {name: kept(value) for name, value in built.items() if name.startswith("edge")})
    return _changed(built, kept) if isinstance(built, tuple) else kept(built)


def _kept(value: Any, edge_index: Tensor, mine: Tensor, shard: Shard) -> Any:
    """What is kept of what has a row for each edge; anything else as it is."""
    if value is edge_index:
        return tag(edge_index[:, mine], shard, None, NODES, BOTH)
    if isinstance(value, Tensor) and value.ndim and len(value) == edge_index.shape[1]:
        return tag(value[mine], shard, EDGE)
    return value


def _tensors(value: Any) -> Iterator[ShardTensor]:
    """Those among arguments, also within containers."""
    if isinstance(value, ShardTensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _untagged(value: Any) -> Any:
    return plain(value) if isinstance(value, ShardTensor) else value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of containers of any types, with each item changed."""
    if isinstance(value, Mapping):
        return _filled(value, {name: _changed(item, change) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def _filled(mapping: Any, items: Mapping[str, Any]) -> Any:
    filled = copy.copy(mapping)
    filled.update(items)
    return filled
