"""SevenNet (Park et al., J. Chem. Theory Comput. 2024, 20, 4857) behind alchemi-spec's contract.

Two parts of a model are wrapped once it is loaded, its one-hot layer and its envelope; `sevenn` itself is not modified.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import sevenn._keys as KEY
import torch
from sevenn import util
from sevenn._const import ACTIVATION
from sevenn.nn.edge_embedding import EdgeEmbedding
from sevenn.nn.node_embedding import OnehotEmbedding
from torch import Tensor, nn

from alchemi_spec import SPEC_MPNN_HALO, MLIPSpec, UntrustedPickle

ALL_OUTPUTS = ("energy", "forces", "stress")
VOIGT = torch.tensor([[0, 3, 5], [3, 1, 4], [5, 4, 2]])
"""Where the entries of a symmetric matrix stand in SevenNet's (xx, yy, zz, xy, yz, zx)."""


class SevenNetWrapper(nn.Module):
    """A pretrained SevenNet by name, or a checkpoint file. Computes in the model's dtype: `wrapper.double()` changes it.

    Differences of positions are formed in the wider of theirs and the model's, then cast.
    """

    distribution_spec: MLIPSpec

    def __init__(self, name: str | Path = "7net-0", *, modal: str | None = None, trust_pickle: bool = False) -> None:
        """Load `name`. `modal`: which fidelity of a multi-fidelity model.

        Raises:
            UntrustedPickle: for a file of one's own, unless `trust_pickle`.
            ValueError: where there is neither such a file nor such a name, or the fidelity is missing or unknown.

        """
        super().__init__()
        if Path(name).exists() and not trust_pickle:
            raise UntrustedPickle(
                f"{name} is a pickle: loading it runs whatever code is stored in it, which torch refuses by default.\n"
                f"If you trust where it comes from, pass trust_pickle=True (--trust-pickle at the command line)."
            )
        checkpoint = util.load_checkpoint(str(name))
        model = checkpoint.build_model().requires_grad_(False).eval()
        model.set_is_batch_data(True)
        fidelities = list(model.modal_map or {})
        if modal not in (fidelities or [None]):
            raise ValueError(f"{name} has the fidelities {fidelities}, not {modal!r}: choose one with modal=...")
        for key, module in list(model._modules.items()):
            if isinstance(module, OnehotEmbedding):
                model.replace_module(key, _OnehotInModelDtype(module, model))
            if isinstance(module, EdgeEmbedding):
                module.cutoff_function = _MaskedEnvelope(module.cutoff_function, checkpoint.config[KEY.CUTOFF])
        model.eval_modal_map = False  # the fidelity's number is given, instead of its name
        self.model, self.modal = model, model.modal_map[modal] if fidelities else None
        self.cutoff = float(checkpoint.config[KEY.CUTOFF])
        self.elements = frozenset(int(z) for z in checkpoint.config[KEY.TYPE_MAP])
        # an edge without radial features is nothing to a network of no bias whose activation leaves zero as it is
        leaves_zero = ACTIVATION[checkpoint.config[KEY.ACTIVATION_RADIAL]](torch.zeros(1)).item() == 0
        self.distribution_spec = SPEC_MPNN_HALO.replaced(ignores_longer_edges=leaves_zero)

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return _dtype(self.model)

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3, those of `outputs`."""
        sender, receiver = data["edge_index"]
        wide = torch.promote_types(data["positions"].dtype, self.dtype)
        positions, cell, shifts = (data[name].detach().to(wide) for name in ("positions", "cell", "edge_shifts"))
        lattice = cell[data["batch"][receiver]]
        vectors = positions[sender] - positions[receiver] + (shifts[:, :, None] * lattice).sum(1)
        graph = {
            KEY.ATOMIC_NUMBERS: data["atomic_numbers"],
            KEY.NODE_FEATURE: data["atomic_numbers"],
            KEY.EDGE_IDX: (receiver, sender),  # SevenNet names receivers first
            KEY.EDGE_VEC: vectors.to(self.dtype),
            KEY.BATCH: data["batch"],
            KEY.NUM_ATOMS: torch.tensor([len(positions)]),
            KEY.CELL_VOLUME: torch.linalg.det(cell).abs().to(self.dtype),
        }
        if self.modal is not None:
            graph[KEY.MODAL_TYPE] = torch.full((len(cell),), self.modal, device=cell.device)
        result = self.model(graph)
        found = {
            "energy": result[KEY.PRED_TOTAL_ENERGY],
            "forces": result[KEY.PRED_FORCE],
            "stress": -result[KEY.PRED_STRESS][:, VOIGT.to(cell.device)],
        }
        return {name: found[name].detach() for name in outputs}


class _MaskedEnvelope(nn.Module):
    """SevenNet's envelopes are polynomials that touch zero at the cutoff and grow again beyond; this one stays there."""

    def __init__(self, envelope: nn.Module, cutoff: float) -> None:
        super().__init__()
        self.envelope, self.cutoff = envelope, float(cutoff)

    def forward(self, r: Tensor) -> Tensor:
        return self.envelope(r) * (r < self.cutoff)  # type: ignore[no-any-return]


class _OnehotInModelDtype(nn.Module):
    """SevenNet's one-hot layer gives float32 whatever the weights are; everything after it multiplies with them."""

    def __init__(self, onehot: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.onehot = onehot
        self.keys = (onehot.key_output, onehot.key_additional_output)
        self._weights = [model]  # in a list: not a submodule

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        data = self.onehot(data)
        for key in self.keys:
            if key is not None:
                data[key] = data[key].to(_dtype(self._weights[0]))  # type: ignore[index]
        return data


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
