"""UMA (Wood et al., arXiv:2506.23971) and eSEN (Fu et al., arXiv:2502.12147) behind alchemi-spec's contract.

The model is fairchem-core's and is not modified: while it runs, it is handed the graph instead of building one, and each
layer the rows that its senders count.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from fairchem.core.models.base import HydraModel
from fairchem.core.models.uma import escn_md
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

from alchemi_models_uma.loading import default_dtype, load
from alchemi_spec import SPEC_MPNN_HALO, SPEC_UMA_HALO, InputError, MLIPSpec, OutputKind, StrategyKind

ALL_OUTPUTS = ("energy", "forces", "stress")
SAME = 1e-5
"""By how much parts of a composition may differ, as in fairchem's own check."""


class UMAWrapper(nn.Module):
    """Any model of fairchem-core's UMA and eSEN family, for one of its tasks.

    `wrapper(data, outputs)` computes in the model's dtype: `wrapper.double()` changes it. Differences of positions are formed
    in the wider of theirs and the model's, then cast. Charges and spins are `data["charge"]` and `data["spin"]`, by default
    fairchem's: 0, and the task's own spin. All edges within the cutoff count: there is no largest number of neighbours. Single
    atoms are computed as anything else; fairchem looks their energies up instead, where a model is not made for them.
    """

    references: Tensor | None

    def __init__(self, model: HydraModel, task: str | None = None, settings: InferenceSettings | None = None) -> None:
        """Wrap a live model whose tasks are set up. `task`: which dataset's energies, as "omat"; default its only one.

        With `settings.merge_mole` the experts are merged for the composition, charge and spin of the first batch that is seen,
        and other ones are refused. Of `settings`, `compile` and graph generation have no meaning here.

        Raises:
            ValueError: where the model has no such task, or no energy for it.

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
        model = copy.deepcopy(model)  # experts are merged, and layers made ready for kernels, in place
        self.backbone, self.heads, self.together = model.backbone, model.output_heads, model.pass_through_head_outputs
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
        """Elements' energies stay in float64: thousands of eV of each atom add up."""
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
        """Load a checkpoint by fairchem's name, such as `uma-s-1p1`, or a file in its format; `NAME@TASK` names the task too.

        `settings`: fairchem's inference settings, or the name of some. Named models are fetched from Hugging Face, which wants
        a token for them.

        Raises:
            UntrustedPickle: for a file, unless `trust_pickle`.
            FileNotFoundError: where there is neither such a file nor such a name.
            ValueError: where it has no such task.

        """
        if task is None and "@" in str(name) and not Path(name).exists():
            name, _, task = str(name).rpartition("@")
        model, settings = load(name, settings, trust_pickle)
        return cls(model, task, settings)

    def distribution_spec(self, strategy: StrategyKind = StrategyKind.HALO) -> MLIPSpec:
        """The specification under a strategy. Steps are not captured where experts have to be chosen in each."""
        mixes = self._has_experts() and not self.settings.merge_mole
        preset = SPEC_UMA_HALO if mixes else SPEC_MPNN_HALO.replaced(name=SPEC_UMA_HALO.name)
        kinds = {k: OutputKind.PER_NODE if k == "forces" else OutputKind.PER_GRAPH for k in self._outputs()}
        whole = frozenset({"forces"} if self.direct else ())
        preset = preset.replaced(output_kinds=kinds, owned_only_outputs=whole)
        return preset.under(strategy)  # which does not ignore longer edges: one costs more than leaving it out

    def _has_experts(self) -> bool:
        return getattr(self.backbone, "num_experts", 0) > 0

    def _prepare_kernels(self) -> None:
        """Have the backbone's layers as its kernels want them, which is fairchem's to say."""
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

        Every rank must call it; runs sums over ranks where experts are merged.

        Raises:
            InputError: on every rank, naming the system.

        """
        for name, (low, high) in (("charge", CHARGE_RANGE), ("spin", SPIN_RANGE)):
            given = data.get(name)
            if given is not None and ((given != given.round()) | (given < low) | (given > high)).any():
                raise InputError(f"{name} = {given.tolist()}: UMA takes whole numbers from {low} to {high}.")
        if (self.settings.merge_mole and self._has_experts()) or self.merged is not None:
            self._merge(data)

    def _merge(self, data: Mapping[str, Tensor]) -> None:
        """Merge the experts for these systems, which must be alike; or see that they are those that they were merged for."""
        count = torch.zeros(len(data["cell"]), max(self.elements) + 1, dtype=self.dtype, device=data["cell"].device)
        onehot = F.one_hot(_plain(data["atomic_numbers"]), max(self.elements) + 1).to(count.dtype)
        count = _plain(count.index_add_(0, data["batch"], onehot))
        charge, spin = self._charge_and_spin(data)
        atoms = count.sum(-1)
        if self.merged is None and not atoms.all():
            raise InputError("experts cannot be merged for a system without atoms: begin with systems that have some.")
        real = atoms > 0
        found = (count / atoms[:, None])[real], charge[real], spin[real]
        first = found if self.merged is None else self.merged
        for name, value, expected in zip(("composition", "charge", "spin"), found, first, strict=True):
            if not torch.isclose(value.double(), expected[:1].to(value.device).double(), rtol=SAME).all():
                raise InputError(
                    f"the experts are merged for one {name}, but these systems have others.\n"
                    f"Load the model anew for other systems, or with settings='batch', which merges nothing."
                )
        if self.merged is None:
            graph, plainly = self._inputs(data, charge, spin), _plain_coefficients(self.backbone, data["batch"])
            with default_dtype(self.dtype), patch.object(self.backbone, "set_MOLE_coefficients", plainly):
                self.backbone = self.backbone.merge_MOLE_model(graph).to(count.device, self.dtype).requires_grad_(False)
            self._prepare_kernels()
            self.merged = found

    def _charge_and_spin(self, data: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        none = torch.zeros(len(data["cell"]), dtype=torch.long, device=data["cell"].device)
        spin = DEFAULT_SPIN_OMOL if self.task == UMATask.OMOL else DEFAULT_SPIN
        given = data.get("charge"), data.get("spin")
        default = none + DEFAULT_CHARGE, none + spin
        return tuple(d if g is None else g.round().long() for g, d in zip(given, default, strict=True))  # type: ignore[return-value]

    def _inputs(self, data: Mapping[str, Tensor], charge: Tensor, spin: Tensor) -> "_Data":
        """What the backbone reads, the graph apart."""
        numbers = _plain(data["atomic_numbers"])
        needs = [self.backbone.charge_channel_end, self.backbone.spin_channel_end] + [
            getattr(m, "reduce", "sum") != "sum" for m in self.heads.modules()
        ]
        atoms = torch.zeros(len(data["cell"]), dtype=torch.long, device=numbers.device)
        if any(needs):
            atoms = atoms.index_add(0, data["batch"], torch.ones_like(numbers))
        dataset = [self.task] * len(charge)
        return _Data(atomic_numbers=numbers, batch=data["batch"], natoms=atoms, charge=charge, spin=spin, dataset=dataset)

    def forward(self, data: Mapping[str, Tensor], outputs: Sequence[str] = ALL_OUTPUTS) -> dict[str, Tensor]:
        """Energy (B,) in eV, forces (N, 3) in eV/Å, stress (B, 3, 3) in eV/Å^3, those of `outputs`."""
        stressed = "stress" in outputs and not self.direct
        forced = stressed or ("forces" in outputs and not self.direct)
        wide = torch.promote_types(data["positions"].dtype, self.dtype)
        positions = data["positions"].detach().to(wide).requires_grad_(forced)
        cell = data["cell"].detach().to(wide).requires_grad_(stressed)
        inputs = self._inputs(data, *self._charge_and_spin(data))
        inputs.update(pos=_plain(positions).to(self.dtype), cell=cell.to(self.dtype), batch=_plain(data["batch"]))
        with (
            tf32_context_manager(self.settings.tf32),
            _asked(self.backbone, self.heads, forced, stressed),
            _handed_the_graph(self.backbone, partial(_graph, data, positions, cell, self.dtype), data),
        ):
            features = self.backbone(inputs)
            # from here on heads add up systems, and differentiate by the wider ones
            inputs.update(pos=positions, cell=cell, batch=data["batch"], batch_full=data["batch"])
            found: dict[str, Any] = {}
            for name, head in self.heads.items():
                made = head(inputs, features)
                found.update(made if self.together else {name: made})
        return {name: self._scaled(name, found, data) for name in outputs}

    def _scaled(self, name: str, found: Mapping[str, Any], data: Mapping[str, Tensor]) -> Tensor:
        """An output in its units, the elements' energies with it."""
        key = self.names.get(name, self.names["energy"].removesuffix("energy") + name)
        scale: Any = self.scales[name if name in self.scales else "energy"]
        value: Tensor = found[key][name].detach() * scale.rmsd
        if name == "stress":
            return value.view(-1, 3, 3).to(self.dtype)
        if name == "forces":
            return value.to(self.dtype)
        value = value + scale.mean
        if self.references is not None:
            own = self.references[_plain(data["atomic_numbers"])]
            value = value + torch.zeros_like(value, dtype=torch.float64).index_add(0, data["batch"], own)
        return value


class _Data(dict[str, Any]):
    """A dict whose entries are attributes, too, as in fairchem's AtomicData."""

    __getattr__ = dict.__getitem__

    def get(self, key: str, default: Any = None) -> Any:
        return super().get(key, default)


@contextmanager
def _asked(backbone: nn.Module, heads: nn.Module, forces: bool, stress: bool) -> Iterator[None]:
    """While open, these derivatives are taken, and no others."""
    holders: list[Any] = [backbone, *heads.modules()]
    configs = {id(m.regress_config): m.regress_config for m in holders if hasattr(m, "regress_config")}
    with ExitStack() as set_to:
        for config in configs.values():
            if not config.direct_forces:
                set_to.enter_context(patch.multiple(config, forces=forces, stress=stress, hessian=False))
        yield


@contextmanager
def _handed_the_graph(backbone: Any, graph: Callable[[Any], dict[str, Tensor]], data: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, the backbone is handed the graph, its layers their senders' rows, and its experts this rank's edges.

    What it does with one atom or one edge at a time it does on plain tensors; sums over systems see the batch's tag.
    """
    instead = {
        "_generate_graph": graph,
        "set_MOLE_sizes": partial(_set_sizes, backbone),
        "set_MOLE_coefficients": _plain_coefficients(backbone, data["batch"]),
    }
    balanced = partial(_balanced, escn_md.balance_channels_batched, data["batch"])
    with ExitStack() as replaced:
        replaced.enter_context(patch.object(escn_md, "balance_channels_batched", balanced))
        for name, method in instead.items():
            replaced.enter_context(patch.object(backbone, name, method))
        for part, name, method in _without_waits(backbone):
            replaced.enter_context(patch.object(part, name, method))
        bare = data["edge_index"].shape[1] == 0  # which its convolutions cannot bear
        if bare:
            replaced.enter_context(patch.object(backbone.edge_degree_embedding, "forward", _unlinked))
        for block in backbone.blocks:
            layer = block.edge_wise
            reaching = partial(_bare, data["nodes"]) if bare else partial(_reaching, layer, layer.forward, data["nodes"])
            replaced.enter_context(patch.object(layer, "forward", reaching))
        yield


def _graph(data: Mapping[str, Tensor], positions: Tensor, cell: Tensor, dtype: torch.dtype, inputs: _Data) -> dict[str, Tensor]:
    """The edges of this rank's atoms by local id, and what is read of their ends."""
    sender, receiver = data["edge_index"]
    lattice = cell[data["batch"][receiver]]
    shifts = (data["edge_shifts"].to(cell.dtype)[:, :, None] * lattice).sum(1)
    vectors = _plain(positions[sender] - positions[receiver] + shifts).to(dtype)
    edge_index = _plain(data["edge_index"])
    inputs["atomic_numbers_full"] = _plain(data["atomic_numbers"][data["nodes"]])
    inputs["scatter_target"] = edge_index[1]
    return {"edge_index": edge_index, "edge_distance": vectors.norm(dim=-1), "edge_distance_vec": vectors}


def _without_waits(backbone: Any) -> Iterator[tuple[Any, str, Callable[..., Tensor]]]:
    """Which parts of a backbone copy from the host or look at values there, and what is put in the place of what does."""
    if backbone.spin_embedding.embedding_type == "pos_emb":
        yield backbone.spin_embedding, "forward", partial(_spin_rows, backbone.spin_embedding.W)
    if backbone.use_dataset_embedding:
        yield backbone.dataset_embedding, "forward", partial(_dataset_rows, backbone.dataset_embedding)
    if getattr(backbone.backend, "supports_fused_edgewise", False):
        yield backbone.backend, "edge_degree_scatter", partial(_add_degrees, backbone.backend.edge_degree_scatter)


def _spin_rows(frequencies: Tensor, spin: Tensor) -> Tensor:
    """The embedding (B, C) of spins (B,), zero for those that are not known; fairchem's own looks for them on the host."""
    phase = spin[:, None] * frequencies * 2 * torch.pi
    return torch.cat([phase.sin(), phase.cos()], dim=-1) * (spin != 0)[:, None]


def _dataset_rows(known: Any, datasets: Sequence[str]) -> Tensor:
    """The embedding (B, C) of datasets; fairchem's own copies an index from the host."""
    return torch.cat([known.dataset_emb_dict[known.dataset_mapping[name]].weight for name in datasets])


def _add_degrees(
    original: Callable[..., Tensor], x: Tensor, radial: Tensor, wigner: Tensor, target: Tensor, n: int, width: int, by: float
) -> Tensor:
    """Edges' first embedding, added to atoms (N, 9, C), of compact Wigner blocks (E, 35); fairchem's own indexes by lists."""
    if wigner.shape[-1] != 35:
        return original(x, radial, wigner, target, n, width, by)
    rows, blocks = radial.reshape(-1, n, width), wigner.reshape(-1, 35, 1)
    parts = zip((blocks[:, :1], blocks[:, 2:9:3], blocks[:, 12::5]), rows.split(1, dim=1), strict=True)
    return x.index_add(0, target, torch.cat([block * row for block, row in parts], dim=1).to(x.dtype) / by)


def _set_sizes(backbone: Any, nsystems: int, batch_full: Tensor, edge_index: Tensor) -> None:
    """How many of this rank's edges, which lie in the order of systems, each system's experts work on."""
    if getattr(backbone, "num_experts", 0):
        sizes = torch.bincount(batch_full[edge_index[1]], minlength=nsystems)
        backbone.global_mole_tensors.mole_sizes = sizes.cpu()


def _plain_coefficients(backbone: Any, batch: Tensor) -> Callable[..., None]:
    return partial(_set_coefficients, backbone, backbone.set_MOLE_coefficients, batch)


def _set_coefficients(
    backbone: Any, original: Callable[..., None], batch: Tensor, atomic_numbers_full: Tensor, batch_full: Tensor, **named: Any
) -> None:
    """How much of each expert a system has, by its composition, which is a mean over all ranks' atoms."""
    original(atomic_numbers_full=atomic_numbers_full, batch_full=batch, **named)
    if getattr(backbone, "num_experts", 0):
        mole = backbone.global_mole_tensors
        mole.expert_mixing_coefficients = _plain(mole.expert_mixing_coefficients)


def _balanced(original: Callable[..., Tensor], tagged: Tensor, batch: Tensor, **named: Any) -> Tensor:
    """Channels that are to add up to a system's charge or spin, over all ranks' atoms."""
    return _plain(original(batch=tagged, **named))


def _reaching(layer: Any, forward: Callable[..., Tensor], nodes: Tensor, x: Tensor, *args: Any, **named: Any) -> Tensor:
    """A layer's messages (n_owned, ...), of rows [owned | ghost], which travel now: once, also where edges go in chunks."""
    rows = _plain(x[nodes])

    def chunk(original: Callable[..., Tensor], x_full: Tensor, *rest: Any) -> Tensor:
        return original(rows, *rest)

    with patch.object(layer, "forward_chunk", partial(chunk, layer.forward_chunk)):
        return forward(x, *args, **named)


def _unlinked(x: Tensor, x_edge: Tensor, scatter_target: Tensor, wigner_inv_envelope: Tensor) -> Tensor:
    """A rank's features to which no edge adds, but which depend on positions as the others' do."""
    return x + 0 * wigner_inv_envelope.sum()


def _bare(nodes: Tensor, x: Tensor, *_: Any, **__: Any) -> Tensor:
    """The messages of a rank without edges. It takes part in the exchange, there and back."""
    return torch.zeros_like(x) + 0 * _plain(x[nodes]).sum()


def _plain(t: Tensor) -> Tensor:
    return t.as_subclass(Tensor)
