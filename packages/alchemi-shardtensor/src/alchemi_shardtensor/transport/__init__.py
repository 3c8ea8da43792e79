"""Transport: ranks, the collectives between them, and who sends which rows to whom. MPI's is imported when it is used."""

from alchemi_shardtensor.transport.collectives import (
    AllToAllRows,
    PrefetchedGhosts,
    all_gather_rows,
    max_over_ranks,
    min_over_ranks,
    packed_all_to_all,
    reduce_scatter_rows,
    sum_over_ranks,
)
from alchemi_shardtensor.transport.comm import Comm, Traffic
from alchemi_shardtensor.transport.config import MODES, DomainConfig
from alchemi_shardtensor.transport.launch import RankPool, comm_from_environment
from alchemi_shardtensor.transport.routing import Edges, Owners, Routing
from alchemi_shardtensor.transport.strategy import Partition, Strategy

__all__ = [
    "MODES",
    "AllToAllRows",
    "Comm",
    "DomainConfig",
    "Edges",
    "Owners",
    "Partition",
    "PrefetchedGhosts",
    "RankPool",
    "Routing",
    "Strategy",
    "Traffic",
    "all_gather_rows",
    "comm_from_environment",
    "max_over_ranks",
    "min_over_ranks",
    "packed_all_to_all",
    "reduce_scatter_rows",
    "sum_over_ranks",
]
