"""fairchem's backbone and head, not modified and without `UMAWrapper`, with edges that the backbone finds itself."""

from functools import partial

import torch
from fairchem.core.models.uma.escn_md import MLP_EFS_Head, eSCNMDBackbone
from fairchem.core.models.uma.nn.so2_layers import SO2_Convolution
from torch import nn

from alchemi_graphpart import keep_owned
from alchemi_shardtensor import EDGE, ShardTensor, plain, tag
from alchemi_spec import DistributionSpec, GraphParallelPolicy, MethodAdapter, MLIPSpec


class Inputs(dict):
    """What fairchem reads as items and as attributes."""

    def get(self, key, default=None):
        return super().get(key, default)

    def __getattr__(self, name):
        if name in self:
            return self[name]
        raise AttributeError(name)


def owned_graph(build, backbone, inputs):
    """The backbone's own edges among all atoms, of which this rank's are kept; it notes in the inputs where they end."""
    everyone = Inputs(inputs | {"batch": torch.repeat_interleave(inputs["natoms"])})
    graph = keep_owned(partial(build, backbone), everyone)
    inputs["scatter_target"] = graph["edge_index"][1]
    return graph


def row_by_row(method, module, first, *rest):
    """What is made of one edge each, by operations of which a tag does not know that: rotations, and their convolutions."""
    if not isinstance(first, ShardTensor):
        return method(module, first, *rest)
    made = method(module, *(plain(t) if isinstance(t, torch.Tensor) else t for t in (first, *rest)))
    return tuple(tag(t, first.shard, EDGE) for t in made) if isinstance(made, tuple) else tag(made, first.shard, EDGE)


class UMABuildsItsOwn(nn.Module):
    elements = None

    def __init__(self, **sizes):
        super().__init__()
        torch.manual_seed(0)
        small = {"sphere_channels": 8, "hidden_channels": 8, "edge_channels": 8, "num_layers": 2, "lmax": 2, "mmax": 2}
        asked = {"cutoff": 4.5, "num_distance_basis": 16, "otf_graph": True, "always_use_pbc": False, "dataset_list": ["omat"]}
        derivatives = {"direct_forces": False, "regress_forces": True, "regress_stress": False}
        self.backbone = eSCNMDBackbone(**small | asked | derivatives | sizes).double().requires_grad_(False).eval()
        self.head = MLP_EFS_Head(self.backbone, wrap_property=False).double().requires_grad_(False).eval()
        self.cutoff = 4.5

    @property
    def dtype(self):
        return torch.float64

    def forward(self, data, outputs=("energy", "forces")):
        n, batch = len(data["cell"]), data["batch"]
        count = torch.zeros(n, dtype=torch.long).index_add(0, batch, torch.ones_like(data["atomic_numbers"]))
        neutral = torch.zeros(n, dtype=torch.long)
        inputs = Inputs(
            pos=data["positions"].detach().requires_grad_(),
            atomic_numbers=data["atomic_numbers"],
            batch=batch,
            cell=data["cell"],
            pbc=data["pbc"],
            natoms=count.as_subclass(torch.Tensor),
            charge=neutral,
            spin=neutral,
            dataset=["omat"] * n,
        )
        found = self.head(inputs, self.backbone(inputs))
        return {name: found[name].detach() for name in outputs}


UMABuildsItsOwn.distribution_spec = MLIPSpec(
    name="uma_builds_its_own",
    distribution=DistributionSpec(
        policy=GraphParallelPolicy(geometry="replicated"),
        helpers=(
            MethodAdapter(eSCNMDBackbone, "_generate_graph", "uma_builds_its_own:owned_graph"),
            MethodAdapter(eSCNMDBackbone, "_get_rotmat_and_wigner", "uma_builds_its_own:row_by_row"),
            MethodAdapter(SO2_Convolution, "forward", "uma_builds_its_own:row_by_row"),
        ),
    ),
    output_kinds={"energy": "per_graph", "forces": "per_node"},
)
