"""Which handlers serve a policy: entry points `alchemi.layouts`, ours and anybody's, by the policy's kind."""

from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from alchemi_spec import DistributionSpec, SpecError

if TYPE_CHECKING:
    from alchemi_shardtensor.table import HandlerTable


def find_layout(spec: DistributionSpec) -> "HandlerTable":
    """The table that serves `spec`: its policy's layout, with its operators' adapters in front.

    Raises:
        SpecError: listing the kinds of policies that are served.

    """
    kind = spec.policy.kind
    found = entry_points(group="alchemi.layouts", name=kind)
    if not found:
        served = ", ".join(sorted(entry_points(group="alchemi.layouts").names))
        raise SpecError(f"no layout serves a policy of kind {kind!r}: served are {served}; register one in alchemi.layouts.")
    table: HandlerTable = next(iter(found)).load()(spec)
    return table
