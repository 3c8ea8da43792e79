"""Dispatch: the tensor whose operations are looked up, and the table that they are looked up in."""

from alchemi_shardtensor.dispatch.registry import find_layout, make_shard, shard_of
from alchemi_shardtensor.dispatch.table import HandlerTable
from alchemi_shardtensor.dispatch.tensor import ShardTensor

__all__ = ["HandlerTable", "ShardTensor", "find_layout", "make_shard", "shard_of"]
