"""Data, models and strategies for the tests of compiled Keras models."""

from types import SimpleNamespace

import numpy as np
import pytest

NUM_EXAMPLES = 70


@pytest.fixture
def problem(keras):
    """Returns data with an uneven end, and functions that make models for it."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(NUM_EXAMPLES, 4)).astype("float32")
    labels = (inputs[:, 0] > 0).astype("int32")

    def make_layers():
        return [
            keras.layers.Dense(5, activation="relu", kernel_regularizer="l2"),
            keras.layers.Dense(2),
        ]

    def make_uncompiled(kind):
        keras.utils.set_random_seed(0)
        if kind == "sequential":
            return keras.Sequential([keras.layers.Input((4,)), *make_layers()])
        if kind == "functional":
            first, second = make_layers()
            entry = keras.Input((4,))
            return keras.Model(entry, second(first(entry)))
        return make_subclassed()

    def make_model(kind="sequential", loss=None, optimizer=None, **options):
        model = make_uncompiled(kind)
        loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizer = optimizer or keras.optimizers.Adam(1e-2)
        options = {"metrics": ["accuracy"], **options}
        model.compile(optimizer=optimizer, loss=loss, **options)
        return model

    def make_subclassed():
        class Subclassed(keras.Model):
            def __init__(self):
                super().__init__()
                self.first, self.second = make_layers()

            def call(self, x):
                return self.second(self.first(x))

        return Subclassed()

    def read(model):
        return [np.array(variable.value) for variable in model.variables]

    return SimpleNamespace(
        x=inputs,
        y=labels,
        weights=rng.random(NUM_EXAMPLES).astype("float32"),
        make_model=make_model,
        make_uncompiled=make_uncompiled,
        read=read,
    )
