"""MACE potentials for alchemi"""
