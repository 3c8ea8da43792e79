"""Fused convolutions, imitated on the CPU by MACE's own: ghost rows are fetched first, for each library's signature."""

# before e3nn 0.4.4, whose constants torch refuses to load otherwise
from small_mace import silica, small_mace  # isort: split

import pickle

import pytest
import torch
from e3nn import o3
from mace.modules.wrapper_ops import with_oeq_conv_fusion
from test_mace import contract_data

from alchemi_models_mace import MACEWrapper


class SegmentedPolynomial(torch.nn.Module):
    """MACE's convolution of single edges with the signature of cuEquivariance's kernel, on rows [owned | ghost]."""

    def __init__(self, product):
        super().__init__()
        self.product, self.weight_numel, self.rows = product, product.weight_numel, []

    def forward(self, weights_rows_attrs, senders, like, receivers):
        weights, rows, attrs = weights_rows_attrs
        return [self.summed(rows, attrs, weights, senders[1], receivers[0], len(like[0]))]

    def summed(self, rows, attrs, weights, sender, receiver, n):
        self.rows.append(rows)
        messages = self.product(rows[sender], attrs, weights)
        return messages.new_zeros(n, messages.shape[1]).index_add_(0, receiver, messages)


class TensorProductConv(SegmentedPolynomial):
    """The same with OpenEquivariance's signature. Pickling keeps its product and loses attributes that were set on it."""

    def forward(self, rows, attrs, weights, receiver, sender):
        return self.summed(rows, attrs, weights, sender, receiver, len(rows))

    def __getstate__(self):
        return self.product

    def __setstate__(self, product):
        TensorProductConv.__init__(self, product)


LIBRARIES = {"cueq": SegmentedPolynomial, "oeq": lambda product: with_oeq_conv_fusion(TensorProductConv(product))}


def fused(library):
    """A small MACE with such convolutions."""
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
        block.conv_fusion, block.conv_tp = library, LIBRARIES[library](product)
    return model


@pytest.mark.parametrize("pickled", [False, True], ids=["made here", "pickled"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_kernels_get_ghost_rows_and_the_first_layer_s_are_computed_without_an_exchange(library, pickled):
    model = fused(library)
    model = pickle.loads(pickle.dumps(model)) if pickled else model
    kernels = [block.conv_tp for block in model.interactions]
    data = contract_data(silica(), 4.5)
    expected = MACEWrapper(small_mace().requires_grad_(False))(data)
    results = MACEWrapper(model)(data)
    for name, value in expected.items():
        torch.testing.assert_close(results[name], value, rtol=0, atol=1e-12)
    first, second = (kernel.rows[0] for kernel in kernels)
    assert not first.requires_grad and second.requires_grad
