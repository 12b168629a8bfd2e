"""Tests of errors about state that a step uses without a path from the trainer."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.errors import TraceContextError

from armillary.distribute import DefaultStrategy
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.errors import CapturedStateError
from armillary.state._captured import find_constants
from armillary.state._lift import State
from tests.problems import Holder

global_model: nnx.Linear
FIX = (
    r"Assign what holds them to the trainer \(`self\.{0} = {0}` in `__init__`\), or "
    r"take their value as a constant on purpose"
)


@pytest.fixture(autouse=True, scope="module")
def make_global_model():
    # Not when the tests are collected: what is there then is left out (`gc.freeze`)
    # of the living objects among which the library looks for variables.
    global global_model
    global_model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def trace(step: Any, root: Any) -> Any:
    flat = FlatState(State([(root, "")]), DefaultStrategy())
    return trace_step(step, flat, (), user_fn=step, owner="the trainer")


def test_a_global_module_that_is_read_is_named():
    def step():
        return global_model(jnp.ones((1, 2)))

    with pytest.raises(CapturedStateError, match=FIX.format("global_model")) as caught:
        trace(step, Holder(w=jnp.ones(1)))
    message = str(caught.value)
    assert message.startswith(
        "`step` reads 2 variables that the trainer does not reach, so they would be "
        "frozen into the compiled program:\n"
    )
    assert "  global_model/kernel (nnx.Param (2, 3))\n" in message
    assert "  global_model/bias (nnx.Param (3,))\n" in message


def test_a_global_module_that_is_written_is_named():
    before = global_model.bias[...]

    def step():
        global_model.bias[...] = global_model.bias[...] + 1

    with pytest.raises(CapturedStateError, match=FIX.format("global_model")) as caught:
        trace(step, Holder(w=jnp.ones(1)))
    assert "`step` writes 2 variables" in str(caught.value)
    assert "global_model/bias (nnx.Param (3,))" in str(caught.value)
    assert global_model.bias[...] is before


@pytest.mark.parametrize("is_nested", [False, True])
def test_a_module_in_a_closure_is_named(is_nested):
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    def step():
        def inner():
            return model.kernel[...] * 2

        return jax.jit(inner)() if is_nested else inner()

    with pytest.raises(CapturedStateError, match=FIX.format("model")) as caught:
        trace(step, Holder())
    assert "model/kernel (nnx.Param (2, 3))" in str(caught.value)
    assert "bias" not in str(caught.value)


def test_a_variable_that_no_name_leads_to_is_described():
    class Registry:
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))

    root = Holder(registry=Registry())

    def step():
        return root.registry.model.kernel[...] * 2

    with pytest.raises(
        CapturedStateError, match=r"a variable without a name \(nnx.Param \(2, 3\)\)"
    ):
        trace(step, root)


def test_a_variable_that_shares_its_array_with_a_lifted_one_is_named():
    array = jnp.ones(3)
    captured = nnx.Param(array)
    root = Holder(model=nnx.Param(array))

    def step():
        root.model[...] = root.model[...] + captured[...]

    with pytest.raises(CapturedStateError, match=r"captured \(nnx.Param \(3,\)\)"):
        trace(step, root)


def test_an_unrelated_variable_with_the_array_of_a_lifted_one_is_fine():
    array = jnp.ones(3)
    bystander = nnx.Param(array)
    root = Holder(model=nnx.Param(array))

    def read_constant(constant):
        return constant * 2

    step = functools.partial(read_constant, array)
    trace(step, root)
    assert bystander[...] is array


def test_captured_arrays_are_constants():
    table = jnp.arange(3.0)
    host_table = np.arange(3.0, dtype=np.float32)
    root = Holder(model=nnx.Param(jnp.ones(3)))

    def step():
        root.model[...] = root.model[...] + table + host_table

    traced = trace(step, root)
    assert any(constant is table for constant in find_constants(traced.program))


def test_another_error_of_flax_is_passed_on():
    def step():
        variable = nnx.Variable(jnp.ones(1))

        def body(carry, _):
            variable[...] = variable[...] + 1
            return carry, None

        return jax.lax.scan(body, 0.0, length=2)

    with pytest.raises(TraceContextError):
        trace(step, Holder(w=jnp.ones(1)))
