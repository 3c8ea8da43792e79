"""A model on atoms that move: neighbour lists with a skin, made anew when an atom has moved too far."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TypeVar

import torch
from torch import Tensor

from alchemi_domain.derivatives import rows_times
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.edge_lists import cutoffs
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_domain.static_buffers import Capacity, Room, routing_of
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import Captured, SideStream
from alchemi_shardtensor.compiled import compiled
from alchemi_spec import MissingHandler, OutputKind, SpecError

T = TypeVar("T")
MARGINS = (0.01, 0.03, 0.1)
"""How much more a room holds than what moves needs, at first and after overflows."""


class Domain:
    """`model` on a `batch` whose positions and cell are changed in place.

    The lists are right while `slack` is not negative: then `evaluate` sends one exchange of positions and what the model's
    layers need, and waits for nothing, unless the model would not ignore edges longer than its cutoff and has them trimmed.
    `rebuild` gives each atom to the rank in whose part of space it is, with all its fields, and makes lists and ghosts anew;
    `batch` is another afterwards.

    As `DomainConfig.compile` says, steps are captured: they run on tensors of fixed size (`room`), in CUDA graphs on CUDA; a
    rebuild fills the same tensors. A room that has become too small is replaced by a larger one, and steps are captured anew.
    `why_eager`: why they are not captured, or None; it may be found when a step is first made; `why_uncompiled`: why inductor
    does not compile them. `recaptures`: how many rooms have become too small.
    """

    @torch.inference_mode(False)
    def __init__(self, model: DistributedModel, batch: ShardedBatch, skin: float = 0.5) -> None:
        """`skin` in Å: how much longer than the cutoff listed edges are. Every rank must call it.

        Raises:
            ValueError: for a negative skin; and what `DistributedModel.prepare` raises.

        """
        if not skin >= 0:
            raise ValueError(f"a skin is a length that is added to the cutoff, so {skin} Å has no meaning: use 0 or more.")
        self.model, self.skin, self.batch = model, float(skin), batch
        self.why_eager, self.why_uncompiled = _why_eager(model), None if _asked(model) == "inductor" else "it was not asked for"
        self._has_room = self.why_eager is None  # also where it turns out that steps are eager
        self.room: Room | None = None
        self.recaptures = 0
        self._side = SideStream(batch.comm.device)
        self._evaluations: dict[tuple[str, ...], Captured[dict[str, Tensor]]] = {}
        self._reach = max(cutoffs(model.model).values()) + self.skin
        self.connect()

    @torch.inference_mode(False)
    def evaluate(self, outputs: Sequence[str] = ("energy", "forces")) -> dict[str, Tensor]:
        """The model's outputs at the batch's positions and cell, with the lists as they are. Every rank must call it.

        They are right if `slack` is not negative afterwards.
        """
        results = self.computed(tuple(outputs))
        return results if self.room is None else self.room.living_rows(results)

    def computed(self, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """`evaluate`, on all rows of the room, if there is one, and in tensors that the next call overwrites."""
        if self.room is None:
            self.model.refresh(self.data, self.batch)
            return self.model.compute(self.model.shown(self.data, self.batch, self.skin), self.batch, outputs)
        if outputs not in self._evaluations:
            self._evaluations[outputs] = Captured(self._compiled(partial(self._computed, outputs)), self.batch.comm, self._side)
        results = self._evaluations[outputs]()
        self.why_eager = self.why_eager or self._evaluations[outputs].why_not
        return results

    def _computed(self, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        assert self.room is not None
        self.model.refresh(self.room.data, self.room.batch)
        self.room.forget()
        results = self.room.whole(self.model.compute(self.room.shown(), self.room.batch, outputs))
        self.room.forget()
        return results

    def _compiled(self, step: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
        """A step by inductor, if it was asked for and can be; otherwise as it is."""
        if self.why_uncompiled is None and self.room is not None:
            try:
                return compiled(step, self.room.tensors, self.batch.comm, model=self.model)
            except MissingHandler as error:
                self.why_uncompiled = str(error)
        return step

    def captured(self, step: Callable[[], T]) -> Callable[[], T]:
        """A step on this room's tensors, to be made while the room lasts; without a room, the step as it is."""
        return step if self.room is None else Captured(step, self.batch.comm, self._side)

    def slack(self) -> Tensor:
        """How much nearer two of this rank's atoms may yet come to others (Å, a scalar on the device); nan if one is nowhere.

        A pair that is not listed was further apart than r = cutoff + skin. The cell has since been deformed by F, and atom i
        has left the place to which F took it by d_i: so the pair is further apart than (1 - |F - 1|) r - d_i - d_j. The
        ranks' smallest must not be negative. It is also negative once more edges came within the cutoff than there is room for.
        """
        batch = self.batch if self.room is None else self.room.batch
        frames, systems = self._frames, len(self.batch.cell)
        lattice = torch.where(self.batch.pbc[..., None], self.batch.cell.double(), frames.vectors)
        change = frames.inverse @ lattice - self._one
        of_atoms = change.index_select(0, batch.batch.clamp(max=systems - 1))
        left = (batch.positions - self._positions - rows_times(self._positions, of_atoms)).norm(dim=-1)
        farthest = torch.cat([left, left.new_zeros(1)]).amax()
        stretch: Tensor = change.flatten(1).norm(dim=-1).amax()
        slack = self.skin - stretch * self._reach - 2 * farthest
        return slack if self.room is None else torch.where(self.room.left < 0, -torch.inf, slack)

    def overflowed(self) -> bool:
        """Whether on any rank more edges came within the cutoff than there is room for. Every rank must call it."""
        return self.room is not None and self.room.trims and bool(self.batch.comm.all_reduce(self.room.left < 0))

    @torch.inference_mode(False)
    def rebuild(self) -> None:
        """Move atoms to their owners, and make lists and ghosts anew. Every rank must call it.

        Raises:
            NonFinitePosition, InvalidCell: on every rank.

        """
        self.batch = self.batch.settled()
        self.connect()

    @torch.inference_mode(False)
    def carry(self, **fields: Tensor) -> None:
        """Have these per-atom fields (n_owned, *F) go with the batch's atoms. Every rank must call it."""
        self.batch, self.room = self.batch.carrying(**fields), None
        self.connect()

    @torch.inference_mode(False)
    def connect(self) -> None:
        """Make lists and ghosts anew, atoms staying where they are. Every rank must call it."""
        data, before = self.model.prepare(self.batch, skin=self.skin), self.room
        frames = LatticeFrames.of(self.batch.cell, self.batch.pbc).to(self.batch.comm.device)
        if self._has_room and routing_of(data).place is not None:
            self.why_eager, self._has_room = "an all-gather brings the rows of all atoms", False
            self.room, self._evaluations = None, {}  # also where it is atoms that have come closer that make it so
        if self._has_room:
            self._fill_room(data)
        self.data = data if self.room is None else self.room.data
        positions = (self.batch if self.room is None else self.room.batch).positions.double()
        if self.room is None or self.room is not before:
            self._positions, self._frames = positions.clone(), frames
            self._one = torch.eye(3, dtype=torch.float64, device=positions.device)
        else:
            self._positions.copy_(positions)
            for kept, new in zip(vars(self._frames).values(), vars(frames).values(), strict=True):
                kept.copy_(new)

    def _fill_room(self, data: Mapping[str, Tensor]) -> None:
        """Put `data` into the room, or into a larger one where any rank's is too small."""
        needed, room = Capacity.needed(data, self._near(data)), self.room
        misfit = room is None or room.capacity.joined(needed) != room.capacity
        if room is None or self.batch.comm.all_reduce(torch.tensor(misfit)):
            self.recaptures += room is not None
            capacity = needed.grown(MARGINS[min(self.recaptures, len(MARGINS) - 1)] if self.skin else 0.0)
            capacity = capacity if room is None else capacity.joined(room.capacity)
            self.room, self._evaluations = Room(self.model, capacity, data, self.batch), {}
            self._side = SideStream(self._side.device)  # memory of its own, whatever holds on to the old room's
        assert self.room is not None
        self.batch = self.room.fill(data, self.batch)

    def _near(self, data: Mapping[str, Tensor]) -> dict[str, int]:
        """How many edges of each list the model is to be shown, and as many as may come in a step; none where all are."""
        spec = self.model.spec
        if not self.skin or (spec.ignores_longer_edges and not spec.compile.trim):
            return {}
        return {name: ceil(1.004 * int(near.sum())) for name, near in self.model.near(data, self.batch).items()}


def _asked(model: DistributedModel) -> str:
    """What the user wants, or else the model."""
    return model.config.compile if model.config.compile != "auto" else model.spec.compile.mode


def _why_eager(model: DistributedModel) -> str | None:
    """Why steps are not captured, if that is known before they are made.

    Raises:
        SpecError: where a mode is asked for that the model cannot bear.

    """
    policy, comm, storage, asked = model.spec.compile, model.config.comm, model.table.storage, _asked(model)
    if not getattr(policy, asked, True):
        raise SpecError(f"compile={asked!r}, which this model's specification says that it cannot bear: use 'auto'.")
    carried = comm.transport is None or comm.transport.carrier(comm.device) == comm.device
    mixed = (OutputKind.UNKNOWN, OutputKind.GLOBAL)
    unknown = [name for name, kind in model.spec.output_kinds.items() if kind in mixed]
    reasons = {
        "compile is off": asked == "off",
        "it was not asked for, and there are no graphs on the CPU": asked == "auto" and comm.device.type != "cuda",
        "the model's specification says that it cannot bear it": not policy.capture,
        "its layout's rows are not this rank's and its ghosts'": storage.whole,
        f"its outputs {unknown} may be made of all rows, and not all of them would be atoms": bool(unknown),
        "an adapter asks for rows by global id": model.needs_owners,
        "messages go through the host": not carried,
    }
    return next((why for why, holds in reasons.items() if holds), None)
