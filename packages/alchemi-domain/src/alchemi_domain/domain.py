"""A model on atoms that move: neighbour lists with a skin, rebuilt when an atom has moved too far."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import TypeVar, cast

import torch
from torch import Tensor

from alchemi_domain.atom_buffers import AtomBuffers
from alchemi_domain.derivatives import rows_times
from alchemi_domain.distributed_model import DistributedModel
from alchemi_domain.edge_lists import cutoffs
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_domain.static_buffers import Capacity, StaticBuffers, routing_of
from alchemi_kernels import LatticeFrames
from alchemi_shardtensor import CapturedStep, SideStream, compile_step
from alchemi_spec import MissingHandler, OutputKind, SpecError

T = TypeVar("T")
MARGINS = (0.01, 0.03, 0.1)
"""How much larger static buffers are than what moves needs: at first, and after they have become too small."""


class Domain:
    """`model` on a batch of atoms whose positions and cells are changed in place.

    `atoms` owns the tensors of the atoms (see `AtomBuffers` for who may write them); `batch` is the view of this rank's real
    atoms. The neighbour lists are valid while `list_margin` is not negative on any rank. Then `evaluate` sends one exchange of
    positions and what the model's layers exchange, and does not synchronise with the host, unless the model needs trimmed
    lists. `rebuild` moves atoms to the ranks that own them now and builds new lists; `batch` is another object afterwards.

    `DomainConfig.compile` says whether steps are captured. They then run on `buffers`, tensors of fixed size, and on CUDA in
    CUDA graphs. A rebuild fills the same tensors. If they are too small it allocates larger ones, and steps are captured
    again: `recaptures` counts this. `why_eager` is the reason why steps are not captured, or None; it may be found only when a
    step is first run. `why_uncompiled` is the reason why inductor does not compile them, or None.
    """

    data: Mapping[str, Tensor]
    _listed_positions: Tensor
    _listed_frames: LatticeFrames

    @torch.inference_mode(False)
    def __init__(self, model: DistributedModel, batch: ShardedBatch, skin: float = 0.5) -> None:
        """`skin` in Å: edges up to the cutoff plus this length are listed. Every rank must call it.

        Raises:
            ValueError: for a negative skin; and what `DistributedModel.prepare` raises.

        """
        if not skin >= 0:
            raise ValueError(f"a skin is a length that is added to the cutoff, so {skin} Å has no meaning: use 0 or more.")
        self.model, self.skin = model, float(skin)
        self.cutoff_with_skin = max(cutoffs(model.model).values()) + self.skin
        self.why_eager = _why_eager(model)
        self.why_uncompiled = None if _compile_mode(model) == "inductor" else "compile='inductor' was not asked for"
        self.atoms, self.buffers = AtomBuffers(batch), cast(StaticBuffers | None, None)
        self.recaptures = 0
        self._static = self.why_eager is None  # stays true where a step turns out not to be capturable
        self._comm = batch.comm
        self._side = SideStream(batch.comm.device)
        self._evaluations: dict[tuple[str, ...], CapturedStep[dict[str, Tensor]]] = {}
        self.build_neighbour_list()

    @property
    def batch(self) -> ShardedBatch:
        """The atoms that this rank owns: views of `atoms`."""
        return self.atoms.real

    @torch.inference_mode(False)
    def evaluate(self, outputs: Sequence[str] = ("energy", "forces")) -> dict[str, Tensor]:
        """The model's outputs at the present positions and cells, with the present lists. Every rank must call it.

        They are right if `list_margin` is not negative on any rank afterwards.
        """
        results = self.evaluate_all_rows(tuple(outputs))
        return results if self.buffers is None else self.buffers.real_rows(results)

    def evaluate_all_rows(self, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """`evaluate` with a row for each row of `atoms`. If steps are captured, the next call overwrites the tensors."""
        if self.buffers is None:
            self.model.refresh(self.data, self.atoms.all_rows)
            data = self.model.trim_edges(self.data, self.atoms.all_rows, self.skin)
            return self.model.compute(data, self.atoms.all_rows, outputs)
        if outputs not in self._evaluations:
            step = self._compile_step(partial(self._evaluate_static, self.buffers, outputs))
            self._evaluations[outputs] = CapturedStep(step, self._comm, self._side)
        results = self._evaluations[outputs]()
        self.why_eager = self.why_eager or self._evaluations[outputs].why_not
        return results

    def _evaluate_static(self, buffers: StaticBuffers, outputs: tuple[str, ...]) -> dict[str, Tensor]:
        """What is captured: the evaluation on tensors of fixed size."""
        self.model.refresh(buffers.data, buffers.atoms.all_rows)
        buffers.drop_ghosts()
        results = self.model.compute(buffers.trim_edges(), buffers.atoms.all_rows, outputs)
        buffers.drop_ghosts()
        return buffers.mask_padding(results)

    def _compile_step(self, step: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
        """The step compiled by inductor, if that was asked for and is possible; otherwise the step as it is."""
        if self.why_uncompiled is None and self.buffers is not None:
            try:
                return compile_step(step, self.buffers.tensors, self._comm, model=self.model)
            except MissingHandler as error:
                self.why_uncompiled = str(error)
        return step

    def capture_step(self, step: Callable[[], T]) -> Callable[[], T]:
        """Capture `step`, which works on the present buffers; without static buffers, the step as it is."""
        return step if self.buffers is None else CapturedStep(step, self._comm, self._side)

    def list_margin(self) -> Tensor:
        """How far two of this rank's atoms may still approach others (Å, a scalar on the device) while the lists are valid.

        A pair that is not listed was further apart than r = cutoff + skin. Since then the cell was deformed by F, and atom i is
        d_i away from where F would have taken it. So the pair is further apart than (1 - |F - 1|) r - d_i - d_j. The lists
        are valid if the smallest margin of all ranks is not negative. It is nan if a position is, and minus infinity if
        more edges came within the cutoff than the static buffers hold.
        """
        atoms, frames = self.atoms.all_rows, self._listed_frames
        lattice = torch.where(atoms.pbc[..., None], atoms.cell.double(), frames.vectors)
        change = frames.inverse @ lattice - self._one
        deformed = rows_times(self._listed_positions, change.index_select(0, atoms.batch))
        moved = (atoms.positions - self._listed_positions - deformed).norm(dim=-1)
        farthest = torch.cat([moved, moved.new_zeros(1)]).amax()
        strain: Tensor = change.flatten(1).norm(dim=-1).amax()
        margin = self.skin - strain * self.cutoff_with_skin - 2 * farthest
        return margin if self.buffers is None else torch.where(self.buffers.spare_edges < 0, -torch.inf, margin)

    def edges_overflowed(self) -> bool:
        """Whether on any rank more edges came within the cutoff than the buffers hold. Every rank must call it."""
        if self.buffers is None or not self.buffers.trims_edges:
            return False
        return bool(self._comm.all_reduce(self.buffers.spare_edges < 0))

    @torch.inference_mode(False)
    def rebuild(self) -> None:
        """Move atoms to the ranks that own them now, and build lists and ghosts anew. Every rank must call it.

        Raises:
            NonFinitePosition, InvalidCell: on every rank.

        """
        self.build_neighbour_list(self.batch.migrate_or_repartition())

    @torch.inference_mode(False)
    def attach_fields(self, **fields: Tensor) -> None:
        """Add per-atom fields (n_owned, *F) to the extra fields, which migrate with the atoms. Every rank must call it."""
        batch, self.buffers = self.batch.with_extra_fields(**fields), None
        self.build_neighbour_list(batch)

    @torch.inference_mode(False)
    def build_neighbour_list(self, batch: ShardedBatch | None = None) -> None:
        """Build lists and ghosts for these atoms, by default the present ones, without moving any. Every rank must call it."""
        batch = self.batch if batch is None else batch
        data = self.model.prepare(batch, skin=self.skin)
        if self._static and routing_of(data).gather_row is not None:
            self.why_eager, self._static = "the strategy fetches ghosts by an all-gather of all atoms' rows", False
            self.buffers, self._evaluations = None, {}
        if self._static:
            buffers = self._fill_buffers(data, batch)
            atoms, self.data = buffers.atoms, buffers.data
        else:
            atoms, self.data = AtomBuffers(batch), data
        self._set_reference(atoms)
        self.atoms = atoms

    def _set_reference(self, atoms: AtomBuffers) -> None:
        """Remember the positions and cells for which the lists are built; in place, if the buffers are the same as before."""
        rows = atoms.all_rows
        frames, positions = LatticeFrames.of(rows.cell, rows.pbc).to(self._comm.device), rows.positions.double()
        if atoms is self.atoms:
            self._listed_positions.copy_(positions)
            for kept, new in zip(vars(self._listed_frames).values(), vars(frames).values(), strict=True):
                kept.copy_(new)
        else:
            self._listed_positions, self._listed_frames = positions.clone(), frames
            self._one = torch.eye(3, dtype=torch.float64, device=positions.device)

    def _fill_buffers(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> StaticBuffers:
        """Fill the static buffers; all ranks first allocate larger ones if any rank's are too small."""
        needed, buffers = Capacity.needed(data, self._edges_to_pass(data, batch)), self.buffers
        too_small = buffers is None or buffers.capacity.maximum(needed) != buffers.capacity
        if buffers is None or self._comm.all_reduce(torch.tensor(too_small)):
            buffers = self._allocate(needed, data, batch)
        buffers.fill(data, batch)
        return buffers

    def _allocate(self, needed: Capacity, data: Mapping[str, Tensor], batch: ShardedBatch) -> StaticBuffers:
        """New static buffers, for more than is `needed` now, and for what the ones before held."""
        before = self.buffers
        self.recaptures += before is not None
        capacity = needed.with_margin(MARGINS[min(self.recaptures, len(MARGINS) - 1)] if self.skin else 0.0)
        capacity = capacity if before is None else capacity.maximum(before.capacity)
        self.buffers, self._evaluations = StaticBuffers(self.model, capacity, data, batch), {}
        self._side = SideStream(self._side.device)  # its own memory: something may still hold the old buffers'
        return self.buffers

    def _edges_to_pass(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> dict[str, int]:
        """How many edges of each list the model will be passed, with a margin for changes in a step; empty if it gets all."""
        spec = self.model.spec
        if not self.skin or (spec.ignores_longer_edges and not spec.compile.trim):
            return {}
        return {name: ceil(1.004 * int(kept.sum())) for name, kept in self.model.edges_within_cutoff(data, batch).items()}


def _compile_mode(model: DistributedModel) -> str:
    """The mode that the user asks for; with `auto`, the one that the model's specification wants."""
    return model.config.compile if model.config.compile != "auto" else model.spec.compile.mode


def _why_eager(model: DistributedModel) -> str | None:
    """The reason why steps are not captured, if it is known before the first step.

    Raises:
        SpecError: if the user asks for a mode that the model's specification forbids.

    """
    policy, comm, mode = model.spec.compile, model.config.comm, _compile_mode(model)
    if (mode == "capture" and not policy.capture) or (mode == "inductor" and not policy.inductor):
        raise SpecError(f"compile={mode!r} is not possible: the model's specification forbids it. Use compile='auto'.")
    if mode == "off":
        return "compile is off"
    if mode == "auto" and comm.device.type != "cuda":
        return "compile is 'auto', and there are no CUDA graphs on the CPU"
    if not policy.capture:
        return "the model's specification forbids capture"
    if model.table.storage.whole:
        return "in this layout's tensors, rows are not this rank's atoms and ghosts"
    mixed = (OutputKind.UNKNOWN, OutputKind.GLOBAL)
    unknown = [name for name, kind in model.spec.output_kinds.items() if kind in mixed]
    if unknown:
        return f"the model's outputs {unknown} may be computed from all rows, padding included"
    if model.needs_owners:
        return "an adapter asks for rows by global id"
    if comm.transport is not None and comm.transport.carrier(comm.device) != comm.device:
        return "messages are copied through the host"
    return None
