"""SevenNet potentials for alchemi: pretrained weights come with the wheel of `sevenn`."""

from alchemi_models_sevennet.wrapper import SevenNetWrapper

__all__ = ["SevenNetWrapper"]
