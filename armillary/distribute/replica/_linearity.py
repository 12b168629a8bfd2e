"""Classes of the operations on numbers: linear, scaling and curved."""

PRODUCTS = ("mul", "dot_general", "conv_general_dilated")

# Linear in all operands together.
LINEAR = frozenset(
    {"add", "add_any", "sub", "neg", "convert_element_type", "copy", "copy_p", "real"}
    | {"reshape", "squeeze", "broadcast_in_dim", "transpose", "slice", "rev", "imag"}
    | {"concatenate", "pad", "split", "reduce_sum", "cumsum", "stop_gradient", "pvary"}
    | {"reduce_precision", "optimization_barrier", "sharding_constraint", "complex"}
    | {"conj"}
)
# Not linear, but `f(2 * x)` is `2 * f(x)`.
SCALING = frozenset(
    {"abs", "max", "min", "clamp", "reduce_max", "reduce_min", "cummax", "cummin"}
)
# Not linear, and a factor of the operand is not a factor of the result.
CURVED = frozenset(
    {"integer_pow", "pow", "square", "sqrt", "rsqrt", "cbrt", "sign", "nextafter"}
    | {"exp", "exp2", "expm1", "log", "log1p", "logistic", "cumprod", "cumlogsumexp"}
    | {"sin", "cos", "tan", "asin", "acos", "atan", "atan2", "reduce_prod"}
    | {"sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "floor", "ceil", "round"}
    | {"erf", "erfc", "erf_inv", "lgamma", "digamma", "polygamma", "zeta", "rem"}
    | {"bessel_i0e", "bessel_i1e", "igamma", "igammac", "regularized_incomplete_beta"}
)
NONLINEAR = SCALING | CURVED
