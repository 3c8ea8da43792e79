"""Gathers: reading rows through an index. These are the only operations that fetch rows in the forward pass."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from alchemi_shardtensor.rules.exchange import resolve_gather
from alchemi_shardtensor.rules.row_dims import row_dim_after_indexing
from alchemi_shardtensor.rules.rule import Rule, handles, indices, needs_index, points_at
from alchemi_shardtensor.rules.shard import Shard, owned_rows
from alchemi_shardtensor.storage import TensorCache
from alchemi_shardtensor.tag import LOST, NODES, OWNED, PARTIAL, SYSTEMS, End, Ends, TaggedTensor, has_ghost_rows, tag_in_place
from alchemi_spec import MissingHandler

_SELECTS = (Tensor.index_select, torch.index_select)
_GATHERS = (Tensor.gather, torch.gather)
_TAKES = (Tensor.take_along_dim, torch.take_along_dim)


@needs_index
def _is_edge_index(shard: Shard, named: dict[str, Any]) -> bool:
    x = named["input"]
    return isinstance(x, TaggedTensor) and type(x.tag.end) is tuple


@handles(Tensor.__getitem__, when=_is_edge_index)
def row_of_edge_index(shard: Shard, op: Any, input: TaggedTensor, index: Any) -> Any:
    """edge_index (2, E) -> senders or receivers (E,), or some edges (2, E'), or its rows in another order."""
    head, rest = (index[0], index[1:]) if isinstance(index, tuple) and index else (index, ())
    rows = LOST if any(isinstance(r, (int, slice)) and r != slice(None) for r in rest) else shard.rows_of_edges
    if isinstance(head, int):
        row = _row(input, head)
        return tag_in_place(row[rest], shard, rows, NODES, row.end) if rest else row
    if isinstance(head, list):
        ends: Ends = tuple(_ends(input)[i] for i in head)
    else:
        whole = not isinstance(head, Tensor) and head in (slice(None), Ellipsis) and index is not Ellipsis
        ends = input.end if whole else None
    result = input[index]
    return tag_in_place(result, shard, rows if result.ndim == 2 else LOST, NODES, ends, result.ndim - 1)


@handles(Tensor.unbind, torch.unbind, Tensor.__iter__, when=_is_edge_index)
def rows_of_edge_index(shard: Shard, op: Any, input: TaggedTensor, dim: int = 0) -> Any:
    """edge_index (2, E) -> (senders (E,), receivers (E,)); also `sender, receiver = edge_index`."""
    if dim % 2:
        raise MissingHandler("unbind of an edge_index along its edges gives one tensor per edge: index its two rows instead.")
    rows = tuple(_row(input, i) for i in range(len(input)))
    return iter(rows) if op is Tensor.__iter__ else rows


@handles(Tensor.select, torch.select, when=_is_edge_index)
def select_of_edge_index(shard: Shard, op: Any, input: TaggedTensor, dim: int, index: int) -> Tensor:
    """edge_index (2, E) -> senders or receivers (E,)."""
    return _row(input, index) if dim % 2 == 0 else tag_in_place(input.select(1, index), shard, LOST, NODES)


@needs_index
def _flips_ends(shard: Shard, named: dict[str, Any]) -> bool:
    return _is_edge_index(shard, named) and named["dims"] in (0, (0,), [0])


@handles(Tensor.flip, torch.flip, when=_flips_ends)
def flip_of_edge_index(shard: Shard, op: Any, input: TaggedTensor, dims: Any) -> Tensor:
    """edge_index (2, E) -> its rows in the other order, for models that name receivers first."""
    return tag_in_place(input.flip(0), shard, shard.rows_of_edges, NODES, _ends(input)[::-1], 1)


@needs_index
def _are_ends(shard: Shard, named: dict[str, Any]) -> bool:
    return named.get("dim", 0) == 0 and all(isinstance(getattr(t, "end", None), End) for t in named["tensors"])


@handles(torch.stack, when=_are_ends)
def stack_ends(shard: Shard, op: Any, tensors: Any, dim: int = 0) -> Tensor:
    """Senders (E,), receivers (E,), in any order -> an edge_index (2, E)."""
    return tag_in_place(torch.stack(list(tensors)), shard, shard.rows_of_edges, NODES, tuple(t.end for t in tensors), 1)


def _ends(edge_index: TaggedTensor) -> tuple[End, ...]:
    return cast(tuple[End, ...], edge_index.end)


def _row(edge_index: TaggedTensor, row: int) -> TaggedTensor:
    """A row of an edge_index (2, E). What becomes known of it, such as its local ids, is kept with the edge_index."""
    shard, row = edge_index.shard, row % len(edge_index)
    end = tag_in_place(edge_index.select(0, row), shard, shard.rows_of_edges, NODES, _ends(edge_index)[row])
    if shard.storage.global_ids:
        shard.cache.tensors[end] = shard.cache.of(edge_index).ends.setdefault(row, TensorCache())
    return end


@handles(Tensor.__getitem__, when=points_at(NODES))
def gather_nodes(shard: Shard, op: Any, input: Tensor, index: Any) -> Tensor:
    """Per-atom rows (N, *F), index (E,) -> (E, *F)."""
    if isinstance(index, TaggedTensor):
        rows, local = resolve_gather(shard, input, index)
        picked = _picked(shard, rows, local, index)
        return _gathered(shard, picked, input, index, index.tag.row_dim)
    parts = index if isinstance(index, tuple) else (index,)
    first = parts[0]
    if not isinstance(first, TaggedTensor) or any(getattr(i, "points_at", None) is NODES for i in indices(parts[1:])):
        raise MissingHandler(
            f"x[..., index] with an index that points at atoms, beyond dim 0 of x {tuple(input.shape)}.\n"
            f"Only dim 0 is spread over ranks: move the atoms' dimension to the front."
        )
    rows, local = resolve_gather(shard, input, first)
    return _gathered(shard, rows[(local, *parts[1:])], input, first, row_dim_after_indexing(first, input, index))


def _picked(shard: Shard, rows: Tensor, local: Tensor, index: TaggedTensor) -> Tensor:
    """rows[local], by the operation with the cheapest adjoint: indexing's sorts the index on CUDA."""
    if index.tag.end is None and not shard.storage.global_ids and shard.cache.known(index).names_all_rows:
        return rows.clone()
    return rows.index_select(0, local) if local.ndim == 1 and local.dtype in (torch.int64, torch.int32) else rows[local]


@handles(*_SELECTS, *_GATHERS, when=points_at(NODES))
def select_nodes(shard: Shard, op: Any, input: Tensor, dim: int, index: Any, **rest: Any) -> Tensor:
    """Per-atom rows (N, *F), index (E,) or (E, *F) -> (E, *F)."""
    if dim % max(input.ndim, 1):
        raise MissingHandler(
            f"{op.__name__} along dim {dim} with an index that points at atoms.\n"
            f"Only dim 0 is spread over ranks: move the atoms' dimension to the front."
        )
    rows, local = resolve_gather(shard, input, index)
    taken = op(rows, local, dim) if op is torch.take_along_dim else op(rows, dim, local, **rest)
    return _gathered(shard, taken, input, index, index.row_dim)


@handles(*_TAKES, when=points_at(NODES))
def take_nodes(shard: Shard, op: Any, input: Tensor, index: Any, dim: int | None = None) -> Tensor:
    """Per-atom rows (N, *F), index (E, *F) or (E, 1, ...) -> (E, *F)."""
    if dim is None:
        raise MissingHandler("take_along_dim of flattened values with an index that points at atoms: name dim=0.")
    return select_nodes.handler(shard, torch.take_along_dim, input, dim, index)  # type: ignore[no-any-return]


def _looks_up(name: str) -> Any:
    return needs_index(lambda shard, named: getattr(named.get(name), "points_at", None) is not None)


@handles(F.embedding, when=_looks_up("input"))
def look_up(shard: Shard, op: Any, input: TaggedTensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """An index (E,) into per-atom or per-system rows (N, F) as into the table of an embedding -> (E, F)."""
    handler = gather_nodes if input.points_at is NODES else gather_systems
    return handler.handler(shard, op, weight, input)  # type: ignore[no-any-return]


@handles(torch.embedding, when=_looks_up("weight"))
def look_up_in_table(shard: Shard, op: Any, input: Tensor, weight: TaggedTensor, **_: Any) -> Tensor:
    """The same with the table first."""
    return look_up.handler(shard, op, weight, input)  # type: ignore[no-any-return]


@handles(Tensor.__getitem__, when=points_at(SYSTEMS))
def gather_systems(shard: Shard, op: Any, input: Tensor, index: Any) -> Tensor:
    """Per-system values (B, *F), batch (N,) -> (N, *F)."""
    if isinstance(index, TaggedTensor):
        return _gathered(shard, input[index], input, index, index.row_dim)
    batch = next(i for i in indices(index) if getattr(i, "points_at", None) is SYSTEMS)
    return _gathered(shard, input[index], input, batch, row_dim_after_indexing(batch, input, index))


@handles(*_SELECTS, *_GATHERS, when=points_at(SYSTEMS))
def select_systems(shard: Shard, op: Any, input: Tensor, dim: int, index: Any, **rest: Any) -> Tensor:
    """Per-system values (B, *F), batch (N,) -> (N, *F)."""
    row_dim = index.row_dim if op in _GATHERS else dim % max(input.ndim, 1)
    return _gathered(shard, op(input, dim, index, **rest), input, index, row_dim)


@handles(*_TAKES, when=points_at(SYSTEMS))
def take_systems(shard: Shard, op: Any, input: Tensor, index: Any, dim: int | None = None) -> Tensor:
    """Per-system values (B, *F), batch (N, *F) or (N, 1, ...) -> (N, *F)."""
    return _gathered(shard, torch.take_along_dim(input, index, dim), input, index, index.row_dim)


def _gathered(shard: Shard, result: Tensor, source: Tensor, index: TaggedTensor, row_dim: int | None) -> Tensor:
    """Tag what was gathered: its rows are the index's, and values that are indices still point at the same."""
    mark = source.tag if isinstance(source, TaggedTensor) else None
    if mark is not None and mark.rows is PARTIAL:
        raise MissingHandler(
            "a per-system sum of which each rank has a part was read per atom: the parts have to be added up first.\n"
            "Leave per_system_reduce of the specification on, or read the sum after it is whole."
        )
    rows = LOST if row_dim is None or index.tag.rows is None else index.tag.rows
    target, end = (None, None) if mark is None else (mark.points_at, mark.end)
    return tag_in_place(result, shard, rows, target, end, row_dim or 0)


@needs_index
def _max_of_index(shard: Shard, named: dict[str, Any]) -> bool:
    x = named["input"]
    over_all = named.get("dim") is None or (x.ndim == 1 and named["dim"] in (0, -1))
    return getattr(x, "points_at", None) is not None and over_all and "other" not in named


@needs_index
def _last_system(shard: Shard, named: dict[str, Any]) -> bool:
    x, index = named["input"], named.get("index")
    return type(index) is int and index == -1 and getattr(x, "points_at", None) is SYSTEMS and x.ndim == 1


def _largest(shard: Shard, input: TaggedTensor) -> Tensor:
    count = shard.n_systems if input.points_at is SYSTEMS else shard.n_rows
    return torch.full((), count - 1, device=input.device)  # no copy from the host


@handles(Tensor.max, torch.max, Tensor.amax, torch.amax, when=_max_of_index)
def largest_index(shard: Shard, op: Any, input: TaggedTensor, dim: int | None = None, keepdim: bool = False) -> Any:
    """`index.max() + 1` is how many rows a model should make: all that may be pointed at, whatever this rank's edges are."""
    largest = _largest(shard, input)
    largest = largest[None] if keepdim and input.ndim == 1 else largest
    return largest if dim is None or "amax" in op.__name__ else torch.return_types.max((largest, input.argmax(dim, keepdim)))


@handles(Tensor.__getitem__, when=_last_system)
def last_system(shard: Shard, op: Any, input: TaggedTensor, index: int) -> Tensor:
    """`batch[-1] + 1` counts the systems, as `batch` ascends."""
    return _largest(shard, input)


@handles(Tensor.__getitem__, when=lambda shard, named: _masks_rows(named))
def owned_of_mask(shard: Shard, op: Any, input: TaggedTensor, index: Any) -> Tensor:
    """[owned | ghost] rows, a mask of them -> the owned rows among those it names; ghosts' rows are their owners' to take."""
    mask, *rest = index if isinstance(index, tuple) else (index,)
    return tag_in_place(owned_rows(shard, input)[(owned_rows(shard, mask), *rest)], shard, OWNED, input.points_at, input.end)


def _masks_rows(named: dict[str, Any]) -> bool:
    x, index = named["input"], named.get("index")
    mask = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(x, TaggedTensor) or not isinstance(mask, TaggedTensor) or x.tag.row_dim or mask.tag.row_dim:
        return False
    return mask.dtype == torch.bool and mask.ndim == 1 and has_ghost_rows(x) and has_ghost_rows(mask)


RULES: list[Rule] = [
    row_of_edge_index,
    rows_of_edge_index,
    select_of_edge_index,
    flip_of_edge_index,
    stack_ends,
    gather_nodes,
    select_nodes,
    take_nodes,
    gather_systems,
    select_systems,
    take_systems,
    look_up,
    look_up_in_table,
    largest_index,
    last_system,
]
