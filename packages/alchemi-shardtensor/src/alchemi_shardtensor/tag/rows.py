"""What the rows of a tensor are, and what an index points at."""

from enum import StrEnum


class Rows(StrEnum):
    """What dim 0 of a tensor (or `row_dim`, where an operation has moved it) enumerates."""

    OWNED = "owned"
    """This rank's atoms."""
    PADDED = "padded"
    """This rank's atoms, then its ghosts, whose rows equal their owners'."""
    STALE = "stale"
    """This rank's atoms, then its ghosts, whose rows differ from their owners' and are refreshed when they are read."""
    GLOBAL = "global"
    """All atoms by global id, the same on every rank."""
    EDGE = "edge"
    """The edges whose receivers this rank owns."""
    SYSTEM = "system"
    """The structures of the batch, or any other value that is the same on every rank."""
    PARTIAL = "partial"
    """This rank's part of a per-system sum: the whole is the sum over ranks."""
    LOST = "lost"
    """Made of this rank's rows, but no dim enumerates them any more: must not be reduced."""


class PointsAt(StrEnum):
    """What the values of an integer tensor index."""

    NODES = "nodes"
    """Atoms: below n_owned the owned ones, from there the ghosts; in the sharded layout, all by global id."""
    SYSTEMS = "systems"
    """Structures of the batch."""


class End(StrEnum):
    """Which end of the edges an index names. Receivers are all owned; senders may be ghosts."""

    SENDER = "sender"
    RECEIVER = "receiver"


OWNED, PADDED, STALE, GLOBAL, EDGE, SYSTEM, PARTIAL, LOST = Rows
SHARDED = (OWNED, PADDED, STALE, EDGE, LOST)
"""Rows of which each rank holds its own part only."""
REPLICATED = (SYSTEM, GLOBAL)
"""Rows that every rank holds alike."""
NODES, SYSTEMS = PointsAt
SENDER, RECEIVER = End
BOTH = (SENDER, RECEIVER)
"""The ends that the two rows of an edge_index (2, E) name."""

Ends = End | tuple[End, ...] | None
