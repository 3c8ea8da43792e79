"""Models and strategies by name: entry points, ours and anybody's."""

import importlib
import inspect
import pickle
from importlib.metadata import entry_points
from typing import Any, Protocol

from torch import Tensor, nn

from alchemi_shardtensor import Comm, Edges
from alchemi_spec import AlchemiError, InputError


class Partition(Protocol):
    """Space, or whatever a strategy divides, shared out among ranks."""

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, ids: Tensor) -> Tensor:
        """The rank (n,) that is to own each atom (n, 3) Å, one of `ids` (n,), by this rank's knowledge alone."""
        ...


class Strategy(Protocol):
    """A way to build the partition. Below it there is one exchange, one reverse, one sum.

    It may have a `kind`, a `StrategyKind` by which models choose their specification; default `HALO`.
    """

    def partition(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        comm: Comm,
        weights: Tensor | None = None,
        *,
        ids: Tensor,
    ) -> Partition:
        """Who is to own what, from each rank's own atoms (n, 3) Å, `ids` (n,) of all, of equal sums of `weights` (n,).

        Every rank must call it.
        """
        ...

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges of this rank's atoms, of their senders too for depth 2, and so on; and the routing of all senders."""
        ...


def find_strategy(strategy: str | Strategy) -> Strategy:
    """A strategy by its name in the entry points `alchemi.strategies`, or itself.

    Raises:
        InputError: listing the names that there are.

    """
    return _entry("alchemi.strategies", strategy)() if isinstance(strategy, str) else strategy


def load_model(name: str, comm: Comm | None = None, *, trust_pickle: bool = False) -> nn.Module:
    """A model by `NAME`, `NAME:ARGUMENT` (entry points `alchemi.models`) or `module:factory`, the same on every rank.

    Rank 0 loads it, so that a file is read or fetched once, and sends it to the others; what cannot be sent is loaded by
    each. `trust_pickle` is passed on to loaders that ask for it.

    Raises:
        InputError: on every rank, where there is no such model; and what the loader raises.

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
    """The module that has to be imported to load this model, so that it can be imported before ranks are forked."""
    first = name.partition(":")[0]
    return next((entry.module for entry in entry_points(group="alchemi.models", name=first)), first)


def known(group: str) -> list[str]:
    """The names that the installed packages have registered in a group."""
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
            raise InputError(f"the model {name!r} cannot be made: {error}") from error
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
