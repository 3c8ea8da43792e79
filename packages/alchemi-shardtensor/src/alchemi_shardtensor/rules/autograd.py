"""The boundary of the gradient convention: the gradient of a replicated value is a partial sum, summed once, here."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from alchemi_shardtensor.collectives import sum_over_ranks
from alchemi_shardtensor.table import Rule, handles
from alchemi_shardtensor.tensor import (
    EDGE,
    GLOBAL,
    LOST,
    REPLICATED,
    SHARE,
    STALE,
    SYSTEM,
    Shard,
    ShardTensor,
    holds_ghosts,
    plain,
    tag_in_place,
)
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

    A replicated output is seeded on rank 0 only, so nothing is divided by the number of ranks; the gradient of a
    replicated input is summed over ranks; those of owned and edge rows are whole already; those of ghost rows go home.

    Raises:
        MissingHandler: where an output has lost its tag, or an untagged input differs in shape between ranks.

    """
    ys, xs = _listed(outputs), _listed(inputs)
    _check_graphs(shard)
    seeds = _listed(grad_outputs) if grad_outputs is not None else [None] * len(ys)
    _check_replicated(shard, [x for x in xs if not _is_share(x)])
    seeds = [_seed(shard, y, seed) for y, seed in zip(ys, seeds, strict=True)]
    shard.seen["backwards"] = shard.seen.get("backwards", 0) + 1
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


def _check_graphs(shard: Shard) -> None:
    """At a shard's first backward pass all ranks must have as many collectives to repeat, or some would wait for ever."""
    if "graphs" in shard.seen:
        return
    shard.seen["graphs"] = True
    tracked = shard.comm.all_gather(torch.tensor(shard.comm.traffic.tracked - shard.began)).tolist()
    if len(set(tracked)) > 1:
        raise MissingHandler(
            f"ranks have {tracked} collectives to repeat in the backward pass: some took another way through the model, such "
            f"as an `if` on what atoms they have.\nLet every rank run the same operations, also on no atoms."
        )


def _listed(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (tuple, list)) else [values]


def _is_share(x: Tensor) -> bool:
    return getattr(x, "rows", None) in SHARE


def _seed(shard: Shard, output: Tensor, seed: Tensor | None) -> Tensor | None:
    rows = getattr(output, "rows", None)
    if rows is None or rows is LOST:
        raise MissingHandler(
            f"grad of an output of shape {tuple(output.shape)} of which it is not known whether it is one rank's share or the "
            f"whole (TorchScript returns plain tensors).\nSum per-atom values through the batch index outside the script."
        )
    if seed is None and output.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs: pass grad_outputs")
    seed = torch.ones_like(output) if seed is None else seed
    if rows in REPLICATED:  # a graph of the seed goes on, also where nothing of it is left
        return seed if shard.comm.rank == 0 else seed.masked_fill(torch.ones((), dtype=torch.bool, device=seed.device), 0)
    if not holds_ghosts(output):  # type: ignore[arg-type]
        return seed
    return _without_ghosts(shard, seed, output.row_dim)  # type: ignore[attr-defined]


def _without_ghosts(shard: Shard, x: Tensor, row_dim: int = 0) -> Tensor:
    """The same shape, with nothing in the ghosts' rows."""
    owned = x.narrow(row_dim, 0, shard.n_owned)
    return torch.cat([owned, torch.zeros_like(x.narrow(row_dim, shard.n_owned, shard.n_ghost))], row_dim)


def _whole(shard: Shard, x: Tensor, gradient: Tensor) -> Tensor:
    if isinstance(x, ShardTensor) and holds_ghosts(x):
        rows_first = gradient.movedim(x.row_dim, 0)
        owned = shard.routing.folded(rows_first)
        both = torch.cat([owned[: shard.n_owned], torch.zeros_like(rows_first[shard.n_owned :])])
        return tag_in_place(both.movedim(0, x.row_dim), shard, STALE, row_dim=x.row_dim)
    if getattr(x, "rows", None) is EDGE and shard.storage.repeats_edges:
        raise MissingHandler(
            "grad with respect to edges that several ranks hold (depth > 1) would be a part of it on each.\n"
            "Differentiate with respect to positions and strain."
        )
    if _is_share(x):
        return tag_in_place(gradient, shard, x.rows, row_dim=x.row_dim)  # type: ignore[attr-defined]
    rows = GLOBAL if getattr(x, "rows", None) is GLOBAL else SYSTEM
    return tag_in_place(sum_over_ranks(gradient, shard.comm), shard, rows)


def _check_replicated(shard: Shard, inputs: list[Tensor]) -> None:
    """Untagged inputs must have one shape on all ranks. Asked once for each list of ndims, which ranks have in common."""
    shapes = [tuple(x.shape) for x in inputs if not isinstance(x, ShardTensor)]
    key = "replicated", tuple(map(len, shapes))
    if not shapes or shard.seen.get(key) == shapes:
        return
    everywhere = shard.comm.gather_objects(shapes)
    if any(other != shapes for other in everywhere):
        raise MissingHandler(
            f"grad with respect to untagged tensors whose shapes differ between ranks: {everywhere}.\n"
            f"Tag them with what their rows are: tag(x, shard, rows=OWNED)."
        )
    shard.seen[key] = shapes


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
