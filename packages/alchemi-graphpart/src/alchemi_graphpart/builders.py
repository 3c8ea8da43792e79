"""For models that build their graph themselves, from all positions: keep the edges of this rank's receivers."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from alchemi_shardtensor import BOTH, EDGE, GLOBAL, NODES, Shard, ShardTensor, plain, tag
from alchemi_spec import MissingHandler


def keep_owned(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `original(*args, **kwargs)`, which builds edges; keep the edges of this rank's receivers, and tag them.

    `original` gets copies of its arguments with plain tensors. It returns one of three things: `edge_index` (2, E), with the
    receivers second; a tuple with `edge_index` first, whose other tensors with E rows are per-edge fields; or a dict with
    `edge_index`, whose other names that begin with `edge` are per-edge fields. Without a `ShardTensor` among the arguments,
    its result is returned unchanged.

    Raises:
        MissingHandler: if it returns no `edge_index`, or does not get the positions of all atoms.

    """
    tagged = list(_tensors((args, kwargs)))
    if not tagged:
        return original(*args, **kwargs)
    shard = tagged[0].shard
    if not any(t.rows is GLOBAL for t in tagged):
        raise MissingHandler(
            "the function that builds edges gets only this rank's atoms, so it would miss edges to atoms of other ranks.\n"
            'Give the model GraphParallelPolicy(geometry="replicated"): then it gets the positions of all atoms.'
        )
    built = original(*_changed(args, _untagged), **_changed(kwargs, _untagged))
    edge_index = built.get("edge_index") if isinstance(built, Mapping) else built[0] if isinstance(built, tuple) else built
    if not isinstance(edge_index, Tensor) or edge_index.shape[:1] != (2,):
        raise MissingHandler(
            f"the function that builds edges returned {type(built).__name__} without an edge_index (2, E).\n"
            f"Let it return one: alone, first in a tuple, or by that name in a dict. Or write your own replacement."
        )
    mine = (shard.owners.rank[edge_index[1]] == shard.comm.rank).nonzero().flatten()

    def kept(value: Any) -> Any:
        return _kept(value, edge_index, mine, shard)

    if isinstance(built, Mapping):
        return _updated(built, {name: kept(value) for name, value in built.items() if name.startswith("edge")})
    return _changed(built, kept) if isinstance(built, tuple) else kept(built)


def _kept(value: Any, edge_index: Tensor, mine: Tensor, shard: Shard) -> Any:
    """The rows of owned receivers of a field with a row per edge; any other value unchanged."""
    if value is edge_index:
        return tag(edge_index[:, mine], shard, None, NODES, BOTH)
    if isinstance(value, Tensor) and value.ndim and len(value) == edge_index.shape[1]:
        return tag(value[mine], shard, EDGE)
    return value


def _tensors(value: Any) -> Iterator[ShardTensor]:
    """The ShardTensors among arguments, also within containers."""
    if isinstance(value, ShardTensor):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def _untagged(value: Any) -> Any:
    return plain(value) if isinstance(value, ShardTensor) else value


def _changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested containers, with `change` applied to each item."""
    if isinstance(value, Mapping):
        return _updated(value, {name: _changed(item, change) for name, item in value.items()})
    if isinstance(value, (list, tuple)):
        items = [_changed(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return change(value)


def _updated(mapping: Any, items: Mapping[str, Any]) -> Any:
    updated = copy.copy(mapping)
    updated.update(items)
    return updated
