"""Spatial decomposition of atomic systems: owners, ghosts, routing, neighbour lists."""

from alchemi_halo.cuts import Cuts, Grid, Partition
from alchemi_halo.frames import Frames
from alchemi_halo.plan import Density, Plan, plan
from alchemi_halo.strategy import HaloStrategy

__all__ = ["Cuts", "Density", "Frames", "Grid", "HaloStrategy", "Partition", "Plan", "plan"]
