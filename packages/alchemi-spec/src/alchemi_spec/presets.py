"""A specification for each family of models. They differ in the rows that a model sees, and in what is sent when."""

from collections.abc import Mapping

from alchemi_spec.adapters import AllReduceSum, InputTransform, OpAdapter, SliceOwned
from alchemi_spec.policies import GatherRule, GraphParallelPolicy, HaloStoragePolicy, ScatterRule
from alchemi_spec.spec import CompilePolicy, DistributionSpec, MLIPSpec

PADDED = HaloStoragePolicy(layout="padded")
EACH_ATOM_ONCE: Mapping[int | str, InputTransform] = {"positions": SliceOwned(), "charges": SliceOwned(), "batch": SliceOwned()}

SPEC_MPNN_HALO = MLIPSpec(name="mpnn_halo")
"""A message-passing model under spatial decomposition.

The model sees owned rows, so node-wise layers cost nothing for ghosts. Each gather through senders fetches the features of
ghosts, once per layer. Only rows that are read are sent.
"""

SPEC_MPNN_GP = MLIPSpec(name="mpnn_gp", distribution=DistributionSpec(policy=GraphParallelPolicy()))
"""A message-passing model under graph partition: atoms are divided by index or along a curve, and never migrate.

Positions and features are fetched once per layer, by an exchange or an all-gather, whichever suits the graph. This is
for graphs that are too small or too dense to be divided in space.
"""

SPEC_UMA_HALO = MLIPSpec(name="uma_halo", compile=CompilePolicy(capture=False))
"""UMA and eSEN under spatial decomposition: like `SPEC_MPNN_HALO`, but without capture of the step.

Each system's composition, an average over its atoms, sets its mixture of experts. The average is a sum over ranks. Choosing
the experts by it is a host sync, which a CUDA graph cannot capture.
"""

SPEC_LJ_HALO = MLIPSpec(
    name="lj_halo", distribution=DistributionSpec(policy=PADDED), compile=CompilePolicy(inductor=False, trim=False)
)
"""A pair potential under spatial decomposition, also one in an opaque kernel.

The kernel indexes [owned | ghost] positions. They are fetched once per step, and the forward pass sends nothing else. A
kernel with a half list also adds energies and forces to ghosts: these are sent to the owners and added there.
"""

SPEC_EWALD_HALO = MLIPSpec(
    name="ewald_halo",
    distribution=DistributionSpec(
        policy=PADDED,
        custom_ops=(OpAdapter("alchemi::ewald_structure_factors", EACH_ATOM_ONCE, {0: AllReduceSum()}),),
    ),
)
"""Ewald summation under spatial decomposition: like `SPEC_LJ_HALO` in real space.

In reciprocal space every atom acts on every other, but only through the structure factors S(k) (B, K) of its system. Each
rank sums them over its owned atoms, never over ghosts, and the sums are added over ranks. In plain torch this is a scatter
through the batch index, which needs no adapter; the adapter does the same for an opaque op.
"""

SPEC_PME_HALO = MLIPSpec(
    name="pme_halo",
    distribution=DistributionSpec(
        policy=PADDED, custom_ops=(OpAdapter("alchemi::pme_spread", EACH_ATOM_ONCE, {0: AllReduceSum()}),)
    ),
)
"""Particle-mesh Ewald under spatial decomposition: like `SPEC_LJ_HALO` in real space.

Each rank spreads the charges of its owned atoms on the mesh, and the mesh is summed over ranks once. A mesh cell is neither
an atom nor a system, so no tag describes it, and the op that spreads charges needs an adapter. Each rank then transforms
the whole mesh and reads the potential at its own atoms.
"""

SPEC_DFTD3_HALO = MLIPSpec(
    name="dftd3_halo",
    distribution=DistributionSpec(
        policy=HaloStoragePolicy(layout="padded", depth=2, scatter=ScatterRule.LOCAL, gather=GatherRule.LOCAL)
    ),
)
"""DFT-D3 dispersion under spatial decomposition, with ghosts up to two cutoffs away.

The energy of an atom needs the coordination numbers of its neighbours, and these need the neighbours of neighbours. With
both on this rank nothing is sent between the two passes. Positions are fetched once, and forces on ghosts are sent to their
owners once.
"""
