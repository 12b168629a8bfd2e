"""Replaces how JAX hands convolutions to the CPU compiler.

This file alone looks into JAX's tables of lowering rules, which are not public. Where
they are not as expected, nothing is changed. A rule of ours does what JAX's own does
unless the thread that lowers a program asks for the other form.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from armillary.xla._convolutions import Form, choose_form, convolve, example_axes
from armillary.xla._max_pool import is_supported, scatter_to_winners

Split: TypeAlias = Callable[[tuple[int, ...], int | None], NamedSharding]
"""From a shape, and its axis of examples if it has one, to where such an array lies."""

PLATFORM = "cpu"
"""The platform whose rules are replaced."""

_OTHER_PLATFORMS = ("cuda", "rocm", "tpu")
"""Platforms where convolutions are told how to be divided, and no more."""

CONVOLUTION_PARAMETERS = frozenset(
    {
        "batch_group_count",
        "dimension_numbers",
        "feature_group_count",
        "lhs_dilation",
        "out_sharding",
        "padding",
        "precision",
        "preferred_element_type",
        "rhs_dilation",
        "window_strides",
    }
)
"""The parameters of a convolution, all of which a rule must heed."""

POOL_PARAMETERS = frozenset(
    {"padding", "select_prim", "window_dimensions", "window_strides"}
)
"""The parameters of the gradient of max-pooling."""


_wants_canonical: Any = jax.make_user_context(None)
"""Whether this thread lowers canonically; JAX keeps programs of each kind apart.

`None` is what holds for the whole process.
"""

_is_everywhere = False
"""Whether the whole process lowers canonically."""

_split: Any = jax.make_user_context(None)
"""How this thread's programs divide examples; `None` where nobody divides them."""

_INSTALLING = threading.Lock()
_UNKNOWN_TABLES = (AttributeError, KeyError, TypeError, ValueError)


def use_canonical_convolutions() -> bool:
    """Makes convolutions and max-pooling fast on CPUs in your own `jax.jit` programs.

    Armillary's programs have them so without this call, and need it no more. Here XLA's
    CPU compiler optimizes convolutions only outside of loops, and is slow everywhere
    with the gradient of max-pooling and with convolutions in groups. From this call on,
    JAX writes them in a form that the compiler runs fast wherever they stand. Models
    and results stay what they are, up to rounding.

    It is a setting of the whole process. Only programs for CPUs change, and those that
    are compiled already are compiled again at their next call. A second call does
    nothing.

    It replaces rules that JAX keeps private. If this version of JAX keeps them in
    another way, the call changes nothing, warns and returns `False`.

    Returns:
        Whether convolutions are compiled in this form from now on.
    """
    try:
        _install_rules()
    except _UNKNOWN_TABLES as error:
        warnings.warn(
            f"`use_canonical_convolutions` changed nothing: JAX {jax.__version__} "
            f"keeps its lowering rules in a way that is not known here ({error!r}). "
            "Programs are correct, and steps with convolutions are slow on CPUs. Use "
            "a version of JAX that Armillary names in its dependencies, or remove the "
            "call.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    global _is_everywhere
    if not _is_everywhere:
        _is_everywhere = True
        jax.clear_caches()
    return True


def has_rules() -> bool:
    """Returns whether JAX can be made to lower canonically, and prepares it for that.

    Until `canonically` or `use_canonical_convolutions` asks, its own rules do the work.
    """
    try:
        _install_rules()
    except _UNKNOWN_TABLES:
        return False
    return True


class Lowered:
    """A program that is lowered in another way than JAX's, whenever it is.

    Other programs are not, neither of this thread nor of others that lower meanwhile.

    Args:
        compiled: What `jax.jit` returned.
        context: Makes the context in which the program is lowered so: `canonically`, or
            `partitioned` with a split.
    """

    def __init__(
        self, compiled: Any, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._compiled, self._context = compiled, context

    def __call__(self, *args: Any) -> Any:
        """Runs the program."""
        with self._context():
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Returns what the compiler gets."""
        with self._context():
            return self._compiled.lower(*args)


def canonically() -> AbstractContextManager[Any]:
    """Lowers canonically what JAX lowers meanwhile, in this thread."""
    return _wants_canonical(True)


@contextlib.contextmanager
def partitioned(split: Split) -> Iterator[None]:
    """Has XLA divide convolutions that JAX lowers meanwhile by examples only.

    Left to itself, it may divide them by places of the image, by features, or where
    devices get unequal shares; gradients are then wrong (JAX 0.10.2).
    """
    with _split(split), _wants_canonical(False):
        yield


def _install_rules() -> None:
    with _INSTALLING:
        own_convolve = _find_rule(lax.conv_general_dilated_p)
        if isinstance(own_convolve, _ConvolutionRule):
            return
        own_scatter = _find_rule(lax.select_and_scatter_add_p)
        _check_parameters()
        for primitive, rule in (
            (lax.conv_general_dilated_p, _ConvolutionRule(own_convolve)),
            (lax.select_and_scatter_add_p, _PoolRule(own_scatter)),
        ):
            mlir.register_lowering(primitive, rule, platform=PLATFORM)
        for platform in _OTHER_PLATFORMS:
            own = _find_rule(lax.conv_general_dilated_p, platform)
            rule = _ConvolutionRule(own, has_canonical=False)
            mlir.register_lowering(lax.conv_general_dilated_p, rule, platform=platform)


class _ConvolutionRule:
    """Lowers a convolution in order where that is asked for, else as JAX does."""

    def __init__(self, own: Callable[..., Any], *, has_canonical: bool = True) -> None:
        self._own, self._has_canonical = own, has_canonical

    def __call__(self, context: Any, lhs: Any, rhs: Any, **parameters: Any) -> Any:
        split = _split.value
        if split is not None and not _is_manual(context):
            return self._divide(split, context, lhs, rhs, parameters)
        if not (self._has_canonical and _is_canonical()):
            return self._own(context, lhs, rhs, **parameters)
        form = choose_form(parameters, *context.avals_in, *context.avals_out)
        # JAX makes three real convolutions of a complex one, which come here again.
        is_complex = jnp.issubdtype(context.avals_out[0].dtype, jnp.complexfloating)
        if form is Form.UNCHANGED or is_complex:
            return self._own(context, lhs, rhs, **parameters)
        lower = mlir.lower_fun(partial(convolve, form=form), multiple_results=False)
        return lower(context, lhs, rhs, **parameters)

    def _divide(
        self, split: Split, context: Any, lhs: Any, rhs: Any, parameters: Any
    ) -> Any:
        avals = *context.avals_in, *context.avals_out
        axes = example_axes(parameters)

        def constrain(value: Any, aval: Any, axis: int | None) -> Any:
            sharding = split(aval.shape, axis)
            lower = mlir.lower_fun(
                lambda array: lax.with_sharding_constraint(array, sharding),
                multiple_results=False,
            )
            (value,) = lower(context.replace(avals_in=[aval], avals_out=[aval]), value)
            return value

        lhs, rhs = map(constrain, (lhs, rhs), avals, axes)
        (out,) = self._own(context, lhs, rhs, **parameters)
        return [constrain(out, avals[-1], axes[-1])]


class _PoolRule:
    """Lowers the gradient of max-pooling without a scatter, as `_ConvolutionRule`."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(
        self, context: Any, source: Any, operand: Any, **parameters: Any
    ) -> Any:
        is_ours = _is_canonical() and is_supported(parameters, *context.avals_in)
        if not is_ours:
            return self._own(context, source, operand, **parameters)
        lower = mlir.lower_fun(scatter_to_winners, multiple_results=False)
        return lower(context, source, operand, **parameters)


def _is_canonical() -> bool:
    wanted = _wants_canonical.value
    return _is_everywhere if wanted is None else wanted


def _is_manual(context: Any) -> bool:
    """Returns whether the code is that of one device, as inside `shard_map`."""
    axis_context = context.module_context.axis_context
    return bool(getattr(axis_context, "manual_axes", ()))


def _find_rule(primitive: Any, platform: str = PLATFORM) -> Callable[..., Any]:
    entry = mlir._platform_specific_lowerings[platform].get(primitive)
    rule = (entry or mlir._lowerings[primitive]).rule
    if not callable(rule):
        raise TypeError(f"the rule of {primitive} is {rule!r}")
    return rule


def _check_parameters() -> None:
    """Checks that the primitives have the parameters that are known here.

    Raises:
        ValueError: If one has others, or if gradients do not use it.
    """
    value = jax.ShapeDtypeStruct((1, 1, 2), np.float32)

    def compute(array: jax.Array) -> jax.Array:
        array = lax.conv_general_dilated(array, array, (1,), "SAME")
        return lax.reduce_window(
            array, -np.inf, lax.max, (1, 1, 2), (1, 1, 2), "VALID"
        ).sum()

    program = jax.make_jaxpr(jax.grad(compute))(value)
    known = {
        lax.conv_general_dilated_p: CONVOLUTION_PARAMETERS,
        lax.select_and_scatter_add_p: POOL_PARAMETERS,
    }
    missing = set(known)
    for equation in program.eqns:
        expected = known.get(equation.primitive)
        if expected is None:
            continue
        missing.discard(equation.primitive)
        if set(equation.params) != expected:
            raise ValueError(
                f"{equation.primitive} has the parameters {sorted(equation.params)}"
            )
    if missing:
        raise ValueError(f"gradients do not use {sorted(map(str, missing))}")
