"""Spatial decomposition of atomic systems: owners, ghosts, routing, neighbour lists."""

from alchemi_halo.bisection import RecursiveBisection
from alchemi_halo.density import Density
from alchemi_halo.planning import Plan, plan
from alchemi_halo.processor_grid import ProcessorGrid
from alchemi_halo.strategy import HaloStrategy

__all__ = ["Density", "HaloStrategy", "Plan", "ProcessorGrid", "RecursiveBisection", "plan"]
