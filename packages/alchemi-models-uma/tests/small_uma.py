"""UMA's own classes at small sizes, with random weights; and their checkpoint in fairchem's format."""

import copy

import hydra
import torch
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint

TASKS = ("omat", "omol")
MIXTURE = {
    "model": "fairchem.core.models.uma.escn_moe.eSCNMDMoeBackbone",
    "num_experts": 4,
    "use_composition_embedding": True,
    "moe_layer_type": "pytorch",
    "moe_expert_coefficient_norm": "softmax",
}


DIRECT = {
    "omat_energy": {"module": "fairchem.core.models.uma.escn_md.MLP_Energy_Head"},
    "omat_forces": {"module": "fairchem.core.models.uma.escn_md.Linear_Force_Head"},
}
"""Heads of a model that predicts forces directly."""


def config(mixture=True, heads=None, **sizes):
    """A HydraModel's configuration as checkpoints have it."""
    backbone = {
        "model": "fairchem.core.models.uma.escn_md.eSCNMDBackbone",
        "sphere_channels": 8,
        "lmax": 2,
        "mmax": 2,
        "otf_graph": True,
        "cutoff": 4.5,
        "edge_channels": 8,
        "num_distance_basis": 16,
        "direct_forces": False,
        "regress_forces": True,
        "regress_stress": True,
        "num_layers": 2,
        "hidden_channels": 8,
        "dataset_mapping": {name: name for name in TASKS},
        "always_use_pbc": False,
    }
    head = {
        "module": "fairchem.core.models.uma.escn_moe.DatasetSpecificMoEWrapper",
        "dataset_mapping": {name: name for name in TASKS},
        "head_cls": "fairchem.core.models.uma.escn_md.MLP_EFS_Head",
        "head_kwargs": {"wrap_property": False},
    }
    return {
        "_target_": "fairchem.core.models.base.HydraModel",
        "backbone": backbone | (MIXTURE if mixture else {}) | sizes,
        "heads": heads or {"energyandforcehead": head},
        "otf_graph": True,
        "pass_through_head_outputs": heads is None,
        "model_id": "UMA-small-1.2.1",
    }


def task(name, dataset, level, shape, rmsd=1.0, references=None):
    """A task's configuration as checkpoints have it."""
    spec = {"_target_": "fairchem.core.units.mlip_unit.mlip_unit.OutputSpec", "dim": shape, "dtype": "float32"}
    normalizer = {"_target_": "fairchem.core.modules.normalization.normalizer.Normalizer", "mean": 0.0, "rmsd": rmsd}
    kept = {
        "_target_": "fairchem.core.modules.normalization.element_references.ElementReferences",
        "element_references": references,
    }
    return {
        "_target_": "fairchem.core.units.mlip_unit.mlip_unit.Task",
        "name": f"{dataset}_{name}",
        "level": level,
        "property": name,
        "loss_fn": None,
        "out_spec": spec,
        "normalizer": normalizer,
        "datasets": [dataset],
        "metrics": [],
        "element_references": None if references is None else kept,
    }


def tasks():
    """Energies of two datasets with elements' own, and forces of one; stress of none, which fairchem adds."""
    own = torch.linspace(-1.0, -3.0, 101, dtype=torch.float64)
    return [
        *(task("energy", name, "system", [1], rmsd=1.7, references=own) for name in TASKS),
        *(task("forces", name, "atom", [3], rmsd=1.7) for name in TASKS),
    ]


def small_uma(seed=0, dtype=torch.float64, **sizes):
    """A live model whose tasks are set up."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = hydra.utils.instantiate(config(**sizes))
    finally:
        torch.set_default_dtype(before)
    model.setup_tasks(tasks())
    return model.to(dtype).requires_grad_(False).eval()


def save(path, **sizes):
    """The same as a checkpoint."""
    model = small_uma(**sizes)
    weights = model.state_dict()
    averaged = {f"module.{k}": v for k, v in weights.items()} | {"n_averaged": torch.tensor(1)}
    torch.save(MLIPInferenceCheckpoint(copy.deepcopy(config(**sizes)), weights, averaged, tasks()), path)
    return model


def in_chunks(wrapper, edges):
    """Set the number of edges in a chunk, instead of fairchem's 131,072."""
    backbone = wrapper.backbone
    for part in (backbone.edge_degree_embedding, *(block.edge_wise for block in backbone.blocks)):
        assert part.activation_checkpoint_chunk_size
        part.activation_checkpoint_chunk_size = edges
    return wrapper
