"""The reusable trainer and evaluator of one task, on data made for the test."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example

single_task = load_example("single_task")


class Network(nnx.Module):
    """Two layers and dropout; it refuses inputs other than the features."""

    def __init__(self, num_outputs: int, dropout: float = 0.0) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = nnx.Linear(4, 16, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.output = nnx.Linear(16, num_outputs, rngs=rngs)

    def __call__(self, inputs: dict) -> jax.Array:
        assert list(inputs) == ["features"]
        x = self.dropout(nnx.relu(self.hidden(inputs["features"])))
        x = self.output(x)
        return x if x.shape[-1] > 1 else x[:, 0]


def make_data(num_examples: int = 150) -> dict[str, np.ndarray]:
    """Returns examples of three classes; `target` is a number for each."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, num_examples).astype("int32")
    features = rng.normal(size=(num_examples, 4)) + 2.0 * np.eye(3, 4)[label]
    target = features @ np.array([1.0, -2.0, 3.0, 0.5])
    return {
        "features": features.astype("float32"),
        "label": label,
        "target": target.astype("float32"),
    }


def select(*keys: str) -> dict[str, np.ndarray]:
    data = make_data()
    return {key: data[key] for key in keys}


def make_trainer(strategy, model):
    source = armillary.data.from_arrays(
        select("features", "label"), batch_size=32, shuffle_seed=0, repeat=True
    )
    with strategy.scope():
        return single_task.SingleTaskTrainer(
            source,
            "label",
            model=model,
            loss_fn=optax.softmax_cross_entropy_with_integer_labels,
            optimizer=nnx.Optimizer(model, optax.sgd(0.05), wrt=nnx.Param),
            metrics=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()),
        )


def mirrored(num_replicas: int) -> armillary.MirroredStrategy:
    return armillary.MirroredStrategy(jax.devices("cpu")[:num_replicas])


@pytest.mark.slow
def test_loss_falls_by_more_than_half_under_a_controller():
    strategy = mirrored(2)
    trainer = make_trainer(strategy, Network(3))
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=100,
    )
    controller.train(1)
    first = float(trainer.training_loss.compute())
    controller.train(500)
    assert float(trainer.training_loss.compute()) < first / 2
    assert float(trainer.metrics.compute()["accuracy"]) > 0.85


@pytest.mark.slow
def test_evaluator_counts_each_example_once_and_without_dropout():
    strategy = mirrored(4)
    model = Network(3, dropout=0.5)
    make_trainer(strategy, model).train(20)
    with strategy.scope():
        evaluator = single_task.SingleTaskEvaluator(
            armillary.data.from_arrays(select("features", "label"), batch_size=32),
            "label",
            model=nnx.view(model, deterministic=True),
            metrics=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()),
        )
    data = make_data()
    logits = nnx.view(model, deterministic=True)({"features": data["features"]})
    expected = float(jnp.mean(jnp.argmax(logits, axis=-1) == data["label"]))
    for _ in range(2):
        assert evaluator.evaluate(-1)["accuracy"] == pytest.approx(expected)


@pytest.mark.slow
def test_regression_has_its_own_loss_and_metrics():
    source = armillary.data.from_arrays(
        select("features", "target"), batch_size=50, shuffle_seed=0, repeat=True
    )
    strategy = mirrored(2)
    model = Network(1)
    errors = armillary.metrics.MeanAbsoluteError
    with strategy.scope():
        trainer = single_task.SingleTaskTrainer(
            source,
            "target",
            model=model,
            loss_fn=optax.l2_loss,
            optimizer=nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param),
        )
        evaluator = single_task.SingleTaskEvaluator(
            armillary.data.from_arrays(select("features", "target"), batch_size=40),
            "target",
            model=model,
            metrics=nnx.MultiMetric(error=errors()),
        )
    before = float(evaluator.evaluate(-1)["error"])
    assert list(trainer.train(300)) == ["training_loss"]
    after = float(evaluator.evaluate(-1)["error"])
    data = make_data()
    outputs = np.asarray(model({"features": data["features"]}))
    assert after == pytest.approx(np.abs(outputs - data["target"]).mean(), rel=1e-5)
    assert after < before / 5
