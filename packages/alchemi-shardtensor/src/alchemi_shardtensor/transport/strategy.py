"""What a strategy and its partition must be: the protocols that alchemi calls, for ours and for anybody's."""

from typing import Protocol

from torch import Tensor

from alchemi_shardtensor.transport.comm import Comm
from alchemi_shardtensor.transport.routing import Edges
from alchemi_spec import StrategyKind


class Partition(Protocol):
    """How a strategy has divided the atoms among the ranks."""

    def owners(self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, ids: Tensor, /) -> Tensor:
        """The rank (n,) that owns each atom at `positions` (n, 3) Å, with global `ids` (n,). It sends no message."""
        ...


class Strategy(Protocol):
    """A way to divide the atoms among the ranks and to find each rank's edges and ghosts.

    Everything below a strategy is the same for all of them: one exchange, its reverse, and one sum over ranks.
    A package registers a strategy by an entry point in `alchemi.strategies`: a callable without arguments that returns one.
    """

    @property
    def kind(self) -> StrategyKind:
        """The kind by which a model chooses its specification."""
        ...

    def partition(
        self,
        positions: Tensor,
        batch: Tensor,
        cell: Tensor,
        pbc: Tensor,
        comm: Comm,
        weights: Tensor | None = None,
        *,
        ids: Tensor | None = None,
    ) -> Partition:
        """Divide the atoms so that each rank's have about the same sum of `weights` (n,), by default 1 each.

        `positions` (n, 3) Å and `batch` (n,) are this rank's, `cell` (B, 3, 3) Å and `pbc` (B, 3) all systems'. `ids` (n,):
        the global ids of these atoms; by default, all ranks' rows are numbered in the order of ranks.
        Every rank must call it.
        """
        ...

    def build_neighbour_list(
        self, positions: Tensor, batch: Tensor, cell: Tensor, pbc: Tensor, cutoff: float, comm: Comm, depth: int = 1
    ) -> Edges:
        """All edges within `cutoff` Å of this rank's atoms (n, 3) Å, and the routing of the ghosts that they name.

        For `depth` 2 it adds all edges of the atoms that send to them, and so on. Every rank must call it.
        """
        ...
