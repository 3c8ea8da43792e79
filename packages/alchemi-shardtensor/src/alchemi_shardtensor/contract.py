"""Where a contraction puts the rows of its arguments, and whether it sums over them."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from alchemi_shardtensor.tag import EDGE, OWNED, TaggedTensor

CONTRACTIONS = frozenset(
    "einsum matmul mm bmm mv dot vdot inner outer linear bilinear tensordot __matmul__ __rmatmul__ cdist".split()
)
"""Operations that sum over a dim that two tensors share, or pair all rows with all."""


def einsummed(s: TaggedTensor, equation: str, *operands: Any) -> int | None:
    """Where the letter of the rows stands in the output; None where it is summed, repeated, or differs between terms."""
    terms, output = _terms(equation, operands)
    places = set()
    for letters, x in terms:
        if x is s:
            letter = letters[s.row_dim]
            places.add(output.index(letter) if output.count(letter) == letters.count(letter) == 1 else None)
    return places.pop() if len(places) == 1 else None


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


def linear(s: TaggedTensor, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> int | None:
    """Rows of the input, unless they are along its last dim."""
    return s.row_dim if s is input and s is not weight and s is not bias and s.row_dim < s.ndim - 1 else None


def multiplied(s: TaggedTensor, a: Tensor, b: Tensor) -> int | None:
    """Rows that are not contracted: of a in front of its last dim, of b in its last or before its last two."""
    ndim = max(a.ndim, b.ndim) - (a.ndim == 1) - (b.ndim == 1)
    if a is b or (s is a and s.row_dim == a.ndim - 1):
        return None
    if s is a:
        return ndim - a.ndim + s.row_dim + (b.ndim == 1)
    from_end = b.ndim - s.row_dim
    return None if b.ndim == 1 or from_end == 2 else ndim - from_end + (a.ndim == 1 and from_end > 2)


def tensordotted(s: TaggedTensor, a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> int | None:
    """Of a what is left, then of b what is left."""
    in_a, in_b = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    gone_a, gone_b = ({d % t.ndim for d in ([ds] if isinstance(ds, int) else ds)} for t, ds in ((a, in_a), (b, in_b)))
    gone, before = (gone_a, 0) if s is a else (gone_b, a.ndim - len(gone_a))
    return None if a is b or s.row_dim in gone else before + s.row_dim - sum(d < s.row_dim for d in gone)


def contracts_rows(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """The operation sums over the rows of its shares, each with each, so that the whole is the sum over ranks."""
    if name == "einsum":
        terms, output = _terms(args[0], args[1:])
        rows = {letters[x.row_dim] for letters, x in terms if _is_whole_share(x)}  # type: ignore[attr-defined]
        row = rows.pop() if len(rows) == 1 else "..."
        named = [(letters, x) for letters, x in terms if row in letters]
        return (
            bool(named)
            and row not in output
            and all(_is_whole_share(x) and letters.index(row) == x.row_dim and letters.count(row) == 1 for letters, x in named)  # type: ignore[attr-defined]
        )
    a, b = args[1::-1] if name == "__rmatmul__" else args[:2]
    if not (_is_whole_share(a) and _is_whole_share(b)):
        return False
    if name in ("dot", "vdot"):
        return True
    if name == "tensordot":
        return _pairs_rows(a, b, args[2] if len(args) > 2 else kwargs.get("dims", 2))
    return name in _PRODUCTS and a.row_dim == a.ndim - 1 and b.row_dim == max(b.ndim - 2, 0)


_PRODUCTS = frozenset("matmul mm bmm mv __matmul__ __rmatmul__".split())


def _is_whole_share(x: Any) -> bool:
    return isinstance(x, TaggedTensor) and x.rows in (OWNED, EDGE)


def _pairs_rows(a: TaggedTensor, b: TaggedTensor, dims: Any) -> bool:
    in_a, in_b = (range(a.ndim - dims, a.ndim), range(dims)) if isinstance(dims, int) else dims
    pairs = zip([in_a] if isinstance(in_a, int) else in_a, [in_b] if isinstance(in_b, int) else in_b, strict=True)
    return (a.row_dim, b.row_dim) in {(d % a.ndim, e % b.ndim) for d, e in pairs}
