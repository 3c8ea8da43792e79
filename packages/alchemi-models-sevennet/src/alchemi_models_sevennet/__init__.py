"""SevenNet potentials for alchemi, pretrained weights included"""
