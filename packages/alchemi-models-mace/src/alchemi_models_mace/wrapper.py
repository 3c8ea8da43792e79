"""MACE (Batatia et al., arXiv:2206.07697) behind alchemi-spec's contract; the model itself is not modified."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from mace.calculators import foundations_models
from mace.modules import MACE, ScaleShiftMACE, blocks
from torch import Tensor, nn
from torch.jit import ScriptModule

from alchemi_models_mace.fused import fused_forwards, plain
from alchemi_models_mace.patches import allow_pickle_loading, cast_edge_vectors, keep_default_dtype, replace_convolutions
from alchemi_spec import SPEC_MPNN_HALO, MLIPSpec, OpAdapter, SameRows, UntrustedPickle

ALL_OUTPUTS = ("energy", "forces", "stress")
MASKED_BY_FEATURES = {
    blocks.RealAgnosticInteractionBlock,
    blocks.RealAgnosticResidualInteractionBlock,
    blocks.RealAgnosticDensityInteractionBlock,
    blocks.RealAgnosticDensityResidualInteractionBlock,
}
"""Interactions to which an edge adds zero if its radial features are zero: their networks have no bias."""
MASKED_BY_CUTOFF = MASKED_BY_FEATURES | {
    blocks.RealAgnosticAttResidualInteractionBlock,
    blocks.RealAgnosticResidualNonLinearInteractionBlock,
}
"""Interactions to which an edge adds zero if the envelope is multiplied last (`apply_cutoff=False`)."""

ROWWISE_OPS = tuple(
    OpAdapter(f"cuequivariance::{name}", {}, {0: SameRows()}) for name in ("uniform_1d", "fused_tensor_product")
)
"""Kernels of cuEquivariance that treat each atom or edge alone. `alchemi_models_mace.fused` handles those that gather."""
SPEC = SPEC_MPNN_HALO.replaced(distribution=SPEC_MPNN_HALO.distribution.replaced(custom_ops=ROWWISE_OPS))
SPEC_SUMMED_AT_END = SPEC.replaced(
    distribution=SPEC.distribution.replaced(per_system_reduce=False), all_reduce_outputs=frozenset({"energy"})
)
"""MACE's own classes only add up energies, so one sum over ranks at the end of a step is enough."""
MACE_CLASSES = (MACE, ScaleShiftMACE)


class MACEWrapper(nn.Module):
    """Any MACE model that `mace-torch` makes or loads, with e3nn, cuEquivariance or OpenEquivariance kernels.

    `wrapper(data, outputs)` computes in the model's dtype: `wrapper.double()` and `wrapper.float()` change it. Positions are
    subtracted in the wider of their dtype and the model's, and the differences are then cast; a scripted model subtracts in
    its own dtype. The wrapper differentiates by positions and strain, and does not change the parameters. While a call runs
    it replaces some methods of the model (`alchemi_models_mace.patches`), so do not call one model from two threads at once.
    """

    distribution_spec: MLIPSpec

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        """Wrap a live model. `head` names a head of a multi-head model; default its last, as in MACE's own calculator.

        Raises:
            ValueError: if the model has no such head.

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
        spec = SPEC_SUMMED_AT_END if type(model) in MACE_CLASSES else SPEC
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
        releases and is trusted. With `cueq` the model is converted to cuEquivariance kernels.

        Raises:
            UntrustedPickle: for a file, unless `trust_pickle`.
            FileNotFoundError: if there is no such file and MACE knows no model of that name.

        """
        known = [*foundations_models.mace_mp_urls, *(f"off-{size}" for size in foundations_models.mace_off_urls)]
        if isinstance(name, str) and not Path(name).exists() and name in known:
            model = _load_foundation_model(name)
        else:
            if not isinstance(name, io.BytesIO) and not Path(name).exists():
                raise FileNotFoundError(f"no file {name}, and MACE knows no model of that name; it knows {', '.join(known)}.")
            if not trust_pickle:
                raise UntrustedPickle.of(name)
            model = torch.load(name, map_location="cpu", weights_only=False)
        model.requires_grad_(False).eval()
        wrapper = cls(model, head)
        return wrapper.with_cueq() if cueq else wrapper

    def with_cueq(self) -> "MACEWrapper":
        """Convert the model to cuEquivariance kernels, fused on CUDA, by MACE's own conversion. Needs the extra `cueq`."""
        from mace.cli.convert_e3nn_cueq import run  # noqa: PLC0415  only with the extra

        return self._convert(run)

    def with_oeq(self) -> "MACEWrapper":
        """Convert the model to fused OpenEquivariance kernels by MACE's own conversion. Needs CUDA and `openequivariance`."""
        from mace.cli.convert_e3nn_oeq import run  # noqa: PLC0415  only with the library

        return self._convert(run)

    def _convert(self, run: Callable[..., nn.Module]) -> "MACEWrapper":
        """Wrap the model that `run` makes of this one, with the same head."""
        with keep_default_dtype():
            fast = run(self.model, device="cuda" if torch.cuda.is_available() else "cpu")
        wrapper = MACEWrapper(fast.requires_grad_(False).eval())
        wrapper.head = self.head
        return wrapper

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Compute those of `outputs`: energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3."""
        dtype = self._edge_vector_dtype(data["positions"])
        want_stress = "stress" in outputs
        to_cast = _edge_vector_modules(self.model) if dtype != self.dtype else []
        forwards = fused_forwards(self.model, data["nodes"], self._first_rows(data))
        with cast_edge_vectors(to_cast, self.dtype), replace_convolutions(forwards):
            result = self.model(
                self._inputs(data, dtype),
                compute_force="forces" in outputs or want_stress,
                compute_stress=want_stress,
                compute_displacement=want_stress,
            )
        return {name: result[name].detach().to(self.dtype) for name in outputs}

    def _inputs(self, data: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        """Make the fields that MACE reads, with positions, cell and shifts in `dtype`."""
        receiver = data["edge_index"][1]
        cell = data["cell"].to(dtype)
        shifts = -data["edge_shifts"].to(dtype)  # MACE's vectors run from sender to receiver
        return {
            "positions": data["positions"].detach().to(dtype),
            "node_attrs": self.onehot[data["atomic_numbers"]],  # type: ignore[index]
            "edge_index": data["edge_index"],
            "unit_shifts": shifts,
            "shifts": (shifts[:, :, None] * cell[data["batch"][receiver]]).sum(1),  # a batch of tiny products is slow on CUDA
            "cell": cell,
            "batch": data["batch"],
            "ptr": torch.empty(len(cell) + 1),  # only its length is read
            "head": torch.full((len(cell),), self.head, device=cell.device),
            "displacement": torch.zeros(len(cell), 3, 3, dtype=dtype, device=cell.device).requires_grad_(),
        }

    def _first_rows(self, data: Mapping[str, Tensor]) -> Callable[[], Tensor] | None:
        """Return a function that computes the first layer's rows [owned | ghost] from the elements, without an exchange.

        None if the first layer is not fused, or if its rows may depend on more than the elements.
        """
        block = self.model.interactions[0]  # type: ignore[index]
        known = type(self.model) in MACE_CLASSES and type(block) in MASKED_BY_CUTOFF
        known = known and not hasattr(self.model, "joint_embedding")
        if not (known and getattr(block, "conv_fusion", None)):
            return None
        numbers = plain(data["atomic_numbers"][data["nodes"]])
        return lambda: block.linear_up(self.model.node_embedding(self.onehot[numbers]))  # type: ignore[index,operator,union-attr]

    def _edge_vector_dtype(self, positions: Tensor) -> torch.dtype:
        """Return the wider of the positions' dtype and the model's. Scripted parts take the model's dtype only."""
        if any(isinstance(module, ScriptModule) for module in _edge_vector_modules(self.model)):
            return self.dtype
        return torch.promote_types(positions.dtype, self.dtype)


def _ignores_longer_edges(model: nn.Module) -> bool:
    """Check whether an edge beyond the cutoff adds exactly zero.

    MACE masks its envelope there, but two interactions read more of an edge than its masked features.
    """
    if type(model) not in MACE_CLASSES:
        return False
    last = not getattr(model.radial_embedding, "apply_cutoff", True)
    masked = all(type(block) in (MASKED_BY_CUTOFF if last else MASKED_BY_FEATURES) for block in model.interactions)  # type: ignore[union-attr]
    return masked and _repulsion_cutoff(model) <= float(model.r_max)  # type: ignore[arg-type]


def _repulsion_cutoff(model: nn.Module) -> float:
    """Return the longest distance at which ZBL repulsion acts: the sum of two covalent radii, in Å; 0 without repulsion."""
    if not hasattr(model, "pair_repulsion"):
        return 0.0
    return 2 * float(model.pair_repulsion_fn.covalent_radii[model.atomic_numbers].max())  # type: ignore[index,union-attr]


def _edge_vector_modules(model: nn.Module) -> list[nn.Module]:
    """List the parts of MACE whose first argument is edge vectors or lengths."""
    names = ("spherical_harmonics", "radial_embedding", "pair_repulsion_fn")
    return [getattr(model, name) for name in names if hasattr(model, name)]


def _load_foundation_model(name: str) -> nn.Module:
    """Load a foundation model by MACE's own loaders, which cache downloads. `off-...` are the organic force fields."""
    off = name.startswith("off-")
    loader = foundations_models.mace_off if off else foundations_models.mace_mp
    options = {"device": "cpu", "default_dtype": "float32", "return_raw_model": True}
    with allow_pickle_loading():
        return loader(model=name.removeprefix("off-"), **options)  # type: ignore[no-any-return]
