"""Tests of reading the global step from any object that holds it."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.state._step_counter import as_step_counter


def test_a_step_is_read_whatever_holds_it():
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    optimizer.step[...] = jnp.asarray(7, jnp.uint32)
    assert as_step_counter(optimizer.step)() == 7
    assert as_step_counter(armillary.create_global_step(3))() == 3
    for value in (5, jnp.asarray(5), np.int64(5)):
        assert type(as_step_counter(lambda value=value: value)()) is int


def test_anything_else_is_an_error():
    with pytest.raises(TypeError, match=r"`global_step` is 0 of type int.* Use `optim"):
        as_step_counter(0)
