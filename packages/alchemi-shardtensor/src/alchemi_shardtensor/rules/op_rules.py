"""The row of one operation in the table of operations, and constructors of the usual kinds of rows."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alchemi_shardtensor.rules.arguments import Signature, signature
from alchemi_shardtensor.rules.contractions import never_contracts_rows
from alchemi_shardtensor.rules.row_dims import no_row_dim, row_dim_unless_along

NEVER, ALWAYS, OF_ONE_TENSOR, OF_TENSORS = range(0), range(sys.maxsize), range(1, 2), range(2, sys.maxsize)
"""For `OpRule.linear`: x * 2 is linear and x * y is not; x + y is linear and x + 2 is not."""

_REDUCTION = "input dim keepdim"
_REDUCTION_SIGNATURE = signature(_REDUCTION)


@dataclass(frozen=True, slots=True)
class OpRule:
    """How a tag goes through one operation."""

    arguments: Signature = _REDUCTION_SIGNATURE
    """The names of its positional arguments. Handlers take the arguments by these names."""
    row_dim: Callable[..., int | None] | None = None
    """The row dim rule: (source, *arguments) -> the dim of the result that enumerates the source's rows, or None."""
    broadcasts: bool = False
    """Its tensors are broadcast against each other. The row dim is found by aligning their last dims."""
    pointwise: bool = False
    """Every element of the result depends only on the elements at the same index."""
    reduces: bool = False
    """The dims named `dim`, or all, are reduced."""
    contracts_rows: Callable[..., bool] | None = None
    """(*arguments) -> whether it sums over the rows of its arguments. None if the operation is no contraction."""
    linear: range = NEVER
    """With how many tensors among its arguments it is linear, so that ranks may be summed before or after it."""
    keeps_index: bool = False
    """Integers of the result are values of the arguments, so an index still points."""
    keeps_end: bool = False
    """The two rows of an edge_index stay in place. An index of one end of the edges keeps it without this."""
    first_argument_only: bool = False
    """The other arguments lend only a type or a shape."""
    second_lends_rows: bool = False
    """If the first argument has no rows of this rank, the result has the rows of the second."""
    indexes: bool = False
    """The other arguments select elements of the first. The result has the rows of a tagged index."""
    joins: bool = False
    """Several tensors are joined into one."""
    numbers_rows: bool = False
    """The values of the result are numbers of this rank's rows. For `where`: if it is called with a condition alone."""
    creates: bool = False
    """The result is a new tensor, with no value and no dim from the arguments. It stays untagged."""
    in_place_reshapes: bool = False
    """The in-place form changes the shape of its argument."""

    name: str = ""
    """Set by `rule_of`: the operation, without the underscore of an in-place form; "" for a scripted module."""
    in_place: bool = False
    """Set by `rule_of`: this is the in-place form."""
    writes: bool = False
    """Set by `rule_of`: this form changes its first argument."""
    opaque: bool = False
    """Set by `rule_of`: it may gather or add inside, where alchemi cannot see it."""


def pointwise(**fields: Any) -> OpRule:
    """Make the row of an operation that treats every element alone."""
    return OpRule(pointwise=True, broadcasts=True, **fields)


def reduces(arguments: str = _REDUCTION, **fields: Any) -> OpRule:
    """Make the row of a reduction."""
    return OpRule(signature(arguments), reduces=True, **fields)


def rearranges(row_dim: Callable[..., int | None], arguments: str = _REDUCTION, **fields: Any) -> OpRule:
    """Make the row of an operation with a row dim rule of its own."""
    return OpRule(signature(arguments), row_dim, **fields)


def along_one_dim(arguments: str = _REDUCTION, **fields: Any) -> OpRule:
    """Make the row of an operation along one dim that leaves the others as they are."""
    return OpRule(signature(arguments), row_dim_unless_along(signature(arguments)), **fields)


def contracts(row_dim: Callable[..., int | None] = no_row_dim, rows: Callable[..., bool] = never_contracts_rows) -> OpRule:
    """Make the row of an operation that sums over a dim of two tensors, or pairs all rows with all."""
    return OpRule(row_dim=row_dim, contracts_rows=rows)


def takes(arguments: str, **fields: Any) -> OpRule:
    """Make the row of an operation of which only the arguments are known."""
    return OpRule(signature(arguments), **fields)
