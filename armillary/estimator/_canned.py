"""Canned estimators: linear models and networks that need no model function.

Each one is an `Estimator` whose model function is written here: columns turn features
into numbers, a module turns these into logits, and a head turns logits into
predictions, a loss and metrics. Learning rates and the names of metrics are as in
TensorFlow 2.
"""

import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from armillary._checks import check_callable, is_positive_int
from armillary.errors import EstimatorError
from armillary.estimator._columns import DenseColumn
from armillary.estimator._estimator import Estimator
from armillary.estimator._heads import Head, class_head, regression_head
from armillary.estimator._input_layer import InputLayer, as_dense
from armillary.estimator._model_fn import EstimatorSpec, ModeKeys
from armillary.estimator._optimizers import as_optimizer, ftrl
from armillary.estimator._run_config import RunConfig

StrPath = str | os.PathLike[str]

_LINEAR_RATE = 0.2
"""The learning rate of a linear estimator whose optimizer is named."""
_BASELINE_RATE = 0.3
"""The learning rate of a baseline whose optimizer is named."""


class _Linear(nnx.Module):
    """A linear layer that begins at zero, as TensorFlow's linear models do."""

    def __init__(
        self, columns: tuple[DenseColumn, ...], num_logits: int, rngs: nnx.Rngs
    ) -> None:
        zeros = nnx.initializers.zeros_init()
        size = sum(column.num_inputs for column in columns)
        self.inputs = InputLayer(columns, rngs)
        self.linear = nnx.Linear(size, num_logits, kernel_init=zeros, rngs=rngs)

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        del training
        return self.linear(self.inputs(features))


class _Network(nnx.Module):
    """Dense layers, with dropout after the hidden layers."""

    def __init__(
        self,
        columns: tuple[DenseColumn, ...],
        num_logits: int,
        rngs: nnx.Rngs,
        *,
        hidden_units: Sequence[int],
        activation_fn: Callable[[jax.Array], jax.Array],
        dropout: float | None,
    ) -> None:
        first = sum(column.num_inputs for column in columns)
        sizes = [first, *hidden_units, num_logits]
        glorot = nnx.initializers.glorot_uniform()
        self.inputs = InputLayer(columns, rngs)
        self.layers = nnx.List(
            nnx.Linear(*pair, kernel_init=glorot, rngs=rngs)
            for pair in itertools.pairwise(sizes)
        )
        self.dropout = nnx.Dropout(dropout or 0.0, rngs=rngs)
        self.activation_fn = activation_fn

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        values = self.inputs(features)
        *hidden, last = self.layers
        for layer in hidden:
            values = self.activation_fn(layer(values))
            values = self.dropout(values, deterministic=not training)
        return last(values)


class _Bias(nnx.Module):
    """The same logits for every example."""

    def __init__(self, columns: Any, num_logits: int, rngs: nnx.Rngs) -> None:
        del columns, rngs
        self.bias = nnx.Param(jnp.zeros(num_logits))

    def __call__(self, features: Any, *, training: bool) -> jax.Array:
        del training
        count = jax.tree.leaves(features)[0].shape[0]
        return jnp.tile(self.bias[...], (count, 1))


class _CannedEstimator(Estimator):
    """An estimator of columns, a module and a head."""

    def __init__(
        self,
        make_network: Callable[..., Any],
        columns: tuple[DenseColumn, ...],
        head: Head,
        optimizer: optax.GradientTransformation,
        *,
        model_dir: StrPath | None,
        config: RunConfig | None,
        warm_start_from: StrPath | None,
    ) -> None:
        def model_fn(
            features: Any,
            labels: Any,
            mode: ModeKeys,
            modules: Any,
        ) -> EstimatorSpec:
            def make(rngs: nnx.Rngs) -> Any:
                return make_network(columns, head.num_logits, rngs)

            network = modules.make("network", make)
            logits = network(features, training=mode is ModeKeys.TRAIN)
            return head.make_spec(mode, logits, labels, optimizer)

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        self._label_rule = head.label_rule


class LinearRegressor(_CannedEstimator):
    """Linear regression of columns (`tf.estimator.LinearRegressor`).

    The loss is the mean squared error. An evaluation reports `average_loss`, `loss`,
    `label/mean`, `prediction/mean` and `global_step`. A prediction is a dictionary with
    `predictions`, shape `(label_dimension,)`.

    Args:
        feature_columns: The columns that are read, for example
            `[numeric_column("x")]`.
        model_dir: As in `Estimator`.
        label_dimension: The number of values in a label.
        optimizer: An Optax transformation, a function without arguments that returns
            one, or one of the names `"Adagrad"`, `"Adam"`, `"Ftrl"`, `"RMSProp"` and
            `"SGD"`, in any case. A named optimizer has the learning rate 0.2. `None` is
            FTRL with 0.2, or `1 / sqrt(number of columns)` if that is less.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

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
        warm_start_from: StrPath | None = None,
    ) -> None:
        columns = as_dense(feature_columns, is_linear=True)
        super().__init__(
            _Linear,
            columns,
            regression_head(label_dimension),
            _linear_optimizer(optimizer, columns),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class LinearClassifier(_CannedEstimator):
    """Logistic regression of columns (`tf.estimator.LinearClassifier`).

    The loss is the mean cross-entropy. An evaluation reports `accuracy`,
    `average_loss`, `loss` and `global_step`; with two classes also
    `accuracy_baseline`, `auc`, `auc_precision_recall`, `label/mean`, `precision`,
    `prediction/mean` and `recall`. A prediction is a dictionary with `logits`,
    `probabilities` and `class_ids`; with two classes also `logistic`.

    Args:
        feature_columns: As in `LinearRegressor`.
        model_dir: As in `Estimator`.
        n_classes: The number of classes. Labels are integers from 0 to
            `n_classes - 1`.
        optimizer: As in `LinearRegressor`.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

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
        warm_start_from: StrPath | None = None,
    ) -> None:
        columns = as_dense(feature_columns, is_linear=True)
        super().__init__(
            _Linear,
            columns,
            class_head(n_classes),
            _linear_optimizer(optimizer, columns),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class DNNRegressor(_CannedEstimator):
    """Regression with a dense network (`tf.estimator.DNNRegressor`).

    Loss, metrics and predictions are as in `LinearRegressor`.

    Args:
        hidden_units: The size of each hidden layer, for example `[64, 32]`.
        feature_columns: The columns that are read; a categorical column must be wrapped
            in `indicator_column` or `embedding_column`.
        model_dir: As in `Estimator`.
        label_dimension: The number of values in a label.
        optimizer: As in `LinearRegressor`, but a named optimizer has the learning rate
            of Keras: 0.01 for `"SGD"`, and 0.001 for the others.
        activation_fn: Applied after each hidden layer.
        dropout: The share of hidden values that training drops; `None` for none.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

    Raises:
        EstimatorError: If a column, the optimizer, `hidden_units` or `dropout` is of
            another kind.
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
        warm_start_from: StrPath | None = None,
    ) -> None:
        super().__init__(
            _network(hidden_units, activation_fn, dropout),
            as_dense(feature_columns, is_linear=False),
            regression_head(label_dimension),
            as_optimizer(optimizer),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class DNNClassifier(_CannedEstimator):
    """Classification with a dense network (`tf.estimator.DNNClassifier`).

    Loss, metrics and predictions are as in `LinearClassifier`.

    Args:
        hidden_units: As in `DNNRegressor`.
        feature_columns: As in `DNNRegressor`.
        model_dir: As in `Estimator`.
        n_classes: As in `LinearClassifier`.
        optimizer: As in `DNNRegressor`.
        activation_fn: As in `DNNRegressor`.
        dropout: As in `DNNRegressor`.
        config: As in `Estimator`.
        warm_start_from: As in `Estimator`.

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
        warm_start_from: StrPath | None = None,
    ) -> None:
        super().__init__(
            _network(hidden_units, activation_fn, dropout),
            as_dense(feature_columns, is_linear=False),
            class_head(n_classes),
            as_optimizer(optimizer),
            model_dir=model_dir,
            config=config,
            warm_start_from=warm_start_from,
        )


class BaselineRegressor(_CannedEstimator):
    """Predicts the mean label for all features (`tf.estimator.BaselineRegressor`).

    Loss, metrics and predictions are as in `LinearRegressor`.

    Args:
        model_dir: As in `Estimator`.
        label_dimension: The number of values in a label.
        optimizer: As in `LinearRegressor`, but a named optimizer has the learning rate
            0.3.
        config: As in `Estimator`.

    Raises:
        EstimatorError: If the optimizer is of another kind.
        ValueError: If `label_dimension` is not positive.
    """

    def __init__(
        self,
        model_dir: StrPath | None = None,
        *,
        label_dimension: int = 1,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        super().__init__(
            _Bias,
            (),
            regression_head(label_dimension),
            as_optimizer(optimizer, _BASELINE_RATE),
            model_dir=model_dir,
            config=config,
            warm_start_from=None,
        )


class BaselineClassifier(_CannedEstimator):
    """Predicts the share of each class (`tf.estimator.BaselineClassifier`).

    Loss, metrics and predictions are as in `LinearClassifier`.

    Args:
        model_dir: As in `Estimator`.
        n_classes: As in `LinearClassifier`.
        optimizer: As in `BaselineRegressor`.
        config: As in `Estimator`.

    Raises:
        EstimatorError: If the optimizer is of another kind, or there are fewer than two
            classes.
    """

    def __init__(
        self,
        model_dir: StrPath | None = None,
        *,
        n_classes: int = 2,
        optimizer: Any = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        super().__init__(
            _Bias,
            (),
            class_head(n_classes),
            as_optimizer(optimizer, _BASELINE_RATE),
            model_dir=model_dir,
            config=config,
            warm_start_from=None,
        )


def _linear_optimizer(
    optimizer: Any, columns: tuple[DenseColumn, ...]
) -> optax.GradientTransformation:
    if optimizer is None:
        return ftrl(min(_LINEAR_RATE, 1 / math.sqrt(len(columns))))
    return as_optimizer(optimizer, _LINEAR_RATE)


def _network(
    hidden_units: Any, activation_fn: Any, dropout: Any
) -> Callable[..., _Network]:
    """Checks the arguments of a network; returns a function that makes it."""
    check_callable("activation_fn", activation_fn)
    sizes = tuple(hidden_units) if isinstance(hidden_units, list | tuple) else ()
    if not sizes or not all(map(is_positive_int, sizes)):
        raise EstimatorError(
            f"`hidden_units` is {hidden_units!r}, but it must be a list of positive "
            "integers, one for each hidden layer. Write `hidden_units=[64, 32]`."
        )
    is_number = isinstance(dropout, int | float) and not isinstance(dropout, bool)
    is_share = is_number and 0 <= dropout < 1
    if dropout is not None and not is_share:
        raise EstimatorError(
            f"`dropout` is {dropout!r}, but it must be a share from 0 to below 1. "
            "Write `dropout=0.1`."
        )
    return functools.partial(
        _Network, hidden_units=sizes, activation_fn=activation_fn, dropout=dropout
    )
