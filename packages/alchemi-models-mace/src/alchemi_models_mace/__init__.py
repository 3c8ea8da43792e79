"""MACE potentials for alchemi: an unmodified MACE model behind alchemi-spec's contract."""

from alchemi_models_mace.wrapper import MACEWrapper

__all__ = ["MACEWrapper"]
