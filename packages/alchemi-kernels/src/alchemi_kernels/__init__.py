"""Physical potentials on a neighbour list, each in one pass: Triton on CUDA, plain torch elsewhere."""

from alchemi_kernels.pairs import FullList, PairSums, lennard_jones

__all__ = ["FullList", "PairSums", "lennard_jones"]
