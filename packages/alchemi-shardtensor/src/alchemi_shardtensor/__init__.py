"""A torch.Tensor that knows its rows are one rank's share, and everything that ranks say to each other."""

from alchemi_shardtensor.adapters import adapted, unscripted, wrap_custom_op
from alchemi_shardtensor.capture import Captured, SideStream
from alchemi_shardtensor.collectives import (
    all_gather_rows,
    max_over_ranks,
    min_over_ranks,
    packed_all_to_all,
    reduce_scatter_rows,
    sum_over_ranks,
)
from alchemi_shardtensor.comm import Comm, Traffic
from alchemi_shardtensor.config import DomainConfig
from alchemi_shardtensor.launch import RankPool, comm_from_environment
from alchemi_shardtensor.layouts import find_layout
from alchemi_shardtensor.routing import Edges, Owners, Routing
from alchemi_shardtensor.storage import Storage, brought
from alchemi_shardtensor.strategy import Partition, Strategy
from alchemi_shardtensor.table import HandlerTable, Rule, handles, points_at, rows_are
from alchemi_shardtensor.tensor import (
    BOTH,
    EDGE,
    GLOBAL,
    LOST,
    NODES,
    OWNED,
    PADDED,
    PARTIAL,
    RECEIVER,
    SENDER,
    STALE,
    SYSTEM,
    SYSTEMS,
    Fired,
    Shard,
    ShardTensor,
    plain,
    tag,
    tag_all,
    trace,
)

__all__ = [
    "BOTH",
    "EDGE",
    "GLOBAL",
    "LOST",
    "NODES",
    "OWNED",
    "PADDED",
    "PARTIAL",
    "RECEIVER",
    "SENDER",
    "STALE",
    "SYSTEM",
    "SYSTEMS",
    "Captured",
    "Comm",
    "DomainConfig",
    "Edges",
    "Fired",
    "HandlerTable",
    "Owners",
    "Partition",
    "RankPool",
    "Routing",
    "Rule",
    "Shard",
    "ShardTensor",
    "SideStream",
    "Storage",
    "Strategy",
    "Traffic",
    "adapted",
    "all_gather_rows",
    "brought",
    "comm_from_environment",
    "find_layout",
    "handles",
    "max_over_ranks",
    "min_over_ranks",
    "packed_all_to_all",
    "plain",
    "points_at",
    "reduce_scatter_rows",
    "rows_are",
    "sum_over_ranks",
    "tag",
    "tag_all",
    "trace",
    "unscripted",
    "wrap_custom_op",
]
