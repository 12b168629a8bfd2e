"""Tests of every strategy with every way to train, as TensorFlow's guide lists them.

Each cell trains a model of one weight and one bias, whose numbers NumPy can predict.
The table in `docs/devices/strategies.md` shows the same cells. Two processes do the
same in `tests/multiprocess/test_multi_worker.py` and `tests/estimator/test_cluster.py`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from armillary.distribute import CentralStorageStrategy, DefaultStrategy, Strategy
from armillary.distribute.coordinator import ClusterCoordinator
from tests.distribute.contract import TPUOnCPU
from tests.ray_cluster import stop_ray

PAGE = Path(__file__).resolve().parents[2] / "docs" / "devices" / "strategies.md"
MESH = {"data": 2, "fsdp": 2}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "DefaultStrategy": DefaultStrategy,
    "OneDeviceStrategy": lambda: armillary.OneDeviceStrategy("cpu:1"),
    "MirroredStrategy": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "TPUStrategy": TPUOnCPU,
    "MultiWorkerMirroredStrategy": armillary.MultiWorkerMirroredStrategy,
    "CentralStorageStrategy": lambda: CentralStorageStrategy(jax.devices()[:4]),
    # One worker, which no other worker makes stale: its numbers equal NumPy's.
    "ParameterServerStrategy": lambda: armillary.ParameterServerStrategy(
        num_workers=1, num_ps=1
    ),
    "ShardedStrategy": lambda: armillary.ShardedStrategy(
        MESH, devices=jax.devices()[:4]
    ),
}


@pytest.fixture(scope="module")
def server_strategy() -> Iterator[Strategy]:
    ray = pytest.importorskip("ray")
    was_running = ray.is_initialized()
    patch = pytest.MonkeyPatch()
    patch.setenv("JAX_NUMPY_RANK_PROMOTION", "allow")  # Workers run Keras.
    strategy = STRATEGIES["ParameterServerStrategy"]()
    coordinator = ClusterCoordinator(strategy)
    yield strategy
    coordinator.shutdown()
    if not was_running:
        stop_ray()
    patch.undo()


@pytest.fixture
def strategy(request: pytest.FixtureRequest) -> Strategy:
    if request.param == "ParameterServerStrategy":
        return request.getfixturevalue("server_strategy")
    return STRATEGIES[request.param]()


def make_keras_model(keras: Any) -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])


def read_sum(model: Any) -> float:
    """Returns the prediction for 1: the weight and the bias."""
    return sum(float(np.sum(variable.value)) for variable in model.trainable_variables)


def check_fit(keras: Any, strategy: Strategy, tmp_path: Path) -> None:
    """Keras: a step of rate 0.01 leaves 0.96 of the error, whose square is the loss."""
    del tmp_path
    ones = np.ones((100, 1), "float32")
    with strategy.scope():
        model = make_keras_model(keras)
        model.compile(optimizer="sgd", loss="mse")
    error = read_sum(model) - 1

    data = armillary.data.from_arrays((ones, ones), batch_size=10)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    losses.append(model.evaluate(data, verbose=0))
    arrays = {"x": ones, "y": ones, "batch_size": 10}
    losses += model.fit(**arrays, epochs=2, verbose=0).history["loss"]
    predicted = model.predict(ones[:3], verbose=0)

    squares = (error * 0.96 ** np.arange(41)) ** 2
    epochs = [squares[start : start + 10].mean() for start in range(0, 40, 10)]
    np.testing.assert_allclose(losses, [*epochs[:2], squares[20], *epochs[2:]], 1e-5)
    np.testing.assert_allclose(predicted, 1 + error * 0.96**40, 1e-5)


def check_custom_loop(keras: Any, strategy: Strategy, tmp_path: Path) -> None:
    """A loop of one's own: a sigmoid, and a loss divided by the global batch size."""
    del tmp_path
    with strategy.scope():
        model = make_keras_model(keras)
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)
        loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction=None)
    logit = read_sum(model)

    def train_step(inputs: Any) -> Any:
        features, labels = inputs

        def loss_fn() -> Any:
            losses = loss_object(labels, model(features, training=True))
            return armillary.compute_average_loss(losses)

        loss, gradients = armillary.value_and_grad(loss_fn, model.trainable_variables)
        gradients = armillary.all_reduce("sum", gradients)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    ones = np.ones((320, 1), "float32")
    data = armillary.data.from_arrays((ones, ones), batch_size=40)
    if isinstance(strategy, armillary.ParameterServerStrategy):
        losses = schedule_steps(strategy, train_step, data)
    else:
        losses = run_steps(strategy, train_step, data)

    expected = []
    for _ in range(8):
        expected.append(np.log1p(np.exp(-logit)))
        logit += 0.1 * 2 / (1 + np.exp(logit))
    np.testing.assert_allclose(losses, expected, 1e-5)
    np.testing.assert_allclose(read_sum(model), logit, 1e-5)


def run_steps(strategy: Strategy, step: Callable[..., Any], data: Any) -> list[float]:
    @armillary.function
    def distributed_step(batch: Any) -> Any:
        losses = strategy.run(step, args=(batch,))
        return strategy.reduce("SUM", losses, axis=None)

    batches = strategy.distribute_dataset(data)
    return [float(distributed_step(batch)) for batch in batches]


def schedule_steps(
    strategy: armillary.ParameterServerStrategy, step: Callable[..., Any], data: Any
) -> list[float]:
    coordinator = ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(lambda: data))

    def scheduled_step(iterator: Any) -> Any:
        return strategy.run(step, args=(next(iterator),))

    losses = [coordinator.schedule(scheduled_step, args=(iterator,)) for _ in range(8)]
    coordinator.join()
    return coordinator.fetch(losses)


class Line(nnx.Module):
    def __init__(self) -> None:
        self.weight, self.bias = nnx.Param(jnp.zeros(())), nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.weight[...] * x + self.bias[...]


def model_fn(features: Any, labels: Any, mode: str, modules: Any) -> Any:
    predictions = modules.make("line", lambda rngs: Line())(features["feats"])
    squares = (predictions - labels) ** 2
    return estimator.EstimatorSpec(
        mode,
        predictions,
        loss=squares.mean(),
        train_op=optax.sgd(0.2),
        eval_metric_ops={"average_loss": squares, "prediction/mean": predictions},
    )


def input_fn() -> Any:
    ones = np.ones(1000, "float32")
    return armillary.data.from_arrays(({"feats": ones}, ones), batch_size=10)


def check_estimator(keras: Any, strategy: Strategy, tmp_path: Path) -> None:
    """Linear regression: a step of rate 0.2 leaves a fifth of the error."""
    del keras
    config = estimator.RunConfig(
        train_distribute=strategy, eval_distribute=strategy, log_step_count_steps=5
    )
    model = estimator.Estimator(model_fn, tmp_path, config)
    model.train(input_fn, steps=5)
    result = model.evaluate(input_fn, steps=5)
    assert result["average_loss"] == pytest.approx(0.2**10, rel=1e-3)
    assert result["prediction/mean"] == pytest.approx(1 - 0.2**5, rel=1e-6)

    # The output that the guide shows.
    model.train(input_fn, steps=5)
    result = model.evaluate(input_fn, steps=5)
    assert result["average_loss"] == pytest.approx(1.4210855e-14, rel=1e-4)
    assert result["prediction/mean"] == pytest.approx(0.99999994, rel=1e-7)


WAYS = {
    "Keras `fit`": check_fit,
    "custom loop": check_custom_loop,
    "Estimator": check_estimator,
}


def list_cells() -> Iterator[Any]:
    """Yields a case for each cell; Ray, which one row needs, is slow to start."""
    marks = [pytest.mark.xdist_group("ray")]
    for row in STRATEGIES:
        for column in WAYS:
            is_on_ray = row == "ParameterServerStrategy"
            name = f"{row}-{column.replace('`', '')}"
            yield pytest.param(row, column, marks=marks if is_on_ray else [], id=name)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), [*list_cells()], indirect=["strategy"])
def test_every_cell_trains_with_the_numbers_of_numpy(keras, strategy, way, tmp_path):
    WAYS[way](keras, strategy, tmp_path)


def read_table() -> list[list[str]]:
    head = "| strategy | Keras `fit` |"
    table = PAGE.read_text().partition(head)[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+) \|$", head + table, re.MULTILINE)
    return [row.split(" | ") for row in rows]


def test_the_page_shows_the_cells_that_are_tested():
    head, _, *rows = read_table()
    assert head == ["strategy", *WAYS]
    assert [row[0] for row in rows] == [f"`{name}`" for name in STRATEGIES]
    for name, *cells in rows:
        assert len(cells) == len(WAYS), name
        assert all(cell == "yes" or cell.startswith("yes, ") for cell in cells), name
