"""Replaces how JAX hands convolutions to the compiler, where a program asks for it.

This file alone looks into JAX's tables of lowering rules, which are not public. Where
they are not as expected, nothing is changed. A rule of ours does what JAX's own does
unless the thread that lowers a program asks for another form.
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
    is_supported,
    scatter_to_winners,
)

Split: TypeAlias = Callable[[tuple[int, ...], int | None], NamedSharding]
"""From a shape, and its axis of examples if it has one, to where such an array lies."""

PLATFORM = "cpu"
"""The platform whose rules are replaced; on others convolutions are only divided."""

_CANONICAL = "canonical"
_how: Any = jax.make_user_context(None)
"""How this thread lowers: canonically, or with a `Split`; JAX keeps programs apart."""
_INSTALLING = threading.Lock()


def has_rules() -> bool:
    """Returns whether JAX can be made to lower otherwise, and prepares it for that."""
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
        self._compiled, self._context = compiled, context

    def __call__(self, *args: Any) -> Any:
        with self._context():
            return self._compiled(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        with self._context():
            return self._compiled.lower(*args)


def canonically() -> AbstractContextManager[Any]:
    """Lowers for CPUs, canonically, what JAX lowers meanwhile, in this thread."""
    return _how(_CANONICAL)


def partitioned(split: Split) -> AbstractContextManager[Any]:
    """Has XLA divide convolutions that JAX lowers meanwhile by examples only.

    Left to itself, it may divide them by places of the image, by features, or where
    devices get unequal shares; gradients are then wrong (JAX 0.10.2).
    """
    return _how(split)


def _install_rules() -> None:
    own = _find_rule(lax.conv_general_dilated_p, PLATFORM)
    if isinstance(own, _Rule):
        return
    pool = _find_rule(lax.select_and_scatter_add_p, PLATFORM)
    rules = [(lax.select_and_scatter_add_p, _Rule(_lower_pool, pool), PLATFORM)]
    for platform in (PLATFORM, "cuda", "rocm", "tpu"):
        own = _find_rule(lax.conv_general_dilated_p, platform)
        rule = _Rule(_lower_convolution, own)
        rules.append((lax.conv_general_dilated_p, rule, platform))
    for primitive, rule, platform in rules:
        mlir.register_lowering(primitive, rule, platform=platform)


def _find_rule(primitive: Any, platform: str) -> Callable[..., Any]:
    entry = mlir._platform_specific_lowerings[platform].get(primitive)
    rule = (entry or mlir._lowerings[primitive]).rule
    if not callable(rule):
        raise TypeError(f"the rule of {primitive} is {rule!r}")
    return rule


class _Rule:
    """Lowers as `ours` does, which gets JAX's own rule first."""

    def __init__(self, ours: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._ours, self._own = ours, own

    def __call__(self, context: Any, *operands: Any, **parameters: Any) -> Any:
        return self._ours(self._own, context, *operands, **parameters)


def _lower_convolution(
    own: Callable[..., Any], context: Any, lhs: Any, rhs: Any, **parameters: Any
) -> Any:
    how, avals = _how.value, (*context.avals_in, *context.avals_out)
    if how == _CANONICAL:
        form = choose_form(parameters, *avals)
        # JAX makes three real convolutions of a complex one, which come here again.
        is_complex = jnp.issubdtype(avals[-1].dtype, jnp.complexfloating)
        if form is not Form.UNCHANGED and not is_complex:
            lower = mlir.lower_fun(partial(convolve, form=form), multiple_results=False)
            return lower(context, lhs, rhs, **parameters)
    # Inside `shard_map`, the code is that of one device.
    is_manual = getattr(context.module_context.axis_context, "manual_axes", ())
    if how in (None, _CANONICAL) or is_manual:
        return own(context, lhs, rhs, **parameters)

    def constrain(value: Any, aval: Any, axis: int | None) -> Any:
        sharding = how(aval.shape, axis)
        lower = mlir.lower_fun(
            lambda array: lax.with_sharding_constraint(array, sharding),
            multiple_results=False,
        )
        (value,) = lower(context.replace(avals_in=[aval], avals_out=[aval]), value)
        return value

    axes = example_axes(parameters)
    lhs, rhs = map(constrain, (lhs, rhs), avals, axes)
    (out,) = own(context, lhs, rhs, **parameters)
    return [constrain(out, avals[-1], axes[-1])]


def _lower_pool(
    own: Callable[..., Any], context: Any, *operands: Any, **parameters: Any
) -> Any:
    if _how.value != _CANONICAL or not is_supported(parameters, *context.avals_in):
        return own(context, *operands, **parameters)
    lower = mlir.lower_fun(scatter_to_winners, multiple_results=False)
    return lower(context, *operands, **parameters)
