"""Contractions: which dim of the result enumerates the rows of an argument, and whether the rows are summed over.

In `row_dim_after_*(s, *arguments)`, `s` is the argument whose rows are followed. In `*_contracts_rows(*arguments)`, the
answer is True where the operation sums over the rows of its arguments, each with the same row of the others: then the
whole result is the sum over ranks.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard

from torch import Tensor

from alchemi_shardtensor.tag import EDGE, OWNED, TaggedTensor


def row_dim_after_einsum(s: TaggedTensor, equation: str, *operands: Any) -> int | None:
    """Return the output's dim with the letter of the rows; None where it is summed, repeated, or differs between terms."""
    terms, output = _terms(equation, operands)
    found = set()
    for letters, x in terms:
        if x is s:
            letter = letters[s.row_dim]
            found.add(output.index(letter) if output.count(letter) == letters.count(letter) == 1 else None)
    return found.pop() if len(found) == 1 else None


def row_dim_after_linear(s: TaggedTensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> int | None:
    """Rows of the input keep their dim, unless it is the last."""
    return s.row_dim if s is input and s is not weight and s is not bias and s.row_dim < s.ndim - 1 else None


def row_dim_after_matmul(s: TaggedTensor, a: Tensor, b: Tensor) -> int | None:
    """Rows are not contracted before the last dim of a, in the last dim of b, and before the last two of b."""
    ndim = max(a.ndim, b.ndim) - (a.ndim == 1) - (b.ndim == 1)
    if a is b or (s is a and s.row_dim == a.ndim - 1):
        return None
    if s is a:
        return ndim - a.ndim + s.row_dim + (b.ndim == 1)
    from_end = b.ndim - s.row_dim
    return None if b.ndim == 1 or from_end == 2 else ndim - from_end + (a.ndim == 1 and from_end > 2)


def row_dim_after_rmatmul(s: TaggedTensor, b: Tensor, a: Tensor) -> int | None:
    """The same as a @ b, with b first."""
    return row_dim_after_matmul(s, a, b)


def row_dim_after_tensordot(s: TaggedTensor, a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> int | None:
    """The result has the dims of a that are not contracted, then those of b."""
    in_a, in_b = _contracted_dims(a, b, dims)
    gone, before = (in_a, 0) if s is a else (in_b, a.ndim - len(in_a))
    return None if a is b or s.row_dim in gone else before + s.row_dim - sum(d < s.row_dim for d in gone)


def row_dim_after_addmm(s: TaggedTensor, bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> int | None:
    """Rows of a are rows of bias + a @ b."""
    return 0 if s is a and s is not b and s is not bias and s.row_dim == 0 else None


def einsum_contracts_rows(equation: str, *operands: Any) -> bool:
    """Every term with the letter of the rows has this rank's rows there, and the output does not have the letter."""
    terms, output = _terms(equation, operands)
    rows = {letters[x.row_dim] for letters, x in terms if _has_each_row_once(x)}
    row = rows.pop() if len(rows) == 1 else "..."
    named = [(letters, x) for letters, x in terms if row in letters]
    return (
        bool(named)
        and row not in output
        and all(_has_each_row_once(x) and letters.index(row) == x.row_dim and letters.count(row) == 1 for letters, x in named)
    )


def matmul_contracts_rows(a: Tensor, b: Tensor, *_: Any, **__: Any) -> bool:
    """Rows are the last dim of a, and the last but one of b or its only one."""
    if not (_has_each_row_once(a) and _has_each_row_once(b)):
        return False
    return a.row_dim == a.ndim - 1 and b.row_dim == max(b.ndim - 2, 0)


def rmatmul_contracts_rows(b: Tensor, a: Tensor) -> bool:
    """The same as a @ b, with b first."""
    return matmul_contracts_rows(a, b)


def dot_contracts_rows(a: Tensor, b: Tensor, *_: Any, **__: Any) -> bool:
    """Both vectors have this rank's rows."""
    return _has_each_row_once(a) and _has_each_row_once(b)


def tensordot_contracts_rows(a: Tensor, b: Tensor, dims: Any = 2, *_: Any, **__: Any) -> bool:
    """The dims of rows are contracted with each other."""
    if not (_has_each_row_once(a) and _has_each_row_once(b)):
        return False
    return (a.row_dim, b.row_dim) in zip(*_contracted_dims(a, b, dims), strict=True)


def never_contracts_rows(*_: Any, **__: Any) -> bool:
    """All rows meet all rows, or rows meet features."""
    return False


def _contracted_dims(a: Tensor, b: Tensor, dims: Any) -> list[list[int]]:
    """The dims of a, and those of b, that a tensordot sums over, in pairs."""
    in_a, in_b = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    return [[d % t.ndim for d in ([ds] if isinstance(ds, int) else ds)] for t, ds in ((a, in_a), (b, in_b))]


def _has_each_row_once(x: Any) -> TypeGuard[TaggedTensor]:
    """Over all ranks, every row is there once: no ghosts, and not the same rows on every rank."""
    return isinstance(x, TaggedTensor) and x.rows in (OWNED, EDGE)


def _terms(equation: str, operands: Sequence[Any]) -> tuple[list[tuple[list[str], Tensor]], list[str]]:
    """Each operand with its dims' letters, and the output's letters; unwritten, those that occur once, in order."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        bare = inputs.replace(",", "").replace("...", "")
        output = "..." * ("..." in inputs) + "".join(sorted(c for c in set(bare) if bare.count(c) == 1))
    listed = operands[0] if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    pairs = list(zip(inputs.split(","), listed, strict=True))
    dots = max(x.ndim - len(term.replace("...", "")) for term, x in pairs)
    width = len(output.replace("...", "")) + (dots if "..." in output else 0)
    return [(_letters(term, x.ndim, dots), x) for term, x in pairs], _letters(output, width, dots)


def _letters(term: str, ndim: int, dots: int) -> list[str]:
    """One name for each dim of a term of an einsum; the dims of `...` are named from the last."""
    before, ellipsis, after = term.partition("...")
    n = ndim - len(before) - len(after) if ellipsis else 0
    return [*before, *(f".{k}" for k in range(dots - n, dots)), *after]
