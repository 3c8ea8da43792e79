"""Which handlers serve a policy: entry points `alchemi.layouts`, by the policy's kind."""

from dataclasses import replace
from importlib.metadata import entry_points

from alchemi_shardtensor.rules.shard import Dispatcher, Shard
from alchemi_shardtensor.transport import Routing
from alchemi_spec import DistributionSpec, SpecError


def find_layout(spec: DistributionSpec) -> Dispatcher:
    """The table that serves `spec`: its policy's layout, with its operators' adapters in front.

    Raises:
        SpecError: listing the kinds of policies that are served.

    """
    kind = spec.policy.kind
    found = entry_points(group="alchemi.layouts", name=kind)
    if not found:
        served = ", ".join(sorted(entry_points(group="alchemi.layouts").names))
        raise SpecError(f"no layout serves a policy of kind {kind!r}: served are {served}; register one in alchemi.layouts.")
    table: Dispatcher = next(iter(found)).load()(spec)
    return table


def make_shard(spec: DistributionSpec, routing: Routing, n_systems: int, table: Dispatcher) -> Shard:
    """A shard of this routing, as the table's layout uses it. Every rank must call it."""
    collective = table.storage.collective
    return Shard(spec, routing if collective is None else routing.with_collective(collective), n_systems, table)


def shard_of(spec: DistributionSpec, routing: Routing, n_systems: int) -> Shard:
    """The shard of these three: one object, however often it is asked for. Every rank must call it.

    The routing keeps its shards; each has a copy of the routing, so that none is in a cycle of references.
    """
    for shard in routing.shards:
        if (shard.spec, shard.n_systems) == (spec, n_systems):
            return shard  # type: ignore[no-any-return]
    shard = make_shard(spec, replace(routing), n_systems, find_layout(spec))
    routing.shards.append(shard)
    return shard
