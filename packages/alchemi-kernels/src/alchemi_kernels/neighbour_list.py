"""The neighbour list: all neighbours of given atoms, by a cell list in plain torch, on the CPU and on CUDA."""

from math import isfinite, pi, prod
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS_PER_CUTOFF = 2
"""Cells per cutoff along the first two axes. More cells mean fewer candidates, but more columns to visit for each receiver."""
LAYERS_PER_CUTOFF = 8
"""Cells per cutoff along the third axis. The cells of a column that are within the cutoff are one run of the sorted images, so
more of them cost only memory."""
MAX_CELLS_PER_IMAGE = 16
"""At most this many cells per image."""
ROUND_OFF = 1e-6
"""An upper bound of the float32 round-off: in Å, and as a part of the region's width. Pairs that are closer to the cutoff than
this are decided in float64."""
MAX_RECEIVERS, MAX_CANDIDATES = 2**10, 2**18
"""At most so many are searched at a time on the CPU, which fits its cache."""
CUDA_FACTOR = 2**6
"""On CUDA this many times more are searched at a time, in about 1 GB."""


class Images(NamedTuple):
    """All periodic images (m,) that may be within the cutoff of a receiver.

    Image k is atom `point[k]` of `points` (n, 3), moved by the whole numbers `shift[:, k]` (3, m) of the vectors `lattice`.
    `at` (3, m): its position in float32, in Å from the middle of the searched region, which is `extent` (3) Å wide. `own`
    (R,): for each receiver, the image that is the receiver itself.
    """

    points: Tensor
    lattice: Tensor
    point: Tensor
    shift: Tensor
    at: Tensor
    own: Tensor
    extent: list[float]


class CellGrid(NamedTuple):
    """A cell list: the images sorted by cell, and where each cell `starts` among them.

    Cell (i, j, k), for any whole numbers, has the number (i * strides[0] + j * strides[1] + k) modulo `n_cells`. In a wide
    region several cells share a number, so empty cells cost nothing. Cells that one receiver visits never share a number.
    The images (m,) are stored twice, (2 m,), so that a run of cells may pass the last one and go on with the first.
    """

    order: Tensor
    at: Tensor
    starts: Tensor
    strides: tuple[int, int]
    n_cells: int
    reach: float


def neighbour_list(
    points: Tensor, receivers: Tensor, vectors: Tensor, periodic: Tensor, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """List all pairs within `cutoff` Å of `receivers` (R,): receivers (E,), senders (E,) and shifts (E, 3).

    `receivers`: ascending row numbers of `points` (n, 3) Å, which may lie anywhere. `vectors` (3, 3): three rows that span
    space, also along directions that are not `periodic` (3,); best kept on the host. The result is sorted by receiver.

    A pair fulfils |x[sender] - x[receiver] + S @ vectors| <= cutoff with whole-numbered shifts S. An atom's own images are
    among its senders; the atom itself is not. Whether a pair is listed does not depend on which of its ends receives, nor on
    the other points.

    Raises:
        ValueError: if points are nan or infinite.

    """
    points, vectors = points.detach().double(), vectors.detach().double().cpu()
    if not len(receivers):
        return receivers.new_empty(0), receivers.new_empty(0), points.new_empty(0, 3)
    images = _images(points, receivers, vectors, periodic.cpu(), cutoff + ROUND_OFF)
    grid = _cell_grid(images, cutoff + ROUND_OFF * (1 + max(images.extent)))
    chunks = images.own.split(MAX_RECEIVERS * CUDA_FACTOR if points.is_cuda else MAX_RECEIVERS)
    return _concatenated(images, [pairs for own in chunks for pairs in _pairs(images, grid, own, cutoff)])


def _images(points: Tensor, receivers: Tensor, vectors: Tensor, periodic: Tensor, reach: float) -> Images:
    """All images within `reach` Å of the box around the receivers.

    Along each vector the images of a point that lie in this region have consecutive shifts: `counts` (n, 3) of them, the
    lowest is `first` (n, 3).
    """
    inverse = torch.linalg.inv(vectors)
    margin = reach * torch.linalg.vector_norm(inverse, dim=0)  # the reach in fractional coordinates
    most = torch.where(periodic, torch.inf, 0.0).double()
    on_device = torch.cat([vectors, inverse, margin[None], most[None]]).to(points.device)
    lattice, inverse, (margin, most) = on_device.split([3, 3, 2])
    fractional = points @ inverse
    inside = fractional[receivers]
    wrap = torch.maximum(torch.minimum(_shifts_to_the_mean(inside), most), -most)
    low, high = torch.aminmax(inside + wrap, dim=0)
    low, high = low - margin, high + margin
    first = torch.maximum((low - fractional).ceil(), -most)
    counts = (torch.minimum((high - fractional).floor(), most) - first + 1).clamp(min=0)
    total, *bounds = torch.cat([(counts.prod(1).sum() + 0 * points.sum())[None], low, high]).tolist()
    if not isfinite(total):
        raise ValueError("Some points are nan or infinite and have no neighbours: look for the first step that made them so.")
    a, b, c = counts.long().T
    strides, each = torch.stack([b * c, c, torch.ones_like(c)], dim=1), a * b * c
    before = each.cumsum(0) - each
    own = before[receivers] + ((wrap - first[receivers]).long() * strides[receivers]).sum(1)
    point = torch.repeat_interleave(each, output_size=int(total))
    place = torch.arange(int(total), device=points.device) - before[point]
    shift = first[point] + place[:, None] // strides[point] % counts.long()[point]
    box = torch.tensor(bounds, dtype=torch.float64).view(2, 3)
    at = points[point] + shift @ lattice - (box.mean(0) @ vectors).to(points.device)
    extent = ((box[1] - box[0]) @ vectors.abs()).tolist()
    return Images(points, lattice, point, shift.T.contiguous(), at.float().T.contiguous(), own, extent)


def _shifts_to_the_mean(fractional: Tensor) -> Tensor:
    """Whole numbers (n, 3) that shift coordinates (n, 3) to within 1/2 of their circular mean: a cluster stays whole."""
    angle = 2 * pi * fractional
    return (torch.atan2(angle.sin().mean(0), angle.cos().mean(0)) / (2 * pi) - fractional).round()


def _cell_grid(images: Images, reach: float) -> CellGrid:
    """Sort the images into cells. Where cells that cover the region would be too many, distant ones share a number."""
    least = [2 * COLUMNS_PER_CUTOFF + 1, 2 * COLUMNS_PER_CUTOFF + 1, 2 * LAYERS_PER_CUTOFF + 2]
    widths = [reach / COLUMNS_PER_CUTOFF, reach / COLUMNS_PER_CUTOFF, reach / LAYERS_PER_CUTOFF]
    shape = [max(int(e / w) + 2, n) for e, w, n in zip(images.extent, widths, least, strict=True)]
    while prod(shape) > min(MAX_CELLS_PER_IMAGE * len(images.point), 2**30) and shape != least:
        axis = max(range(3), key=lambda k: shape[k] / least[k])
        shape[axis] = max(shape[axis] * 7 // 8, least[axis])
    strides, n_cells = (shape[1] * shape[2], shape[2]), prod(shape)
    i, j, k = (torch.floor(x / w).long() for x, w in zip(images.at, widths, strict=True))
    number, order = (i * strides[0] + j * strides[1] + k).remainder_(n_cells).int().sort(stable=True)
    starts = number.new_zeros(n_cells + 1).index_add_(0, number + 1, torch.ones_like(number)).cumsum(0, dtype=torch.int32)
    starts, order = torch.cat([starts, starts[1 : least[2] + 1] + len(order)]), torch.cat([order, order]).int()
    return CellGrid(order, images.at.index_select(1, order), starts, strides, n_cells, reach)


def _candidate_runs(grid: CellGrid, at: Tensor) -> tuple[Tensor, Tensor]:
    """Runs of sorted images that may be within reach of receivers at `at` (3, R): their starts and lengths (R * columns,)."""
    wide, high = grid.reach / COLUMNS_PER_CUTOFF, grid.reach / LAYERS_PER_CUTOFF
    steps = torch.arange(-COLUMNS_PER_CUTOFF, COLUMNS_PER_CUTOFF + 1, device=at.device)
    inner = at[:2, :, None] / wide
    cell = inner.floor()
    inner -= cell
    gap = (torch.maximum(steps - inner, inner - steps - 1).clamp_(min=0) * wide).square_()
    square = (grid.reach**2 - gap[0, :, :, None] - gap[1, :, None, :]).flatten(1)
    half = square.clamp(min=0).sqrt_()
    low, top = ((at[2, :, None] + way).div_(high).floor_() for way in (-half, half))
    column = cell.long() + steps
    column = (column[0] * grid.strides[0])[:, :, None] + (column[1] * grid.strides[1])[:, None, :]
    number = (column.flatten(1) + low.long()).remainder_(grid.n_cells).flatten()
    start = grid.starts.index_select(0, number)
    stop = grid.starts.index_select(0, number + (top - low + 1).long().flatten())
    return start, torch.where(square.flatten() > 0, stop - start, 0)


def _pairs(images: Images, grid: CellGrid, own: Tensor, cutoff: float) -> list[tuple[Tensor, Tensor]]:
    """Pairs (e,) of images within the cutoff, as a list of parts: the receivers' images `own` (r,), and their neighbours."""
    at = images.at.index_select(1, own)
    start, count = _candidate_runs(grid, at)
    total = int(count.sum())
    if total > (MAX_CANDIDATES * CUDA_FACTOR if at.is_cuda else MAX_CANDIDATES) and len(own) > 1:
        return [pairs for half in own.tensor_split(2) for pairs in _pairs(images, grid, half, cutoff)]
    place = torch.arange(total, dtype=torch.int32, device=at.device)
    run = torch.repeat_interleave(count, output_size=total)
    place += (start + count - count.cumsum(0, dtype=torch.int32)).index_select(0, run)
    receiver = torch.repeat_interleave(count.view(len(own), -1).sum(1, dtype=torch.int32), output_size=total)
    square = torch.zeros(total, device=at.device)
    for sender_at, receiver_at in zip(grid.at, at, strict=True):
        difference = sender_at.index_select(0, place).sub_(receiver_at.index_select(0, receiver))
        square.addcmul_(difference, difference)
    near = (square > 0) & (square <= max(0, 2 * cutoff - grid.reach) ** 2)
    unsure = ((square <= grid.reach**2) ^ near).nonzero().flatten()
    i, j = own[receiver[unsure]], grid.order[place[unsure]]
    near[unsure] = (i != j) & (_distances(images, i, j) <= cutoff)
    found = near.nonzero().flatten()
    i, j = receiver.index_select(0, found), place.index_select(0, found)
    return [(own.int().index_select(0, i), grid.order.index_select(0, j))]


def _distances(images: Images, i: Tensor, j: Tensor) -> Tensor:
    """Distances (e,) between images i and j in float64. The order of operations gives i, j the same result as j, i."""
    a, b, c = (images.shift[:, j] - images.shift[:, i])[..., None]
    shift = a * images.lattice[0] + b * images.lattice[1] + c * images.lattice[2]
    x, y, z = (images.points[images.point[j]] - images.points[images.point[i]] + shift).T
    distances: Tensor = (x * x + y * y + z * z).sqrt()
    return distances


def _concatenated(images: Images, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """One list from its parts, filled part by part, so that no second array of its size is needed."""
    total = sum(len(i) for i, _ in found)
    receiver, sender = (images.point.new_empty(total) for _ in range(2))
    shifts, first = images.shift.new_empty(total, 3), 0
    for i, j in found:
        part = slice(first, first := first + len(i))
        torch.index_select(images.point, 0, i, out=receiver[part])
        torch.index_select(images.point, 0, j, out=sender[part])
        for axis, moved in zip(shifts[part].T, images.shift, strict=True):
            torch.sub(moved.index_select(0, j), moved.index_select(0, i), out=axis)
    return receiver, sender, shifts
