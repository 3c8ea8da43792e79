"""Random graphs, shared out over ranks by hand: an independent way to a routing."""

import torch

from alchemi_shardtensor import (
    BOTH,
    EDGE,
    GLOBAL,
    NODES,
    OWNED,
    PADDED,
    STALE,
    SYSTEM,
    SYSTEMS,
    Owners,
    Routing,
    plain,
    shard_of,
    tag,
)
from alchemi_spec import DistributionSpec, GraphParallelPolicy, HaloStoragePolicy, LocalPolicy, ShardedStoragePolicy

UNEVEN = [0] * 20 + [1, 1, 2]
"""Of 23 nodes: rank 0 owns nearly all; rank 3 of four owns nothing."""
LAYOUTS = {
    "owned": HaloStoragePolicy(),
    "padded": HaloStoragePolicy(layout="padded"),
    "sharded": ShardedStoragePolicy(),
    "exchanged": GraphParallelPolicy(collective="exchange"),
    "gathered": GraphParallelPolicy(collective="all_gather"),
    "replicated": GraphParallelPolicy(),
    "local": LocalPolicy(),
}
"""`replicated`: per-node tensors hold all nodes, edges are shared out. `local`: every rank holds everything."""


class RandomGraph:
    """n nodes of `n_systems` systems, random edges, random owners; every rank can see the whole."""

    def __init__(self, comm, n=23, n_edges=90, n_systems=2, seed=0, owners=None, layout="owned", spec=None):
        g = torch.Generator().manual_seed(seed)
        self.comm, self.n, self.n_systems, self.layout = comm, n, n_systems, layout
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

        self.ghosts = ghosts = ghosts_of(comm.rank)
        local = torch.full((n,), -1)
        local[self.mine] = torch.arange(len(self.mine))
        local[ghosts] = len(self.mine) + torch.arange(len(ghosts))
        sent = [g[owner[g] == comm.rank] for g in map(ghosts_of, range(comm.size))]
        self.routing = Routing(
            comm,
            len(self.mine),
            local[torch.cat(sent)],
            tuple(map(len, sent)),
            tuple(int((owner[ghosts] == r).sum()) for r in range(comm.size)),
            owners=Owners.of(self.mine.to(comm.device), comm),
        ).to(comm.device)
        if layout == "local":
            self.routing, self.edges = Routing.without_ghosts(n, comm), torch.arange(n_edges)
        self.shard = shard_of(spec or DistributionSpec(policy=LAYOUTS[layout]), self.routing, n_systems)
        ids = self.edge_index[:, self.edges]
        seen = ids if layout in ("sharded", "local") else local[ids]
        self.local_edge_index = tag(seen.to(comm.device), self.shard, None, NODES, BOTH)
        self.local_batch = self.nodes(self.batch, SYSTEMS)

    def nodes(self, x, points_at=None):
        """Per-node values (n, *F) as this layout's model sees them."""
        if self.layout in ("replicated", "local"):
            return tag(x.to(self.comm.device, copy=True), self.shard, GLOBAL, points_at)
        rows = torch.cat([self.mine, self.ghosts]) if self.layout == "padded" else self.mine
        return tag(x[rows].to(self.comm.device), self.shard, PADDED if self.layout == "padded" else OWNED, points_at)

    def edge(self, x):
        """This rank's share of per-edge values."""
        return tag(x[self.edges].to(self.comm.device), self.shard, SYSTEM if self.layout == "local" else EDGE)

    def owned(self, result):
        """This rank's rows of a per-node result, whatever the layout."""
        assert result.rows in (OWNED, PADDED, STALE, GLOBAL)
        return plain(result).cpu()[self.mine if result.rows is GLOBAL else slice(len(self.mine))]
