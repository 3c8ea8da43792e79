"""Where atoms lie along a space-filling curve, which keeps neighbours together."""

import torch
from torch import Tensor

from alchemi_kernels import Frames

BITS = 20
"""Of each coordinate: an atom's place on the curve has three times as many, in one int64."""


def along_curve(positions: Tensor, batch: Tensor, frames: Frames) -> Tensor:
    """The place (N,) of each of all atoms (N, 3) Å along its system's Hilbert curve.

    Coordinates are wrapped fractional ones, the longest side first and all in one unit of length, so that blocks of the curve
    are as compact as the cell lets them be. In a cubic cell the curve is closed: both its ends lie at the same face.
    """
    inside = frames.wrapped(positions, batch)
    low, high = (b.nan_to_num(posinf=0.0, neginf=0.0) for b in frames.bounds(inside, batch).unbind(1))
    low, high = torch.where(frames.periodic, 0.0, low), torch.where(frames.periodic, 1.0, high)
    sides = (high - low) * frames.heights
    order = sides.argsort(dim=-1, descending=True)
    unit = frames.heights / sides.amax(-1, keepdim=True).clamp(min=1e-12)
    scaled = (inside - low[batch]) * unit[batch]
    return _hilbert((scaled.gather(-1, order[batch]) * 2**BITS).long().clamp(0, 2**BITS - 1))


def _hilbert(x: Tensor) -> Tensor:
    """Whole-numbered coordinates (n, 3) of `BITS` bits -> places (n,) along the Hilbert curve.

    Skilling, AIP Conf. Proc. 707 (2004) 381: turns and mirrors undone from the highest bit down, then a Gray code.
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
    place = torch.zeros_like(axes[0])
    for bit in range(BITS - 1, -1, -1):
        for axis in axes:
            place = place << 1 | (axis ^ flips) >> bit & 1
    return place
