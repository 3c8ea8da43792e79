"""A `Comm` over MPI, through mpi4py (extra `mpi`). Importing this module initialises MPI, so nothing does it unasked.

Start ranks with `mpiexec -n 4 python -m mpi4py script.py`: `-m mpi4py` aborts the whole job at an uncaught error or a
non-zero exit of one rank. Without it that rank waits in MPI_Finalize for the others, and they for it, for ever.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from alchemi_shardtensor.transport.comm import Comm
from alchemi_shardtensor.transport.protocol import Reduction

OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


def mpi_comm(communicator: MPI.Intracomm = MPI.COMM_WORLD, device: torch.device | str = "cpu") -> Comm:
    """The ranks of an MPI communicator, which compute on `device` and talk through the host's memory."""
    return Comm(MpiTransport(communicator), torch.device(device))


def local_rank() -> int:
    """The rank's place among those of its machine."""
    neighbours = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    rank = neighbours.rank
    neighbours.Free()
    return rank


@dataclass(frozen=True)
class MpiTransport:
    """The collectives of an MPI communicator. All but reductions move bytes, and so any type."""

    communicator: MPI.Intracomm

    @property
    def rank(self) -> int:
        """The rank's place in the communicator."""
        return self.communicator.rank

    @property
    def size(self) -> int:
        """The ranks of the communicator."""
        return self.communicator.size

    def carrier(self, _: torch.device, /) -> torch.device:
        """The host: nothing tells whether an MPI library can read a GPU's memory."""
        return torch.device("cpu")

    def all_to_all(self, out: Tensor, rows: Tensor, receive: Sequence[int], send: Sequence[int]) -> None:
        """Counted in rows, not bytes, which may be more than the 2^31 that MPI libraries before MPI-4 can count."""
        row = MPI.BYTE.Create_contiguous(rows.shape[1:].numel() * rows.itemsize).Commit()
        # lists: mpi4py takes a tuple of two for (counts, displacements)
        self.communicator.Alltoallv([_bytes(rows), list(send), row], [_bytes(out), list(receive), row])
        row.Free()

    def all_gather(self, out: Tensor, t: Tensor) -> None:
        """One tensor of each rank on every rank."""
        self.communicator.Allgather(_bytes(t), _bytes(out))

    def all_reduce(self, t: Tensor, op: Reduction) -> None:
        """In the tensor's own type; MPI has no type for floats under 32 bits, which are reduced in float32."""
        wide = t.float() if t.is_floating_point() and t.itemsize < 4 else t
        self.communicator.Allreduce(MPI.IN_PLACE, wide.numpy(), OPERATIONS[op])
        t.copy_(wide)

    def broadcast(self, t: Tensor, source: int) -> None:
        """From the communicator's rank `source`."""
        self.communicator.Bcast(_bytes(t), source)


def _bytes(t: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor."""
    return t.reshape(-1).view(torch.uint8).numpy()
