"""The Lennard-Jones potential on a full neighbour list: by the Triton kernel on CUDA, in plain torch elsewhere.

A full list has both directions of each pair, so the edges of an atom hold the whole force on it.
"""

from torch import Tensor

from alchemi_kernels.lennard_jones_torch import lennard_jones_in_torch
from alchemi_kernels.pair_lists import FullList, PairSums


def lennard_jones(edges: FullList, *, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool = True) -> PairSums:
    """4 ε ((σ/r)^12 - (σ/r)^6), switched off between 0.9 cutoff and `cutoff` with continuous second derivative.

    `sigma` (Å) and `epsilon` (eV): one number each, on the points' device; `cutoff` in Å.

    Distance vectors are computed in the points' dtype and pairs in sigma's. Sums are in the wider of both, so forces add up to
    zero. An edge of `cutoff` or longer adds exactly zero. The result is not differentiable. On CUDA there is no host sync and
    no copy from the host, so a CUDA graph can capture the call.
    """
    edges = edges._replace(points=edges.points.detach())
    if not edges.points.is_cuda:
        return lennard_jones_in_torch(edges, sigma, epsilon, cutoff, virial)
    from alchemi_kernels import lennard_jones_triton  # noqa: PLC0415  torch on the CPU comes without Triton

    return lennard_jones_triton.lennard_jones(edges, sigma, epsilon, cutoff, virial)
