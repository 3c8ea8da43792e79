"""Options of the command line, made from the fields of settings."""

from collections.abc import Callable
from functools import wraps
from importlib.metadata import entry_points
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic.fields import FieldInfo
from rich.console import Console

from alchemi_dist.cli.launch import console_for, one_line_errors
from alchemi_domain.settings import Argument, BaseSettings, Option, option_of

NONE = "none"
"""How None is written where it is one of a setting's choices."""


def command(verb: Callable[[Any, Any, Console], None]) -> Callable[..., None]:
    """A command of typer that calls `verb(settings, launch, console)`; its options are the fields of both settings."""
    kinds = [parameter.annotation for parameter in signature(verb, eval_str=True).parameters.values()][:2]

    @wraps(verb)
    def run(**values: Any) -> None:
        console = console_for(values["json_path"])
        with one_line_errors(console):
            settings, launch = (_filled(kind, values) for kind in kinds)
            verb(settings, launch, console)

    run.__signature__ = Signature([p for kind in kinds for p in _parameters(kind)])  # type: ignore[attr-defined]
    run.__annotations__ = {}
    return run


def _parameters(kind: type[BaseSettings]) -> list[Parameter]:
    """Parameters for typer: the settings' own fields first, then those of their bases."""
    hints = get_type_hints(kind)
    names = dict.fromkeys(name for owner in kind.__mro__ for name in vars(owner).get("__annotations__", {}))
    return [_parameter(kind, name, hints[name]) for name in names if option_of(kind, name)]


def _parameter(kind: type[BaseSettings], name: str, hint: Any) -> Parameter:
    option, field = option_of(kind, name), kind.model_fields[name]
    assert option is not None
    if isinstance(option, Argument):
        info = typer.Argument(help=option.help)
    else:
        flag = option.flag or "--" + name.replace("_", "-")
        info = typer.Option(flag, help=option.help, min=_minimum(field.metadata, hint))
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=_default(field, hint), annotation=Annotated[_type(option, hint), info]
    )


def _default(field: FieldInfo, hint: Any) -> Any:
    if field.is_required():
        return Parameter.empty
    return NONE if field.default is None and _may_be_none(hint) else field.default


def _may_be_none(hint: Any) -> bool:
    """Whether None is one of the choices of a Literal."""
    return get_origin(hint) is Literal and None in get_args(hint)


def _minimum(metadata: list[Any], hint: Any) -> int | None:
    """The smallest value of a whole number. Other limits are left to the settings, whose messages name the unit."""
    whole = int in (hint, *get_args(hint))
    return next((limit.ge for limit in metadata if hasattr(limit, "ge")), None) if whole else None


def _type(option: Option, hint: Any) -> Any:
    if option.entry_points:
        return Literal[tuple(sorted(entry_points(group=option.entry_points).names))]
    if _may_be_none(hint):
        return Literal[tuple(NONE if choice is None else choice for choice in get_args(hint))]
    return hint


def _filled(kind: type[BaseSettings], values: dict[str, Any]) -> BaseSettings:
    """Settings with the values that the command line gave."""
    hints = get_type_hints(kind)
    given = {name: values[name] for name in kind.model_fields if name in values}
    return kind(**{name: None if v == NONE and _may_be_none(hints[name]) else v for name, v in given.items()})
