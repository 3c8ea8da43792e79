"""Spatial decomposition of atomic systems: owners, ghosts, routing, neighbour lists"""
