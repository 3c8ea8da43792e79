"""The layouts: which rules serve a policy, and how its rows are reached. Entry points `alchemi.layouts` name them."""

from alchemi_shardtensor.dispatch.table import HandlerTable
from alchemi_shardtensor.rules import autograd, counting, empty, gather, reduce, scatter
from alchemi_shardtensor.rules.adapters import is_operator, wrap_custom_op
from alchemi_shardtensor.storage import Storage
from alchemi_spec import DistributionSpec, GraphParallelPolicy, HaloStoragePolicy

RULES = (*gather.RULES, *scatter.RULES, *counting.RULES, *autograd.RULES, *reduce.RULES, *empty.RULES)
"""What operations mean on one rank's rows, in the order in which they are asked; the same for all layouts."""


def _layout(spec: DistributionSpec, storage: Storage) -> HandlerTable:
    padded = [gather.owned_of_mask] if storage.padded else []
    return HandlerTable([*map(wrap_custom_op, filter(is_operator, spec.custom_ops)), *padded, *RULES], storage)


def halo(spec: DistributionSpec) -> HandlerTable:
    """Rows the model sees: owned, or [owned | ghost]."""
    policy = spec.policy
    assert isinstance(policy, HaloStoragePolicy)
    storage = Storage(padded=policy.layout == "padded", reads=policy.gather != "local", reduces=policy.scatter != "local")
    return _layout(spec, storage)


def sharded(spec: DistributionSpec) -> HandlerTable:
    """Rows the model sees: owned; indices are global ids."""
    return _layout(spec, Storage(global_ids=True))


def graph_parallel(spec: DistributionSpec) -> HandlerTable:
    """Rows the model sees: owned, and all rows of replicated tensors; an exchange or an all-gather fetches remote rows."""
    assert isinstance(spec.policy, GraphParallelPolicy)
    built = spec.policy.geometry == "replicated"
    return _layout(spec, Storage(collective=spec.policy.collective, global_ids=built, all_positions=built))


def local(spec: DistributionSpec) -> HandlerTable:
    """Rows the model sees: all."""
    return _layout(spec, Storage(replicated=True))
