"""Machine-learned interatomic potentials on many GPUs: any model of alchemi-spec's contract, exactly as on one."""

from alchemi_dist.batch import Batch
from alchemi_dist.domain import Domain
from alchemi_dist.lj import LennardJones
from alchemi_dist.model import DistributedModel
from alchemi_dist.registry import load_model
from alchemi_dist.sharded import ShardedBatch
from alchemi_dist.strain import differentiate
from alchemi_shardtensor import Comm, DomainConfig, RankPool, comm_from_environment

__all__ = [
    "Batch",
    "Comm",
    "DistributedModel",
    "Domain",
    "DomainConfig",
    "LennardJones",
    "RankPool",
    "ShardedBatch",
    "comm_from_environment",
    "differentiate",
    "load_model",
]
