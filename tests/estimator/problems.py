"""Data, model functions and a plain NumPy loop that estimators are compared with."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import armillary
from armillary import estimator

RNG = np.random.default_rng(0)
X = RNG.normal(size=(72, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5], "float32") + 0.3).astype("float32")
BATCH_SIZE = 4


def features_of(x: np.ndarray) -> dict[str, np.ndarray]:
    return {"a": x[:, 0], "b": x[:, 1:]}


def join_features(features: dict[str, Any]) -> jax.Array:
    return jnp.concatenate([features["a"][:, None], features["b"]], axis=1)


def make_input_fn(
    x: np.ndarray = X, y: np.ndarray = Y, batch_size: int = BATCH_SIZE, **options: Any
) -> Callable[[], Any]:
    def input_fn() -> Any:
        arrays = (features_of(x), y)
        return armillary.data.from_arrays(arrays, batch_size=batch_size, **options)

    return input_fn


def make_strategy(replicas: int) -> armillary.distribute.Strategy:
    devices = jax.devices()[:replicas]
    if replicas == 1:
        return armillary.OneDeviceStrategy(devices[0])
    return armillary.MirroredStrategy(devices)


def make_config(replicas: int = 1, **options: Any) -> estimator.RunConfig:
    strategy = make_strategy(replicas)
    options = {"save_summary_steps": None, "log_step_count_steps": 10, **options}
    return estimator.RunConfig(
        train_distribute=strategy, eval_distribute=strategy, **options
    )


def linear_model_fn(features, labels, mode, params, modules):
    """Linear regression that begins at zero."""
    zeros = nnx.initializers.zeros_init()
    layer = modules.make(
        "layer", lambda rngs: nnx.Linear(3, 1, kernel_init=zeros, rngs=rngs)
    )
    predictions = layer(join_features(features))[:, 0]
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, {"y": predictions})
    errors = (predictions - labels) ** 2
    optimizer = params or optax.sgd(0.2)
    return estimator.EstimatorSpec(
        mode, None, errors.mean(), optimizer, {"average_loss": errors}
    )


def make_regressor(
    folder: Path | None, replicas: int = 1, optimizer: Any = None, **options: Any
) -> estimator.Estimator:
    config = make_config(replicas, **options)
    return estimator.Estimator(linear_model_fn, folder, config, optimizer)


def batches_of(
    x: np.ndarray, y: np.ndarray, size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, len(x), size):
        yield x[start : start + size], y[start : start + size]


def check_linear(
    made: estimator.Estimator, batches: Sequence[tuple[np.ndarray, np.ndarray]]
) -> None:
    """Asserts that an estimator predicts as gradient descent on batches does."""
    weights, bias = np.zeros(3), 0.0
    for x, y in batches:
        error = x @ weights + bias - y
        weights -= 0.2 * 2 * x.T @ error / len(x)
        bias -= 0.2 * 2 * error.mean()
    expected = X @ weights + bias
    np.testing.assert_allclose(predict(made), expected, rtol=1e-5, atol=1e-6)


def predict(made: estimator.Estimator, **options: Any) -> np.ndarray:
    return np.array([row["y"] for row in made.predict(make_input_fn(), **options)])


class FailingData:
    """Shuffled batches with positions; reading one of them fails.

    Args:
        num_good: How many batches can be read.
        fail: Called instead of reading another.
    """

    def __init__(self, num_good: int, fail: Callable[[], None]) -> None:
        iterator = make_input_fn(shuffle_seed=0, repeat=True)().make_iterator(0)
        self._iterator, self._num_left, self._fail = iterator, num_good, fail
        self.get_state, self.set_state = iterator.get_state, iterator.set_state

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            self._fail()
        return next(self._iterator)


class Net(nnx.Module):
    """A layer, batch normalization and dropout: state of every kind."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(3, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.last = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        x = self.norm(self.first(x), use_running_average=not training)
        x = self.dropout(nnx.relu(x), deterministic=not training)
        return self.last(x)[:, 0]


def net_model_fn(features, labels, mode, params, modules):
    net = modules.make("net", Net)
    is_training = mode == estimator.ModeKeys.TRAIN
    predictions = net(join_features(features), training=is_training)
    if mode == estimator.ModeKeys.PREDICT:
        return estimator.EstimatorSpec(mode, predictions={"y": predictions})
    errors = (predictions - labels) ** 2
    return estimator.EstimatorSpec(
        mode,
        loss=errors.mean(),
        train_op=optax.adam(params["rate"]),
        eval_metric_ops={
            "error": errors,
            "distance": (
                armillary.metrics.MeanAbsoluteError,
                {"predictions": predictions, "targets": labels},
            ),
        },
    )


def make_net(folder: Path, replicas: int = 1, **options: Any) -> estimator.Estimator:
    config = make_config(replicas, **options)
    return estimator.Estimator(net_model_fn, folder, config, {"rate": 0.01})
