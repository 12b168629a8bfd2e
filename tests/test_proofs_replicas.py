"""Proof: the number of replicas changes losses and parameters by rounding only."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from tests.problems import CNN, Classifier, Metrics, make_strategy, read_state

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]

NUM_STEPS = 50
TRANSFORMS = {
    "sgd": optax.sgd(0.05, momentum=0.9),
    "adam": optax.adam(3e-3),
}


@functools.cache
def train(transform, num_replicas):
    """Returns the loss of each step, and the parameters at the end."""
    trainer = Classifier(
        make_strategy(num_replicas), CNN(nnx.Rngs(0)), TRANSFORMS[transform]
    )
    trainer.train(NUM_STEPS)
    parameters = {
        path: value
        for path, value in read_state(trainer).items()
        if path.startswith("model/")
    }
    return np.asarray(trainer.losses[:NUM_STEPS]), parameters


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_replicas_give_the_losses_and_parameters_of_one(transform, num_replicas):
    expected_losses, expected = train(transform, 1)

    losses, parameters = train(transform, num_replicas)

    assert expected_losses[-1] < expected_losses[0] / 2
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    assert parameters.keys() == expected.keys()
    for path, value in expected.items():
        error = np.linalg.norm(parameters[path] - value) / np.linalg.norm(value)
        assert error < 1e-5, path


@pytest.mark.parametrize("batch_size", [16, 10])
def test_metrics_over_replicas_equal_those_of_one(batch_size):
    rng = np.random.default_rng(1)
    arrays = {
        "value": rng.normal(size=101).astype(np.float32),
        "logits": rng.normal(size=(101, 3)).astype(np.float32),
        "label": rng.integers(0, 3, 101).astype(np.int32),
    }
    outputs, counts = [], []
    for num_replicas in (1, 4):
        strategy = make_strategy(num_replicas)
        source = from_arrays(arrays, batch_size=batch_size)
        evaluator = Metrics(strategy, strategy.distribute_dataset(source))
        outputs.append(evaluator.evaluate(-1))
        counts.append(evaluator.counts)

    assert counts == [(101, 101), (101, 101)]
    np.testing.assert_allclose(outputs[1]["average"], outputs[0]["average"], rtol=1e-6)
    np.testing.assert_allclose(outputs[0]["average"], arrays["value"].mean(), rtol=1e-5)
    assert float(outputs[1]["accuracy"]) == float(outputs[0]["accuracy"])


def test_thousands_of_tiny_steps_on_four_devices():
    strategy = make_strategy(4)

    class Counter(armillary.StandardTrainer):
        def __init__(self, **options):
            batches = from_arrays(
                {"x": np.ones(4, np.int32)}, batch_size=4, repeat=True
            )
            super().__init__(batches, armillary.StandardTrainerOptions(**options))
            self.strategy = strategy
            self.total = nnx.Variable(jnp.zeros((), jnp.int32))

        def train_step(self, iterator):
            def step_fn(batch):
                context = armillary.get_replica_context()
                self.total[...] += context.all_reduce("sum", jnp.sum(batch["x"]))

            strategy.run(step_fn, args=(next(iterator),))

    one_by_one, chunked = Counter(compile_loop=False), Counter(steps_per_chunk=100)
    one_by_one.train(2500)
    for _ in range(25):
        chunked.train(100)

    assert int(one_by_one.total[...]) == int(chunked.total[...]) == 4 * 2500
