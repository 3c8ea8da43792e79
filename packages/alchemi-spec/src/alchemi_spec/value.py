"""What specifications are made of: frozen values that refuse nonsense, print as code, and agree or clash."""

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
"""Context of a validation that leaves nothing to defaults."""
PLAIN_WORDS = {"extra_forbidden": "unknown key", "missing": "missing"}


class Word(StrEnum):
    """One of a few words; prints as code."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class FrozenDict(dict[K, V]):
    """A dict that is a value: hashable, changed by copying."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[type, tuple[dict[K, V]]]:
        return type(self), (dict(self),)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("part of a specification, which is changed by copying: spec.replaced(field={**old, key: value})")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse


Table = Annotated[Mapping[K, V], AfterValidator(FrozenDict)]
Names = Annotated[frozenset[str], PlainSerializer(sorted, return_type=list[str], when_used="json")]


def rewording(init: F) -> F:
    """Mark an `__init__` that only rewords its arguments: pydantic makes nested values without it, context and all."""
    init.__pydantic_base_init__ = True  # type: ignore[attr-defined]
    return init


class Value(BaseModel):
    """Frozen, compared by value, hashable; printed as the code that makes it; changed by `replaced`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, json_schema_serialization_defaults_required=True
    )

    @rewording
    def __init__(self, /, **fields: Any) -> None:
        with in_plain_words(type(self).__name__):
            super().__init__(**fields)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, written: Any, info: ValidationInfo) -> Any:
        missing = set(cls.model_fields) - set(written) if info.context == COMPLETE and isinstance(written, dict) else set()
        if missing:
            raise ValueError(f"missing {', '.join(sorted(missing))}")
        return written

    def replaced(self, **changes: Any) -> Self:
        """A copy with `changes`, checked as when made (which pydantic's own `model_copy` does not do).

        Raises:
            SpecError: where the result contradicts itself.

        """
        with in_plain_words(type(self).__name__):
            return self.model_validate({**dict(self), **changes})

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        fields = type(self).model_fields
        return ((name, value) for name, value in super().__repr_args__() if name and value != fields[name].default)

    def __str__(self) -> str:
        return repr(self)


@contextmanager
def in_plain_words(what: str) -> Iterator[None]:
    """Say what is wrong with `what` as a SpecError, by path and in plain words."""
    try:
        yield
    except ValidationError as invalid:
        raise SpecError(f"{what}: " + "; ".join(map(_fault, invalid.errors()))) from None


def _fault(error: Mapping[str, Any]) -> str:
    said = error.get("ctx", {}).get("error") or PLAIN_WORDS.get(error["type"], error["msg"])
    return ": ".join(filter(None, [".".join(map(str, error["loc"])), str(said)]))


def agreed(field: str, a: V, b: V, yielding: object = None) -> V:
    """What `a` and `b` both say of `field`; one that is `yielding` leaves it to the other.

    Raises:
        SpecError: where they clash.

    """
    if a == yielding:
        return b
    if b in (a, yielding):
        return a
    raise clash(field, a, b)


def clash(field: str, a: object, b: object) -> SpecError:
    """`field` is `a` in one specification and `b` in another, and neither yields."""
    return SpecError(f"these cannot be merged: {field}: {a!r} and {b!r}.\nGive both the same, or run the models apart.")
