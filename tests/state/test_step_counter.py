import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.state._summarize import as_step_counter


def test_an_optimizer_step_is_read():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    counter = as_step_counter(optimizer.step)
    optimizer.step[...] = jnp.asarray(7, jnp.uint32)
    assert counter() == 7 and type(counter()) is int


def test_a_global_step_is_read():
    step = armillary.create_global_step(3)
    assert as_step_counter(step)() == 3


@pytest.mark.parametrize("value", [5, jnp.asarray(5), np.int64(5)])
def test_a_function_is_called(value):
    assert as_step_counter(lambda: value)() == 5


@pytest.mark.parametrize("value", [jnp.asarray(0), 0, None, "step"])
def test_anything_else_is_an_error(value):
    with pytest.raises(TypeError) as caught:
        as_step_counter(value)
    message = str(caught.value)
    assert message.startswith(f"`global_step` is {value!r} of type ")
    assert "it must be a variable that the steps advance, or a function" in message
    assert "Use `optimizer.step`, `armillary.create_global_step()`" in message
