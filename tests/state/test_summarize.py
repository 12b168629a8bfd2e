"""Tests of `summarize` for models of every library."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary._format import format_bytes


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 5, rngs=rngs)]
        )
        self.norm = nnx.BatchNorm(5, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.tied = self.layers[0].kernel
        self.scale = jnp.ones((7,))


TABLE = """\
┏━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━┳━━━━━━━┳━━━━━━━━━┓
┃ array       ┃ shape    ┃ dtype    ┃ kind  ┃ count ┃    size ┃
┡━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━╇━━━━━━━╇━━━━━━━━━┩
│ head/bias   │ (3,)     │ float64  │ array │     3 │    24 B │
│ head/kernel │ (400, 3) │ bfloat16 │ array │ 1,200 │  2.4 kB │
│ key         │ ()       │ key<fry> │ array │     1 │     8 B │
├─────────────┼──────────┼──────────┼───────┼───────┼─────────┤
│ parameters  │          │          │       │ 1,203 │ 2.42 kB │
│ other state │          │          │       │     1 │     8 B │
└─────────────┴──────────┴──────────┴───────┴───────┴─────────┘"""


def find_sizes(summary):
    return [(size.name, size.count, size.bytes) for size in summary.modules]


def test_a_summary_prints_as_a_table():
    arrays = {
        "head": {
            "kernel": jax.ShapeDtypeStruct((400, 3), jnp.bfloat16),
            "bias": np.zeros(3),
        },
        "key": jax.random.key(0),
        "activation": jnp.tanh,
    }

    assert str(armillary.summarize(arrays)) == TABLE


@pytest.mark.parametrize(
    "make",
    [
        lambda: Model(nnx.Rngs(0)),
        lambda: nnx.eval_shape(lambda: Model(nnx.Rngs(0))),
        lambda: nnx.state(Model(nnx.Rngs(0))),
    ],
    ids=["concrete", "abstract", "state"],
)
def test_nnx_parameters_are_apart_from_other_state(make):
    summary = armillary.summarize(make())

    assert summary.count == 12 + 4 + 20 + 5 + 5 + 5
    assert summary.bytes == 4 * summary.count
    kinds = {row.path: row.kind for row in summary.rows}
    assert kinds["layers/1/bias"] == "Param"
    assert kinds["norm/mean"] == "BatchStat"
    assert kinds["dropout/rngs/key"] == "RngKey"
    assert "tied" not in kinds
    assert "scale" not in [row.path for row in summary.parameters]
    assert find_sizes(summary) == [("layers", 41, 164), ("norm", 10, 40)]


def test_modules_are_those_where_the_paths_part():
    model = {"model": {"a": {"w": jnp.ones((2, 2))}, "b": {"x": {"w": jnp.ones(9)}}}}

    summary = armillary.summarize(model)

    assert find_sizes(summary) == [("model/b", 9, 36), ("model/a", 4, 16)]


def test_the_state_of_an_optimizer_and_scalars_are_no_parameters():
    params = {"w": jnp.zeros((3, 3)), "n": jnp.zeros((), int)}
    holder = SimpleNamespace(
        params=params, optimizer=optax.adam(1.0).init(params), loss=jnp.zeros(())
    )

    summary = armillary.summarize(holder)

    assert [row.path for row in summary.parameters] == ["params/w"]
    assert len(summary.rows) > 5


def test_the_state_of_a_pure_step_has_parameters():
    params = {"w": jnp.zeros((3, 3)), "n": jnp.zeros((), int)}
    statistics = {"mean": jnp.zeros(3)}
    opt_state = optax.adam(1.0).init(params)
    trainer = armillary.StepTrainer(
        lambda state: (state, {}),
        {"params": params, "opt_state": opt_state, "batch_stats": statistics},
    )

    summary = armillary.summarize(trainer)

    assert [row.path for row in summary.parameters] == ["state/params/w"]
    assert len(summary.rows) > 5


def test_a_keras_model_has_its_weights_without_optimizer_and_metrics(keras):
    layers = [
        keras.layers.Input((3,)),
        keras.layers.Dense(4),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.1),
    ]
    model = keras.Sequential(layers)
    model.compile("adam", "mse", metrics=["mae"])
    layers[1].trainable = False

    summary = armillary.summarize(model)

    assert sum(row.count for row in summary.rows) == model.count_params()
    assert summary.count == 12 + 4 + 4 + 4


def test_a_model_without_arrays_is_an_error(keras):
    model = keras.Sequential([keras.layers.Dense(4)])

    with pytest.raises(TypeError, match="`model` is of type Sequential, and holds no"):
        armillary.summarize(model)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (12_345_678, "12.3 MB"),
        (7e9, "7 GB"),
        (2e16, "2e+04 TB"),
    ],
)
def test_bytes_print_with_three_digits(number, text):
    assert format_bytes(number) == text
