"""The operations of which every element of the result is made of the elements in its place, and of nothing else."""

_OPERATORS = (
    "add sub mul div truediv floordiv mod pow and or xor lshift rshift eq ne lt le gt ge neg pos abs invert".split()  # __x__
)
_FUNCTIONS = (
    "add sub mul div floor_divide true_divide remainder fmod pow rsub float_power copysign nextafter hypot ldexp xlogy "
    "eq ne lt le gt ge isclose isfinite isinf isnan isneginf isposinf signbit maximum minimum fmax fmin "
    "abs absolute neg negative positive sign sgn square sqrt rsqrt reciprocal exp exp2 expm1 log log2 log10 log1p "
    "sin cos tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh atan2 arctan2 sinc "
    "erf erfc erfinv lgamma digamma polygamma ceil floor round trunc frac fix sigmoid logit "
    "logical_not logical_and logical_or logical_xor bitwise_not bitwise_and bitwise_or bitwise_xor "
    "deg2rad rad2deg angle real imag conj logaddexp logaddexp2 nan_to_num heaviside "
    "clamp clamp_min clamp_max clip lerp addcmul addcdiv where masked_fill "
    "relu relu6 leaky_relu elu selu celu gelu silu mish softplus softsign hardtanh hardswish hardsigmoid logsigmoid tanhshrink "
    "softshrink hardshrink threshold dropout alpha_dropout prelu rrelu "
    "clone detach contiguous type float double half bfloat16 long int short bool cpu cuda requires_grad copy data grad "
    "complex polar zeros_like ones_like full_like empty_like rand_like randn_like zero fill"
).split()
_SPECIAL = "erf erfc erfcx expm1 exp2 log1p sinc bessel_j0 bessel_j1 i0 i1 i0e i1e xlogy gammaln".split()
POINTWISE = frozenset(
    [
        *_FUNCTIONS,
        *(f"special_{name}" for name in _SPECIAL),
        *(f"__{prefix}{name}__" for name in _OPERATORS for prefix in ("", "r", "i")),
    ]
)
"""Names without the underscore of an in-place form."""
