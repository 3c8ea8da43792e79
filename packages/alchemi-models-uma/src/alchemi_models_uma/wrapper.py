"""UMA (Wood et al., arXiv:2506.23971) and eSEN (Fu et al., arXiv:2502.12147) behind alchemi-spec's contract.

The model is fairchem-core's. While it runs, `alchemi_models_uma.patches` gives it one rank's graph in place of its own, and
each layer the ghost rows that its senders need.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.api.inference import (
    CHARGE_RANGE,
    DEFAULT_CHARGE,
    DEFAULT_SPIN,
    DEFAULT_SPIN_OMOL,
    SPIN_RANGE,
    InferenceSettings,
    UMATask,
)
from fairchem.core.units.mlip_unit.utils import tf32_context_manager
from torch import Tensor, nn

from alchemi_models_uma.loading import load
from alchemi_models_uma.patches import default_dtype, plain, request_derivatives, use_given_graph, use_global_composition
from alchemi_spec import SPEC_MPNN_HALO, SPEC_UMA_HALO, InputError, MLIPSpec, OutputKind, StrategyKind

ALL_OUTPUTS = ("energy", "forces", "stress")
COMPOSITION_RTOL = 1e-5
"""Relative tolerance within which two compositions are the same, as in fairchem's own check."""


class UMAWrapper(nn.Module):
    """Any model of fairchem-core's UMA and eSEN family, for one of its tasks.

    `wrapper(data, outputs)` computes in the model's dtype: `wrapper.double()` changes it. Positions are subtracted in the wider
    of their dtype and the model's, and the differences are then cast. Charges and spins are `data["charge"]` and
    `data["spin"]`, by default fairchem's: 0, and the task's own spin. All edges within the cutoff count: there is no largest
    number of neighbours. The model computes single atoms, too; fairchem looks their energies up for models that were not
    trained on them. Do not call one wrapper from two threads at once (`alchemi_models_uma.patches`).
    """

    references: Tensor | None

    def __init__(self, model: HydraModel, task: str | None = None, settings: InferenceSettings | None = None) -> None:
        """Wrap a live model whose tasks are set up. `task` is the dataset whose energies it computes; default its only one.

        With `settings.merge_mole` the experts are merged for the composition, charge and spin of the first batch, and others
        are refused. The settings `compile` and those of graph generation have no effect here.

        Raises:
            ValueError: if the model has no such task, or no energy for it.

        """
        super().__init__()
        tasks = model.dataset_to_tasks
        if task is None and len(tasks) == 1:
            task = next(iter(tasks))
        if task not in tasks:
            raise ValueError(f"this model has no task {task!r}: choose one of {', '.join(sorted(tasks))}.")
        self.task, self.settings = task, settings or InferenceSettings()
        of = {t.property: t for t in tasks[task]}
        if "energy" not in of:
            raise ValueError(f"this model has no energies for the task {task!r}: it has {', '.join(sorted(of))}.")
        self.names = {name: t.name for name, t in of.items()}
        model = copy.deepcopy(model)  # merging experts and preparing kernels work in place
        self.backbone, self.heads = model.backbone, model.output_heads
        self.heads_return_dicts = model.pass_through_head_outputs
        self.cutoff = float(model.backbone.cutoff)
        self.elements = frozenset(range(1, model.backbone.max_num_elements))
        self.direct = bool(model.backbone.regress_config.direct_forces)
        self.scales = nn.ModuleDict({name: t.normalizer for name, t in of.items()})
        own = of["energy"].element_references
        self.register_buffer("references", None if own is None else own.element_references.double(), persistent=False)
        with default_dtype(self.dtype):
            for head in self.heads.values():
                if hasattr(head, "merge_MOLE_model"):  # the experts of a head are its tasks
                    head.merge_MOLE_model(SimpleNamespace(dataset=[task], pos=torch.zeros(0)))
        self.merged: tuple[Tensor, Tensor, Tensor] | None = None
        if not (self._has_experts() and self.settings.merge_mole):
            self._prepare_kernels()

    def _apply(self, fn: Any, recurse: bool = True) -> "UMAWrapper":
        """Convert all but the elements' energies: they stay in float64, since thousands of eV per atom add up."""
        own, self.references = self.references, None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.references = None if own is None else own.to(next(self.backbone.parameters()).device)
        return self

    @classmethod
    def from_checkpoint(
        cls,
        name: str | Path,
        *,
        task: str | None = None,
        settings: InferenceSettings | str = "batch",
        trust_pickle: bool = False,
    ) -> "UMAWrapper":
        """Load a checkpoint by fairchem's name, such as `uma-s-1p1`, or a file in its format; `NAME@TASK` also names the task.

        `settings` are fairchem's inference settings or the name of a preset. Named models are downloaded from Hugging Face,
        which needs a token for them.

        Raises:
            UntrustedPickle: for a file, unless `trust_pickle`.
            FileNotFoundError: if there is no such file and fairchem knows no such name.
            ValueError: if the model has no such task.

        """
        if task is None and "@" in str(name) and not Path(name).exists():
            name, _, task = str(name).rpartition("@")
        model, settings = load(name, settings, trust_pickle)
        return cls(model, task, settings)

    def distribution_spec(self, strategy: StrategyKind = StrategyKind.HALO) -> MLIPSpec:
        """Return the specification for a strategy. Steps are not captured if the experts are mixed in each step."""
        mixes = self._has_experts() and not self.settings.merge_mole
        preset = SPEC_UMA_HALO if mixes else SPEC_MPNN_HALO.replaced(name=SPEC_UMA_HALO.name)
        kinds = {k: OutputKind.PER_NODE if k == "forces" else OutputKind.PER_GRAPH for k in self._outputs()}
        complete = frozenset({"forces"} if self.direct else ())
        preset = preset.replaced(output_kinds=kinds, owned_only_outputs=complete)
        return preset.under(strategy)  # longer edges are filtered out: computing them costs more

    def _has_experts(self) -> bool:
        return getattr(self.backbone, "num_experts", 0) > 0

    def _prepare_kernels(self) -> None:
        """Prepare the backbone's layers for its kernels, by fairchem's own code."""
        self.backbone.backend.validate(self.backbone.lmax, self.backbone.mmax, self.settings)
        with default_dtype(self.dtype):
            self.backbone.backend.prepare_model_for_inference(self.backbone)

    def _outputs(self) -> tuple[str, ...]:
        return tuple(name for name in ALL_OUTPUTS if name in self.names) if self.direct else ALL_OUTPUTS

    @property
    def dtype(self) -> torch.dtype:
        """The model's floating-point type."""
        return next(p.dtype for p in self.backbone.parameters() if p.is_floating_point())  # type: ignore[no-any-return]

    def validate(self, data: Mapping[str, Tensor]) -> None:
        """Refuse charges and spins beyond fairchem's ranges, and systems that the experts were not merged for.

        Every rank must call it: with merged experts it sums over ranks.

        Raises:
            InputError: on every rank, with what was found.

        """
        for name, (low, high) in (("charge", CHARGE_RANGE), ("spin", SPIN_RANGE)):
            given = data.get(name)
            if given is not None and ((given != given.round()) | (given < low) | (given > high)).any():
                raise InputError(f"{name} = {given.tolist()}: UMA takes whole numbers from {low} to {high}.")
        if (self.settings.merge_mole and self._has_experts()) or self.merged is not None:
            self._merge(data)

    def _merge(self, data: Mapping[str, Tensor]) -> None:
        """Merge the experts for these systems, which must be alike, or check that these are what they were merged for."""
        count = torch.zeros(len(data["cell"]), max(self.elements) + 1, dtype=self.dtype, device=data["cell"].device)
        onehot = F.one_hot(plain(data["atomic_numbers"]), max(self.elements) + 1).to(count.dtype)
        count = plain(count.index_add_(0, data["batch"], onehot))
        charge, spin = self._charge_and_spin(data)
        atoms = count.sum(-1)
        if self.merged is None and not atoms.all():
            raise InputError("experts cannot be merged for a system without atoms: begin with systems that have some.")
        real = atoms > 0
        found = (count / atoms[:, None])[real], charge[real], spin[real]
        first = found if self.merged is None else self.merged
        for name, value, expected in zip(("composition", "charge", "spin"), found, first, strict=True):
            if not torch.isclose(value.double(), expected[:1].to(value.device).double(), rtol=COMPOSITION_RTOL).all():
                raise InputError(
                    f"the experts are merged for one {name}, but these systems have others.\n"
                    f"Load the model anew for other systems, or with settings='batch', which merges nothing."
                )
        if self.merged is None:
            inputs = self._inputs(data, charge, spin)
            with default_dtype(self.dtype), use_global_composition(self.backbone, data["batch"]):
                self.backbone = self.backbone.merge_MOLE_model(inputs).to(count.device, self.dtype).requires_grad_(False)
            self._prepare_kernels()
            self.merged = found

    def _charge_and_spin(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return charges (B,) and spins (B,) as integers, fairchem's defaults where `data` has none."""
        none = torch.zeros(len(data["cell"]), dtype=torch.long, device=data["cell"].device)
        spin = DEFAULT_SPIN_OMOL if self.task == UMATask.OMOL else DEFAULT_SPIN
        given = data.get("charge"), data.get("spin")
        default = none + DEFAULT_CHARGE, none + spin
        return tuple(d if g is None else g.round().long() for g, d in zip(given, default, strict=True))  # type: ignore[return-value]

    def _inputs(self, data: Mapping[str, Tensor], charge: Tensor, spin: Tensor) -> "_Data":
        """Make the fields that the backbone reads, except the graph."""
        numbers = plain(data["atomic_numbers"])
        needs = [self.backbone.charge_channel_end, self.backbone.spin_channel_end] + [
            getattr(m, "reduce", "sum") != "sum" for m in self.heads.modules()
        ]
        atoms = torch.zeros(len(data["cell"]), dtype=torch.long, device=numbers.device)
        if any(needs):
            atoms = atoms.index_add(0, data["batch"], torch.ones_like(numbers))
        dataset = [self.task] * len(charge)
        return _Data(atomic_numbers=numbers, batch=data["batch"], natoms=atoms, charge=charge, spin=spin, dataset=dataset)

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Compute those of `outputs`: energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3."""
        want_stress = "stress" in outputs and not self.direct
        want_forces = want_stress or ("forces" in outputs and not self.direct)
        wide = torch.promote_types(data["positions"].dtype, self.dtype)
        positions = data["positions"].detach().to(wide).requires_grad_(want_forces)
        cell = data["cell"].detach().to(wide).requires_grad_(want_stress)
        inputs = self._inputs(data, *self._charge_and_spin(data))
        inputs.update(pos=plain(positions).to(self.dtype), cell=cell.to(self.dtype), batch=plain(data["batch"]))
        with (
            tf32_context_manager(self.settings.tf32),
            request_derivatives(self.backbone, self.heads, want_forces, want_stress),
            use_given_graph(self.backbone, partial(_local_graph, data, positions, cell, self.dtype), data),
        ):
            features = self.backbone(inputs)
            # heads sum through the tagged batch, and differentiate by positions and cell in the wider dtype
            inputs.update(pos=positions, cell=cell, batch=data["batch"], batch_full=data["batch"])
            found: dict[str, Any] = {}
            for name, head in self.heads.items():
                made = head(inputs, features)
                found.update(made if self.heads_return_dicts else {name: made})
        return {name: self._scaled(name, found, data) for name in outputs}

    def _scaled(self, name: str, found: Mapping[str, Any], data: Mapping[str, Tensor]) -> Tensor:
        """Scale an output to its unit, and add the elements' energies to the energy."""
        key = self.names.get(name, self.names["energy"].removesuffix("energy") + name)
        scale: Any = self.scales[name if name in self.scales else "energy"]
        value: Tensor = found[key][name].detach() * scale.rmsd
        if name == "stress":
            return value.view(-1, 3, 3).to(self.dtype)
        if name == "forces":
            return value.to(self.dtype)
        value = value + scale.mean
        if self.references is not None:
            own = self.references[plain(data["atomic_numbers"])]
            value = value + torch.zeros_like(value, dtype=torch.float64).index_add(0, data["batch"], own)
        return value


class _Data(dict[str, Any]):
    """A dict whose entries are also attributes, as in fairchem's AtomicData."""

    __getattr__ = dict.__getitem__

    def get(self, key: str, default: Any = None) -> Any:
        """Look up with `default` as a keyword, which `dict.get` refuses."""
        return super().get(key, default)


def _local_graph(
    data: Mapping[str, Tensor], positions: Tensor, cell: Tensor, dtype: torch.dtype, inputs: _Data
) -> dict[str, Tensor]:
    """Make the edges of this rank's atoms by local id, and add the elements of their ends to `inputs`."""
    sender, receiver = data["edge_index"]
    lattice = cell[data["batch"][receiver]]
    shifts = (data["edge_shifts"].to(cell.dtype)[:, :, None] * lattice).sum(1)
    vectors = plain(positions[sender] - positions[receiver] + shifts).to(dtype)
    edge_index = plain(data["edge_index"])
    inputs["atomic_numbers_full"] = plain(data["atomic_numbers"][data["nodes"]])
    inputs["scatter_target"] = edge_index[1]
    return {"edge_index": edge_index, "edge_distance": vectors.norm(dim=-1), "edge_distance_vec": vectors}
