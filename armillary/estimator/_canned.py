"""The estimators that come with the package, and their optimizers by name.

Learning rates and constants are those of TensorFlow 2: `estimator/canned/linear.py`
gives 0.2 to any optimizer that a linear estimator is named, and `canned/dnn.py` leaves
`tf.keras.optimizers.legacy` at its defaults. The epsilon of Adam and of Adagrad stands
in another place of Optax's formulas, which shows for gradients as small as it is.
"""

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import (
    check_callable,
    check_not_negative,
    is_positive_int,
)
from armillary.errors import EstimatorError, NonFiniteError
from armillary.estimator._estimator import Estimator
from armillary.estimator._heads import (
    Head,
    check_columns,
    class_head,
    regression_head,
)
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys
from armillary.estimator._run_config import RunConfig

StrPath = str | os.PathLike[str]


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
    l1, l2 = l1_regularization_strength, l2_regularization_strength
    check_not_negative("learning_rate", learning_rate)
    check_not_negative("initial_accumulator_value", initial_accumulator_value)
    check_not_negative("l1_regularization_strength", l1)
    check_not_negative("l2_regularization_strength", l2)

    def init_fn(params: optax.Params) -> FtrlState:
        first = functools.partial(jnp.full_like, fill_value=initial_accumulator_value)
        return FtrlState(
            jax.tree.map(first, params), jax.tree.map(jnp.zeros_like, params)
        )

    def update_leaf(gradient: Any, total: Any, linear: Any, param: Any) -> Any:
        new_total = total + gradient**2
        sigma = (jnp.sqrt(new_total) - jnp.sqrt(total)) / learning_rate
        linear = linear + gradient - sigma * param
        quadratic = jnp.sqrt(new_total) / learning_rate + 2 * l2
        shrunk = jnp.clip(linear, -l1, l1)
        return (shrunk - linear) / quadratic - param, new_total, linear

    def update_fn(
        updates: optax.Updates, state: FtrlState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, FtrlState]:
        found = jax.tree.map(update_leaf, updates, *state, params)
        outer, inner = jax.tree.structure(updates), jax.tree.structure((0, 0, 0))
        new, totals, linear = jax.tree.transpose(outer, inner, found)
        return new, FtrlState(totals, linear)

    return optax.GradientTransformation(init_fn, update_fn)  # pyright: ignore[reportArgumentType]


# The name, the default learning rate of Keras, and what makes it.
_BY_NAME: dict[str, tuple[float, Callable[..., optax.GradientTransformation]]] = {
    "Adagrad": (
        0.001,
        functools.partial(optax.adagrad, initial_accumulator_value=0.1, eps=1e-7),
    ),
    "Adam": (0.001, functools.partial(optax.adam, eps=1e-7)),
    "Ftrl": (0.001, ftrl),
    "RMSProp": (
        0.001,
        functools.partial(optax.rmsprop, decay=0.9, eps=1e-7, eps_in_sqrt=False),
    ),
    "SGD": (0.01, optax.sgd),
}


def as_optimizer(
    optimizer: Any, learning_rate: float | None = None
) -> optax.GradientTransformation:
    """Returns an optimizer, from itself, a function that makes it, or its name."""
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


class _Linear(nnx.Module):
    """A linear layer that begins at zero, as TensorFlow's linear models do."""

    def __init__(self, num_inputs: int, num_logits: int, rngs: nnx.Rngs) -> None:
        zeros = nnx.initializers.zeros_init()
        self.linear = nnx.Linear(num_inputs, num_logits, kernel_init=zeros, rngs=rngs)

    def __call__(self, inputs: jax.Array, *, training: bool) -> jax.Array:
        del training
        return self.linear(inputs)


class _Network(nnx.Module):
    """Dense layers, with dropout behind the hidden ones."""

    def __init__(
        self,
        num_inputs: int,
        num_logits: int,
        rngs: nnx.Rngs,
        hidden_units: Sequence[int],
        activation_fn: Callable[[jax.Array], jax.Array],
        dropout: float | None,
    ) -> None:
        sizes = [num_inputs, *hidden_units, num_logits]
        glorot = nnx.initializers.glorot_uniform()
        self.layers = nnx.List(
            nnx.Linear(first, second, kernel_init=glorot, rngs=rngs)
            for first, second in itertools.pairwise(sizes)
        )
        self.dropout = nnx.Dropout(dropout or 0.0, rngs=rngs)
        self.activation_fn = activation_fn

    def __call__(self, inputs: jax.Array, *, training: bool) -> jax.Array:
        *hidden, last = self.layers
        for layer in hidden:
            inputs = self.activation_fn(layer(inputs))
            inputs = self.dropout(inputs, deterministic=not training)
        return last(inputs)


class _Canned(Estimator):
    """An estimator of columns, a head, and a network; without one, a linear layer."""

    def __init__(
        self,
        feature_columns: Any,
        head: Head,
        optimizer: Any,
        model_dir: StrPath | None,
        config: RunConfig | None,
        make_network: Callable[..., Any] | None = None,
    ) -> None:
        columns = check_columns(feature_columns)
        sizes = sum(column.num_inputs for column in columns), head.num_logits
        optimizer = as_optimizer(optimizer, None if make_network else 0.2)

        def model_fn(
            features: Any, labels: Any, mode: ModeKeys, modules: Any
        ) -> EstimatorSpec:
            make = make_network or _Linear
            network = modules.make("network", lambda rngs: make(*sizes, rngs))
            inputs = jnp.concatenate([each.read(features) for each in columns], axis=1)
            logits = network(inputs, training=mode is ModeKeys.TRAIN)
            return head.make_spec(mode, logits, labels, optimizer)

        super().__init__(model_fn, model_dir, config)
        if head.label_rule is not None:
            self._notes = {**self._notes, NonFiniteError: head.label_rule}


def _network_fn(
    hidden_units: Any, activation_fn: Any, dropout: Any
) -> Callable[..., Any]:
    check_callable("activation_fn", activation_fn)
    sizes = tuple(hidden_units) if isinstance(hidden_units, list | tuple) else ()
    if not sizes or not all(map(is_positive_int, sizes)):
        raise EstimatorError(
            f"`hidden_units` is {hidden_units!r}, but it must be a list of positive "
            "integers, one for each hidden layer. Write `hidden_units=[64, 32]`."
        )
    is_number = isinstance(dropout, int | float) and dropout is not False
    if dropout is not None and not (is_number and 0 <= dropout < 1):
        raise EstimatorError(
            f"`dropout` is {dropout!r}, but it must be a share from 0 to below 1. "
            "Write `dropout=0.1`."
        )
    return functools.partial(
        _Network, hidden_units=sizes, activation_fn=activation_fn, dropout=dropout
    )


class LinearRegressor(_Canned):
    """Linear regression of columns (`tf.estimator.LinearRegressor`).

    Args:
        feature_columns: The columns that are read.
        model_dir: As in `Estimator`.
        label_dimension: How many numbers a label has.
        optimizer: An Optax transformation, a function without arguments that returns
            one, or `"Adagrad"`, `"Adam"`, `"Ftrl"`, `"RMSProp"` or `"SGD"`, with a
            learning rate of 0.2.
        config: As in `Estimator`.

    Raises:
        EstimatorError: If a column or the optimizer is of another kind.
        ValueError: If `label_dimension` is not positive.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        head = regression_head(label_dimension)
        super().__init__(feature_columns, head, optimizer, model_dir, config)


class LinearClassifier(_Canned):
    """Logistic regression of columns (`tf.estimator.LinearClassifier`).

    Args:
        n_classes: How many classes there are. Labels are their numbers. The other
            arguments are those of `LinearRegressor`.

    Raises:
        EstimatorError: As in `LinearRegressor`, or if there are fewer than two classes.
    """

    def __init__(
        self,
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        head = class_head(n_classes)
        super().__init__(feature_columns, head, optimizer, model_dir, config)


class DNNRegressor(_Canned):
    """Regression by a dense network (`tf.estimator.DNNRegressor`).

    Args:
        hidden_units: The size of each hidden layer.
        optimizer: As in `LinearRegressor`, with the learning rates of Keras: 0.01 for
            `"SGD"`, 0.001 for the others.
        activation_fn: What follows each hidden layer.
        dropout: The share of hidden values that training drops; `None` for none. The
            other arguments are those of `LinearRegressor`.

    Raises:
        EstimatorError: If a column, the optimizer or `hidden_units` is of another kind.
        ValueError: If `label_dimension` is not positive.
        TypeError: If `activation_fn` cannot be called.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
    ) -> None:
        make = _network_fn(hidden_units, activation_fn, dropout)
        head = regression_head(label_dimension)
        super().__init__(feature_columns, head, optimizer, model_dir, config, make)


class DNNClassifier(_Canned):
    """Classification by a dense network (`tf.estimator.DNNClassifier`).

    Args:
        n_classes: How many classes there are. Labels are their numbers. The other
            arguments are those of `DNNRegressor`.

    Raises:
        EstimatorError: As in `DNNRegressor`, or if there are fewer than two classes.
        TypeError: If `activation_fn` cannot be called.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Any,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Adagrad",
        activation_fn: Callable[[jax.Array], jax.Array] = jax.nn.relu,
        dropout: float | None = None,
        config: RunConfig | None = None,
    ) -> None:
        make = _network_fn(hidden_units, activation_fn, dropout)
        head = class_head(n_classes)
        super().__init__(feature_columns, head, optimizer, model_dir, config, make)
