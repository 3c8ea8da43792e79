"""A torch.Tensor that knows its rows are one rank's share, and everything that ranks say to each other."""

from alchemi_shardtensor.comm import Comm, Traffic
from alchemi_shardtensor.config import DomainConfig
from alchemi_shardtensor.launch import RankPool, comm_from_environment
from alchemi_shardtensor.routing import Edges, Routing, sum_over_ranks
from alchemi_shardtensor.rules import OWNED_LAYOUT
from alchemi_shardtensor.table import HandlerTable, Rule, handles, points_at, rows_are
from alchemi_shardtensor.tensor import (
    BOTH,
    EDGE,
    LOST,
    NODES,
    OWNED,
    PADDED,
    RECEIVER,
    SENDER,
    SYSTEM,
    SYSTEMS,
    Shard,
    ShardTensor,
    plain,
    tag,
)

__all__ = [
    "BOTH",
    "EDGE",
    "LOST",
    "NODES",
    "OWNED",
    "OWNED_LAYOUT",
    "PADDED",
    "RECEIVER",
    "SENDER",
    "SYSTEM",
    "SYSTEMS",
    "Comm",
    "DomainConfig",
    "Edges",
    "HandlerTable",
    "RankPool",
    "Routing",
    "Rule",
    "Shard",
    "ShardTensor",
    "Traffic",
    "comm_from_environment",
    "handles",
    "plain",
    "points_at",
    "rows_are",
    "sum_over_ranks",
    "tag",
]
