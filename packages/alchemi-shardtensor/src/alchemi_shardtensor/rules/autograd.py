"""The boundary of the gradient convention: the gradient of a replicated value is a partial sum, summed once, here."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import _get_current_dispatch_mode

from alchemi_shardtensor.rules.rule import Rule, handles
from alchemi_shardtensor.rules.shard import Shard
from alchemi_shardtensor.tag import (
    EDGE,
    GLOBAL,
    LOST,
    REPLICATED,
    SHARDED,
    STALE,
    SYSTEM,
    TaggedTensor,
    has_ghost_rows,
    plain,
    tag_in_place,
)
from alchemi_shardtensor.transport import sum_over_ranks
from alchemi_spec import MissingHandler


@handles(torch.autograd.grad, when=lambda shard, named: True)
def grad(
    shard: Shard,
    op: Any,
    outputs: Tensor | Sequence[Tensor],
    inputs: Tensor | Sequence[Tensor],
    grad_outputs: Tensor | Sequence[Tensor | None] | None = None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """d(outputs)/d(inputs) over all ranks.

    A replicated output is seeded on rank 0 only, so nothing is divided by the number of ranks. The gradient of a replicated
    input is summed over ranks, that of owned and edge rows is complete already, that of ghost rows is sent to their owners.

    Raises:
        MissingHandler: where an output has lost its tag, or an untagged input differs in shape between ranks.

    """
    ys, xs = _listed(outputs), _listed(inputs)
    seeds = _listed(grad_outputs) if grad_outputs is not None else [None] * len(ys)
    _check_ranks_agree(shard, xs)
    seeds = [_seed(shard, y, seed) for y, seed in zip(ys, seeds, strict=True)]
    shard.cache.backward_passes += 1
    grads = _differentiate(ys, xs, seeds, **options)
    return tuple(None if g is None else _whole(shard, x, g) for x, g in zip(xs, grads, strict=True))


def _differentiate(
    outputs: list[Tensor],
    inputs: list[Tensor],
    seeds: list[Tensor | None],
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
    only_inputs: bool = True,
) -> Sequence[Tensor | None]:
    """torch.autograd.grad by its engine, with dispatch on: a backward pass may run Python that gathers and adds."""
    if is_grads_batched:
        raise MissingHandler("grad with is_grads_batched runs collectives under vmap: differentiate one vector at a time.")
    filled = tuple(torch.ones_like(y) if seed is None else seed for y, seed in zip(outputs, seeds, strict=True))
    retained = create_graph if retain_graph is None else retain_graph
    unused = materialize_grads or bool(allow_unused)
    with torch._C._EnableTorchFunction():
        grads: Sequence[Tensor | None] = _engine_run_backward(
            tuple(outputs), filled, retained, create_graph, tuple(inputs), allow_unreachable=unused, accumulate_grad=False
        )
    if not materialize_grads:
        return grads
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, grads, strict=True)]


def _check_ranks_agree(shard: Shard, inputs: list[Tensor]) -> None:
    """All ranks must have as many collectives to repeat, and untagged inputs of one shape, or some would wait for ever.

    Every rank asks in every backward pass, by one small message; not in a step that is being recorded, which ran before.
    """
    if shard.comm.size == 1 or _is_being_recorded():
        return
    shapes = [tuple(x.shape) for x in inputs if not isinstance(x, TaggedTensor)]
    mine = [shard.comm.traffic.tracked - shard.cache.tracked, crc32(repr(shapes).encode())]
    tracked, digests = shard.comm.all_gather(torch.tensor(mine)).T.tolist()
    if len(set(tracked)) > 1:
        raise MissingHandler(
            f"ranks have {tracked} collectives to repeat in the backward pass: some took another way through the model, such "
            f"as an `if` on what atoms they have.\nLet every rank run the same operations, also on no atoms."
        )
    if len(set(digests)) > 1:
        raise MissingHandler(
            f"grad with respect to untagged tensors whose shapes differ between ranks: {shard.comm.gather_objects(shapes)}.\n"
            f"Tag them with what their rows are: tag(x, shard, rows=OWNED)."
        )


def _is_being_recorded() -> bool:
    """Whether the step is traced, searched for host syncs or captured in a CUDA graph: the same on all ranks."""
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return capturing or _get_current_dispatch_mode() is not None


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _is_sharded(x: Tensor) -> bool:
    return getattr(x, "rows", None) in SHARDED


def _seed(shard: Shard, output: Tensor, seed: Tensor | None) -> Tensor | None:
    rows = getattr(output, "rows", None)
    if rows is None or rows is LOST:
        raise MissingHandler(
            f"cannot differentiate an output of shape {tuple(output.shape)}: it is not known whether it is one rank's part or "
            f"the whole (TorchScript returns plain tensors).\nSum per-atom values through the batch index outside the script."
        )
    if seed is None and output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs: pass grad_outputs")
    seed = torch.ones_like(output) if seed is None else seed
    if rows in REPLICATED:  # a graph of the seed goes on, also where nothing of it is left
        return seed if shard.comm.rank == 0 else seed.masked_fill(torch.ones((), dtype=torch.bool, device=seed.device), 0)
    if not has_ghost_rows(output):  # type: ignore[arg-type]
        return seed
    return _without_ghosts(shard, seed, output.row_dim)  # type: ignore[attr-defined]


def _without_ghosts(shard: Shard, x: Tensor, row_dim: int = 0) -> Tensor:
    """The same shape, with nothing in the ghosts' rows."""
    owned = x.narrow(row_dim, 0, shard.n_owned)
    return torch.cat([owned, torch.zeros_like(x.narrow(row_dim, shard.n_owned, shard.n_ghost))], row_dim)


def _whole(shard: Shard, x: Tensor, gradient: Tensor) -> Tensor:
    if isinstance(x, TaggedTensor) and has_ghost_rows(x):
        rows_first = gradient.movedim(x.row_dim, 0)
        owned = shard.routing.reduce_ghosts(rows_first)
        both = torch.cat([owned[: shard.n_owned], torch.zeros_like(rows_first[shard.n_owned :])])
        return tag_in_place(both.movedim(0, x.row_dim), shard, STALE, row_dim=x.row_dim)
    if getattr(x, "rows", None) is EDGE and shard.storage.repeats_edges:
        raise MissingHandler(
            "grad with respect to edges that several ranks hold (depth > 1) would be a part of it on each.\n"
            "Differentiate with respect to positions and strain."
        )
    if _is_sharded(x):
        return tag_in_place(gradient, shard, x.rows, row_dim=x.row_dim)  # type: ignore[attr-defined]
    rows = GLOBAL if getattr(x, "rows", None) is GLOBAL else SYSTEM
    return tag_in_place(sum_over_ranks(gradient, shard.comm), shard, rows)


@handles(Tensor.backward, when=lambda shard, named: True)
def backward(
    shard: Shard,
    op: Any,
    input: Tensor,
    gradient: Tensor | None = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Tensor | Sequence[Tensor] | None = None,
) -> None:
    """Adds to every leaf's .grad the gradient over all ranks, as `grad` has it; parameters are replicated leaves."""
    leaves = _listed(inputs) if inputs is not None else _leaves(input)
    options = {"retain_graph": retain_graph, "create_graph": create_graph, "allow_unused": True}
    grads = grad.handler(shard, torch.autograd.grad, input, leaves, gradient, **options)
    for leaf, g in zip(leaves, grads, strict=True):
        if g is not None:
            leaf.grad = plain(g) if leaf.grad is None else leaf.grad + plain(g)


def _leaves(output: Tensor) -> list[Tensor]:
    """The tensors that gradients accumulate in, in the order of the graph, which is the same on every rank."""
    found, seen, ahead = [], set(), [output.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        ahead.extend(before for before, _ in reversed(node.next_functions))
    return found


RULES: list[Rule] = [grad, backward]
