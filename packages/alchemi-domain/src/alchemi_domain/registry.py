"""Models and strategies by their names in the entry points of installed packages."""

import importlib
import inspect
import pickle
from importlib.metadata import entry_points
from typing import Any

from torch import nn

from alchemi_shardtensor import Comm, Strategy
from alchemi_spec import AlchemiError, InputError


def find_strategy(strategy: str | Strategy) -> Strategy:
    """Look up a strategy by its name in the entry points `alchemi.strategies`; a strategy object is returned as it is.

    Raises:
        InputError: if no strategy has this name; the message lists the installed ones.

    """
    return _entry("alchemi.strategies", strategy)() if isinstance(strategy, str) else strategy


def load_model(name: str, comm: Comm | None = None, *, trust_pickle: bool = False) -> nn.Module:
    """Load a model by `NAME`, `NAME:ARGUMENT` (entry points `alchemi.models`) or `module:factory`, the same on every rank.

    Rank 0 loads the model, so that a file is read or downloaded once, and sends it to the others. If it cannot be pickled,
    every rank loads it. `trust_pickle` is passed to loaders that have such a parameter.

    Raises:
        InputError: on every rank, if there is no such model; and what the loader raises.

    """
    comm = comm or Comm()
    model = blob = None
    with comm.agreement():
        if comm.rank == 0:
            model = _build(name, trust_pickle)
            blob = _pickled(model) if comm.size > 1 else None
    blob = comm.broadcast_object(blob)
    with comm.agreement():
        if comm.rank > 0:
            model = _build(name, trust_pickle) if blob is None else pickle.loads(blob)
    return model  # type: ignore[return-value]


def module_of(name: str) -> str:
    """The module that loads this model. Importing it before ranks are forked saves each of them the import."""
    first = name.partition(":")[0]
    return next((entry.module for entry in entry_points(group="alchemi.models", name=first)), first)


def known(group: str) -> list[str]:
    """The names that installed packages have registered in this group of entry points."""
    return sorted(entry_points(group=group).names)


def _entry(group: str, name: str) -> Any:
    found = entry_points(group=group, name=name)
    if not found:
        raise InputError(f"nothing is called {name!r} among {group}: installed are {', '.join(known(group)) or 'none'}.")
    return next(iter(found)).load()


def _build(name: str, trust_pickle: bool) -> nn.Module:
    first, _, argument = name.partition(":")
    if first in known("alchemi.models"):
        loader = _entry("alchemi.models", first)
        options = {"trust_pickle": trust_pickle} if "trust_pickle" in inspect.signature(loader).parameters else {}
        try:
            return loader(*([argument] if argument else []), **options)  # type: ignore[no-any-return]
        except (TypeError, ValueError) as error:
            if isinstance(error, AlchemiError):
                raise
            raise InputError(f"the model {name!r} cannot be loaded: {error}") from error
    if not argument:
        raise InputError(
            f"there is no model {name!r}: installed are {', '.join(known('alchemi.models'))}; your own is module:factory."
        )
    try:
        factory = getattr(importlib.import_module(first), argument)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{name!r} is neither an installed model nor module:factory: {error}.") from error
    return factory()  # type: ignore[no-any-return]


def _pickled(model: nn.Module) -> bytes | None:
    try:
        return pickle.dumps(model)
    except Exception:
        return None
