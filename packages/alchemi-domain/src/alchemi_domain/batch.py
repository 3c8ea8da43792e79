"""Structures on one process: a whole `Batch`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from ase import Atoms
from torch import Tensor

from alchemi_spec import InputError, InvalidCell, NonFinitePosition

RESERVED = {"positions", "atomic_numbers", "batch", "cell", "pbc", "nodes", "ids"}
FARTHEST = 1e8
"""Å. Beyond it float64 coordinates are coarser than 1e-8 Å, and forces are noise."""


@dataclass(frozen=True, eq=False)
class Batch:
    """B structures of N atoms together, on the CPU.

    `positions` (N, 3) Å; `atomic_numbers` (N,); `batch` (N,) which structure each atom belongs to, ascending;
    `cell` (B, 3, 3) Å, rows; `pbc` (B, 3). `per_atom` (N, *F) and `per_system` (B, *F): further fields by name, which reach
    the model as they are: `charge` and `spin` of the data contract, or any of its own.
    """

    positions: Tensor
    atomic_numbers: Tensor
    batch: Tensor
    cell: Tensor
    pbc: Tensor
    per_atom: Mapping[str, Tensor] = field(default_factory=dict)
    per_system: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse fields that do not fit together.

        Raises:
            InputError, InvalidCell: naming the field.

        """
        n, systems = len(self.positions), len(self.cell)
        shapes = {"positions": (n, 3), "atomic_numbers": (n,), "batch": (n,), "cell": (systems, 3, 3), "pbc": (systems, 3)}
        for name, shape in shapes.items():
            if getattr(self, name).shape != shape:
                raise InputError(
                    f"{name} has shape {tuple(getattr(self, name).shape)}, but {shape} is needed beside the others."
                )
        for level, count in (("per_atom", n), ("per_system", systems)):
            for name, value in getattr(self, level).items():
                if name in RESERVED or name.startswith("edge_") or len(value) != count:
                    raise InputError(
                        f"{level} field {name!r} of shape {tuple(value.shape)} must have {count} rows, and a name of its own."
                    )
        if not self.cell.isfinite().all():
            raise InvalidCell(f"a cell has entries that are nan or infinite: {self.cell.tolist()}.")
        if n and not (int(self.batch.min()) >= 0 and int(self.batch.max()) < systems):
            raise InputError(f"batch names structures beyond the {systems} cells that are given.")

    @classmethod
    def from_ase(cls, frames: Atoms | Sequence[Atoms], dtype: torch.dtype = torch.float64) -> "Batch":
        """One ASE Atoms, or several as one batch. Positions are taken as they are, not wrapped.

        `charge` (e) and `spin` (2S + 1) are read from `atoms.info` if any structure has them; others are neutral singlets.
        """
        listed = [frames] if isinstance(frames, Atoms) else list(frames)
        if not listed:
            raise InputError("a batch has at least one structure.")
        sizes = torch.tensor([len(a) for a in listed])
        return cls(
            torch.from_numpy(np.concatenate([a.positions for a in listed])).to(dtype),
            torch.from_numpy(np.concatenate([a.numbers for a in listed]).astype(np.int64)),
            torch.repeat_interleave(torch.arange(len(listed)), sizes),
            torch.from_numpy(np.stack([a.cell.array for a in listed])).to(dtype),
            torch.from_numpy(np.stack([a.pbc for a in listed])),
            per_system={
                name: torch.tensor([a.info.get(name, neutral) for a in listed], dtype=kind)
                for name, neutral, kind in (("charge", 0.0, dtype), ("spin", 1, torch.int64))
                if any(name in a.info for a in listed)
            },
        )

    def to_ase(self) -> list[Atoms]:
        """The structures as ASE Atoms."""
        return [
            Atoms(
                self.atomic_numbers[self.batch == b].numpy(),
                self.positions[self.batch == b].numpy(),
                cell=self.cell[b].numpy(),
                pbc=self.pbc[b].numpy(),
                info={name: self.per_system[name][b].item() for name in ("charge", "spin") if name in self.per_system},
            )
            for b in range(len(self.cell))
        ]


def check_positions(positions: Tensor, ids: Tensor) -> None:
    """Refuse the first coordinate that is nan, infinite or too far out, by its atom's id.

    Raises:
        NonFinitePosition: naming the atom and its coordinates.

    """
    bad = ~(positions.abs() <= FARTHEST).all(-1)  # nan compares false
    if bad.any():
        row = int(bad.nonzero()[0])
        raise NonFinitePosition(
            f"atom {int(ids[row])} is at {positions[row].tolist()} Å: nan, infinite, or beyond {FARTHEST:.0e} Å.\n"
            f"The step that led here was too long, or the file is damaged."
        )
