"""Storage: how rows are reached, and what is remembered of them."""

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
