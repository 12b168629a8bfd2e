"""Tests of `fit` with generators that fill one buffer again and again."""

import jax
import numpy as np
import pytest

import armillary
from tests.tiers import slow_after_first

NUM_BATCHES = 12
# Large enough for JAX to use the memory of an array as it is.
ROWS = np.random.default_rng(0).normal(size=(NUM_BATCHES, 64, 512)).astype("float32")
TARGETS = np.random.default_rng(1).normal(size=(NUM_BATCHES, 64, 1)).astype("float32")
STRATEGIES = {
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:2]),
}


def generate(*, reuses, spoils=False):
    """Yields batches; one that `reuses` its buffer may overwrite it at once, too."""
    x, y = np.empty_like(ROWS[0]), np.empty_like(TARGETS[0])
    for rows, targets in zip(ROWS, TARGETS, strict=True):
        if not reuses:
            x, y = np.empty_like(x), np.empty_like(y)
        x[:], y[:] = rows, targets
        yield x, y
        if spoils:
            x[:], y[:] = np.nan, np.nan


def make_py_dataset(keras, *, reuses):
    class Batches(keras.utils.PyDataset):
        def __init__(self):
            super().__init__()
            self.x = np.empty_like(ROWS[0])

        def __len__(self):
            return NUM_BATCHES

        def __getitem__(self, index):
            if not reuses:
                return ROWS[index].copy(), TARGETS[index]
            self.x[:] = ROWS[index]
            return self.x, TARGETS[index]

    return Batches()


def fit(keras, strategy, data, **options):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        inputs = keras.layers.Input((512,))
        hidden = keras.layers.Dense(16, activation="tanh")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
        model.compile(optimizer=keras.optimizers.SGD(0.01), loss="mse")
    history = model.fit(
        data, steps_per_epoch=NUM_BATCHES, shuffle=False, verbose=0, **options
    )
    weights = [np.asarray(variable.value) for variable in model.variables]
    return weights, history.history


@pytest.mark.slow
@slow_after_first("spoils", [True, False])
@slow_after_first("strategy", STRATEGIES)
def test_a_generator_may_fill_one_buffer_again(keras, strategy, spoils):
    strategy = STRATEGIES[strategy]()

    def run(**options):
        return fit(
            keras,
            strategy,
            generate(**options),
            validation_data=generate(**options),
            validation_steps=NUM_BATCHES - 2,
        )

    weights, history = run(reuses=True, spoils=spoils)
    expected, expected_history = run(reuses=False)
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert history == expected_history


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_py_dataset_may_fill_one_buffer_again(keras, strategy):
    strategy = STRATEGIES[strategy]()
    weights, expected = (
        fit(keras, strategy, make_py_dataset(keras, reuses=reuses))[0]
        for reuses in (True, False)
    )
    for found, wanted in zip(weights, expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
