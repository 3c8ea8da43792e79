"""Compare the Triton kernel, run by Triton's interpreter, with plain torch. Run with TRITON_INTERPRET=1."""

import torch
from systems import CUTOFFS, SYSTEMS, edges_beyond, parameters
from test_lennard_jones import EXACT, FP32, close

from alchemi_kernels import lennard_jones, lennard_jones_triton


def by_triton(system, constants, virial=True, tile=lennard_jones_triton.TILE):
    return lennard_jones_triton.lennard_jones(system, *constants.values(), virial, tile)


def main():
    for system in SYSTEMS.values():
        for dtype, tolerance in ((torch.float64, EXACT), (torch.float32, FP32)):
            expected, found = lennard_jones(system, **parameters(dtype)), by_triton(system, parameters(dtype))
            assert all(a.dtype == torch.float64 for a in found)
            close(found, expected, tolerance)
    narrow = SYSTEMS["open"]._replace(points=SYSTEMS["open"].points.float(), cell=SYSTEMS["open"].cell.float())
    expected = lennard_jones(narrow, **parameters(torch.float32))
    assert expected.forces.dtype == torch.float32
    close(by_triton(narrow, parameters(torch.float32)), expected, FP32)
    shifts = SYSTEMS["a batch"]._replace(shifts=SYSTEMS["a batch"].shifts.float())
    bare = by_triton(shifts, parameters(), virial=False, tile=lennard_jones_triton.Tile(2, 16, 1))
    expected = lennard_jones(SYSTEMS["a batch"], **parameters(), virial=False)
    assert bare.virials is None
    close(bare[:2], expected[:2], EXACT)
    for cutoff in CUTOFFS:
        for dtype in (torch.float64, torch.float32):
            constants = parameters(dtype) | {"cutoff": cutoff}
            for system in edges_beyond(cutoff):
                assert all((field == 0).all() for field in by_triton(system, constants))


if __name__ == "__main__":
    main()
