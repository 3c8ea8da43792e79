"""How a layout reaches the rows of its tensors: the answers in which layouts differ."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Storage:
    """A layout's answers.

    `padded`: per-atom tensors hold [owned | ghost] rows. `reads`: ghost rows that an index reads are fetched from their
    owners. `reduces`: what is added to ghost rows is sent to their owners and added there. `global_ids`: indices that point
    at atoms hold global ids. `replicated`: every rank holds all rows and all edges. `collective`: which collective fetches
    rows; None: as the routing was made. `all_positions`: every rank holds the positions of all atoms, and the model lists
    the edges.
    """

    padded: bool = False
    reads: bool = True
    reduces: bool = True
    global_ids: bool = False
    replicated: bool = False
    collective: Literal["auto", "exchange", "all_gather"] | None = None
    all_positions: bool = False

    @property
    def whole(self) -> bool:
        """Some tensors have the rows of all atoms, or are indexed by them."""
        return self.global_ids or self.replicated

    @property
    def indexes_owned(self) -> bool:
        """Local ids below the number of rows are the rows themselves, so that arange(len(x)) names them."""
        return not self.padded and not self.global_ids

    @property
    def repeats_edges(self) -> bool:
        """Edges of ghosts are listed too, so that an edge is on several ranks."""
        return self.padded and not self.reduces
