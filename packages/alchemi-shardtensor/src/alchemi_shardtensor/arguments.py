"""The arguments of torch's operations under one set of names, whatever the form of the call."""

from collections.abc import Callable
from functools import partial
from typing import Any

_GATHER = ("input", "dim", "index")
_SCATTER = ("input", "dim", "index", "src", "reduce")
_WRITE = ("input", "index", "src", "accumulate")
_NORM = ("input", "ord", "dim", "keepdim")
_NAMES: dict[str, tuple[str, ...]] = {
    "__getitem__": ("input", "index"),
    "__setitem__": _WRITE,
    "index_put": _WRITE,
    "index_select": _GATHER,
    "gather": _GATHER,
    "select": _GATHER,
    "index_add": _SCATTER,
    "index_copy": _SCATTER,
    "index_fill": _SCATTER,
    "index_reduce": _SCATTER,
    "scatter": _SCATTER,
    "scatter_add": _SCATTER,
    "scatter_reduce": _SCATTER,
    "take_along_dim": ("input", "index", "dim"),
    "embedding": ("input", "weight"),
    "segment_reduce": ("input", "reduce"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "unique": ("input", "sorted", "return_inverse", "return_counts", "dim"),
    "unique_consecutive": ("input", "return_inverse", "return_counts", "dim"),
    "bincount": ("input", "weights", "minlength"),
    "unbind": ("input", "dim"),
    "stack": ("tensors", "dim"),
    "grad": ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph"),
    "backward": ("input", "gradient", "retain_graph", "create_graph", "inputs"),
    **dict.fromkeys(("std", "var", "std_mean", "var_mean"), ("input", "dim", "unbiased", "keepdim")),
    "norm": _NORM,
    "linalg_norm": _NORM,
    "linalg_vector_norm": _NORM,
    "topk": ("input", "k", "dim"),
    "batch_norm": ("input", "running_mean", "running_var", "weight", "bias", "training"),
    "scaled_dot_product_attention": ("input", "key", "value"),
    "normalize": ("input", "ord", "dim"),
}
_REDUCE = ("input", "dim", "keepdim")
_ALIASES = {
    "source": "src",
    "values": "src",
    "indices": "index",
    "data": "input",
    "axis": "dim",
    "keepdims": "keepdim",
    "size": "shape",
}
_REST = {"view": "shape", "reshape": "shape", "flip": "dims"}
_DEFAULT_DIM = {"sort": -1, "argsort": -1, "topk": -1, "normalize": 1}
"""Where no dim is named."""


def base(name: str) -> str:
    """An operation's name without the underscore of its in-place form."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def bind(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by one set of names, whatever the form of the call; what has no name here is left out.

    `name` is the operation's `base` name.
    """
    if name in _REST:
        rest = args[1] if len(args) == 2 else args[1:]
        named = {"input": args[0], _REST[name]: rest} if args else {}
    else:
        named = dict(zip(_NAMES.get(name, _REDUCE), args, strict=False))
    for key, value in kwargs.items():
        named[_ALIASES.get(key, key)] = value
    if isinstance(named.get("dim"), bool):  # std(x, unbiased)
        del named["dim"]
    if name in _DEFAULT_DIM:
        named.setdefault("dim", _DEFAULT_DIM[name])
    return named


Binder = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def binder(op: Any) -> Binder:
    """What gives the arguments of `op` their names: those of its schema for an operator of torch.ops, else those of `bind`."""
    if not _schemas(op):
        return partial(bind, base(op.__name__))
    names = argument_names(op)
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs


def argument_names(op: Any) -> list[str]:
    """What an operator of torch.ops calls its arguments; a packet's first overload, where it has several."""
    return [argument.name for argument in _schemas(op)[0].arguments]


def _schemas(op: Any) -> list[Any]:
    if hasattr(op, "overloads"):
        return [getattr(op, name)._schema for name in op.overloads()]
    return [op._schema] if hasattr(op, "_schema") else []
