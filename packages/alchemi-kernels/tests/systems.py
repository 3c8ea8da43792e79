"""Small systems and their full neighbour lists, found by brute force."""

from itertools import product

import torch

from alchemi_kernels import FullList

CUTOFF, SKIN = 8.5, 1.0


def argon(n, cell=None, images=0, seed=0, reach=CUTOFF + SKIN):
    """n atoms, 3 Å or more apart, in a box, or in `cell` with all edges up to `reach` Å to its images."""
    g = torch.Generator().manual_seed(seed)
    side = torch.arange(max(1, round((2 * n) ** (1 / 3)) + 1), dtype=torch.float64)
    sites = torch.cartesian_prod(side, side, side)[torch.randperm(len(side) ** 3, generator=g)[:n]]
    sites = sites + 0.15 * (2 * torch.rand(n, 3, dtype=torch.float64, generator=g) - 1)
    points = 4.2 * sites if cell is None else sites / len(side) @ cell
    cell = torch.zeros(3, 3, dtype=torch.float64) if cell is None else cell
    wide = torch.tensor(list(product(range(-images, images + 1), repeat=3)), dtype=torch.float64)
    vectors = points[None, :, None] - points[:, None, None] + wide @ cell  # receiver, sender, image
    length = vectors.norm(dim=-1)
    receiver, sender, image = ((length < reach) & (length > 0)).nonzero().unbind(1)
    return FullList(points, sender, receiver, wide[image], cell[None], torch.zeros(n, dtype=torch.long), n)


def batched(*systems):
    """One batch of several systems."""
    atoms = [0, *torch.tensor([s.n for s in systems]).cumsum(0).tolist()]
    moved = [s._replace(sender=s.sender + a, receiver=s.receiver + a) for s, a in zip(systems, atoms, strict=False)]
    batch = torch.repeat_interleave(torch.arange(len(systems)), torch.tensor([s.n for s in systems]))
    return FullList(*(torch.cat(parts) for parts in list(zip(*moved, strict=True))[:5]), batch, atoms[-1])


def moved(system, device):
    """The same list on `device`."""
    return FullList(*(t.to(device) for t in system[:-1]), system.n)


def first(system, n):
    """The list of the first n atoms; the others are ghosts."""
    kept = system.receiver < n
    fields = {name: getattr(system, name)[kept] for name in ("sender", "receiver", "shifts")}
    return system._replace(**fields, batch=system.batch[:n], n=n)


def parameters(dtype=torch.float64, device="cpu"):
    """The parameters of argon."""
    sigma, epsilon = (torch.tensor(x, dtype=dtype, device=device) for x in (3.4, 0.010341))
    return {"sigma": sigma, "epsilon": epsilon, "cutoff": CUTOFF}


CUTOFFS = (4.9, 5.1, 6.3, 8.1, 8.5)
"""At some of these the switch is zero only to round-off."""


def edges_beyond(cutoff):
    """Two atoms at the cutoff, just beyond it, and so far apart that their squared distance overflows."""
    pair = argon(2)
    lengths = (cutoff, cutoff * (1 + 1e-15), 1.1 * cutoff, 1e60, 1e200)
    return [pair._replace(points=torch.tensor([[0.0, 0, 0], [r, 0, 0]], dtype=torch.float64)) for r in lengths]


SHEARED = torch.tensor([[9.0, 0, 0], [2.0, 8.6, 0], [-1.5, 1.0, 9.4]], dtype=torch.float64)
SYSTEMS = {
    "open": argon(20),
    "images of 5 atoms": argon(5, SHEARED, images=2),
    "an atom and its images": argon(1, SHEARED / 2, images=4),
    "one atom": argon(1),
    "no atoms": argon(0),
    "left-handed": argon(6, SHEARED[[1, 0, 2]], images=2, seed=1),
    "ten cutoffs of edges": argon(3, SHEARED, images=3, reach=20.0),
}
SYSTEMS["a batch"] = batched(*SYSTEMS.values())
SYSTEMS["with ghosts"] = first(SYSTEMS["a batch"], 27)
