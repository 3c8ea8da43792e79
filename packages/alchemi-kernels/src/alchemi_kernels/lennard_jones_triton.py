"""Lennard-Jones in one Triton kernel: each edge is read once, and no tensor with a row per edge is written."""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from alchemi_kernels.pair_lists import FullList, PairSums


class Tile(NamedTuple):
    """The tile of one program: `atoms` receivers, `lanes` edges of each at a time, on `warps` of 32 threads.

    The default is one warp for each atom. Its edges are then summed without shared memory; 90 edges, which are usual, take
    three steps.
    """

    atoms: int = 4
    lanes: int = 32
    warps: int = 4


TILE = Tile()


@triton.jit
def lennard_jones_pair(square, sigma, epsilon, cutoff):
    """`lennard_jones_torch.lennard_jones_pair` as a function of r^2; returns dE/dr / r. One division and one root per pair."""
    inverse = 1 / square
    r = tl.sqrt(square)
    x = tl.minimum(tl.maximum(10 / cutoff * r - 9, 0), 1)
    switch = 1 - x * x * x * (10 - 15 * x + 6 * x * x)
    slope_of_switch = -300 / cutoff * (x * (1 - x)) * (x * (1 - x))
    power2 = sigma * sigma * inverse
    power6 = power2 * power2 * power2
    bare = 4 * epsilon * (power6 * power6 - power6)
    slope = -24 * epsilon * (2 * power6 * power6 - power6)
    return bare * switch, (slope * switch + bare * slope_of_switch * r) * inverse


@triton.jit
def _row(base, row, mask):
    """Load rows of base (N, 3): three numbers each."""
    at = base + 3 * row
    return tl.load(at, mask, 0), tl.load(at + 1, mask, 0), tl.load(at + 2, mask, 0)


@triton.jit
def _store_row(base, row, mask, x, y, z):
    at = base + 3 * row
    tl.store(at, x, mask)
    tl.store(at + 1, y, mask)
    tl.store(at + 2, z, mask)


@triton.jit(do_not_specialize=["n"])
def _lennard_jones(
    points,
    sender,
    starts,
    shifts,
    cell,
    batch,
    sigma,
    epsilon,
    cutoff,
    energies,
    forces,
    virials,
    n,
    VIRIAL: tl.constexpr,
    ATOMS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Atoms are along dim 0, their edges along dim 1. `starts` (n + 1,): where the edges of each atom begin."""
    position: tl.constexpr = points.dtype.element_ty
    real: tl.constexpr = sigma.dtype.element_ty
    wide: tl.constexpr = energies.dtype.element_ty
    atom = tl.program_id(0).to(tl.int64) * ATOMS + tl.arange(0, ATOMS)[:, None]
    mine = atom < n
    begin, end = tl.load(starts + atom, mine, 0), tl.load(starts + atom + 1, mine, 0)
    x, y, z = _row(points, atom, mine)
    vectors = 3 * tl.load(batch + atom, mine, 0)
    ax, ay, az = _row(cell, vectors, mine)
    bx, by, bz = _row(cell, vectors + 1, mine)
    cx, cy, cz = _row(cell, vectors + 2, mine)
    width, depth, reach = tl.load(sigma), tl.load(epsilon), tl.load(cutoff)
    none = tl.zeros((ATOMS, LANES), wide)
    energy, fx, fy, fz = none, none, none, none
    xx, xy, xz, yy, yz, zz = none, none, none, none, none, none
    for first in range(0, tl.max(end - begin).to(tl.int32), LANES):
        edge = begin + first + tl.arange(0, LANES)[None, :]
        listed = edge < end
        sx, sy, sz = _row(points, tl.load(sender + edge, listed, 0), listed)
        a, b, c = _row(shifts, edge, listed)
        a, b, c = a.to(position), b.to(position), c.to(position)
        dx = (sx - x + (a * ax + b * bx + c * cx)).to(real)
        dy = (sy - y + (a * ay + b * by + c * cy)).to(real)
        dz = (sz - z + (a * az + b * bz + c * cz)).to(real)
        square = dx * dx + dy * dy + dz * dz
        near = listed & ~(square >= reach * reach)  # true for nan, which then shows in the results
        dx, dy, dz = tl.where(near, dx, 0), tl.where(near, dy, 0), tl.where(near, dz, 0)
        pair, slope = lennard_jones_pair(tl.where(near, square, reach * reach), width, depth, reach)
        pair = tl.where(near, pair, 0).to(wide)
        gx, gy, gz = (slope * dx).to(wide), (slope * dy).to(wide), (slope * dz).to(wide)
        energy, fx, fy, fz = energy + pair, fx + gx, fy + gy, fz + gz
        if VIRIAL:
            xx, xy, xz = xx + gx * dx, xy + gx * dy, xz + gx * dz
            yy, yz, zz = yy + gy * dy, yz + gy * dz, zz + gz * dz
    tl.store(energies + atom, tl.sum(energy, 1, keep_dims=True) / 2, mine)
    fx, fy, fz = tl.sum(fx, 1, keep_dims=True), tl.sum(fy, 1, keep_dims=True), tl.sum(fz, 1, keep_dims=True)
    _store_row(forces, atom, mine, fx, fy, fz)
    if VIRIAL:
        xx, xy, xz = tl.sum(xx, 1, keep_dims=True) / 2, tl.sum(xy, 1, keep_dims=True) / 2, tl.sum(xz, 1, keep_dims=True) / 2
        yy, yz, zz = tl.sum(yy, 1, keep_dims=True) / 2, tl.sum(yz, 1, keep_dims=True) / 2, tl.sum(zz, 1, keep_dims=True) / 2
        _store_row(virials, 3 * atom, mine, xx, xy, xz)
        _store_row(virials, 3 * atom + 1, mine, xy, yy, yz)
        _store_row(virials, 3 * atom + 2, mine, xz, yz, zz)


def lennard_jones(edges: FullList, sigma: Tensor, epsilon: Tensor, cutoff: float, virial: bool, tile: Tile = TILE) -> PairSums:
    """`alchemi_kernels.lennard_jones` on CUDA; `benchmarks/kernels.py` tries other tiles."""
    points, sender, receiver, shifts, cell, batch, n = edges
    real, wide, device = sigma.dtype, torch.promote_types(points.dtype, sigma.dtype), points.device
    starts = torch.searchsorted(receiver.contiguous(), torch.arange(n + 1, device=device))
    energies, forces = (torch.empty(n, *shape, dtype=wide, device=device) for shape in ((), (3,)))
    virials = torch.empty(n, 3, 3, dtype=wide, device=device) if virial else None
    given = (t.contiguous() for t in (points, sender, starts, shifts, cell.to(points.dtype), batch))
    reach = torch.full((), cutoff, dtype=real, device=device)  # filled on the device; a Python float would be passed in float32
    with torch.cuda.device_of(points):
        _lennard_jones[(triton.cdiv(n, tile.atoms),)](
            *given,
            *(sigma, epsilon.to(real), reach, energies, forces, forces if virials is None else virials, n),
            VIRIAL=virial,
            ATOMS=tile.atoms,
            LANES=tile.lanes,
            num_warps=tile.warps,
        )
    return PairSums(energies, forces, virials)
