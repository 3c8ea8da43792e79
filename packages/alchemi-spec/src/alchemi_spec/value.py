"""The base of all specifications: frozen values that are checked when they are made, and printed as code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any, NoReturn, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, PlainSerializer, ValidationError, ValidationInfo, model_validator

from alchemi_spec.errors import SpecError

K = TypeVar("K")
V = TypeVar("V")
F = TypeVar("F", bound=Callable[..., None])
COMPLETE = {"complete": True}
"""The context of a validation in which no field may be missing."""
MESSAGES = {"extra_forbidden": "unknown key", "missing": "missing"}


class Word(StrEnum):
    """An enum of words that is printed as code."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class FrozenDict(dict[K, V]):
    """A hashable dict that cannot be changed, only copied."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a specification is frozen; it is changed by copying: spec.replaced(field={**old, key: value})")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


Table = Annotated[Mapping[K, V], AfterValidator(FrozenDict)]
Names = Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str], when_used="json")]


def converts_arguments(init: F) -> F:
    """Mark an `__init__` that only converts its arguments. Pydantic then validates nested values without calling it."""
    init.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    return init


class Value(BaseModel):
    """A frozen, hashable value that is compared by value, printed as the code that makes it, and copied by `replaced`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, json_schema_serialization_defaults_required=True
    )

    @converts_arguments
    def __init__(self, /, **fields: Any) -> None:
        with as_spec_error(type(self).__name__):
            super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any, info: ValidationInfo) -> Any:
        missing = set(cls.model_fields) - set(written) if info.context == COMPLETE and isinstance(written, dict) else set()
        if missing:
            raise ValueError(f"missing {', '.join(sorted(missing))}")
        return written

    def replaced(self, **changes: Any) -> Self:
        """A copy with `changes`. It is checked like a new value; pydantic's own `model_copy` does not check.

        Raises:
            SpecError: if the result contradicts itself.

        """
        with as_spec_error(type(self).__name__):
            return self.model_validate({**dict(self), **changes})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        fields = type(self).model_fields
        return ((name, value) for name, value in super().__repr_args__() if name and value != fields[name].default)

    def __str__(self) -> str:
        return repr(self)


@contextmanager
def as_spec_error(name: str) -> Iterator[None]:
    """Turn pydantic's errors about the value `name` into a SpecError that names each field and its fault."""
    try:
        yield
    except ValidationError as invalid:
        raise SpecError(f"{name}: " + "; ".join(map(_fault, invalid.errors()))) from None


def _fault(error: Mapping[str, Any]) -> str:
    message = error.get("ctx", {}).get("error") or MESSAGES.get(error["type"], error["msg"])
    return ": ".join(filter(None, [".".join(map(str, error["loc"])), str(message)]))


def agreed(field: str, a: V, b: V, yielding: object = None) -> V:
    """The value of `field` on which `a` and `b` agree. A value equal to `yielding` yields to the other.

    Raises:
        SpecError: if they differ.

    """
    if a == yielding:
        return b
    if b in (a, yielding):
        return a
    raise clash(field, a, b)


def clash(field: str, a: object, b: object) -> SpecError:
    """The error for a `field` that is `a` in one specification and `b` in another."""
    return SpecError(
        f"these cannot be merged: {field}: {a!r} and {b!r}.\nGive both the same value, or run the models separately."
    )
