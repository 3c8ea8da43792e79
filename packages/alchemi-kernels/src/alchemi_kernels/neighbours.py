"""All neighbours of given atoms, in plain torch, on the CPU and on CUDA alike."""

from math import isfinite, pi, prod
from typing import NamedTuple

import torch
from torch import Tensor

COLUMNS = 2
"""Columns of cells to one reach: the more, the fewer candidates, and the more columns to look at for each receiver."""
LAYERS = 8
"""Cells to one reach along a column. Those in reach are one run of the sorted images, so that more of them cost memory only."""
CELLS = 16
"""Cells for each image, at most."""
SLACK = 1e-6
"""Å, and the part of a region's width, that round-off in float32 stays below. What it leaves open is decided in float64."""
RECEIVERS, CANDIDATES = 2**10, 2**18
"""How many are looked at together, at most: what a cache holds, and on CUDA `ON_CUDA` times as many, in about 1 GB."""
ON_CUDA = 2**6


class Images(NamedTuple):
    """All images in reach of the receivers: of `point` (m,) of `points` (n, 3), moved by `shift` (3, m) of the `lattice`.

    `at` (3, m): float32, Å from the middle of a region `extent` (3) Å wide. `own` (R,): where each receiver itself is.
    """

    points: Tensor
    lattice: Tensor
    point: Tensor
    shift: Tensor
    at: Tensor
    own: Tensor
    extent: list[float]


class Grid(NamedTuple):
    """Images (2 m,) in the order of their cells, all of them twice, and where each cell `starts`, for its runs to go round.

    Cell (i, j, k) of any whole numbers is number (i * strides[0] + j * strides[1] + k) modulo `cells`. In a wide space cells
    share a number, so that empty ones cost nothing, but no two that the same receiver looks at.
    """

    order: Tensor
    at: Tensor
    starts: Tensor
    strides: tuple[int, int]
    cells: int
    reach: float


def neighbours(
    points: Tensor, receivers: Tensor, vectors: Tensor, periodic: Tensor, cutoff: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Receivers (E,), in order, senders (E,) and shifts (E, 3) of all pairs of `receivers` (R,) within `cutoff` Å.

    Shifts are whole-numbered S of |x[sender] - x[receiver] + S @ vectors| <= cutoff. An atom's own images are among its
    senders, itself is not. `receivers` are ascending rows of `points` (n, 3) Å, which may lie anywhere; rows of `vectors`
    (3, 3) span space, also where they are not `periodic` (3,), and are best kept on the host. A pair is found from both its
    ends or from neither, whatever other points there are.

    Raises:
        ValueError: for points that are nan or infinite.

    """
    points, vectors = points.detach().double(), vectors.detach().double().cpu()
    if not len(receivers):
        return receivers.new_empty(0), receivers.new_empty(0), points.new_empty(0, 3)
    images = _images(points, receivers, vectors, periodic.cpu(), cutoff + SLACK)
    grid = _grid(images, cutoff + SLACK * (1 + max(images.extent)))
    together = images.own.split(RECEIVERS * ON_CUDA if points.is_cuda else RECEIVERS)
    return _listed(images, [pairs for own in together for pairs in _pairs(images, grid, own, cutoff)])


def _images(points: Tensor, receivers: Tensor, vectors: Tensor, periodic: Tensor, reach: float) -> Images:
    """Along each vector an image is in the region for a range of whole numbers: from `first` on, `counts` of them (n, 3)."""
    inverse = torch.linalg.inv(vectors)
    margin = reach * torch.linalg.vector_norm(inverse, dim=0)  # over the distances of lattice planes
    most = torch.where(periodic, torch.inf, 0.0).double()
    on_device = torch.cat([vectors, inverse, margin[None], most[None]]).to(points.device)
    lattice, inverse, (margin, most) = on_device.split([3, 3, 2])
    fractional = points @ inverse
    inside = fractional[receivers]
    home = torch.maximum(torch.minimum(_to_the_middle(inside), most), -most)
    low, high = torch.aminmax(inside + home, dim=0)
    low, high = low - margin, high + margin
    first = torch.maximum((low - fractional).ceil(), -most)
    counts = (torch.minimum((high - fractional).floor(), most) - first + 1).clamp(min=0)
    total, *bounds = torch.cat([(counts.prod(1).sum() + 0 * points.sum())[None], low, high]).tolist()
    if not isfinite(total):
        raise ValueError("Some points are nan or infinite, and have no neighbours: look for the first step that made them so.")
    a, b, c = counts.long().T
    strides, each = torch.stack([b * c, c, torch.ones_like(c)], dim=1), a * b * c
    before = each.cumsum(0) - each
    own = before[receivers] + ((home - first[receivers]).long() * strides[receivers]).sum(1)
    point = torch.repeat_interleave(each, output_size=int(total))
    place = torch.arange(int(total), device=points.device) - before[point]
    shift = first[point] + place[:, None] // strides[point] % counts.long()[point]
    box = torch.tensor(bounds, dtype=torch.float64).view(2, 3)
    at = points[point] + shift @ lattice - (box.mean(0) @ vectors).to(points.device)
    extent = ((box[1] - box[0]) @ vectors.abs()).tolist()
    return Images(points, lattice, point, shift.T.contiguous(), at.float().T.contiguous(), own, extent)


def _to_the_middle(fractional: Tensor) -> Tensor:
    """Whole numbers (n, 3) that move coordinates (n, 3) to within 1/2 of their mean on a circle: a cluster is not torn."""
    angle = 2 * pi * fractional
    return (torch.atan2(angle.sin().mean(0), angle.cos().mean(0)) / (2 * pi) - fractional).round()


def _grid(images: Images, reach: float) -> Grid:
    """As large as the region if there are about as many images as cells, else folded."""
    least = [2 * COLUMNS + 1, 2 * COLUMNS + 1, 2 * LAYERS + 2]
    widths = [reach / COLUMNS, reach / COLUMNS, reach / LAYERS]
    shape = [max(int(e / w) + 2, n) for e, w, n in zip(images.extent, widths, least, strict=True)]
    while prod(shape) > min(CELLS * len(images.point), 2**30) and shape != least:
        axis = max(range(3), key=lambda k: shape[k] / least[k])
        shape[axis] = max(shape[axis] * 7 // 8, least[axis])
    strides, cells = (shape[1] * shape[2], shape[2]), prod(shape)
    i, j, k = (torch.floor(x / w).long() for x, w in zip(images.at, widths, strict=True))
    number, order = (i * strides[0] + j * strides[1] + k).remainder_(cells).int().sort(stable=True)
    starts = number.new_zeros(cells + 1).index_add_(0, number + 1, torch.ones_like(number)).cumsum(0, dtype=torch.int32)
    starts, order = torch.cat([starts, starts[1 : least[2] + 1] + len(order)]), torch.cat([order, order]).int()
    return Grid(order, images.at.index_select(1, order), starts, strides, cells, reach)


def _runs(grid: Grid, at: Tensor) -> tuple[Tensor, Tensor]:
    """Where the runs of sorted images start (R * columns,) that are in reach of receivers at (3, R), and their lengths."""
    wide, high = grid.reach / COLUMNS, grid.reach / LAYERS
    steps = torch.arange(-COLUMNS, COLUMNS + 1, device=at.device)
    inner = at[:2, :, None] / wide
    cell = inner.floor()
    inner -= cell
    gap = (torch.maximum(steps - inner, inner - steps - 1).clamp_(min=0) * wide).square_()
    square = (grid.reach**2 - gap[0, :, :, None] - gap[1, :, None, :]).flatten(1)
    half = square.clamp(min=0).sqrt_()
    low, top = ((at[2, :, None] + way).div_(high).floor_() for way in (-half, half))
    column = cell.long() + steps
    column = (column[0] * grid.strides[0])[:, :, None] + (column[1] * grid.strides[1])[:, None, :]
    number = (column.flatten(1) + low.long()).remainder_(grid.cells).flatten()
    start = grid.starts.index_select(0, number)
    stop = grid.starts.index_select(0, number + (top - low + 1).long().flatten())
    return start, torch.where(square.flatten() > 0, stop - start, 0)


def _pairs(images: Images, grid: Grid, own: Tensor, cutoff: float) -> list[tuple[Tensor, Tensor]]:
    """Pairs (e,) of images, in parts: `own` of some receivers, and all within the cutoff of it."""
    at = images.at.index_select(1, own)
    start, count = _runs(grid, at)
    total = int(count.sum())
    if total > (CANDIDATES * ON_CUDA if at.is_cuda else CANDIDATES) and len(own) > 1:
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
    """Between images (e,), from what was given and in an order of operations that makes i, j the same as j, i."""
    a, b, c = (images.shift[:, j] - images.shift[:, i])[..., None]
    shift = a * images.lattice[0] + b * images.lattice[1] + c * images.lattice[2]
    x, y, z = (images.points[images.point[j]] - images.points[images.point[i]] + shift).T
    distances: Tensor = (x * x + y * y + z * z).sqrt()
    return distances


def _listed(images: Images, found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Part by part, so that nothing as large as the list is needed beside it."""
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
