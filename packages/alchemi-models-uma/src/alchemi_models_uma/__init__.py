"""UMA and eSEN potentials for alchemi."""

from alchemi_models_uma.wrapper import UMAWrapper

__all__ = ["UMAWrapper"]
