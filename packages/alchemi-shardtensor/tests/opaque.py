"""What no tag can see into: operators registered with torch, and a library with methods and scripted helpers."""

import torch
from torch import Tensor


@torch.library.custom_op("opaque::pairs", mutates_args=())
def pairs(x: Tensor, edge_index: Tensor) -> Tensor:
    """Each edge adds x[sender] * x[receiver] to its receiver and a tenth of it to its sender."""
    sender, receiver = edge_index
    product = x[sender] * x[receiver]
    return torch.zeros_like(x).index_add_(0, receiver, product).index_add_(0, sender, 0.1 * product)


def _pairs_backward(ctx, grad):
    sender, receiver = ctx.edge_index
    product = grad[receiver] + 0.1 * grad[sender]
    x = torch.zeros_like(ctx.x).index_add_(0, sender, product * ctx.x[receiver])
    return x.index_add_(0, receiver, product * ctx.x[sender]), None


def _keep(ctx, inputs, output):
    ctx.x, ctx.edge_index = inputs


pairs.register_autograd(_pairs_backward, setup_context=_keep)


@torch.library.custom_op("opaque::total", mutates_args=())
def total(x: Tensor, charges: Tensor) -> Tensor:
    return (x * charges[:, None]).sum(0)


@torch.library.custom_op("opaque::smoothed", mutates_args=())
def smoothed(x: Tensor) -> Tensor:
    """The cumulative sum over all rows, in their order."""
    return x.cumsum(0)


smoothed.register_autograd(lambda ctx, grad: grad.flip(0).cumsum(0).flip(0))


def python_pairs(x, edge_index):
    assert type(x) is Tensor
    return pairs(x, edge_index)


def offset(x):
    return x + 1


def raised(original, x):
    return original(x) + 10


def halved(original, self, x):
    return original(self, x) / 2


class Model:
    def scale(self, x):
        return 3 * x

    def forward(self, x):
        return offset(self.scale(x))


@torch.jit.script
def scripted_sum(x: Tensor, batch: Tensor, n: int) -> Tensor:
    return torch.zeros([n, x.size(1)], dtype=x.dtype).index_add_(0, batch, x)


class Summed(torch.nn.Module):
    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return torch.zeros([2, x.size(1)], dtype=x.dtype).index_add_(0, batch, x)


@torch.library.custom_op("opaque::doubled", mutates_args=())
def doubled(tensors: list[Tensor]) -> list[Tensor]:
    """Row by row, as fused kernels take and give lists."""
    return [tensors[0] * 2 + tensors[1].sum()]
