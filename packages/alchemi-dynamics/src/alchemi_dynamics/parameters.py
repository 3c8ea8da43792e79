"""Parameters of integrators, checked when the integrator is made."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from alchemi_dynamics.state import State
from alchemi_shardtensor import Comm
from alchemi_spec import InputError


def positive(name: str, value: float, unit: str, example: float) -> float:
    """Return the value as a float. Refuse it unless it is finite and above zero."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value} {unit}, and has to be finite and above zero. Write for example {name}={example}.")
    return float(value)


def at_least_one(name: str, value: int) -> int:
    """Return the value. Refuse it unless it is a whole number above zero."""
    if value != int(value) or value < 1:
        raise ValueError(f"{name} is {value}, and has to be a whole number of at least 1. Write for example {name}=3.")
    return int(value)


def one_of(name: str, value: str | None, choices: tuple[str | None, ...]) -> None:
    """Refuse a value that is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, which is not known. Write one of {', '.join(map(repr, choices))}.")


class PerSystem:
    """A parameter that is one number for all systems of a batch, or one number for each (B,)."""

    def __init__(self, name: str, value: float | Tensor, unit: str, above: float = -math.inf) -> None:
        """Refuse values that are not finite or not above `above`."""
        self.name = name
        self.values = torch.as_tensor(value, dtype=torch.float64).detach()
        if self.values.ndim > 1:
            raise ValueError(f"{name} has shape {tuple(self.values.shape)}. Write one number, or one for each system (B,).")
        if not bool((self.values.isfinite() & (self.values > above)).all()):
            bound = "finite" if above == -math.inf else f"finite and above {above}"
            raise ValueError(f"{name} is {self.values.tolist()} {unit}, and has to be {bound}. Write it in {unit}.")

    def on(self, state: State) -> Tensor:
        """The values (B,) on the state's device, where they are kept."""
        systems = len(state.cell)
        if self.values.ndim and len(self.values) != systems:
            raise ValueError(f"{self.name} has {len(self.values)} values for {systems} systems. Write one, or {systems}.")
        self.values = self.values.to(state.positions.device)
        return self.values.expand(systems)


def restore(owner: object, saved: Mapping[str, Tensor]) -> None:
    """Set attributes of `owner`. Existing tensors are changed in place, because captured steps read those tensors."""
    for name, value in saved.items():
        kept = getattr(owner, name, None)
        if isinstance(kept, Tensor) and kept.shape == value.shape:
            kept.copy_(value)
        else:
            setattr(owner, name, value.clone())


def fingerprint(value: object, depth: int = 4) -> object:
    """What a captured step depends on: values of numbers, addresses of tensors, attributes of objects."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, (State, Comm)) or not depth:
        return id(value)
    if isinstance(value, (dict, list, tuple)):
        return tuple(fingerprint(v, depth - 1) for v in (value.items() if isinstance(value, dict) else value))
    return tuple((k, fingerprint(v, depth - 1)) for k, v in vars(value).items()) if hasattr(value, "__dict__") else value


def require_volume(state: State, what: str) -> None:
    """Refuse systems that are not periodic in three directions, and states without a stress."""
    bad = (~state.pbc.all(-1) | (state.volume() < 1e-12)).nonzero().flatten().tolist()
    if bad:
        raise InputError(
            f"{what} changes the cell, and system {bad[0]} has pbc {state.pbc[bad[0]].tolist()} and cell "
            f"{state.cell[bad[0]].tolist()}, so it is not periodic in three directions.\n"
            f"Give it a cell and pbc=True, or keep the cell fixed."
        )
    if state.stress is None:
        raise InputError(f"{what} needs the stress, and the state has none. Evaluate the integrator's `outputs`.")
