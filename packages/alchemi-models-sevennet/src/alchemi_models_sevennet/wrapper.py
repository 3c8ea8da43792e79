"""SevenNet (Park et al., J. Chem. Theory Comput. 2024, 20, 4857) behind alchemi-spec's contract.

Of a loaded model, one-hot layers and the envelope are replaced, and energies of atoms are summed and differentiated here:
SevenNet's own such parts wait for the device, which no captured step may. `sevenn` itself is not modified.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import sevenn._keys as KEY
import torch
from sevenn import util
from sevenn._const import ACTIVATION
from sevenn.nn.edge_embedding import EdgeEmbedding
from sevenn.nn.force_output import ForceOutput, ForceStressOutput, ForceStressOutputFromEdge
from sevenn.nn.linear import AtomReduce
from sevenn.nn.node_embedding import OnehotEmbedding
from torch import Tensor, nn

from alchemi_spec import SPEC_MPNN_HALO, MLIPSpec, UntrustedPickle

ALL_OUTPUTS = ("energy", "forces", "stress")
DERIVATIVES = (ForceOutput, ForceStressOutput, ForceStressOutputFromEdge)
LEAST_VOLUME = 1e-3
"""Å^3, of what has none, as in SevenNet."""


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
                model.replace_module(key, _Onehot(module))
            if isinstance(module, EdgeEmbedding):
                module.cutoff_function = _MaskedEnvelope(module.cutoff_function, checkpoint.config[KEY.CUTOFF])
            if isinstance(module, (AtomReduce, *DERIVATIVES)):
                model.delete_module_by_key(key)
            if isinstance(module, AtomReduce):
                self.scale, self._atoms_energies = float(module.constant), module.key_input
        model.eval_modal_map = model.eval_type_map = False  # the fidelity's and elements' numbers are given
        model.key_grad = None
        self.register_buffer("types", model.z_to_onehot_tensor, persistent=False)
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
        vectors = vectors.to(self.dtype).requires_grad_("forces" in outputs or "stress" in outputs)
        graph = {
            KEY.NODE_FEATURE: self.types[data["atomic_numbers"]],  # type: ignore[index]
            KEY.EDGE_IDX: (receiver, sender),  # SevenNet names receivers first
            KEY.EDGE_VEC: vectors,
            KEY.BATCH: data["batch"],
        }
        if self.modal is not None:
            graph[KEY.MODAL_TYPE] = torch.full((len(cell),), self.modal, device=cell.device)
        energies = self.scale * self.model(graph)[self._atoms_energies].squeeze(1)
        energy = energies.new_zeros(len(cell)).index_add(0, data["batch"], energies)
        found = {"energy": energy.detach()}
        if vectors.requires_grad:
            (pull,) = torch.autograd.grad(energy.sum(), vectors)
        if "forces" in outputs:
            found["forces"] = _sums(pull, receiver, len(positions)) - _sums(pull, sender, len(positions))
        if "stress" in outputs:
            virials = _sums(pull[:, :, None] * vectors.detach()[:, None, :], receiver, len(positions))
            volume = torch.linalg.det(cell).abs().clamp(min=LEAST_VOLUME).to(self.dtype)
            stress = _sums(virials, data["batch"], len(cell)) / volume[:, None, None]
            found["stress"] = (stress + stress.mT) / 2
        return {name: found[name] for name in outputs}


def _sums(rows: Tensor, index: Tensor, n: int) -> Tensor:
    return rows.new_zeros(n, *rows.shape[1:]).index_add(0, index, rows)


class _MaskedEnvelope(nn.Module):
    """SevenNet's envelopes are polynomials that touch zero at the cutoff and grow again beyond; this one stays there."""

    def __init__(self, envelope: nn.Module, cutoff: float) -> None:
        super().__init__()
        self.envelope, self.cutoff = envelope, float(cutoff)

    def forward(self, r: Tensor) -> Tensor:
        return self.envelope(r) * (r < self.cutoff)  # type: ignore[no-any-return]


class _Onehot(nn.Module):
    """SevenNet's one-hot layer by a table, in the model's dtype; its own gives float32 and looks at what it is given.

    An element that the model does not know has the type -1: the table's last row, which makes everything nan.
    """

    def __init__(self, layer: OnehotEmbedding) -> None:
        super().__init__()
        self.layer = layer
        none = torch.full((1, layer.num_classes), torch.nan)
        self.register_buffer("table", torch.cat([torch.eye(layer.num_classes), none]), persistent=False)

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        types = data[self.layer.key_x]
        for key in {self.layer.key_output, self.layer.key_additional_output} - {None}:
            data[key] = self.table[types]  # type: ignore[index]
        if self.layer.key_save is not None:
            data[self.layer.key_save] = types
        return data


def _dtype(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())
