"""For mypy, not for pytest: the wrappers are models by alchemi-spec's contract, and what is not one is refused."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from alchemi_dist import LennardJones
from alchemi_models_mace import MACEWrapper
from alchemi_models_sevennet import SevenNetWrapper
from alchemi_spec import SPEC_MPNN_HALO, Model, ModelInput, ModelOutput


class Precise:
    """A wrapper whose keys are checked too."""

    cutoff = 5.0
    elements = frozenset({1, 8})
    dtype = torch.float64
    distribution_spec = SPEC_MPNN_HALO

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ("energy",)) -> ModelOutput[Tensor]:
        """The energy of positions."""
        fields = cast(ModelInput[Tensor], data)
        fields["position"]  # type: ignore[typeddict-item]
        return {"energy": fields["positions"].sum()}


class NoCutoff:
    """Lacks a member."""

    elements = None
    dtype = torch.float64
    distribution_spec = SPEC_MPNN_HALO

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ()) -> dict[str, Tensor]:
        """Nothing."""
        return {}


class ReturnsATensor(Precise):
    """Returns what is no dict."""

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ()) -> Tensor:  # type: ignore[override]
        """The positions."""
        return data["positions"]


def accepts(model: Model[Tensor]) -> None:
    """Take a model."""


def check(mace: MACEWrapper, sevennet: SevenNetWrapper) -> None:
    """Never called: mypy reads it, and reports an ignore that is not needed."""
    accepts(mace)
    accepts(sevennet)
    accepts(LennardJones())
    accepts(Precise())
    accepts(NoCutoff())  # type: ignore[arg-type]
    accepts(ReturnsATensor())  # type: ignore[arg-type]
