"""Machine-learned interatomic potentials on many GPUs"""
