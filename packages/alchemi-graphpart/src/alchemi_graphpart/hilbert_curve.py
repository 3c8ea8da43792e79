"""The index of atoms along a Hilbert curve: a space-filling curve on which neighbours in space are near each other."""

import torch
from torch import Tensor

from alchemi_kernels import LatticeFrames

BITS = 20
"""Bits of each coordinate. The index on the curve has three times as many, in one int64."""


def hilbert_index(positions: Tensor, batch: Tensor, frames: LatticeFrames) -> Tensor:
    """The index (N,) of atoms (N, 3) Å along the Hilbert curve of their system.

    Coordinates are wrapped into the cell, with the longest side first and in one unit of length, so that blocks of the curve
    are as compact as the cell allows. In a cubic cell the curve is closed: its two ends meet at a face.
    """
    inside = frames.wrapped(positions, batch)
    low, high = (b.nan_to_num(posinf=0.0, neginf=0.0) for b in frames.bounds(inside, batch).unbind(1))
    low, high = torch.where(frames.periodic, 0.0, low), torch.where(frames.periodic, 1.0, high)
    sides = (high - low) * frames.heights
    order = sides.argsort(dim=-1, descending=True)
    unit = frames.heights / sides.amax(-1, keepdim=True).clamp(min=1e-12)
    scaled = (inside - low[batch]) * unit[batch]
    return _index_of((scaled.gather(-1, order[batch]) * 2**BITS).long().clamp(0, 2**BITS - 1))


def _index_of(x: Tensor) -> Tensor:
    """Whole-numbered coordinates (n, 3) of `BITS` bits -> indices (n,) along the Hilbert curve.

    Skilling, AIP Conf. Proc. 707 (2004) 381: undo rotations and reflections from the highest bit down, then a Gray code.
    """
    axes = list(x.unbind(-1))
    for bit in range(BITS - 1, 0, -1):
        lower = (1 << bit) - 1
        for i in range(3):
            mirrored = (axes[i] >> bit & 1).bool()
            swapped = (axes[0] ^ axes[i]) & lower
            axes[0] = axes[0] ^ torch.where(mirrored, lower, swapped)
            if i:
                axes[i] = axes[i] ^ torch.where(mirrored, 0, swapped)
    axes[1] = axes[1] ^ axes[0]
    axes[2] = axes[2] ^ axes[1]
    flips = torch.zeros_like(axes[0])
    for bit in range(BITS - 1, 0, -1):
        flips = flips ^ (axes[2] >> bit & 1) * ((1 << bit) - 1)
    index = torch.zeros_like(axes[0])
    for bit in range(BITS - 1, -1, -1):
        for axis in axes:
            index = index << 1 | (axis ^ flips) >> bit & 1
    return index
