"""Spatial decomposition of atomic systems: owners, ghosts, routing, neighbour lists."""

from alchemi_halo.frames import Frames
from alchemi_halo.strategy import HaloStrategy

__all__ = ["Frames", "HaloStrategy"]
