"""Write the structures of this folder from their published parameters: python make_structures.py

- quartz: alpha-quartz at room temperature, Levien, Prewitt and Weidner, Am. Mineral. 65 (1980) 920. 3x3x3, 243 atoms.
- urea: crystalline urea at 12 K by neutrons, Swaminathan, Craven and McMullan, Acta Cryst. B 40 (1984) 300. 2x2x2, 128.
- copper: Cu(111), four layers of 4x4, a = 3.615 Å (Straumanis and Yu, Acta Cryst. A 25 (1969) 676), 15 Å of vacuum on
  either side, not periodic across it. 64 atoms.
"""

from pathlib import Path

from ase import Atoms
from ase.build import fcc111
from ase.io import write
from ase.spacegroup import crystal

HERE = Path(__file__).parent


def quartz() -> Atoms:
    """P3_2 21, silicon on 3a."""
    sites = [("Si", (0.4697, 0, 2 / 3)), ("O", (0.4135, 0.2669, 2 / 3 + 0.1191))]
    return crystal(*zip(*sites, strict=True), spacegroup=154, cellpar=[4.916, 4.916, 5.4054, 90, 90, 120]) * (3, 3, 3)


def urea() -> Atoms:
    """P-4 2_1 m."""
    sites = [
        ("C", (0, 0.5, 0.3260)),
        ("O", (0, 0.5, 0.5953)),
        ("N", (0.1459, 0.6459, 0.1766)),
        ("H", (0.2575, 0.7575, 0.2827)),
        ("H", (0.1441, 0.6441, -0.0380)),
    ]
    return crystal(*zip(*sites, strict=True), spacegroup=113, cellpar=[5.565, 5.565, 4.684, 90, 90, 90]) * (2, 2, 2)


def copper() -> Atoms:
    """A slab."""
    slab = fcc111("Cu", (4, 4, 4), a=3.615, vacuum=15.0)
    slab.set_constraint()
    return slab


if __name__ == "__main__":
    for make in (quartz, urea, copper):
        atoms = make()
        plain = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)
        write(HERE / f"{make.__name__}.extxyz", plain, format="extxyz")
