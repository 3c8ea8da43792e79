"""The arguments of torch's operations under one set of names, whatever the form of the call."""

from typing import Any, NamedTuple

_ALIASES = {
    "source": "src",
    "values": "src",
    "indices": "index",
    "data": "input",
    "axis": "dim",
    "keepdims": "keepdim",
    "size": "shape",
}
"""Other keywords that torch accepts for an argument."""


class Signature(NamedTuple):
    """The names of an operation's positional arguments, in order."""

    names: tuple[str, ...]
    """Of the arguments that take one value each."""
    rest: str | None = None
    """Of all arguments after the first, or of one tuple in their place, as in view(2, 3) and view((2, 3))."""
    default_dim: int | None = None
    """The dim where the call names none and torch has a default."""

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Name the arguments of a call; positional ones without a name are left out."""
        names, rest, default_dim = self
        if rest is None:
            named = dict(zip(names, args, strict=False))
        else:
            named = {names[0]: args[0], rest: args[1] if len(args) == 2 else args[1:]} if args else {}
        for key, value in kwargs.items():
            named[_ALIASES.get(key, key)] = value
        if isinstance(named.get("dim"), bool):  # std(x, unbiased)
            del named["dim"]
        if default_dim is not None:
            named.setdefault("dim", default_dim)
        return named


def signature(text: str) -> Signature:
    """Read `input k dim=-1` or `input *shape`."""
    words = text.split()
    rest = next((word[1:] for word in words if word.startswith("*")), None)
    default = next((int(word[4:]) for word in words if word.startswith("dim=")), None)
    return Signature(tuple(word.partition("=")[0] for word in words if not word.startswith("*")), rest, default)


def base_name(name: str) -> str:
    """An operation's name without the underscore of its in-place form."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def has_schema(op: Any) -> bool:
    """It is an operator of torch.ops, which knows the names of its arguments."""
    return bool(_schemas(op))


def argument_names(op: Any) -> list[str]:
    """The argument names of an operator of torch.ops; those of its first overload where it has several."""
    return [argument.name for argument in _schemas(op)[0].arguments]


def _schemas(op: Any) -> list[Any]:
    if hasattr(op, "overloads"):
        return [getattr(op, name)._schema for name in op.overloads()]
    return [op._schema] if hasattr(op, "_schema") else []
