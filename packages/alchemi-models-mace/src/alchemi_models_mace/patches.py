"""Every place where this package changes mace-torch, a MACE model or torch's global state.

Nothing is changed at import, and each change ends with its context manager. Changes to a model touch only that model's own
objects: do not call one model from two threads at once. `keep_weights_only_setting`, `allow_pickle_loading` and
`keep_default_dtype` concern the whole process while they are open, so they are not safe beside other threads that load
files or make models. Versions: mace-torch 0.3.16, cuequivariance 0.13.0.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

WEIGHTS_ONLY_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


@contextmanager
def keep_weights_only_setting() -> Iterator[None]:
    """Restore the environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD at exit.

    Reason: importing mace (seen in 0.3.16) sets it to 1, since e3nn 0.4.4 loads its constants by `torch.load` at import.
    Left set, it makes every later `torch.load` of any library in the process run the code in a pickle, unless that call
    passes `weights_only`.
    """
    before = os.environ.get(WEIGHTS_ONLY_VARIABLE)
    try:
        yield
    finally:
        os.environ.pop(WEIGHTS_ONLY_VARIABLE, None)
        if before is not None:
            os.environ[WEIGHTS_ONLY_VARIABLE] = before


@contextmanager
def allow_pickle_loading() -> Iterator[None]:
    """Set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD while open: `torch.load` then loads any pickle by default.

    Reason: the loaders of MACE's foundation models (seen in mace-torch 0.3.16) call `torch.load` without `weights_only`, and
    the files are pickles. The loaders have no argument for it.
    """
    with keep_weights_only_setting():
        os.environ[WEIGHTS_ONLY_VARIABLE] = "1"
        yield


@contextmanager
def keep_default_dtype() -> Iterator[None]:
    """Restore torch's default dtype at exit.

    Reason: MACE's conversions to cuEquivariance and OpenEquivariance (seen in mace-torch 0.3.16) set it to the model's dtype
    and leave it so. The dtype is the process's.
    """
    before = torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def cast_edge_vectors(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    """Cast the first argument of `modules`, which is edge vectors or lengths, to `dtype` while open (forward pre-hooks).

    Reason: MACE (seen in mace-torch 0.3.16) forms differences of positions inside its forward and has no place to cast them.
    Float64 positions far from the origin must be subtracted before they are cast to a float32 model's dtype.
    """

    def cast(_: nn.Module, edges: tuple[Any, ...]) -> tuple[Any, ...]:
        return (edges[0].to(dtype), *edges[1:])

    with ExitStack() as hooks:
        for module in modules:
            hooks.callback(module.register_forward_pre_hook(cast).remove)
        yield


@contextmanager
def replace_convolutions(forwards: Mapping[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Replace the `forward` of each of these convolutions while open.

    Reason: a fused convolution (cuEquivariance 0.13.0, OpenEquivariance, called by mace-torch 0.3.16) gathers the senders'
    features inside its kernel, where alchemi cannot see the gather and fetch ghost rows. The replacement fetches them first.
    A forward pre-hook is not enough: MACE's `forward` sums to as many rows as it is given, ghosts included, and MACE sets it
    on the instance, where pickling may lose it.
    """
    with ExitStack() as replaced:
        for convolution, forward in forwards.items():
            replaced.enter_context(patch.object(convolution, "forward", forward))
        yield
