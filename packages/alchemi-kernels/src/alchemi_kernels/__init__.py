"""Neighbour lists, and physical potentials on them: one Triton kernel on CUDA, plain torch elsewhere."""

from alchemi_kernels.lattice_frames import LatticeFrames
from alchemi_kernels.lennard_jones import lennard_jones
from alchemi_kernels.neighbour_list import neighbour_list
from alchemi_kernels.pair_lists import FullList, PairSums

__all__ = ["FullList", "LatticeFrames", "PairSums", "lennard_jones", "neighbour_list"]
