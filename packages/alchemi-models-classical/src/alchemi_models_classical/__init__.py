"""Classical potentials behind alchemi-spec's contract."""

from alchemi_models_classical.lennard_jones import LennardJones

__all__ = ["LennardJones"]
