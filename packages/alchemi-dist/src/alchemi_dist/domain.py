"""A model on atoms that move: neighbour lists with a skin, made anew when an atom has moved too far."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alchemi_dist.lists import cutoffs
from alchemi_dist.model import DistributedModel
from alchemi_dist.sharded import ShardedBatch
from alchemi_halo import Frames


class Domain:
    """`model` on a `batch` whose positions and cell are changed in place.

    The lists are right while `slack` is not negative: then `evaluate` sends one exchange of positions and what the model's
    layers need, and waits for nothing, unless the model would not ignore edges longer than its cutoff and has them trimmed.
    `rebuild` gives each atom to the rank in whose part of space it is, with all its fields, and makes lists and ghosts anew;
    `batch` is another afterwards.
    """

    def __init__(self, model: DistributedModel, batch: ShardedBatch, skin: float = 0.5) -> None:
        """`skin` in Å: how much longer than the cutoff listed edges are. Every rank must call it.

        Raises:
            ValueError: for a negative skin; and what `DistributedModel.prepare` raises.

        """
        if not skin >= 0:
            raise ValueError(f"a skin is a length that is added to the cutoff, so {skin} Å has no meaning: use 0 or more.")
        self.model, self.skin, self.batch = model, float(skin), batch
        self.connect()

    def evaluate(self, outputs: Sequence[str] = ("energy", "forces")) -> dict[str, Tensor]:
        """The model's outputs at the batch's positions and cell, with the lists as they are. Every rank must call it."""
        self.model.refresh(self.data, self.batch)
        shown = self.model.shown(self.data, self.batch, self.skin)
        return self.model.compute(shown, self.batch, outputs)

    def slack(self) -> Tensor:
        """How much nearer two of this rank's atoms may yet come to others (Å, a scalar on the device); nan if one is nowhere.

        A pair that is not listed was further apart than r = cutoff + skin. The cell has since been deformed by F, and atom i
        has left the place to which F took it by d_i: so the pair is further apart than (1 - |F - 1|) r - d_i - d_j. The
        ranks' smallest must not be negative.
        """
        batch, frames = self.batch, self._frames
        lattice = torch.where(batch.pbc[..., None], batch.cell.double(), frames.vectors)
        change = frames.inverse @ lattice - self._one
        led = self._positions + torch.einsum("ni,nij->nj", self._positions, change[batch.batch])
        left = (batch.positions - led).norm(dim=-1)
        farthest = torch.cat([left, left.new_zeros(1)]).amax()
        stretch: Tensor = change.flatten(1).norm(dim=-1).amax()
        return self.skin - stretch * self._reach - 2 * farthest

    def rebuild(self) -> None:
        """Move atoms to their owners, and make lists and ghosts anew. Every rank must call it.

        Raises:
            NonFinitePosition, InvalidCell: on every rank.

        """
        self.batch = self.batch.settled()
        self.connect()

    def connect(self) -> None:
        """Make lists and ghosts anew, atoms staying where they are. Every rank must call it."""
        self.data = self.model.prepare(self.batch, skin=self.skin)
        self._reach = max(cutoffs(self.model.model).values()) + self.skin
        self._positions = self.batch.positions.double().clone()
        self._frames = Frames.of(self.batch.cell, self.batch.pbc).to(self.batch.comm.device)
        self._one = torch.eye(3, dtype=torch.float64, device=self.batch.comm.device)
