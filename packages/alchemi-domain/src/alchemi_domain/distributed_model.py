"""DistributedModel: runs a model, written for one process, on the atoms of all ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from alchemi_domain.batch import check_positions
from alchemi_domain.edge_lists import cutoffs, lengths
from alchemi_domain.registry import find_strategy
from alchemi_domain.sharded_batch import ShardedBatch
from alchemi_shardtensor import (
    BOTH,
    EDGE,
    GLOBAL,
    NODES,
    OWNED,
    PADDED,
    PARTIAL,
    STALE,
    SYSTEM,
    SYSTEMS,
    Comm,
    DomainConfig,
    Edges,
    Owners,
    Routing,
    Shard,
    ShardTensor,
    adapted,
    all_gather_rows,
    find_layout,
    make_shard,
    plain,
    prefetch_ghosts,
    tag,
    tag_all_rows,
    to_local_ids,
)
from alchemi_spec import (
    GatherInputsFull,
    MissingHandler,
    MLIPSpec,
    Model,
    OutputKind,
    SpecError,
    StrategyKind,
    ValidatesStructures,
    check_elements,
)


def spec_of(model: nn.Module, strategy: StrategyKind = StrategyKind.HALO) -> MLIPSpec:
    """The model's specification for this kind of strategy."""
    spec = cast(Model[Tensor], model).distribution_spec
    return spec.under(strategy) if isinstance(spec, MLIPSpec) else spec(strategy)


class DistributedModel(nn.Module):
    """Runs `model` on a `ShardedBatch`. The results are those of one rank, and the model needs to know nothing of ranks.

    The model is moved to the rank's device. `spec` replaces the model's own `distribution_spec`.
    """

    def __init__(self, model: nn.Module, config: DomainConfig | None = None, spec: MLIPSpec | None = None) -> None:
        """Prepare `model` for the ranks of `config`, default a world of one."""
        super().__init__()
        self.config = config or DomainConfig()
        self.strategy = find_strategy(self.config.strategy)  # only once: the search among installed packages takes 40 ms
        self.spec = spec or spec_of(model, self.strategy.kind)
        self.table = find_layout(self.spec.distribution)
        self.model = model.to(self.config.comm.device)

    @property
    def contract(self) -> Model[Tensor]:
        """The model, typed as what alchemi-spec says that it is."""
        return cast(Model[Tensor], self.model)

    def forward(self, batch: ShardedBatch, outputs: Sequence[str] | None = None) -> dict[str, Tensor]:
        """Energy (B,) in eV on every rank, forces (n_owned, 3) in eV/Å of this rank's atoms, stress (B, 3, 3) in eV/Å^3.

        `outputs` names those to compute; default all that the specification has. Every rank must call it. If no structure has
        a volume, there is no `stress` (`batch.why_no_stress()` gives the reasons). If only some have one, the others' rows are
        zero.

        Raises:
            UnsupportedElement, NonFinitePosition, InvalidCell, SpecError: on every rank, before anything is computed.

        """
        with torch.inference_mode(False):
            data = self.prepare(batch)
        return self.compute(data, batch, tuple(self.spec.output_kinds) if outputs is None else outputs)

    def prepare(self, batch: ShardedBatch, edges: Edges | None = None, skin: float = 0.0) -> dict[str, Tensor]:
        """Check this rank's atoms, find their edges and ghosts (or take `edges`), and tag every field of the data contract.

        With a `skin` (Å), edges up to that much beyond the cutoff are listed as well: `compute` is right until two atoms have
        come closer by that much. If the model is one that `ValidatesStructures`, its `validate` is called last.
        """
        self._check(batch)
        comm, storage = batch.comm, self.table.storage
        atoms = {"positions": batch.positions, "atomic_numbers": batch.atomic_numbers, "batch": batch.batch, **batch.per_atom}
        if storage.replicated:
            atoms = {name: comm.all_gather_rows(field) for name, field in atoms.items()}
        edges = edges or (_no_edges(batch) if storage.all_positions else self._build_neighbour_list(batch, atoms, skin))
        routing = edges.routing
        lists = {} if storage.all_positions else self._edge_lists(edges, atoms, batch, skin)
        rows = GLOBAL if storage.replicated else OWNED
        if storage.padded:
            ghosts = routing.exchange_all(*atoms.values())
            atoms = {name: torch.cat([atoms[name], more]) for name, more in zip(atoms, ghosts, strict=True)}
            rows = PADDED
        ids = torch.arange(routing.n_owned + routing.n_ghost, device=comm.device)
        if self.needs_owners:
            routing = replace(routing, owners=Owners.of(batch.ids, comm))
            ids = routing.with_ghosts(batch.ids) if storage.global_ids else ids
        routing = replace(routing, wire=self.config.wire)
        shard = make_shard(self.spec.distribution, routing, len(batch.cell), self.table)
        data = {
            **{name: tag(field, shard, rows, SYSTEMS if name == "batch" else None) for name, field in atoms.items()},
            **batch.per_system,
            "cell": batch.cell,
            "pbc": batch.pbc,
            "nodes": tag_all_rows(ids, shard),
        }
        for name, (edge_index, shifts) in lists.items():
            edge_index = ids[edge_index] if storage.global_ids else edge_index
            data[f"edge_index{name}"] = tag(edge_index, shard, None, NODES, BOTH)
            data[f"edge_shifts{name}"] = tag(shifts, shard, SYSTEM if storage.replicated else EDGE)
        if storage.all_positions:
            data["positions"] = tag(batch.gather(batch.positions), shard, GLOBAL)
        if isinstance(self.model, ValidatesStructures):
            with torch.no_grad():
                self.model.validate(data)
        return data

    def _check(self, batch: ShardedBatch) -> None:
        """Raise an error on every rank if the model cannot be evaluated on this batch."""
        comm = batch.comm
        if (comm.group, comm.device) != (self.config.comm.group, self.config.comm.device):
            raise SpecError("the batch was divided among other ranks than this model's: use one DomainConfig for both.")
        with comm.agreement():
            check_positions(batch.positions, batch.ids)
            self._check_elements(batch)

    def refresh(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> None:
        """Update `data` after the batch's positions or cells were changed in place; at most one exchange.

        Where the model is passed just the owned rows, these are the batch's own tensors, and nothing has to be done.
        """
        storage, positions, shard = self.table.storage, plain(data["positions"]), cast(ShardTensor, data["positions"]).shard
        if storage.all_positions:
            positions.copy_(batch.gather(batch.positions))
        elif storage.replicated:
            positions.copy_(all_gather_rows(batch.positions, _counts(shard, batch), batch.comm))
        elif storage.padded:
            positions.copy_(shard.routing.with_ghosts(batch.positions))

    def trim_edges(self, data: Mapping[str, Tensor], batch: ShardedBatch, skin: float) -> Mapping[str, Tensor]:
        """`data` without the edges that are longer than the model's cutoff now; as it is, if the model ignores them."""
        if not skin or self.spec.ignores_longer_edges or self.table.storage.all_positions:
            return data
        trimmed = dict(data)
        for name, within in self.edges_within_cutoff(data, batch).items():
            index, shifts = (data[f"{kind}{name}"] for kind in ("edge_index", "edge_shifts"))
            kept = within.nonzero().flatten()
            trimmed[f"edge_index{name}"] = tag(plain(index)[:, kept], index.shard, None, NODES, BOTH)  # type: ignore[attr-defined]
            trimmed[f"edge_shifts{name}"] = tag(plain(shifts)[kept], shifts.shard, shifts.rows)  # type: ignore[attr-defined]
        return trimmed

    def edges_within_cutoff(self, data: Mapping[str, Tensor], batch: ShardedBatch) -> dict[str, Tensor]:
        """For each edge list, a mask (E,) of the edges that are within its cutoff now. Every rank must call it."""
        shard, storage = cast(ShardTensor, data["positions"]).shard, self.table.storage
        points, systems = (plain(data[name]) for name in ("positions", "batch"))
        if not (storage.padded or storage.replicated):
            points, systems = _with_ghosts(shard, points, systems)
        found = {}
        for name, cutoff in cutoffs(self.model).items():
            local = to_local_ids(shard, data[f"edge_index{name}"])[1]
            found[name] = lengths(plain(local), plain(data[f"edge_shifts{name}"]), points, systems, batch.cell) <= cutoff
        return found

    def _edge_lists(
        self, edges: Edges, atoms: Mapping[str, Tensor], batch: ShardedBatch, skin: float
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Each of the model's edge lists and its shifts, selected from the longest."""
        routing, edge_index, shifts = edges
        wanted, dtype = cutoffs(self.model), batch.positions.dtype
        longest = max(wanted.values())
        lists = {name: (edge_index, shifts.to(dtype)) for name, cutoff in wanted.items() if cutoff == longest}
        if len(lists) < len(wanted):
            points, systems = (
                atoms[name] if self.table.storage.replicated else routing.with_ghosts(atoms[name])
                for name in ("positions", "batch")
            )
            length = lengths(edge_index, shifts, points, systems, batch.cell)
            for name in wanted.keys() - lists.keys():
                kept = length <= wanted[name] + skin
                lists[name] = edge_index[:, kept], shifts[kept].to(dtype)
        return lists

    def _check_elements(self, batch: ShardedBatch) -> None:
        known, present = self.contract.elements, batch.atomic_numbers.unique().tolist()
        if present and not (present[0] > 0 and (known is None or known.issuperset(present))):
            check_elements(batch.atomic_numbers.tolist(), known, batch.ids.tolist())

    @property
    def needs_owners(self) -> bool:
        """Whether rows are looked up by global id."""
        transforms = (t for op in self.spec.distribution.custom_ops for t in op.arg_transforms.values())
        return self.table.storage.global_ids or any(isinstance(t, GatherInputsFull) for t in transforms)

    def _build_neighbour_list(self, batch: ShardedBatch, atoms: Mapping[str, Tensor], skin: float) -> Edges:
        """The edges of these atoms, found by the strategy, and those of ghosts to the depth that the policy asks for."""
        comm, storage, policy = batch.comm, self.table.storage, self.spec.distribution.policy
        depth = 1 if storage.reduces else getattr(policy, "depth", 1)
        among = Comm() if storage.replicated else comm
        where = atoms["positions"], atoms["batch"], batch.cell, batch.pbc
        edges = self.strategy.build_neighbour_list(*where, max(cutoffs(self.model).values()) + skin, among, depth)
        return edges._replace(routing=Routing.without_ghosts(len(atoms["batch"]), comm)) if storage.replicated else edges

    def compute(self, data: Mapping[str, Tensor], batch: ShardedBatch, outputs: Sequence[str]) -> dict[str, Tensor]:
        """The model's outputs for prepared data. Call `refresh` first if the batch's positions were changed in place."""
        unknown = [name for name in outputs if name not in self.spec.output_kinds]
        if unknown:
            raise SpecError(
                f"the model's specification has no {', '.join(unknown)}: it has {', '.join(self.spec.output_kinds)}."
            )
        asked, reasons = list(outputs), batch.why_no_stress() if "stress" in outputs else []
        if "stress" in asked and None not in reasons:
            asked.remove("stress")
        shard = cast(ShardTensor, data["positions"]).shard
        derivative = torch.is_grad_enabled() or not {"forces", "stress"}.isdisjoint(asked)
        with adapted(self.spec.distribution), torch.inference_mode(False), torch.set_grad_enabled(derivative):
            results = self.model(data, asked)
        unread = {"stress"} - set(asked)
        results = {name: self._complete(name, value, shard, batch) for name, value in results.items() if name not in unread}
        if "stress" in results and any(reasons):
            results["stress"] = results["stress"].masked_fill(batch.without_stress[:, None, None], 0)
        return results

    def _complete(self, name: str, value: Tensor, shard: Shard, batch: ShardedBatch) -> Tensor:
        """The complete output without its tag: the same on every rank, or for this rank's atoms, as its kind says."""
        kind, rows = self.spec.output_kinds[name], getattr(value, "rows", None)
        if kind is OutputKind.PER_GRAPH and value.shape[:1] != (shard.n_systems,):
            raise MissingHandler(
                f"the model's {name} has shape {tuple(value.shape)}, but there are {shard.n_systems} structures.\n"
                f"Make one row for each of data['cell'], whichever of them this rank has atoms of."
            )
        per_graph, per_node = (kind in (k, OutputKind.UNKNOWN) for k in (OutputKind.PER_GRAPH, OutputKind.PER_NODE))
        if kind is OutputKind.GLOBAL or (per_graph and rows is SYSTEM) or (per_node and rows is OWNED):
            return plain(value)
        if per_graph and name in self.spec.all_reduce_outputs and rows in (PARTIAL, None):
            return shard.comm.all_reduce(plain(value))
        if per_node and rows is GLOBAL and shard.storage.all_positions:
            return plain(value)[batch.ids]
        if per_node and rows is GLOBAL:
            before = sum(_counts(shard, batch)[: batch.comm.rank])
            return plain(value)[before : before + len(batch.ids)]
        if per_node and (rows in (PADDED, STALE) or (rows is None and name in self.spec.owned_only_outputs)):
            return plain(value)[: shard.n_owned]
        if per_node and rows is None and shard.storage.padded:
            return shard.routing.reduce_ghosts(value)
        raise MissingHandler(
            f"the model's {name} is {kind} by its specification, but its rows are {rows}: alchemi does not know how to "
            f"complete what one rank computed from its part of the atoms.\n"
            f"Sum per-atom values through data['batch'], and compute per-atom values from per-atom values; or state in the "
            f"specification how it comes (owned_only_outputs, all_reduce_outputs)."
        )


def _no_edges(batch: ShardedBatch) -> Edges:
    """No edges, for a model that finds them itself."""
    nothing = batch.ids.new_empty(2, 0), batch.positions.new_empty(0, 3, dtype=torch.float64)
    return Edges(Routing.without_ghosts(len(batch.ids), batch.comm), *nothing)


def _with_ghosts(shard: Shard, points: Tensor, systems: Tensor) -> tuple[Tensor, Tensor]:
    """[owned | ghost] rows of these owned ones, in one message. The systems, which do not change, are fetched only once."""
    cache = shard.cache
    points, *more = prefetch_ghosts(shard, points, *(() if cache.systems is not None else (systems,)))
    cache.systems = cache.systems if cache.systems is not None else more[0]
    return points, cache.systems


def _counts(shard: Shard, batch: ShardedBatch) -> list[int]:
    """How many atoms each rank owns. Ranks exchange this only once."""
    if shard.cache.counts is None:
        shard.cache.counts = batch.comm.all_gather(torch.tensor(len(batch.ids))).tolist()
    return shard.cache.counts
