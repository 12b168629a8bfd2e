"""Tests that generated models lie where they are annotated, with the same losses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import armillary
from tests.distribute import generated_models as generated
from tests.tiers import slow_after_first

NUM_STEPS = 3


@functools.cache
def train_on_one_device(library, seed, dtype):
    drawn = generated.draw(seed)
    strategy = armillary.OneDeviceStrategy("cpu:0")
    model = generated.LIBRARIES[library](strategy, drawn, dtype)
    losses = model.train(NUM_STEPS)
    kernel = model.arrays()["stack/up/kernel"][0]
    return losses, np.asarray(kernel)


@slow_after_first("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
@slow_after_first("dtype", [jnp.float32, jnp.float64], ids=["float32", "float64"])
@slow_after_first("seed", range(5))
@pytest.mark.parametrize("library", generated.LIBRARIES)
def test_a_generated_model_lies_where_it_is_annotated(library, seed, dtype, kind):
    if library == "equinox":
        pytest.importorskip("equinox")
    drawn = generated.draw(seed)
    axes = tuple(drawn.sizes)
    mesh = jax.make_mesh(
        tuple(drawn.sizes.values()), axes, axis_types=(kind,) * len(axes)
    )
    with jax.enable_x64(dtype == jnp.float64):
        strategy = generated.make_strategy(library, drawn, mesh)
        model = generated.LIBRARIES[library](strategy, drawn, dtype)
        losses = model.train(NUM_STEPS)
        kernel = np.asarray(model.arrays()["stack/up/kernel"][0])
        expected, expected_kernel = train_on_one_device(library, seed, dtype)

    assert generated.find_misplaced(drawn, model, strategy.mesh) == []
    assert kernel.dtype == dtype
    is_double = dtype == jnp.float64
    np.testing.assert_allclose(losses, expected, rtol=1e-12 if is_double else 1e-5)
    exactness = 1e-10 if is_double else 1e-3
    np.testing.assert_allclose(kernel, expected_kernel, rtol=0, atol=exactness)


def test_the_drawn_models_differ():
    models = [generated.draw(seed) for seed in range(5)]
    assert len({tuple(drawn.sizes) for drawn in models}) > 2
    assert {drawn.birth for drawn in models} == {"elsewhere", "make", "scope"}
    names = [names for drawn in models for names in drawn.names.values()]
    assert None in names
    entries = {name for each in names if each for name in each}
    assert None in entries
    assert {"data", f"{generated.ALIAS}data"} <= entries
