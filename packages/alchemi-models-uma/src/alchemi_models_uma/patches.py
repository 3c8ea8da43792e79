"""Every place where this package changes fairchem-core, a UMA model or torch's global state.

Nothing is changed at import, and each change ends with its context manager. Changes to a model set attributes of one wrapper's
own copy of it: two wrappers do not affect each other, but do not call one wrapper from two threads at once. `default_dtype`
concerns the whole process while it is open, so it is not safe beside other threads. Version: fairchem-core 2.24.0.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from fairchem.core.models.uma import escn_md
from torch import Tensor, nn

Replacement = tuple[Any, str, Callable[..., Any]]
"""An object, the name of one of its methods, and what replaces it."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype while open.

    Reason: fairchem's model classes (seen in 2.24.0) make tables that no checkpoint holds in the default dtype, and take no
    argument for it.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def request_derivatives(backbone: nn.Module, heads: nn.Module, forces: bool, stress: bool) -> Iterator[None]:
    """Set which derivatives the heads compute while open, in the configurations (`regress_config`) of the model's parts.

    Reason: fairchem's heads (seen in 2.24.0) read it from their configuration and not from their arguments.
    """
    holders: list[Any] = [backbone, *heads.modules()]
    configs = {id(m.regress_config): m.regress_config for m in holders if hasattr(m, "regress_config")}
    with ExitStack() as changed:
        for config in configs.values():
            if not config.direct_forces:
                changed.enter_context(patch.multiple(config, forces=forces, stress=stress, hessian=False))
        yield


@contextmanager
def use_global_composition(backbone: Any, batch: Tensor) -> Iterator[None]:
    """Replace `set_MOLE_coefficients` while open: experts are mixed by the composition over all ranks' atoms.

    Reason: the backbone (seen in fairchem-core 2.24.0) works on plain tensors here, whose mean would be over this rank's atoms.
    """
    with _replaced([_global_composition(backbone, batch)]):
        yield


@contextmanager
def use_given_graph(backbone: Any, graph: Callable[[Any], dict[str, Tensor]], data: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the backbone's methods while open, so that it runs on the atoms and edges of one rank.

    `graph` makes the edges. What the backbone does with single atoms or edges runs on plain tensors; sums over systems go
    through the tagged `data["batch"]`, and each layer fetches the ghost rows that its senders need.

    Reason: fairchem's backbone (seen in 2.24.0) has no argument for edges of one rank: it finds edges among all atoms, and its
    graph parallelism needs every atom on every rank and a process group of its own.
    """
    layers = _edgeless_layers if data["edge_index"].shape[1] == 0 else _exchanging_layers
    replacements: list[Replacement] = [
        (backbone, "_generate_graph", graph),
        _global_composition(backbone, data["batch"]),
        (backbone, "balance_channels", partial(balance_channels, backbone, data["batch"])),
        *_without_host_syncs(backbone),
        *layers(backbone, data["nodes"]),
    ]
    with _replaced(replacements):
        yield


@contextmanager
def _replaced(replacements: Iterable[Replacement]) -> Iterator[None]:
    """Replace methods of single objects while open."""
    with ExitStack() as replaced:
        for owner, name, method in replacements:
            replaced.enter_context(patch.object(owner, name, method))
        yield


def _global_composition(backbone: Any, batch: Tensor) -> Replacement:
    method = partial(set_expert_coefficients, backbone, backbone.set_MOLE_coefficients, batch)
    return backbone, "set_MOLE_coefficients", method


def _without_host_syncs(backbone: Any) -> Iterator[Replacement]:
    """Replace the parts of a backbone that synchronise with the host, or copy from it, in each call."""
    if backbone.spin_embedding.embedding_type == "pos_emb":
        yield backbone.spin_embedding, "forward", partial(embed_spins, backbone.spin_embedding.W)
    if backbone.use_dataset_embedding:
        yield backbone.dataset_embedding, "forward", partial(embed_datasets, backbone.dataset_embedding)
    if getattr(backbone.backend, "supports_fused_edgewise", False):
        scatter = backbone.backend.edge_degree_scatter
        yield backbone.backend, "edge_degree_scatter", partial(scatter_edge_degrees, scatter)


def _exchanging_layers(backbone: Any, nodes: Tensor) -> Iterator[Replacement]:
    """Replace each layer's `forward` by one that fetches ghost rows first."""
    for layer in (block.edge_wise for block in backbone.blocks):
        yield layer, "forward", partial(gather_sender_rows, layer, layer.forward, nodes)


def _edgeless_layers(backbone: Any, nodes: Tensor) -> Iterator[Replacement]:
    """Replace what fairchem's convolutions (seen in 2.24.0) cannot do on a rank without edges."""
    yield backbone.edge_degree_embedding, "forward", add_no_edges
    for block in backbone.blocks:
        yield block.edge_wise, "forward", partial(return_zero_messages, nodes)


def embed_spins(frequencies: Tensor, spin: Tensor) -> Tensor:
    """Embed spins (B,) as (B, C), zero for spin 0, which means unknown.

    Reason: fairchem's own (seen in 2.24.0) searches for zeros with `torch.where`, a host sync.
    """
    phase = spin[:, None] * frequencies * 2 * torch.pi
    return torch.cat([phase.sin(), phase.cos()], dim=-1) * (spin != 0)[:, None]


def embed_datasets(embedding: Any, datasets: Sequence[str]) -> Tensor:
    """Embed names of datasets as (B, C).

    Reason: fairchem's own (seen in 2.24.0) copies an index from the host in each call.
    """
    return torch.cat([embedding.dataset_emb_dict[embedding.dataset_mapping[name]].weight for name in datasets])


def scatter_edge_degrees(
    original: Callable[..., Tensor], x: Tensor, radial: Tensor, wigner: Tensor, target: Tensor, n: int, width: int, by: float
) -> Tensor:
    """Add edges' first embedding to atoms (N, 9, C), from compact Wigner blocks (E, 35).

    Reason: the fast GPU backend's own (seen in fairchem-core 2.24.0) indexes by Python lists, which are copied from the host.
    """
    if wigner.shape[-1] != 35:
        return original(x, radial, wigner, target, n, width, by)
    rows, blocks = radial.reshape(-1, n, width), wigner.reshape(-1, 35, 1)
    parts = zip((blocks[:, :1], blocks[:, 2:9:3], blocks[:, 12::5]), rows.split(1, dim=1), strict=True)
    return x.index_add(0, target, torch.cat([block * row for block, row in parts], dim=1).to(x.dtype) / by)


def set_expert_coefficients(
    backbone: Any, original: Callable[..., None], batch: Tensor, atomic_numbers_full: Tensor, batch_full: Tensor, **named: Any
) -> None:
    """Set the weight of each expert for each system, from its composition: a mean over all ranks' atoms."""
    original(atomic_numbers_full=atomic_numbers_full, batch_full=batch, **named)
    if getattr(backbone, "num_experts", 0):
        mole = backbone.global_mole_tensors
        mole.expert_mixing_coefficients = plain(mole.expert_mixing_coefficients)


def balance_channels(
    backbone: Any, tagged: Tensor, x: Tensor, charge: Tensor, spin: Tensor, natoms: Tensor, batch: Tensor
) -> Tensor:
    """Shift channels so that they add up to a system's charge or spin, over all ranks' atoms.

    Reason: fairchem's own (seen in 2.24.0) sums through a batch index without a tag, so over this rank's atoms.
    """
    for name, target, offset in (("charge", charge, 0.0), ("spin", spin, 1.0)):
        start, end = (getattr(backbone, f"{name}_channel_{side}") for side in ("start", "end"))
        if end > start:
            x = plain(escn_md.balance_channels_batched(x, target, natoms, tagged, start, end, offset))
    return x


def gather_sender_rows(
    layer: Any, forward: Callable[..., Tensor], nodes: Tensor, x: Tensor, *args: Any, **named: Any
) -> Tensor:
    """Compute a layer's messages (n_owned, ...) from rows [owned | ghost], with one exchange, also where edges go in chunks.

    Reason: `forward` (seen in fairchem-core 2.24.0) gathers from the rows `x` and returns as many messages as `x` has rows. So
    `forward` gets the owned rows, and `forward_chunk`, which gathers, those with ghosts.
    """
    rows = plain(x[nodes])

    def chunk(original: Callable[..., Tensor], x_full: Tensor, *rest: Any) -> Tensor:
        return original(rows, *rest)

    with _replaced([(layer, "forward_chunk", partial(chunk, layer.forward_chunk))]):
        return forward(x, *args, **named)


def add_no_edges(x: Tensor, x_edge: Tensor, scatter_target: Tensor, wigner_inv_envelope: Tensor) -> Tensor:
    """Return the features of a rank without edges, as a function of positions, so that it differentiates as other ranks do."""
    return x + 0 * wigner_inv_envelope.sum()


def return_zero_messages(nodes: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """Return the messages of a rank without edges. It takes part in the exchange and its adjoint, as all ranks must."""
    return torch.zeros_like(x) + 0 * plain(x[nodes]).sum()


def plain(t: Tensor) -> Tensor:
    """Return `t` as an ordinary tensor, without alchemi's tag."""
    return t.as_subclass(Tensor)
