"""Spatial decomposition of atomic systems: owners, ghosts, routing, neighbour lists."""

from alchemi_halo.cuts import Cuts, Grid
from alchemi_halo.density import Density
from alchemi_halo.planning import Plan, plan
from alchemi_halo.strategy import HaloStrategy

__all__ = ["Cuts", "Density", "Grid", "HaloStrategy", "Plan", "plan"]
