"""MACE (Batatia et al., arXiv:2206.07697) behind alchemi-spec's contract; the model itself is not modified."""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from mace.calculators import foundations_models  # before e3nn is used: it allows what torch's safe loading refuses
from mace.modules import MACE, ScaleShiftMACE, blocks
from mace.modules.wrapper_ops import get_layout
from torch import Tensor, nn
from torch.jit import ScriptModule

from alchemi_spec import SPEC_MPNN_HALO, MLIPSpec, OpAdapter, SameRows, SpecError, UntrustedPickle

ALL_OUTPUTS = ("energy", "forces", "stress")
MASKED_BY_FEATURES = {
    blocks.RealAgnosticInteractionBlock,
    blocks.RealAgnosticResidualInteractionBlock,
    blocks.RealAgnosticDensityInteractionBlock,
    blocks.RealAgnosticDensityResidualInteractionBlock,
}
"""Interactions to which an edge without radial features is nothing: their networks have no bias."""
MASKED_BY_CUTOFF = MASKED_BY_FEATURES | {
    blocks.RealAgnosticAttResidualInteractionBlock,
    blocks.RealAgnosticResidualNonLinearInteractionBlock,
}
"""Interactions to which an edge is nothing if the envelope is multiplied last (`apply_cutoff=False`)."""

ROW_BY_ROW = tuple(OpAdapter(f"cuequivariance::{name}", {}, {0: SameRows()}) for name in ("uniform_1d", "fused_tensor_product"))
"""Kernels of cuEquivariance that work on atoms or edges one by one; those that gather are handed the rows that they read."""
SPEC = SPEC_MPNN_HALO.replaced(distribution=SPEC_MPNN_HALO.distribution.replaced(custom_ops=ROW_BY_ROW))
SUMMED_ONCE = SPEC.replaced(
    distribution=SPEC.distribution.replaced(per_system_reduce=False), all_reduce_outputs=frozenset({"energy"})
)
"""MACE's own classes add up energies and do nothing else with them: one sum over ranks, at the end, is enough."""
PLAIN = (MACE, ScaleShiftMACE)


class MACEWrapper(nn.Module):
    """Any MACE model that `mace-torch` makes or loads, with e3nn, cuEquivariance or OpenEquivariance kernels.

    `wrapper(data, outputs)` computes in the model's dtype: `wrapper.double()` and `wrapper.float()` change it. Differences of
    positions are formed in the wider of theirs and the model's, then cast; a scripted model forms them in its own. The
    gradient is taken with respect to positions and strain; the parameters are left as they are.
    """

    distribution_spec: MLIPSpec

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        """Wrap a live model. `head`: which of a multi-head model's; default its last, as in MACE's own calculator.

        Raises:
            ValueError: where the model has no such head.

        """
        super().__init__()
        heads = list(getattr(model, "heads", None) or ["Default"])
        if head is not None and head not in heads:
            raise ValueError(f"this model has no head {head!r}: choose one of {', '.join(heads)}.")
        self.model = model
        self.head = heads.index(head) if head is not None else len(heads) - 1
        self.cutoff = float(model.r_max)  # type: ignore[arg-type]
        numbers = [int(z) for z in model.atomic_numbers]  # type: ignore[union-attr]
        self.elements = frozenset(numbers)
        spec = SUMMED_ONCE if type(model) in PLAIN else SPEC
        self.distribution_spec = spec.replaced(ignores_longer_edges=_ignores_longer_edges(model))
        onehot = torch.zeros(max(numbers) + 1, len(numbers))
        onehot[numbers, range(len(numbers))] = 1
        self.register_buffer("onehot", onehot.to(self.dtype), persistent=False)

    @classmethod
    def from_checkpoint(
        cls, name: str | Path | io.BytesIO, *, head: str | None = None, trust_pickle: bool = False, cueq: bool = False
    ) -> "MACEWrapper":
        """Load a `.model` file, or a foundation model that MACE knows by name (such as `medium-mpa-0`).

        A `.model` file is a pickle: loading it runs code that is stored in it. A named model comes from MACE's own
        releases and is trusted. `cueq`: convert to cuEquivariance kernels.

        Raises:
            UntrustedPickle: for a file, unless `trust_pickle`.
            FileNotFoundError: where there is neither such a file nor such a name.

        """
        known = [*foundations_models.mace_mp_urls, *(f"off-{size}" for size in foundations_models.mace_off_urls)]
        if isinstance(name, str) and not Path(name).exists() and name in known:
            model = _download(name)
        else:
            if not isinstance(name, io.BytesIO) and not Path(name).exists():
                raise FileNotFoundError(f"no file {name}, and MACE knows no model of that name; it knows {', '.join(known)}.")
            if not trust_pickle:
                raise UntrustedPickle(
                    f"{name} is a pickle: loading it runs whatever code is stored in it, which torch refuses by default.\n"
                    f"If you trust where it comes from, pass trust_pickle=True (--trust-pickle at the command line)."
                )
            model = torch.load(name, map_location="cpu", weights_only=False)
        model.requires_grad_(False).eval()
        wrapper = cls(model, head)
        return wrapper.with_cueq() if cueq else wrapper

    def with_cueq(self) -> "MACEWrapper":
        """The same model with cuEquivariance kernels (MACE's own conversion; needs the extra `cueq`); fused on CUDA."""
        from mace.cli.convert_e3nn_cueq import run  # noqa: PLC0415  only with the extra

        return self._converted(run)

    def with_oeq(self) -> "MACEWrapper":
        """The same model with OpenEquivariance kernels (MACE's own conversion; needs CUDA and `openequivariance`); fused."""
        from mace.cli.convert_e3nn_oeq import run  # noqa: PLC0415  only with the library

        return self._converted(run)

    def _converted(self, run: Callable[..., nn.Module]) -> "MACEWrapper":
        before = torch.get_default_dtype()
        try:
            fast = run(self.model, device="cuda" if torch.cuda.is_available() else "cpu")
        finally:
            torch.set_default_dtype(before)  # which the conversion changes
        wrapper = MACEWrapper(fast.requires_grad_(False).eval())
        wrapper.head = self.head
        return wrapper

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3, those of `outputs`."""
        receiver = data["edge_index"][1]
        batch, dtype = data["batch"], self._dtype_of_differences(data["positions"])
        cell = data["cell"].to(dtype)
        shifts = -data["edge_shifts"].to(dtype)  # MACE's vectors run from sender to receiver
        mace_data = {
            "positions": data["positions"].detach().to(dtype),
            "node_attrs": self.onehot[data["atomic_numbers"]],  # type: ignore[index]
            "edge_index": data["edge_index"],
            "unit_shifts": shifts,
            "shifts": (shifts[:, :, None] * cell[batch[receiver]]).sum(1),  # a batch of tiny products is slow on CUDA
            "cell": cell,
            "batch": batch,
            "ptr": torch.empty(len(cell) + 1),  # only its length is read
            "head": torch.full((len(cell),), self.head, device=cell.device),
            "displacement": torch.zeros(len(cell), 3, 3, dtype=dtype, device=cell.device).requires_grad_(),
        }
        want_stress = "stress" in outputs
        with (
            _casting_edges(self.model, dtype, self.dtype),
            _reaching_fused_kernels(self.model, self._first_rows(data), data["nodes"]),
        ):
            result = self.model(
                mace_data,
                compute_force="forces" in outputs or want_stress,
                compute_stress=want_stress,
                compute_displacement=want_stress,
            )
        return {name: result[name].detach().to(self.dtype) for name in outputs}

    def _first_rows(self, data: Mapping[str, Tensor]) -> Callable[[], Tensor] | None:
        """What makes the first layer's [owned | ghost] rows of the elements alone, which do not change, where that is known."""
        block = self.model.interactions[0]  # type: ignore[index]
        plain = type(self.model) in PLAIN and type(block) in MASKED_BY_CUTOFF and not hasattr(self.model, "joint_embedding")
        if not (plain and getattr(block, "conv_fusion", None)):
            return None
        numbers = _plain(data["atomic_numbers"][data["nodes"]])
        return lambda: block.linear_up(self.model.node_embedding(self.onehot[numbers]))  # type: ignore[index,operator,union-attr]

    def _dtype_of_differences(self, positions: Tensor) -> torch.dtype:
        """The wider of the positions' and the model's. Scripted parts cannot be shown another than the model's."""
        if any(isinstance(reader, ScriptModule) for reader in _readers_of_edges(self.model)):
            return self.dtype
        return torch.promote_types(positions.dtype, self.dtype)


def _ignores_longer_edges(model: nn.Module) -> bool:
    """Whether an edge beyond the cutoff adds exactly nothing: MACE masks its envelope, but two interactions mix in more."""
    if type(model) not in PLAIN:
        return False
    last = not getattr(model.radial_embedding, "apply_cutoff", True)
    masked = all(type(block) in (MASKED_BY_CUTOFF if last else MASKED_BY_FEATURES) for block in model.interactions)  # type: ignore[union-attr]
    return masked and _reach_of_repulsion(model) <= float(model.r_max)  # type: ignore[arg-type]


def _reach_of_repulsion(model: nn.Module) -> float:
    """The longest pair that ZBL repulsion acts on: the sum of two covalent radii, in Å; 0 without repulsion."""
    if not hasattr(model, "pair_repulsion"):
        return 0.0
    return 2 * float(model.pair_repulsion_fn.covalent_radii[model.atomic_numbers].max())  # type: ignore[index,union-attr]


def _readers_of_edges(model: nn.Module) -> list[nn.Module]:
    """The parts of MACE that are called with edge vectors or lengths, as their first argument."""
    names = ("spherical_harmonics", "radial_embedding", "pair_repulsion_fn")
    return [getattr(model, name) for name in names if hasattr(model, name)]


@contextmanager
def _casting_edges(model: nn.Module, found: torch.dtype, dtype: torch.dtype) -> Iterator[None]:
    """While open, edge vectors and lengths, which MACE forms in the positions' dtype `found`, are read as `dtype`."""

    def cast(_: nn.Module, edges: tuple[Any, ...]) -> tuple[Any, ...]:
        return (edges[0].to(dtype), *edges[1:])

    with ExitStack() as hooks:
        for reader in _readers_of_edges(model) if found != dtype else []:
            hooks.callback(reader.register_forward_pre_hook(cast).remove)
        yield


def _download(name: str) -> nn.Module:
    """MACE's own loaders, which keep what they fetched; `off-...` are the organic force fields."""
    off = name.startswith("off-")
    loader = foundations_models.mace_off if off else foundations_models.mace_mp
    options = {"device": "cpu", "default_dtype": "float32", "return_raw_model": True}
    return loader(model=name.removeprefix("off-"), **options)  # type: ignore[no-any-return]


@contextmanager
def _reaching_fused_kernels(model: nn.Module, first: Callable[[], Tensor] | None, nodes: Tensor) -> Iterator[None]:
    """While open, convolutions that gather inside their kernel are handed the rows that their senders count.

    `first` makes those of the first layer, which need not travel.
    """
    with ExitStack() as replaced:
        for i, block in enumerate(model.interactions):  # type: ignore[arg-type]
            if getattr(block, "conv_fusion", None):
                conv = block.conv_tp  # what MACE has put on it may not survive pickling: then its own forward is the kernel
                kernel = conv.__dict__.get("original_forward", conv.forward)
                way = partial(_by_cueq if type(conv).__name__ == "SegmentedPolynomial" else _by_oeq, block, kernel)
                forward = partial(_reaching, way, nodes, None if i else first)
                replaced.enter_context(patch.object(conv, "forward", forward))
        yield


def _reaching(
    way: Callable[..., Tensor],
    nodes: Tensor,
    known: Callable[[], Tensor] | None,
    node_feats: Tensor,
    edge_attrs: Tensor,
    tp_weights: Tensor,
    edge_index: Tensor,
) -> Tensor:
    """Messages (n_owned, K) of rows [owned | ghost], which travel now unless they are known."""
    rows = node_feats[nodes] if known is None else known()
    sender, receiver = (_plain(end) for end in edge_index)
    return way(_plain(rows), _plain(node_feats), _plain(edge_attrs), _plain(tp_weights), sender, receiver)


def _by_cueq(
    block: Any, kernel: Any, rows: Tensor, like: Tensor, attrs: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor
) -> Tensor:
    return kernel([weights, rows, attrs], {1: sender}, {0: like}, {0: receiver})[0]  # type: ignore[no-any-return]


def _by_oeq(
    block: Any, kernel: Any, rows: Tensor, like: Tensor, attrs: Tensor, weights: Tensor, sender: Tensor, receiver: Tensor
) -> Tensor:
    """Which makes a row of messages for each row that it reads."""
    into, out = (getattr(block.conv_tp, f"layout_transpose_{end}", None) for end in ("in", "out"))
    if into is None and get_layout(block.cueq_config) == "ir_mul":
        raise SpecError("OpenEquivariance's convolution lost its change of layout by pickling: use one of the two libraries.")
    messages = kernel(rows if into is None else into(rows), attrs, weights, receiver, sender)[: len(like)]
    return messages if out is None else out(messages)  # type: ignore[no-any-return]


def _plain(t: Tensor) -> Tensor:
    return t.as_subclass(Tensor)
