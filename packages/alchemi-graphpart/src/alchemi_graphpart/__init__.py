"""Partition of atomic systems by index or along a curve: balanced, and atoms never migrate."""

from alchemi_graphpart.builders import keep_owned
from alchemi_graphpart.strategy import BlockOwners, GraphPartitionStrategy

__all__ = ["BlockOwners", "GraphPartitionStrategy", "keep_owned"]
