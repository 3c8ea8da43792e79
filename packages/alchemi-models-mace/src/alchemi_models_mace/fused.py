"""MACE's fused convolutions, which gather inside their kernel: fetch the senders' features first, then call the kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

from mace.modules.wrapper_ops import get_layout
from torch import Tensor, nn

from alchemi_spec import SpecError

Forward = Callable[..., Tensor]


def fused_forwards(model: nn.Module, nodes: Tensor, first_rows: Callable[[], Tensor] | None) -> dict[nn.Module, Forward]:
    """Map each fused convolution of `model` to a `forward` that fetches ghost rows before it calls the kernel.

    `first_rows` computes the first layer's rows [owned | ghost] on this rank, which saves their exchange; None exchanges them.
    """
    forwards: dict[nn.Module, Forward] = {}
    for i, block in enumerate(model.interactions):  # type: ignore[arg-type]
        if getattr(block, "conv_fusion", None):
            convolution = block.conv_tp  # pickling may lose the forward that MACE set on it: then its class's is the kernel
            kernel = convolution.__dict__.get("original_forward", convolution.forward)
            call = call_cueq if type(convolution).__name__ == "SegmentedPolynomial" else call_oeq
            forwards[convolution] = partial(gather_sender_rows, partial(call, block, kernel), nodes, None if i else first_rows)
    return forwards


def gather_sender_rows(
    call: Forward,
    nodes: Tensor,
    first_rows: Callable[[], Tensor] | None,
    node_feats: Tensor,
    edge_attrs: Tensor,
    tp_weights: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Compute messages (n_owned, K) from features (n_owned, C): exchange ghost rows, or compute them, then call the kernel."""
    rows = node_feats[nodes] if first_rows is None else first_rows()
    sender, receiver = (plain(end) for end in edge_index)
    return call(plain(rows), plain(node_feats), plain(edge_attrs), plain(tp_weights), sender, receiver)


def call_cueq(
    block: Any, kernel: Any, rows: Tensor, like: Tensor, attrs: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor
) -> Tensor:
    """Call cuEquivariance's kernel: it gathers from `rows` and sums to as many rows as `like` has."""
    return kernel([weights, rows, attrs], {1: sender}, {0: like}, {0: receiver})[0]  # type: ignore[no-any-return]


def call_oeq(
    block: Any, kernel: Any, rows: Tensor, like: Tensor, attrs: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor
) -> Tensor:
    """Call OpenEquivariance's kernel, which returns one row for each of `rows`; keep those of `like`.

    Raises:
        SpecError: where the model needs a change of layout that was lost when it was pickled.

    """
    into, out = (getattr(block.conv_tp, f"layout_transpose_{end}", None) for end in ("in", "out"))
    if into is None and get_layout(block.cueq_config) == "ir_mul":
        raise SpecError("OpenEquivariance's convolution lost its change of layout by pickling: use one of the two libraries.")
    messages = kernel(rows if into is None else into(rows), attrs, weights, receiver, sender)[: len(like)]
    return messages if out is None else out(messages)  # type: ignore[no-any-return]


def plain(t: Tensor) -> Tensor:
    """Return `t` as an ordinary tensor, without alchemi's tag."""
    return t.as_subclass(Tensor)
