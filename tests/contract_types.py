"""For mypy, not for pytest: our models, strategies and integrators fulfil their protocols, and what does not is refused."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from alchemi_dist import LennardJones
from alchemi_dynamics import FIRE, NPT, NVE, Integrator, Langevin, NoseHooverChain
from alchemi_graphpart import GraphPartitionStrategy
from alchemi_halo import HaloStrategy
from alchemi_models_mace import MACEWrapper
from alchemi_models_sevennet import SevenNetWrapper
from alchemi_shardtensor import Comm, Edges, Strategy
from alchemi_spec import SPEC_MPNN_HALO, HasEdgeLists, Model, ModelInput, ModelOutput, ValidatesStructures


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


class Thorough(Precise):
    """Has the optional members as well."""

    edge_lists = {"dispersion": 12.0}

    def validate(self, data: Mapping[str, Tensor]) -> None:
        """Nothing is refused."""


class NoKind:
    """No strategy: it does not say of which kind it is."""

    partition = HaloStrategy.partition

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """None."""
        raise NotImplementedError


def accepts(model: Model[Tensor]) -> None:
    """Take a model."""


def accepts_thorough(validates: ValidatesStructures[Tensor], lists: HasEdgeLists) -> None:
    """Take a model with the optional members."""


def accepts_strategy(strategy: Strategy) -> None:
    """Take a strategy."""


def accepts_integrators(*integrators: Integrator) -> None:
    """Take integrators."""


def check(mace: MACEWrapper, sevennet: SevenNetWrapper) -> None:
    """Never called: mypy reads it, and reports an ignore that is not needed."""
    accepts(mace)
    accepts(sevennet)
    accepts(LennardJones())
    accepts(Precise())
    accepts(NoCutoff())  # type: ignore[arg-type]
    accepts(ReturnsATensor())  # type: ignore[arg-type]
    accepts_thorough(Thorough(), Thorough())
    accepts_thorough(Precise(), Thorough())  # type: ignore[arg-type]
    accepts_thorough(Thorough(), Precise())  # type: ignore[arg-type]
    accepts_strategy(HaloStrategy())
    accepts_strategy(GraphPartitionStrategy())
    accepts_strategy(NoKind())  # type: ignore[arg-type]
    accepts_integrators(NVE(1.0), Langevin(1.0, 300.0), NoseHooverChain(1.0, 300.0), NPT(1.0, 300.0), FIRE())
