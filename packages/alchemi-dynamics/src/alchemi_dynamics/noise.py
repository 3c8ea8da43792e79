"""Random numbers that are a function of atom and step, not of rank: a counter-based generator, in plain torch."""

import math

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def normal(seed: int, step: int | Tensor, ids: Tensor, columns: int = 3, stream: int = 0) -> Tensor:
    """Standard normal numbers (n, columns) float64 for atoms `ids` (n,), a function of these arguments alone.

    An atom's numbers at a step are the same on any number of ranks, in any order and on any device (up to libm's round-off).
    Uses with different `stream` < 256 are independent. `columns` <= 512, `step` < 2**48. Box-Muller on 53-bit uniforms.
    """
    block = torch.arange((columns + 1) // 2, device=ids.device)
    low, high = (ids & WORD)[:, None] + 0 * block, (ids >> 32)[:, None] + 0 * block
    last = 0 * low + block + (stream << 8) + ((step >> 32) << 16)
    a, b, c, d = philox((low, high, 0 * low + (step & WORD), last), (seed & WORD, (seed >> 32) & WORD))
    radius = torch.sqrt(-2 * torch.log1p(-_uniform(a, b)))
    angle = 2 * math.pi * _uniform(c, d)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(1)[:, :columns]


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Turn four 32-bit words, in int64 tensors, into four random words: Philox4x32-10 of Salmon et al., SC'11 (2011) 16."""
    a, b, c, d = counter
    for i in range(10):
        high0, low0 = _multiply(a, 0xD2511F53)
        high1, low1 = _multiply(c, 0xCD9E8D57)
        key0, key1 = (key[0] + i * 0x9E3779B9) & WORD, (key[1] + i * 0xBB67AE85) & WORD
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
    return a, b, c, d


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product. int64 wraps around, but keeps all 64 bits."""
    product = word * factor
    return (product >> 32) & WORD, product & WORD


def _uniform(high: Tensor, low: Tensor) -> Tensor:
    """Turn two words into a multiple of 2**-53 in [0, 1)."""
    return ((high << 21) | (low >> 11)).to(torch.float64) * 2.0**-53
