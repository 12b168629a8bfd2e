"""Optimizers of the estimators that come with the package, by TensorFlow's names.

Learning rates and constants are those of TensorFlow 2: `estimator/canned/linear.py`
gives 0.2 to any optimizer that a linear estimator is named, and `canned/dnn.py` leaves
`tf.keras.optimizers.legacy` at its defaults. The epsilon of Adam and of Adagrad stands
in another place of Optax's formulas, which shows for gradients as small as it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from armillary._checks import check_not_negative
from armillary.errors import EstimatorError

LINEAR_LEARNING_RATE = 0.2


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

    After McMahan et al., "Ad Click Prediction: a View from the Trenches", with a
    learning rate that falls with the square root of the summed squared gradients.

    Args:
        learning_rate: The learning rate.
        initial_accumulator_value: What the sums of squared gradients begin with.
        l1_regularization_strength: Weights below it are exactly 0.
        l2_regularization_strength: Pulls weights towards 0.
    """
    check_not_negative("learning_rate", learning_rate)
    check_not_negative("initial_accumulator_value", initial_accumulator_value)
    check_not_negative("l1_regularization_strength", l1_regularization_strength)
    check_not_negative("l2_regularization_strength", l2_regularization_strength)

    def init_fn(params: optax.Params) -> FtrlState:
        def fill(value: float) -> optax.Updates:
            return jax.tree.map(lambda leaf: jnp.full_like(leaf, value), params)

        return FtrlState(fill(initial_accumulator_value), fill(0.0))

    def update_leaf(gradient: Any, total: Any, linear: Any, param: Any) -> Any:
        new_total = total + gradient**2
        sigma = (jnp.sqrt(new_total) - jnp.sqrt(total)) / learning_rate
        linear = linear + gradient - sigma * param
        quadratic = jnp.sqrt(new_total) / learning_rate + 2 * l2_regularization_strength
        shrunk = jnp.clip(
            linear, -l1_regularization_strength, l1_regularization_strength
        )
        return (shrunk - linear) / quadratic - param, new_total, linear

    def update_fn(
        updates: optax.Updates, state: FtrlState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FtrlState]:
        leaves, treedef = jax.tree.flatten(updates)
        others = (jax.tree.leaves(tree) for tree in (*state, params))
        found = [update_leaf(*each) for each in zip(leaves, *others, strict=True)]
        new, totals, linear = (
            treedef.unflatten(part) for part in zip(*found, strict=True)
        )
        return new, FtrlState(totals, linear)

    return optax.GradientTransformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


# The name, the default learning rate of Keras, and what makes it.
_BY_NAME: dict[str, tuple[float, Callable[[float], optax.GradientTransformation]]] = {
    "Adagrad": (
        0.001,
        lambda rate: optax.adagrad(rate, initial_accumulator_value=0.1, eps=1e-7),
    ),
    "Adam": (0.001, lambda rate: optax.adam(rate, eps=1e-7)),
    "Ftrl": (0.001, ftrl),
    "RMSProp": (
        0.001,
        lambda rate: optax.rmsprop(rate, decay=0.9, eps=1e-7, eps_in_sqrt=False),
    ),
    "SGD": (0.01, optax.sgd),
}


def as_optimizer(
    optimizer: Any, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Returns an optimizer, from itself, a function that makes it, or its name.

    A name has a learning rate by default.

    Raises:
        EstimatorError: If it is none of these.
    """
    if isinstance(optimizer, str) and optimizer in _BY_NAME:
        default, make = _BY_NAME[optimizer]
        return make(default if learning_rate is None else learning_rate)
    made = optimizer() if callable(optimizer) else optimizer
    if not isinstance(made, optax.GradientTransformation):
        raise EstimatorError(
            f"`optimizer` is {optimizer!r:.80}, but it must be an Optax "
            "transformation, a function without arguments that returns one, or one of "
            f"the names {', '.join(map(repr, _BY_NAME))}. Write "
            "`optimizer=optax.adam(0.001)`."
        )
    return made
