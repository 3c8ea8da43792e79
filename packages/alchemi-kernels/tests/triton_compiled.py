"""Compile the Triton kernel for an H200, which needs no GPU: the compiler refuses some code that the interpreter runs."""

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from alchemi_kernels import lennard_jones_triton

POSITIONS = dict.fromkeys(("points", "shifts", "cell"), "*fp64") | dict.fromkeys(("sender", "starts", "batch"), "*i64")
SUMS = dict.fromkeys(("energies", "forces", "virials"), "*fp64")


def compiled(real, virial):
    tile = lennard_jones_triton.TILE
    chosen = {"VIRIAL": virial, "ATOMS": tile.atoms, "LANES": tile.lanes}
    constants = dict.fromkeys(("sigma", "epsilon", "cutoff"), f"*{real}")
    kinds = POSITIONS | constants | SUMS | {"n": "i32"} | dict.fromkeys(chosen, "constexpr")
    signature = {name: kinds[name] for name in lennard_jones_triton._lennard_jones.arg_names}
    source = ASTSource(lennard_jones_triton._lennard_jones, signature, chosen)
    return triton.compile(source, GPUTarget("cuda", 90, 32), {"num_warps": tile.warps})


def main():
    for real in ("fp64", "fp32"):
        for virial in (True, False):
            ptx = compiled(real, virial).asm["ptx"]
            assert ".local" not in ptx, "registers spill"


if __name__ == "__main__":
    main()
