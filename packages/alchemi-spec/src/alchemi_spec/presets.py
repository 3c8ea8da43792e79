"""A specification for each family of models. They differ in which rows a model is shown, and in what travels when."""

from collections.abc import Mapping

from alchemi_spec.adapters import AllReduceSum, InputTransform, OpAdapter, SliceOwned
from alchemi_spec.policies import GatherRule, GraphParallelPolicy, HaloStoragePolicy, ScatterRule
from alchemi_spec.spec import CompilePolicy, DistributionSpec, MLIPSpec

PADDED = HaloStoragePolicy(layout="padded")
EACH_ATOM_ONCE: Mapping[int | str, InputTransform] = {"positions": SliceOwned(), "charges": SliceOwned(), "batch": SliceOwned()}

SPEC_MPNN_HALO = MLIPSpec(name="mpnn_halo")
"""A message-passing model under spatial decomposition.

It sees owned rows, so that node-wise layers cost nothing for ghosts; features travel at each gather through senders, once
per layer, and nothing travels that is not read.
"""

SPEC_MPNN_GP = MLIPSpec(name="mpnn_gp", distribution=DistributionSpec(policy=GraphParallelPolicy()))
"""A message-passing model under graph partition: atoms are shared out by index or along a curve, and never migrate.

Positions and features travel once per layer, routed or by an all-gather, whichever suits the graph. For graphs too small or
too dense to be cut in space.
"""

SPEC_UMA_HALO = MLIPSpec(name="uma_halo", compile=CompilePolicy(capture=False))
"""UMA and eSEN under spatial decomposition: as `SPEC_MPNN_HALO`, but the step is not captured.

The mixture of experts is set by each system's composition, an average over its atoms and so a per-system sum over ranks;
choosing the experts by it waits for the device, which a captured step must not do.
"""

SPEC_LJ_HALO = MLIPSpec(
    name="lj_halo", distribution=DistributionSpec(policy=PADDED), compile=CompilePolicy(inductor=False, trim=False)
)
"""A pair potential under spatial decomposition, also one in an opaque kernel.

The kernel indexes [owned | ghost] positions, which travel once per step, and nothing else does on the way in. Half lists
add to ghosts too: their share of energies and forces is summed into the owners.
"""

SPEC_EWALD_HALO = MLIPSpec(
    name="ewald_halo",
    distribution=DistributionSpec(
        policy=PADDED,
        custom_ops=(OpAdapter("alchemi::ewald_structure_factors", EACH_ATOM_ONCE, {0: AllReduceSum()}),),
    ),
)
"""Ewald summation under spatial decomposition: in real space as `SPEC_LJ_HALO`.

In reciprocal space every atom acts on every other, but only through the structure factors S(k) (B, K) of its system: each
rank sums them over its owned atoms, never over ghosts, and they are summed over ranks. In plain torch they are a scatter
through the batch index, which is summed anyway; the adapter does it for an opaque op.
"""

SPEC_PME_HALO = MLIPSpec(
    name="pme_halo",
    distribution=DistributionSpec(
        policy=PADDED, custom_ops=(OpAdapter("alchemi::pme_spread", EACH_ATOM_ONCE, {0: AllReduceSum()}),)
    ),
)
"""Particle-mesh Ewald under spatial decomposition: in real space as `SPEC_LJ_HALO`.

What is summed over ranks, once, is the mesh of charges: each rank spreads its owned atoms only. A mesh cell is neither an
atom nor a system, so no tag would tell, and the op that spreads must be adapted. Each rank then transforms the whole mesh
and reads the potential at its own rows.
"""

SPEC_DFTD3_HALO = MLIPSpec(
    name="dftd3_halo",
    distribution=DistributionSpec(
        policy=HaloStoragePolicy(layout="padded", depth=2, scatter=ScatterRule.LOCAL, gather=GatherRule.LOCAL)
    ),
)
"""DFT-D3 dispersion under spatial decomposition, by a band of ghosts two cutoffs wide.

An atom's energy needs its neighbours' coordination numbers, and these need the neighbours of neighbours. With both at hand
nothing travels between the two passes: positions come once, and the ghosts' share of the forces goes home once.
"""
