"""How a model may be spread over ranks, as a frozen value that travels as JSON."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from alchemi_spec.errors import SpecError


class OutputKind(StrEnum):
    """What one row of an output describes, and so how the ranks' shares make the whole."""

    PER_NODE = "per_node"
    PER_GRAPH = "per_graph"


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HaloStoragePolicy(_Value):
    """Partition by space: each rank owns the atoms of a region and reads those within reach of it.

    `layout="owned"`: the model sees owned rows only. A gather through senders brings exactly the ghost rows it reads; a
    scatter to receivers is local.
    """

    kind: Literal["halo"] = "halo"
    layout: Literal["owned"] = "owned"


class DistributionSpec(_Value):
    """How a model may be spread over ranks.

    Frozen, compared by value, changed by `spec.model_copy(update=...)`; `save` and `load` round-trip exactly and an
    unknown key is refused by name.
    """

    version: Literal[1] = 1
    name: str
    policy: HaloStoragePolicy = HaloStoragePolicy()
    output_kinds: dict[str, OutputKind] = {
        "energy": OutputKind.PER_GRAPH,
        "forces": OutputKind.PER_NODE,
        "stress": OutputKind.PER_GRAPH,
    }

    def save(self, path: str | Path) -> None:
        """Write as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            SpecError: naming each key that is unknown, missing or out of range.

        """
        written = json.loads(Path(path).read_text(encoding="utf-8"))
        required = set(cls.model_fields) - set(written) if isinstance(written, dict) else set()
        if required:
            raise SpecError(f"{path} has no {', '.join(sorted(required))}: write specifications with DistributionSpec.save")
        try:
            return cls.model_validate(written)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise SpecError(f"{path} is not a specification of version 1: {faults}") from None


SPEC_MPNN_HALO = DistributionSpec(name="mpnn_halo")
"""A message-passing model under spatial decomposition: rows travel at each gather through senders, once per layer."""

SPEC_LJ_HALO = DistributionSpec(name="lj_halo")
"""A pair potential under spatial decomposition: only positions travel."""
