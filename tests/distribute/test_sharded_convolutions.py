"""Tests of convolutions under `ShardedStrategy`, whose gradients XLA may get wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import ShardedStrategy
from armillary.xla import _compile
from armillary.xla._lowerings import has_rules, partitioned
from tests.distribute.sharded_trainers import (
    MAKERS,
)
from tests.problems import (
    read_state,
)


@pytest.mark.slow
@pytest.mark.parametrize("num_groups", [1, 4])
@pytest.mark.parametrize("num_examples", [5, 8])
def test_convolutions_have_the_gradients_of_one_device(num_examples, num_groups):
    images = np.random.default_rng(0).normal(size=(num_examples, 8, 8, 4))

    def run(strategy):
        rngs = nnx.Rngs(0)
        first = nnx.Conv(4, 8, (3, 3), strides=2, rngs=rngs)
        second = nnx.Conv(8, 8, (3, 3), feature_group_count=num_groups, rngs=rngs)
        dense = nnx.Linear(128, 64, rngs=rngs)
        model = nnx.List([first, second, dense])
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        def step_fn(batch):
            def loss_fn(model):
                x = nnx.relu(model[1](nnx.relu(model[0](batch))))
                return jnp.mean(jnp.tanh(model[2](x.reshape(len(x), -1))) ** 2)

            optimizer.update(
                model, armillary.all_reduce("sum", nnx.grad(loss_fn)(model))
            )

        (batch,) = strategy.distribute_dataset([images.astype(np.float32)])
        strategy.run(step_fn, args=(batch,))
        return read_state(model)

    expected = run(MAKERS["one device"]())
    for shape in ({"data": 2, "fsdp": 2}, {"data": 3, "fsdp": 2}):
        devices = jax.devices()[: 2 * shape["data"]]
        state = run(ShardedStrategy(shape, devices=devices))
        for path, value in expected.items():
            np.testing.assert_allclose(state[path], value, 0, 1e-6, err_msg=path)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_convolutions_are_divided_by_examples_on_all_platforms(platform):
    assert has_rules()
    layout = ShardedStrategy().layout

    def gradient(kernel, x):
        shape = (1, 1), "SAME"
        return armillary.all_reduce(
            "sum", jax.grad(lambda k: jax.lax.conv(x, k, *shape).sum())(kernel)
        )

    arrays = jnp.ones((2, 3, 3, 3)), layout.place(np.ones((8, 3, 4, 4), np.float32))
    with partitioned(layout.sharding_of):
        traced = jax.jit(gradient).trace(*arrays)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert text.count("sharding_constraint") == 3


def test_convolutions_that_cannot_be_divided_rightly_are_an_error(monkeypatch):
    monkeypatch.setattr(_compile, "has_rules", lambda: False)
    conv = nnx.Conv(1, 1, (3, 3), rngs=nnx.Rngs(0))
    with pytest.raises(RuntimeError, match="convolutions would have wrong gradients"):
        ShardedStrategy().run(lambda x: conv(x), args=(np.ones((8, 4, 4, 1), "f"),))
