"""Every place where this package changes a SevenNet model. The changes are made once, when a wrapper has loaded its model.

The model belongs to that wrapper, so no other model and none of `sevenn`'s modules and classes change. Version: sevenn 0.13.0.
"""

import torch
from sevenn.nn.edge_embedding import EdgeEmbedding
from sevenn.nn.force_output import ForceOutput, ForceStressOutput, ForceStressOutputFromEdge
from sevenn.nn.linear import AtomReduce
from sevenn.nn.node_embedding import OnehotEmbedding
from sevenn.nn.sequential import AtomGraphSequential
from torch import Tensor, nn

DERIVATIVES = (ForceOutput, ForceStressOutput, ForceStressOutputFromEdge)


def replace_onehot(model: AtomGraphSequential) -> None:
    """Replace the one-hot layers by tables.

    Reason: SevenNet's `OnehotEmbedding` (seen in sevenn 0.13.0) calls `torch.nn.functional.one_hot`. That checks its values,
    by a host sync or an assertion on the GPU, but an element that the model does not know, -1, has to give nan. The layer
    also returns float32 whatever the model's dtype.
    """
    for key, module in list(model._modules.items()):
        if isinstance(module, OnehotEmbedding):
            model.replace_module(key, OnehotTable(module))


def mask_envelope(model: AtomGraphSequential, cutoff: float) -> None:
    """Multiply the envelope by 0 beyond `cutoff`, in Å.

    Reason: SevenNet's envelopes (seen in sevenn 0.13.0) are polynomials that reach zero at the cutoff and grow again beyond it,
    so edges of a neighbour list with a skin would count.
    """
    for module in model.children():
        if isinstance(module, EdgeEmbedding):
            module.cutoff_function = MaskedEnvelope(module.cutoff_function, cutoff)


def delete_outputs(model: AtomGraphSequential) -> tuple[str, float]:
    """Delete the sum over atoms, forces and stress; return the key of atoms' energies and the factor of their sum.

    Reason: SevenNet's `AtomReduce` and force outputs (seen in sevenn 0.13.0) read the numbers of systems and atoms on the
    host, so a step could not be captured, and they compute stress even if it is not requested. The wrapper sums the energies
    and differentiates them instead.
    """
    total = next(module for module in model if isinstance(module, AtomReduce))
    for name, module in list(model._modules.items()):
        if isinstance(module, (AtomReduce, *DERIVATIVES)):
            model.delete_module_by_key(name)
    model.key_grad = None
    return total.key_input, float(total.constant)


def skip_preprocessing(model: AtomGraphSequential) -> None:
    """Have the model take indices of elements and of the fidelity as they are.

    Reason: SevenNet's own lookups (seen in sevenn 0.13.0) copy tables from the host in each call. The wrapper keeps them on the
    model's device.
    """
    model.eval_modal_map = model.eval_type_map = False


class OnehotTable(nn.Module):
    """Look one-hot vectors (N, types) up in a table of the model's dtype.

    The type of an element that the model does not know is -1: the table's last row, which makes every result nan.
    """

    def __init__(self, layer: OnehotEmbedding) -> None:
        super().__init__()
        self.layer = layer
        unknown = torch.full((1, layer.num_classes), torch.nan)
        self.register_buffer("table", torch.cat([torch.eye(layer.num_classes), unknown]), persistent=False)

    def forward(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """Write the vectors of `data`'s types under the keys that SevenNet's layer uses."""
        types = data[self.layer.key_x]
        for key in {self.layer.key_output, self.layer.key_additional_output} - {None}:
            data[key] = self.table[types]  # type: ignore[index]
        if self.layer.key_save is not None:
            data[self.layer.key_save] = types
        return data


class MaskedEnvelope(nn.Module):
    """Compute the envelope (E,) of distances (E,) in Å, zero beyond the cutoff."""

    def __init__(self, envelope: nn.Module, cutoff: float) -> None:
        super().__init__()
        self.envelope, self.cutoff = envelope, float(cutoff)

    def forward(self, r: Tensor) -> Tensor:
        """Multiply by 0 beyond the cutoff."""
        return self.envelope(r) * (r < self.cutoff)  # type: ignore[no-any-return]
