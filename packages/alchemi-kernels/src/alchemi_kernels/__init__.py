"""Physical potentials on a neighbour list, each in one pass: Triton on CUDA, plain torch elsewhere. And such lists."""

from alchemi_kernels.frames import Frames
from alchemi_kernels.neighbours import neighbours
from alchemi_kernels.pairs import FullList, PairSums, lennard_jones

__all__ = ["Frames", "FullList", "PairSums", "lennard_jones", "neighbours"]
