"""DistributedModel: a model that sees one process's atoms, run on all ranks' atoms."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from alchemi_dist.batch import ShardedBatch, check_positions
from alchemi_dist.registry import find_strategy
from alchemi_shardtensor import (
    BOTH,
    EDGE,
    NODES,
    OWNED,
    OWNED_LAYOUT,
    PADDED,
    SYSTEM,
    SYSTEMS,
    DomainConfig,
    Shard,
    plain,
    tag,
)
from alchemi_spec import DistributionSpec, MissingHandler, Model, OutputKind, SpecError, check_elements


class DistributedModel(nn.Module):
    """Runs `model`, which knows nothing of ranks, on a `ShardedBatch`: the same numbers as on one rank.

    The model is moved to the rank's device. `spec` replaces the model's own `distribution_spec`.
    """

    def __init__(self, model: nn.Module, config: DomainConfig | None = None, spec: DistributionSpec | None = None) -> None:
        """Prepare `model` for the ranks of `config`, default a world of one."""
        super().__init__()
        self.config = config or DomainConfig()
        self.spec = spec or cast(Model, model).distribution_spec
        self.model = model.to(self.config.comm.device)

    def _whole(self, name: str, value: Tensor) -> Tensor:
        """The output without its tag, which must say what its kind says."""
        expected = SYSTEM if self.spec.output_kinds[name] is OutputKind.PER_GRAPH else OWNED
        found = getattr(value, "rows", None)
        if found is not expected:
            raise MissingHandler(
                f"the model's {name} should have {expected} rows, but they are {found}: it was reduced or built in a way that "
                f"is not known to be right on a share of the atoms.\n"
                f"Sum per-atom values through data['batch'], and make per-atom values from per-atom values."
            )
        return plain(value)

    @property
    def contract(self) -> Model:
        """The model, by what alchemi-spec says that it has."""
        return cast(Model, self.model)

    def forward(self, batch: ShardedBatch, outputs: Sequence[str] = ("energy", "forces", "stress")) -> dict[str, Tensor]:
        """Energy (B,) in eV on every rank, forces (n_owned, 3) in eV/Å of this rank's atoms, stress (B, 3, 3) in eV/Å^3.

        Every rank must call it. There is no `stress` where no structure has a volume (`batch.why_no_stress()` says why);
        in a batch of both kinds, the rows without one are zero.

        Raises:
            UnsupportedElement, NonFinitePosition, InvalidCell, SpecError: on every rank, before anything is computed.

        """
        return self.compute(self.prepare(batch), batch, outputs)

    def prepare(self, batch: ShardedBatch) -> dict[str, Tensor]:
        """Check this rank's atoms, find their edges and ghosts, and tag every field of the data contract."""
        comm = batch.comm
        if (comm.group, comm.device) != (self.config.comm.group, self.config.comm.device):
            raise SpecError("the batch was shared out over other ranks than this model's: use one DomainConfig for both.")
        with comm.agreement():
            check_positions(batch.positions, batch.ids)
            check_elements(batch.atomic_numbers.tolist(), self.contract.elements, batch.ids.tolist())
        routing, edge_index, shifts = find_strategy(self.config.strategy).connect(
            batch.positions, batch.batch, batch.cell, batch.pbc, self.contract.cutoff, comm
        )
        shard = Shard(self.spec, routing.to(comm.device), len(batch.cell), OWNED_LAYOUT)

        def put(t: Tensor, *what: Any) -> Tensor:
            return tag(t.to(comm.device), shard, *what)

        return {
            "positions": put(batch.positions, OWNED),
            "atomic_numbers": put(batch.atomic_numbers, OWNED),
            "batch": put(batch.batch, OWNED, SYSTEMS),
            "cell": batch.cell.to(comm.device),
            "pbc": batch.pbc.to(comm.device),
            "edge_index": put(edge_index, None, NODES, BOTH),
            "edge_shifts": put(shifts.to(batch.positions.dtype), EDGE),
            "nodes": put(torch.arange(routing.n_owned + routing.n_ghost), PADDED, NODES),
        }

    def compute(self, data: Mapping[str, Tensor], batch: ShardedBatch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """The model's outputs for prepared data; call it again after changing `data["positions"]` in place."""
        unknown = [name for name in outputs if name not in self.spec.output_kinds]
        if unknown:
            raise SpecError(
                f"the model's specification has no {', '.join(unknown)}: it has {', '.join(self.spec.output_kinds)}."
            )
        asked = list(outputs)
        if "stress" in asked:
            missing = torch.tensor([why is not None for why in batch.why_no_stress()])
            if missing.all():
                asked.remove("stress")
        results = {name: self._whole(name, value) for name, value in self.model(data, asked).items()}
        if "stress" in results and missing.any():
            results["stress"] = results["stress"].masked_fill(missing.to(results["stress"].device)[:, None, None], 0)
        return results
