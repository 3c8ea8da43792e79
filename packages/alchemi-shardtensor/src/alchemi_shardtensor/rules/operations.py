"""The table of operations: what tag propagation knows of each by its name, one row an operation.

An operation that is not listed gives a result whose rows are lost. To add one, write a line into `_ROWS`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket

from alchemi_shardtensor.rules.arguments import argument_names, base_name, has_schema, signature
from alchemi_shardtensor.rules.contractions import (
    dot_contracts_rows,
    einsum_contracts_rows,
    matmul_contracts_rows,
    rmatmul_contracts_rows,
    row_dim_after_addmm,
    row_dim_after_einsum,
    row_dim_after_linear,
    row_dim_after_matmul,
    row_dim_after_rmatmul,
    row_dim_after_tensordot,
    tensordot_contracts_rows,
)
from alchemi_shardtensor.rules.op_rules import (
    ALWAYS,
    OF_ONE_TENSOR,
    OF_TENSORS,
    OpRule,
    along_one_dim,
    contracts,
    pointwise,
    rearranges,
    reduces,
    takes,
)
from alchemi_shardtensor.rules.row_dims import (
    first_dim,
    row_dim_after_cat,
    row_dim_after_cross,
    row_dim_after_diff,
    row_dim_after_embedding,
    row_dim_after_expand,
    row_dim_after_expand_as,
    row_dim_after_flatten,
    row_dim_after_flip,
    row_dim_after_hstack,
    row_dim_after_index_select,
    row_dim_after_indexing,
    row_dim_after_layer_norm,
    row_dim_after_matrix_transpose,
    row_dim_after_movedim,
    row_dim_after_pad,
    row_dim_after_permute,
    row_dim_after_repeat_interleave,
    row_dim_after_reversing_dims,
    row_dim_after_roll,
    row_dim_after_select,
    row_dim_after_split,
    row_dim_after_squeeze,
    row_dim_after_transpose,
    row_dim_after_unbind,
    row_dim_after_unflatten,
    row_dim_after_unsqueeze,
    row_dim_after_view,
    row_dim_after_view_as,
    row_dim_before_last,
    row_dim_of_first_argument,
    row_dim_unless_dim,
    same_row_dim,
)

_ROWS: list[tuple[str, OpRule]] = [
    # one element at a time
    (
        """__abs__ __and__ __div__ __eq__ __floordiv__ __ge__ __gt__ __iadd__ __iand__ __idiv__ __ifloordiv__ __ilshift__
        __imod__ __imul__ __invert__ __ior__ __ipow__ __irshift__ __isub__ __itruediv__ __ixor__ __le__ __lshift__ __lt__
        __mod__ __ne__ __or__ __pos__ __pow__ __rand__ __rdiv__ __rfloordiv__ __rlshift__ __rmod__ __ror__ __rpow__
        __rrshift__ __rshift__ __rsub__ __rtruediv__ __rxor__ __xor__""",
        pointwise(),
    ),
    (
        """abs absolute acos acosh addcdiv addcmul angle arccos arcsin arctan arctan2 asin asinh atan atan2 atanh bitwise_and
        bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip complex conj copysign cos cosh deg2rad digamma
        eq erf erfc erfinv exp exp2 expm1 fix float_power floor floor_divide fmax fmin fmod frac ge gt heaviside hypot imag
        isclose isfinite isinf isnan isneginf isposinf ldexp le lerp lgamma log log10 log1p log2 logaddexp logaddexp2
        logical_and logical_not logical_or logical_xor logit lt masked_fill maximum minimum nan_to_num ne negative nextafter
        polar polygamma positive pow rad2deg real reciprocal remainder round rsqrt rsub sgn sigmoid sign signbit sin sinc
        sinh sqrt square tan tanh true_divide trunc xlogy""",
        pointwise(),
    ),
    (
        """special_bessel_j0 special_bessel_j1 special_erf special_erfc special_erfcx special_exp2 special_expm1
        special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_sinc special_xlogy""",
        pointwise(),
    ),
    (
        """alpha_dropout celu dropout elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish prelu relu
        relu6 rrelu selu silu softplus softshrink softsign tanhshrink threshold""",
        pointwise(),
    ),
    ("empty_like fill full_like ones_like rand_like randn_like requires_grad zero", pointwise()),
    ("bfloat16 bool half short", pointwise()),
    ("__neg__ data double float neg zeros_like", pointwise(linear=ALWAYS)),
    ("__mul__ __rmul__ __truediv__ div mul", pointwise(linear=OF_ONE_TENSOR)),
    ("__add__ __radd__ __sub__ add sub", pointwise(linear=OF_TENSORS)),
    ("clone contiguous detach", pointwise(keeps_index=True, keeps_end=True, linear=ALWAYS)),
    ("cpu cuda int long", pointwise(keeps_index=True, keeps_end=True)),
    ("copy type", pointwise(keeps_index=True)),
    ("where", pointwise(keeps_index=True, numbers_rows=True)),
    # the attribute of a tensor, and torch.autograd.grad
    ("grad", pointwise(arguments=signature("outputs inputs grad_outputs retain_graph create_graph"), linear=ALWAYS)),
    # reductions
    ("all amax amin aminmax any argmax argmin count_nonzero logsumexp mean median mode", reduces()),
    ("nanmean nanmedian nansum prod", reduces()),
    ("sum", reduces(linear=ALWAYS)),
    ("max min", reduces(broadcasts=True)),
    ("std std_mean var var_mean", reduces("input dim unbiased keepdim")),
    ("linalg_norm linalg_vector_norm norm", reduces("input ord dim keepdim")),
    # the order of dims
    ("transpose", rearranges(row_dim_after_transpose, keeps_index=True, linear=ALWAYS, in_place_reshapes=True)),
    ("swapaxes swapdims", rearranges(row_dim_after_transpose, keeps_index=True, in_place_reshapes=True)),
    ("moveaxis movedim", rearranges(row_dim_after_movedim, keeps_index=True, in_place_reshapes=True)),
    ("permute", rearranges(row_dim_after_permute, keeps_index=True, linear=ALWAYS)),
    ("T", rearranges(row_dim_after_reversing_dims, keeps_index=True, linear=ALWAYS)),
    ("t", rearranges(row_dim_after_reversing_dims, keeps_index=True, in_place_reshapes=True)),
    ("H", rearranges(row_dim_after_reversing_dims)),
    ("mT", rearranges(row_dim_after_matrix_transpose, keeps_index=True, linear=ALWAYS)),
    ("adjoint mH", rearranges(row_dim_after_matrix_transpose)),
    # shapes
    ("unsqueeze", rearranges(row_dim_after_unsqueeze, keeps_index=True, linear=ALWAYS, in_place_reshapes=True)),
    ("squeeze", rearranges(row_dim_after_squeeze, keeps_index=True, linear=ALWAYS, in_place_reshapes=True)),
    ("view reshape", rearranges(row_dim_after_view, "input *shape", keeps_index=True, linear=ALWAYS)),
    ("view_as reshape_as", rearranges(row_dim_after_view_as, first_argument_only=True)),
    ("flatten", rearranges(row_dim_after_flatten, keeps_index=True, linear=ALWAYS)),
    ("unflatten", rearranges(row_dim_after_unflatten, keeps_index=True)),
    ("broadcast_to expand repeat tile", rearranges(row_dim_after_expand, keeps_index=True)),
    ("expand_as", rearranges(row_dim_after_expand_as, keeps_index=True, first_argument_only=True, second_lends_rows=True)),
    ("view_as_complex", rearranges(row_dim_before_last(1))),
    ("view_as_real", rearranges(row_dim_of_first_argument)),
    ("pad", rearranges(row_dim_after_pad)),
    # types
    ("to", rearranges(same_row_dim, keeps_index=True, keeps_end=True, first_argument_only=True, linear=ALWAYS)),
    ("type_as", rearranges(same_row_dim, first_argument_only=True)),
    ("one_hot", rearranges(same_row_dim)),
    # parts
    ("__getitem__", rearranges(row_dim_after_indexing, "input index", keeps_index=True, linear=ALWAYS, indexes=True)),
    ("__iter__", OpRule(keeps_index=True)),
    ("select", rearranges(row_dim_after_select, "input dim index", keeps_index=True, linear=ALWAYS, indexes=True)),
    ("unbind", rearranges(row_dim_after_unbind, "input dim", keeps_index=True)),
    ("narrow", rearranges(row_dim_unless_dim, keeps_index=True)),
    ("gather", rearranges(row_dim_unless_dim, "input dim index", keeps_index=True)),
    ("index_select", rearranges(row_dim_after_index_select, "input dim index", keeps_index=True)),
    ("embedding", rearranges(row_dim_after_embedding, "input weight")),
    ("masked_select", rearranges(first_dim, keeps_index=True)),
    ("take_along_dim", takes("input index dim", keeps_index=True)),
    ("chunk split", rearranges(row_dim_after_split, keeps_index=True)),
    ("tensor_split", rearranges(row_dim_after_split)),
    ("argwhere nonzero", OpRule(numbers_rows=True)),
    ("unique", takes("input sorted return_inverse return_counts dim", keeps_index=True)),
    ("unique_consecutive", takes("input return_inverse return_counts dim", keeps_index=True)),
    # several tensors in one, or one several times
    ("cat", rearranges(row_dim_after_cat, keeps_index=True, linear=ALWAYS, joins=True)),
    ("concat", rearranges(row_dim_after_cat, keeps_index=True, joins=True)),
    ("stack", rearranges(row_dim_after_unsqueeze, "tensors dim", keeps_index=True, linear=ALWAYS, joins=True)),
    ("hstack", rearranges(row_dim_after_hstack)),
    ("repeat_interleave", rearranges(row_dim_after_repeat_interleave, "input repeats dim", keeps_index=True)),
    # writes
    (
        "index_add index_copy index_fill scatter scatter_add scatter_reduce",
        rearranges(row_dim_unless_dim, "input dim index src reduce"),
    ),
    ("index_reduce", takes("input dim index src reduce")),
    ("__setitem__ index_put", takes("input index src accumulate")),
    # along one dim
    ("cummax cummin cumprod cumsum log_softmax logcumsumexp softmax softmin", along_one_dim()),
    ("sort", along_one_dim("input dim=-1 descending", keeps_index=True)),
    ("argsort", along_one_dim("input dim=-1 descending")),
    ("topk", along_one_dim("input k dim=-1")),
    ("normalize", along_one_dim("input ord dim=1")),
    ("flip", rearranges(row_dim_after_flip, "input *dims", keeps_index=True)),
    ("roll", rearranges(row_dim_after_roll, keeps_index=True)),
    ("diff", rearranges(row_dim_after_diff)),
    ("cross linalg_cross", rearranges(row_dim_after_cross)),
    # contractions
    ("einsum", contracts(row_dim_after_einsum, einsum_contracts_rows)),
    ("matmul mm bmm mv __matmul__", contracts(row_dim_after_matmul, matmul_contracts_rows)),
    ("__rmatmul__", contracts(row_dim_after_rmatmul, rmatmul_contracts_rows)),
    ("dot", contracts(row_dim_after_matmul, dot_contracts_rows)),
    ("vdot", contracts(rows=dot_contracts_rows)),
    ("tensordot", contracts(row_dim_after_tensordot, tensordot_contracts_rows)),
    ("linear", contracts(row_dim_after_linear)),
    ("bilinear cdist inner outer", contracts()),
    ("addmm", rearranges(row_dim_after_addmm)),
    # layers, and matrices in the last two dims
    ("layer_norm rms_norm", rearranges(row_dim_after_layer_norm)),
    ("bucketize conv1d conv2d group_norm instance_norm", rearranges(row_dim_of_first_argument)),
    ("batch_norm", rearranges(row_dim_of_first_argument, "input running_mean running_var weight bias training")),
    ("scaled_dot_product_attention", rearranges(row_dim_before_last(2), "input key value")),
    ("det inverse logdet matrix_exp pinverse slogdet tril triu", rearranges(row_dim_before_last(2))),
    (
        """linalg_cholesky linalg_det linalg_eigh linalg_eigvalsh linalg_inv linalg_matrix_exp linalg_matrix_norm linalg_pinv
        linalg_qr linalg_slogdet linalg_solve linalg_svd linalg_svdvals""",
        rearranges(row_dim_before_last(2)),
    ),
    # only handlers know what these do
    ("backward", takes("input gradient retain_graph create_graph inputs")),
    ("bincount", takes("input weights minlength")),
    ("segment_reduce", takes("input reduce")),
]

OPS: Mapping[str, OpRule] = MappingProxyType({name: rule for names, rule in _ROWS for name in names.split()})
"""The rule of each operation, by its name without the underscore of an in-place form."""

_UNKNOWN, _SCRIPTED = OpRule(), OpRule(broadcasts=True)
"""A scripted module is taken to keep its rows."""
_CREATES = OpRule(creates=True)
"""Of new_zeros and its like, also as overloads of torch.ops such as new_zeros.default."""


@functools.lru_cache(maxsize=4096)
def rule_of(op: Any) -> OpRule:
    """Return what is known of an operation, in the form that is called."""
    full = _name(op)
    name = base_name(full)
    return replace(
        _rule_named(name),
        name=name,
        in_place=name != full,
        writes=name != full or name == "__setitem__",
        opaque=not name or isinstance(op, (OpOverload, OpOverloadPacket)),
    )


def _rule_named(name: str) -> OpRule:
    if name.startswith("new_"):
        return _CREATES
    return OPS.get(name, _UNKNOWN) if name else _SCRIPTED


def _name(op: Any) -> str:
    if isinstance(op, torch.ScriptMethod):
        return ""
    name: str = getattr(op, "__name__", "")
    return op.__self__.__name__ if name == "__get__" else name


Binder = Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any]]


def binder(op: Any) -> Binder:
    """Return what names the arguments of `op`: its schema if it is an operator of torch.ops, else its row in `OPS`."""
    if not has_schema(op):
        return OPS.get(base_name(op.__name__), _UNKNOWN).arguments.bind
    names = argument_names(op)
    return lambda args, kwargs: dict(zip(names, args, strict=False)) | kwargs
