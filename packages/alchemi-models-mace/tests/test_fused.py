"""Fused convolutions, played by MACE's own on the CPU: the exchange goes in front of the kernel, whatever its call form."""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from small_mace import silica, small_mace  # isort: split

import pytest
import torch
from e3nn import o3
from test_mace import contract_data

from alchemi_models_mace import MACEWrapper


class Fused(torch.nn.Module):
    """What MACE does edge by edge, called as cuEquivariance's or OpenEquivariance's kernel, on rows [owned | ghost]."""

    def __init__(self, product, library):
        super().__init__()
        self.product, self.weight_numel, self.rows = product, product.weight_numel, []
        if library == "oeq":
            self.layout_transpose_in = self.layout_transpose_out = None

    def forward(self, *arguments):
        if len(arguments) == 4:  # cuEquivariance's
            (weights, rows, attrs), senders, like, receivers = arguments
            return [self.summed(rows, attrs, weights, senders[1], receivers[0], len(like[0]))]
        rows, attrs, weights, receiver, sender = arguments
        return self.summed(rows, attrs, weights, sender, receiver, len(rows))

    def summed(self, rows, attrs, weights, sender, receiver, n):
        self.rows.append(rows)
        messages = self.product(rows[sender], attrs, weights)
        return messages.new_zeros(n, messages.shape[1]).index_add_(0, receiver, messages)


def fused(library):
    """A small MACE whose convolutions are `Fused`, and these."""
    model = small_mace().requires_grad_(False)
    for block in model.interactions:
        tp = block.conv_tp
        product = o3.TensorProduct(
            tp.irreps_in1,
            tp.irreps_in2,
            tp.irreps_out,
            [(i.i_in1, i.i_in2, i.i_out, i.connection_mode, i.has_weight) for i in tp.instructions],
            shared_weights=False,
            internal_weights=False,
        ).double()
        block.conv_fusion, block.conv_tp = library, Fused(product, library)
    return model, [block.conv_tp for block in model.interactions]


@pytest.mark.parametrize("library", ["cueq", "oeq"])
def test_rows_reach_the_kernel_and_the_first_layers_are_made_on_the_spot(library):
    model, kernels = fused(library)
    data = contract_data(silica(), 4.5)
    expected = MACEWrapper(small_mace().requires_grad_(False))(data)
    results = MACEWrapper(model)(data)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=1e-12)
    first, second = (kernel.rows[0] for kernel in kernels)
    assert not first.requires_grad and second.requires_grad
