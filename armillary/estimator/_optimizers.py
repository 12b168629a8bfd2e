"""Optimizers by their names in TensorFlow, and FTRL, which Optax lacks.

The defaults are those in Keras, so that a migrated program trains with the same
numbers.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from armillary._checks import check_not_negative
from armillary.errors import EstimatorError

_EPSILON = 1e-7
"""The epsilon of Keras' optimizers."""


class FtrlState(NamedTuple):
    """State of `ftrl`: sums of squared gradients, and of corrected gradients."""

    accumulators: optax.Updates
    linear: optax.Updates


def ftrl(
    learning_rate: float,
    *,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
) -> optax.GradientTransformation:
    """Returns FTRL-Proximal as an Optax transformation (`tf.keras.optimizers.Ftrl`).

    The algorithm is from McMahan et al., "Ad Click Prediction: a View from the
    Trenches". The learning rate of each weight falls with the square root of its summed
    squared gradients.

    Args:
        learning_rate: The learning rate.
        initial_accumulator_value: The first value of the sums of squared gradients.
        l1_regularization_strength: Sets small weights to exactly 0.
        l2_regularization_strength: Pulls weights towards 0.

    Returns:
        The transformation. Its `update` needs the parameters.

    Raises:
        ValueError: If a number is negative, or the learning rate is 0.
    """
    rate = check_not_negative("learning_rate", learning_rate)
    if not rate:
        raise ValueError(
            "`learning_rate` is 0, but FTRL divides by it. Use `learning_rate=0.05`."
        )
    first = check_not_negative("initial_accumulator_value", initial_accumulator_value)
    l1 = check_not_negative("l1_regularization_strength", l1_regularization_strength)
    l2 = check_not_negative("l2_regularization_strength", l2_regularization_strength)

    def init_fn(params: optax.Params) -> FtrlState:
        def fill(param: Any) -> jax.Array:
            return jnp.full_like(param, first)

        linear = jax.tree.map(jnp.zeros_like, params)
        return FtrlState(jax.tree.map(fill, params), linear)

    def update_leaf(gradient: Any, total: Any, linear: Any, param: Any) -> Any:
        new_total = total + gradient**2
        sigma = (jnp.sqrt(new_total) - jnp.sqrt(total)) / rate
        new_linear = linear + gradient - sigma * param

        quadratic = jnp.sqrt(new_total) / rate + 2 * l2
        is_still = quadratic == 0  # No gradient has come yet.
        shrunk = jnp.clip(new_linear, -l1, l1)
        new_param = (shrunk - new_linear) / jnp.where(is_still, 1, quadratic)
        update = jnp.where(is_still, 0, new_param - param)
        return update, new_total, new_linear

    def update_fn(
        updates: optax.Updates, state: FtrlState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FtrlState]:
        found = jax.tree.map(update_leaf, updates, *state, params)
        outer = jax.tree.structure(updates)
        inner = jax.tree.structure((0, 0, 0))
        new, totals, linear = jax.tree.transpose(outer, inner, found)
        return new, FtrlState(totals, linear)

    return optax.GradientTransformation(init_fn, cast(Any, update_fn))


class _Named(NamedTuple):
    """An optimizer that users can name, with the learning rate of Keras."""

    make: Callable[..., optax.GradientTransformation]
    learning_rate: float


_BY_NAME = {
    "Adagrad": _Named(
        functools.partial(optax.adagrad, initial_accumulator_value=0.1, eps=_EPSILON),
        0.001,
    ),
    "Adam": _Named(functools.partial(optax.adam, eps=_EPSILON), 0.001),
    "Ftrl": _Named(ftrl, 0.001),
    "RMSProp": _Named(
        functools.partial(optax.rmsprop, decay=0.9, eps=_EPSILON, eps_in_sqrt=False),
        0.001,
    ),
    "SGD": _Named(optax.sgd, 0.01),
}


def as_optimizer(
    optimizer: Any, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Returns an optimizer, from itself, from a function that makes it, or by name.

    Args:
        optimizer: The argument of the user.
        learning_rate: The rate of a named optimizer. `None` takes the rate of Keras.
    """
    if isinstance(optimizer, str):
        by_name = {name.lower(): named for name, named in _BY_NAME.items()}
        named = by_name.get(optimizer.lower())
        if named is not None:
            rate = named.learning_rate if learning_rate is None else learning_rate
            return named.make(rate)
    made = optimizer() if callable(optimizer) else optimizer
    if not isinstance(made, optax.GradientTransformation):
        names = ", ".join(map(repr, _BY_NAME))
        raise EstimatorError(
            f"`optimizer` is {optimizer!r:.80}, but it must be an Optax "
            "transformation, a function without arguments that returns one, or one of "
            f"the names {names}. Write `optimizer=optax.adam(0.001)`."
        )
    return made
