"""Settings of a run: each stands once, with its type, default, unit and help text. The command line is made from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Strict, ValidationError
from pydantic_core import ErrorDetails
from torch import nn

from alchemi_domain.registry import load_model
from alchemi_shardtensor import Comm
from alchemi_spec import InputError

FilePath = Annotated[Path, Strict(False)]
"""A path, or text that is converted to one."""
PLAIN_WORDS = {"missing": "the setting {name} is missing", "extra_forbidden": "there is no setting {name}"}
"""Messages for errors that have no value to show, by pydantic's type of error."""


@dataclass(frozen=True)
class Option:
    """How a setting is presented to a user: plain sentences, the first of which gets the unit.

    `entry_points`: the group whose names are the setting's choices. `flag`: its name on the command line, if not its own.
    """

    text: str
    unit: str = ""
    entry_points: str = ""
    flag: str = ""

    @property
    def help(self) -> str:
        """The text with the unit in it."""
        return self.text.replace(".", f", in {self.unit}.", 1) if self.unit else self.text


class Argument(Option):
    """A setting that the command line takes by position."""


def option_of(settings: type[BaseModel], name: str) -> Option | None:
    """The `Option` in the annotation of a field, or None."""
    field = settings.model_fields.get(name)
    return next((m for m in field.metadata if isinstance(m, Option)), None) if field else None


class BaseSettings(BaseModel):
    """Frozen settings with strict types: text is not accepted as a number, and neither text nor a number as a boolean."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, /, **values: Any) -> None:
        """Check the values.

        Raises:
            InputError: naming each setting that is wrong, its value, and what it should be.

        """
        try:
            super().__init__(**values)
        except ValidationError as invalid:
            raise InputError(" ".join(self._message(error) for error in invalid.errors())) from None

    @classmethod
    def _message(cls, error: ErrorDetails) -> str:
        if error["type"] == "value_error":
            return str(error["ctx"]["error"])
        name = str(error["loc"][0])
        if error["type"] in PLAIN_WORDS:
            return PLAIN_WORDS[error["type"]].format(name=name) + "."
        option = option_of(cls, name)
        unit = f" {option.unit}" if option and option.unit else ""
        return f"{name} is {error['input']!r}{unit}: {error['msg'].replace('Input', 'it', 1)}."


class ModelSettings(BaseSettings):
    """Which model to load, and how it is distributed over the ranks."""

    model: Annotated[
        str, Option("Model to use: sevennet[:NAME], mace:PATH|NAME, uma:PATH|NAME@TASK, lj, or module:factory for your own.")
    ] = "sevennet"
    dtype: Annotated[
        Literal["float32", "float64"] | None, Option("Floating-point type of the model. Default: the model's own.")
    ] = None
    strategy: Annotated[
        str, Option("How atoms are divided among ranks: halo, halo-grid, graph, graph-index, or any installed strategy.")
    ] = "halo"
    trust_pickle: Annotated[bool, Option("Allow a model file to run code when it is loaded.")] = False

    def load(self, comm: Comm) -> nn.Module:
        """The model, of type `dtype`. Every rank must call it."""
        model = load_model(self.model, comm, trust_pickle=self.trust_pickle)
        return model if self.dtype is None else model.to(getattr(torch, self.dtype))
