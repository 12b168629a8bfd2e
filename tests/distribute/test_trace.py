"""Tests that a traced step is part of a loop's program without changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core.primitives import jit_p

from armillary.distribute import DefaultStrategy
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.state._lift import State
from tests.problems import Holder

TABLE = np.arange(3.0, dtype=np.float32)


def double(holder):
    holder.w = holder.w * 2
    return holder.w.sum()


def look_up(holder):
    holder.w = holder.w + jnp.asarray(TABLE)
    return holder.w.sum()


@pytest.mark.parametrize(
    ("change", "expected"), [(double, [2.0, 2.0, 2.0]), (look_up, [1.0, 2.0, 3.0])]
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_call_is_one_operation_and_not_traced_again(change, expected, is_compiled):
    holder = Holder(w=jnp.ones(3))
    flat = FlatState(State([(holder, "")]), DefaultStrategy())
    step = trace_step(
        lambda: change(holder), flat, (), user_fn=change, owner="the test"
    )

    def run(w):
        (new,), (total,) = step.call([w], [])
        return new, total

    with jax.disable_jit(not is_compiled):
        equations = jax.make_jaxpr(run)(jnp.ones(3)).eqns
        new, total = run(jnp.ones(3))
    np.testing.assert_array_equal(new, expected)
    assert total == sum(expected)
    if is_compiled and not step.program.consts:
        (call,) = equations
        assert call.primitive is jit_p
        assert call.params["jaxpr"] is step.program
        assert call.params["name"] == "step"
    assert bool(step.program.consts) == (change is look_up)


def test_a_call_takes_only_what_it_uses():
    holder = Holder(w=jnp.ones(3), other=jnp.zeros(2))
    state = State([(holder, "")])
    flat = FlatState(state, DefaultStrategy())
    step = trace_step(
        lambda: double(holder), flat, (), user_fn=double, owner="the test"
    )
    (call,) = jax.make_jaxpr(lambda *slots: step.call(slots, []))(*state.read()).eqns
    assert [variable.aval.shape for variable in call.invars] == [(3,)]


def test_a_run_on_one_replica_returns_no_array_of_the_state_as_it_was():
    holder = Holder(w=jnp.ones(3), other=jnp.zeros(2))
    strategy = DefaultStrategy()
    flat = FlatState(State([(holder, "")]), strategy)
    step = trace_step(
        lambda: strategy.run(double, args=(holder,)),
        flat,
        (),
        user_fn=double,
        owner="the test",
    )

    # XLA would compile more arrays for each array that a step changes.
    [call] = step.program.jaxpr.eqns
    assert call.params["name"] == "double"
    assert len(call.outvars) == 2  # the new `w`, and the sum
    inside = call.params["jaxpr"].jaxpr
    assert not {*map(id, inside.outvars)} & {*map(id, inside.invars)}
