"""SevenNet (Park et al., J. Chem. Theory Comput. 2024, 20, 4857) behind alchemi-spec's contract.

The wrapper sums the energies of atoms and differentiates them. `alchemi_models_sevennet.patches` removes the parts of the
loaded model that would do it, and replaces those that synchronise with the host.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import sevenn._keys as KEY
import torch
from sevenn import util
from sevenn._const import ACTIVATION
from torch import Tensor, nn

from alchemi_models_sevennet.patches import delete_outputs, mask_envelope, replace_onehot, skip_preprocessing
from alchemi_spec import SPEC_MPNN_HALO, MLIPSpec, UntrustedPickle

ALL_OUTPUTS = ("energy", "forces", "stress")
MIN_VOLUME = 1e-3
"""Volume of a system without a cell, in Å^3, as in SevenNet."""


class SevenNetWrapper(nn.Module):
    """A pretrained SevenNet by name, or a checkpoint file. Computes in the model's dtype: `wrapper.double()` changes it.

    Positions are subtracted in the wider of their dtype and the model's, and the differences are then cast.
    """

    distribution_spec: MLIPSpec

    def __init__(self, name: str | Path = "7net-0", *, modal: str | None = None, trust_pickle: bool = False) -> None:
        """Load `name`. `modal` is the fidelity to use of a multi-fidelity model.

        Raises:
            UntrustedPickle: for a file, unless `trust_pickle`.
            ValueError: if there is no such file and SevenNet knows no such name, or if the fidelity is missing or unknown.

        """
        super().__init__()
        if Path(name).exists() and not trust_pickle:
            raise UntrustedPickle.of(name)
        checkpoint = util.load_checkpoint(str(name))
        model = checkpoint.build_model().requires_grad_(False).eval()
        model.set_is_batch_data(True)
        fidelities = list(model.modal_map or {})
        if modal not in (fidelities or [None]):
            raise ValueError(f"{name} has the fidelities {fidelities}, not {modal!r}: choose one with modal=...")
        self.cutoff = float(checkpoint.config[KEY.CUTOFF])
        replace_onehot(model)
        mask_envelope(model, self.cutoff)
        skip_preprocessing(model)
        self._energies_key, self.scale = delete_outputs(model)
        self.register_buffer("types", model.z_to_onehot_tensor, persistent=False)
        self.model, self.modal = model, model.modal_map[modal] if fidelities else None
        self.elements = frozenset(int(z) for z in checkpoint.config[KEY.TYPE_MAP])
        # a network without bias whose activation maps 0 to 0 adds nothing for an edge with zero radial features
        maps_zero_to_zero = ACTIVATION[checkpoint.config[KEY.ACTIVATION_RADIAL]](torch.zeros(1)).item() == 0
        self.distribution_spec = SPEC_MPNN_HALO.replaced(ignores_longer_edges=maps_zero_to_zero)

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())  # type: ignore[no-any-return]

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Compute those of `outputs`: energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3."""
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
        energies = self.scale * self.model(graph)[self._energies_key].squeeze(1)
        energy = energies.new_zeros(len(cell)).index_add(0, data["batch"], energies)
        found = {"energy": energy.detach()}
        if vectors.requires_grad:
            (gradient,) = torch.autograd.grad(energy.sum(), vectors)
        if "forces" in outputs:
            found["forces"] = _sum_rows(gradient, receiver, len(positions)) - _sum_rows(gradient, sender, len(positions))
        if "stress" in outputs:
            virials = _sum_rows(gradient[:, :, None] * vectors.detach()[:, None, :], receiver, len(positions))
            volume = torch.linalg.det(cell).abs().clamp(min=MIN_VOLUME).to(self.dtype)
            stress = _sum_rows(virials, data["batch"], len(cell)) / volume[:, None, None]
            found["stress"] = (stress + stress.mT) / 2
        return {name: found[name] for name in outputs}


def _sum_rows(rows: Tensor, index: Tensor, n: int) -> Tensor:
    """Sum `rows` (M, ...) by `index` (M,) to (n, ...)."""
    return rows.new_zeros(n, *rows.shape[1:]).index_add(0, index, rows)
