"""Storage: how the rows of a layout are reached, and the cache of a shard."""

from alchemi_shardtensor.storage.cache import (
    Counted,
    GhostRows,
    LocalIds,
    ShardCache,
    Snapshot,
    TensorCache,
    TraceEvent,
)
from alchemi_shardtensor.storage.storage import Storage

__all__ = ["Counted", "GhostRows", "LocalIds", "ShardCache", "Snapshot", "Storage", "TensorCache", "TraceEvent"]
