"""The handlers of the owned layout, in the order in which they are asked."""

from alchemi_shardtensor.rules import autograd, empty, gather, reduce, scatter
from alchemi_shardtensor.table import HandlerTable

OWNED_LAYOUT = HandlerTable([*gather.RULES, *scatter.RULES, *autograd.RULES, *reduce.RULES, *empty.RULES])
"""Rows the model sees: owned. A gather exchanges, a scatter to receivers is local, one to senders is folded home."""
