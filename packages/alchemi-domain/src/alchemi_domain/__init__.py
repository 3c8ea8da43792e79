"""Structures divided among ranks, and models evaluated on them with the results of one rank."""

from alchemi_domain.atom_buffers import AtomBuffers
from alchemi_domain.batch import Batch
from alchemi_domain.derivatives import differentiate
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.domain import Domain
from alchemi_domain.registry import load_model
from alchemi_domain.sharded_batch import ShardedBatch

__all__ = ["AtomBuffers", "Batch", "DistributedModel", "Domain", "ShardedBatch", "differentiate", "load_model"]
