"""Replaces JAX's lowering rules for convolutions, in programs that ask for it.

Only this file reads JAX's tables of lowering rules, which are not public. If they are
not as expected, nothing is changed. A new rule does the same as JAX's own rule unless
the thread that lowers a program asks for another form.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from armillary.xla._convolutions import (
    Form,
    choose_form,
    convolve,
    example_axes,
)
from armillary.xla._pooling import is_supported, scatter_to_winners

Split: TypeAlias = Callable[[tuple[int, ...], int | None], NamedSharding]
"""A function of a shape and its axis of examples, if any, that returns a sharding."""

PLATFORM = "cpu"
"""The platform whose rules are replaced; on others convolutions are only divided."""

_CANONICAL = "canonical"
_current_request: Any = jax.make_user_context(None)
"""The way in which this thread lowers convolutions: `_CANONICAL` or a `Split`.

`None` leaves them to JAX. JAX caches the programs of different values separately.
"""
_INSTALLING = threading.Lock()


def has_rules() -> bool:
    """Installs the rules, and returns whether this release of JAX allows it."""
    try:
        with _INSTALLING:
            _install_rules()
    except (AttributeError, KeyError, TypeError):
        return False
    return True


class Lowered:
    """A function of `jax.jit`, to be lowered in a context such as `canonically()`."""

    def __init__(
        self, compiled: Any, context: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._compiled = compiled
        self._context = context

    def __call__(self, *args: Any) -> Any:
        with self._context():
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        with self._context():
            return self._compiled.lower(*args)


def canonically() -> AbstractContextManager[Any]:
    """Makes JAX lower programs for CPUs canonically, in this thread, meanwhile."""
    return _current_request(_CANONICAL)


def partitioned(split: Split) -> AbstractContextManager[Any]:
    """Makes XLA divide convolutions by examples only, in programs lowered meanwhile.

    Left to itself, XLA may divide them by places of the image, by features, or into
    unequal shares. The gradients are then wrong (JAX 0.10.2).
    """
    return _current_request(split)


def _install_rules() -> None:
    convolution = lax.conv_general_dilated_p
    pool_gradient = lax.select_and_scatter_add_p
    current = _find_rule(convolution, PLATFORM)
    if isinstance(current, _LoweringRule):
        return

    own = _find_rule(pool_gradient, PLATFORM)
    rules = [(pool_gradient, _LoweringRule(_lower_pool, own), PLATFORM)]
    for platform in (PLATFORM, "cuda", "rocm", "tpu"):
        own = _find_rule(convolution, platform)
        rule = _LoweringRule(_lower_convolution, own)
        rules.append((convolution, rule, platform))
    # All rules are found before the first is replaced: a release of JAX without one of
    # them keeps all of its own.
    for primitive, rule, platform in rules:
        mlir.register_lowering(primitive, rule, platform=platform)


def _find_rule(primitive: Any, platform: str) -> Callable[..., Any]:
    """Returns JAX's rule of a platform, or else the rule of all platforms."""
    entry = mlir._platform_specific_lowerings[platform].get(primitive)
    if entry is None:
        entry = mlir._lowerings[primitive]
    rule = entry.rule
    if not callable(rule):
        # `has_rules` catches this error, and nothing is replaced.
        raise TypeError(f"the rule of {primitive} is {rule!r}")
    return rule


class _LoweringRule:
    """Lowers with `ours`, whose first argument is JAX's own rule."""

    def __init__(self, ours: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._ours = ours
        self._own = own

    def __call__(self, context: Any, *operands: Any, **parameters: Any) -> Any:
        return self._ours(self._own, context, *operands, **parameters)


def _lower_convolution(
    own: Callable[..., Any],
    context: Any,
    lhs: Any,
    rhs: Any,
    **parameters: Any,
) -> Any:
    request = _current_request.value
    if request is None:
        return own(context, lhs, rhs, **parameters)
    if request == _CANONICAL:
        return _lower_canonically(own, context, lhs, rhs, parameters)

    # Inside `shard_map`, the code is for one device, so there is nothing to divide.
    is_manual = getattr(context.module_context.axis_context, "manual_axes", ())
    if is_manual:
        return own(context, lhs, rhs, **parameters)
    return _lower_divided(request, own, context, lhs, rhs, parameters)


def _lower_canonically(
    own: Callable[..., Any],
    context: Any,
    lhs: Any,
    rhs: Any,
    parameters: dict[str, Any],
) -> Any:
    lhs_aval, rhs_aval = context.avals_in
    (out_aval,) = context.avals_out
    form = choose_form(parameters, lhs_aval, rhs_aval, out_aval)
    # JAX makes three real convolutions of a complex one, which come here again.
    is_complex = jnp.issubdtype(out_aval.dtype, jnp.complexfloating)
    if form is Form.UNCHANGED or is_complex:
        return own(context, lhs, rhs, **parameters)
    lower = mlir.lower_fun(partial(convolve, form=form), multiple_results=False)
    return lower(context, lhs, rhs, **parameters)


def _lower_divided(
    split: Split,
    own: Callable[..., Any],
    context: Any,
    lhs: Any,
    rhs: Any,
    parameters: dict[str, Any],
) -> Any:
    """Constrains operands and result, so that XLA divides them by examples."""

    def constrain(value: Any, aval: Any, axis: int | None) -> Any:
        sharding = split(aval.shape, axis)
        lower = mlir.lower_fun(
            lambda array: lax.with_sharding_constraint(array, sharding),
            multiple_results=False,
        )
        context_of_value = context.replace(avals_in=[aval], avals_out=[aval])
        (value,) = lower(context_of_value, value)
        return value

    lhs_aval, rhs_aval = context.avals_in
    (out_aval,) = context.avals_out
    lhs_axis, rhs_axis, out_axis = example_axes(parameters)
    lhs = constrain(lhs, lhs_aval, lhs_axis)
    rhs = constrain(rhs, rhs_aval, rhs_axis)
    (out,) = own(context, lhs, rhs, **parameters)
    return [constrain(out, out_aval, out_axis)]


def _lower_pool(
    own: Callable[..., Any], context: Any, *operands: Any, **parameters: Any
) -> Any:
    is_asked = _current_request.value == _CANONICAL
    if not is_asked or not is_supported(parameters, *context.avals_in):
        return own(context, *operands, **parameters)
    lower = mlir.lower_fun(scatter_to_winners, multiple_results=False)
    return lower(context, *operands, **parameters)
