"""Adapters of opaque operators: the transforms that a specification puts around one."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from alchemi_shardtensor.rules.arguments import argument_names
from alchemi_shardtensor.rules.rule import Rule, handles
from alchemi_shardtensor.rules.shard import Shard, owned_rows, tag
from alchemi_shardtensor.tag import (
    GLOBAL,
    LOST,
    OWNED,
    PADDED,
    SHARDED,
    STALE,
    SYSTEM,
    TaggedTensor,
    find_tagged,
    plain,
    tag_in_place,
)
from alchemi_shardtensor.transport import all_gather_rows, sum_over_ranks
from alchemi_spec import (
    AllReduceSum,
    GatherInputs,
    GatherInputsFull,
    MissingHandler,
    OpAdapter,
    SameRows,
    ScatterOutputs,
    SliceOutputsOwned,
    SliceOwned,
    SpecError,
)


def wrap_custom_op(adapter: OpAdapter) -> Rule:
    """A rule that puts the adapter's transforms around its operator, if one of that name is registered.

    The operator itself sees plain tensors. What no transform is declared for goes in as it is and comes out as rows of
    which nothing is known.
    """

    @handles(adapter.op, when=lambda shard, named: True)
    def adapted_op(shard: Shard, op: Any, **named: Any) -> Any:
        names = argument_names(op)
        transforms = {_argument(adapter, key, names): t for key, t in adapter.arg_transforms.items()}
        return _called(shard, op, adapter, transforms, named)

    return adapted_op


def _argument(adapter: OpAdapter, key: int | str, names: list[str]) -> str:
    """The name of an argument that is given by its name or its position.

    Raises:
        SpecError: where the operator has none such.

    """
    if isinstance(key, str) and key in names:
        return key
    if isinstance(key, int) and 0 <= key < len(names):
        return names[key]
    raise SpecError(f"{adapter.op} has no argument {key!r}: it takes {', '.join(names)}.")


def _called(
    shard: Shard, op: Callable[..., Any], adapter: OpAdapter, transforms: Mapping[Any, Any], named: dict[str, Any]
) -> Any:
    """The operator on transformed arguments, its results transformed and tagged."""
    if shard.storage.replicated:
        transforms, adapter = {}, OpAdapter(adapter.op)  # every rank has everything
    moved = (*transforms.values(), *adapter.output_transforms.values())
    if shard.storage.global_ids and any(isinstance(t, (GatherInputs, ScatterOutputs)) for t in moved):
        raise MissingHandler(
            f"{adapter.op} is adapted for [owned | ghost] rows, but in the sharded layout its indices hold global ids.\n"
            f"Use GatherInputsFull and SliceOutputsOwned, or a halo policy."
        )
    full = any(isinstance(t, GatherInputsFull) for t in transforms.values())
    tagged: list[TaggedTensor] = []
    find_tagged(named.values(), tagged)
    sharded = [t for t in tagged if t.rows in SHARDED]
    given = {name: _into(shard, transforms.get(name), value) for name, value in named.items()}
    result = op(**given)
    if isinstance(result, dict):
        return {key: _out(shard, adapter.output_transforms.get(key), value, full, sharded) for key, value in result.items()}
    if isinstance(result, (tuple, list)):
        return tuple(_out(shard, adapter.output_transforms.get(i), value, full, sharded) for i, value in enumerate(result))
    return _out(shard, adapter.output_transforms.get(0), result, full, sharded)


def _into(shard: Shard, transform: Any, value: Any) -> Any:
    """An argument as the operator wants it."""
    if not isinstance(value, Tensor):
        return value
    rows = getattr(value, "rows", None)
    if isinstance(transform, GatherInputs):
        return plain(value) if rows is PADDED else shard.routing.with_ghosts(plain(_owned(shard, value)))
    if isinstance(transform, GatherInputsFull) and rows is not GLOBAL:
        gathered = all_gather_rows(plain(_owned(shard, value)), shard.owners.counts, shard.comm)
        return gathered.index_select(0, shard.owners.gather_row)
    if isinstance(transform, SliceOwned):
        return plain(_owned(shard, value))
    return plain(value)


def _owned(shard: Shard, value: Tensor) -> Tensor:
    if getattr(value, "rows", None) is GLOBAL:
        return value.index_select(0, shard.ids[: shard.n_owned])
    mine = owned_rows(shard, value)
    if mine.shape[:1] != (shard.n_owned,):
        raise MissingHandler(
            f"a tensor of shape {tuple(value.shape)} does not have this rank's {shard.n_owned} atoms along dim 0, as the "
            f"adapter's transform needs it.\nTag per-atom tensors, or take the transform off this argument."
        )
    return mine


def _out(shard: Shard, transform: Any, value: Any, full: bool, sharded: Sequence[TaggedTensor]) -> Any:
    """A result with its transform done, and what its rows then are."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(transform, ScatterOutputs):
        owned = shard.routing.reduce_ghosts(value)
        if not shard.storage.padded:
            return tag_in_place(owned, shard, OWNED)
        return tag_in_place(torch.cat([owned[: shard.n_owned], torch.zeros_like(value[shard.n_owned :])]), shard, STALE)
    if isinstance(transform, AllReduceSum):
        return tag_in_place(sum_over_ranks(value, shard.comm), shard, SYSTEM)
    if isinstance(transform, SliceOutputsOwned):
        mine = value.index_select(0, shard.ids[: shard.n_owned]) if full else value[: shard.n_owned]
        return tag_in_place(mine, shard, OWNED)
    if isinstance(transform, SameRows):
        kinds = {t.rows for t in sharded if not t.row_dim and t.shape[:1] == value.shape[:1]}
        return tag_in_place(value, shard, kinds.pop() if len(kinds) == 1 else LOST)
    if sharded:
        return tag(value, shard, LOST)
    replicated = shard.storage.replicated and value.shape[:1] == (shard.n_owned,)
    return tag(value, shard, GLOBAL if replicated else SYSTEM)


def is_operator(adapter: OpAdapter) -> bool:
    """It adapts an operator of torch.ops, not a Python function `module:name`, which has to be replaced (see `patches`)."""
    return "::" in adapter.op


def adapt_function(adapter: OpAdapter) -> Callable[..., Any]:
    """A Python function's replacement, with the transforms around it where a TaggedTensor comes in."""

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        named = inspect.signature(original).bind(*args, **kwargs).arguments
        shard = next((value.shard for value in named.values() if isinstance(value, TaggedTensor)), None)
        if shard is None:
            return original(*args, **kwargs)
        transforms = {_argument(adapter, key, list(named)): t for key, t in adapter.arg_transforms.items()}
        return _called(shard, original, adapter, transforms, named)

    return call
