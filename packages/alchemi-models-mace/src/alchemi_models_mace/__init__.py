"""MACE potentials for alchemi: an unmodified MACE model behind alchemi-spec's contract."""

from alchemi_models_mace.patches import keep_weights_only_setting

with keep_weights_only_setting():
    from alchemi_models_mace.wrapper import MACEWrapper

__all__ = ["MACEWrapper"]
