"""Random graphs, shared out over ranks by hand: an independent way to a routing."""

import torch

from alchemi_shardtensor import BOTH, EDGE, NODES, OWNED, OWNED_LAYOUT, SYSTEMS, Routing, Shard, tag
from alchemi_spec import SPEC_MPNN_HALO


class RandomGraph:
    """n nodes of `n_systems` systems, random edges, uneven random owners; every rank can see the whole."""

    def __init__(self, comm, n=23, n_edges=90, n_systems=2, seed=0, owners=None):
        g = torch.Generator().manual_seed(seed)
        self.comm, self.n, self.n_systems = comm, n, n_systems
        self.edge_index = torch.randint(0, n, (2, n_edges), generator=g)
        self.batch = torch.arange(n) * n_systems // n
        owner = torch.randint(0, comm.size, (n,), generator=g) if owners is None else torch.tensor(owners) % comm.size
        sender, receiver = self.edge_index
        self.mine = (owner == comm.rank).nonzero().flatten()
        self.edges = (owner[receiver] == comm.rank).nonzero().flatten()

        def ghosts_of(rank):
            read = torch.unique(sender[owner[receiver] == rank])
            read = read[owner[read] != rank]
            return read[torch.argsort(owner[read], stable=True)]

        ghosts = ghosts_of(comm.rank)
        local = torch.full((n,), -1)
        local[self.mine] = torch.arange(len(self.mine))
        local[ghosts] = len(self.mine) + torch.arange(len(ghosts))
        sent = [g[owner[g] == comm.rank] for g in map(ghosts_of, range(comm.size))]
        self.ghosts = ghosts
        self.routing = Routing(
            comm,
            len(self.mine),
            local[torch.cat(sent)],
            tuple(map(len, sent)),
            tuple(int((owner[ghosts] == r).sum()) for r in range(comm.size)),
        )
        self.shard = Shard(SPEC_MPNN_HALO, self.routing, n_systems, OWNED_LAYOUT)
        self.local_edge_index = tag(local[self.edge_index[:, self.edges]], self.shard, None, NODES, BOTH)
        self.local_batch = tag(self.batch[self.mine], self.shard, OWNED, SYSTEMS)

    def owned(self, x):
        """This rank's share of per-node values."""
        return tag(x[self.mine].clone(), self.shard, OWNED)

    def edge(self, x):
        """This rank's share of per-edge values."""
        return tag(x[self.edges].clone(), self.shard, EDGE)
