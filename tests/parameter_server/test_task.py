"""Tests of the use of variables in scheduled functions, and of refusals."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.distribute.program._flat_state import FlatState
from armillary.errors import StateStructureError
from armillary.parameter_server._optimizers import make_stand_in
from armillary.parameter_server._program import TaskProgram
from armillary.parameter_server._tasks import WorkerStrategy
from armillary.state._lift import State
from tests.mistakes import mistakes
from tests.releases import FLAX


class Net(nnx.Module):
    def __init__(self):
        self.kernel = nnx.Param(jnp.arange(3.0))
        self.average = nnx.BatchStat(jnp.ones(()))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))


class Holder:
    """The objects of a function in a worker; its optimizers are placeholders."""

    def __init__(self):
        self.model = Net()
        self.optimizer = nnx.Optimizer(self.model, optax.adam(0.1), wrt=nnx.Param)
        self.optimizer.tx = make_stand_in(0)
        self.tx, self.params = make_stand_in(1), {"w": jnp.ones((2,))}
        self.state = (jnp.zeros((2,)),)
        self.total = nnx.metrics.Average()
        self.rngs = nnx.Rngs(0)
        self.other = jnp.ones(())


def grad(model):
    return nnx.grad(lambda model: jnp.sum(model.kernel[...] ** 2))(model)


def trace(fn, holder=None):
    holder = holder or Holder()
    strategy = WorkerStrategy(1, 2, "replica")

    def task():
        return fn(holder, strategy)

    flat = FlatState(State([(task, "")]), strategy)
    with strategy.scope():
        program = TaskProgram(task, flat, (), task)
    return program, flat.state


def run(program, state, call=0):
    values = {i: state.read()[i] for i in program.spec.reads}
    result, gradients, additions = program(values, ((), ()), call)
    added = dict(zip(names(state, program.spec.additions), additions, strict=True))
    return result, gradients, added


def names(state, slots):
    return [state.paths[i].rpartition("holder/")[2] for i in slots]


def test_gradients_are_sent_and_states_of_optimizers_not_read():
    def step(h, strategy):
        h.optimizer.update(h.model, grad(h.model))
        return jnp.sum(h.model.average[...])

    program, state = trace(step)
    (update,) = program.spec.updates
    assert names(state, update.param_slots) == ["model/kernel"]
    assert names(state, program.spec.reads) == ["model/average", "model/kernel"]
    result, gradients, additions = run(program, state)
    assert result == 1
    np.testing.assert_array_equal(gradients[0][0], 2 * np.arange(3.0))
    assert additions == {"optimizer/step": 1}


def test_optax_on_plain_arrays_is_an_update_too():
    def step(h, strategy):
        gradients = jax.tree.map(lambda w: 3 * w, h.params)
        updates, h.state = h.tx.update(gradients, h.state, h.params)
        h.params = optax.apply_updates(h.params, updates)

    program, state = trace(step)
    (update,) = program.spec.updates
    assert update.transformation == 1
    _, gradients, additions = run(program, state)
    np.testing.assert_array_equal(gradients[0][0], [3, 3])
    assert additions == {}


def test_exact_sums_add_up_whatever_the_calls_have_read():
    def step(h, strategy):
        values = jnp.full((60_000,), 0.7)
        h.exact.update(values=values, weights=jnp.ones_like(values))

    holder = Holder()
    holder.exact = armillary.metrics.WeightedMean()
    program, state = trace(step, holder)
    # Two workers have read the same values, so both carry from the same elements.
    for _ in range(3):
        _, _, added = run(program, state)
        for _ in range(2):
            holder.exact.total[...] += added["exact/total"]
            holder.exact.weight[...] += added["exact/weight"]
    assert holder.exact.compute() == pytest.approx(np.float32(0.7), rel=1e-6)
    assert holder.exact.weight.read_float() == 6 * 60_000


def test_sums_are_what_a_call_adds():
    def step(h, strategy):
        h.total.update(values=jnp.array([2.0, 4.0]))
        h.model.count[...] += 5
        h.model.average[...] = 0.9 * h.model.average[...] + 0.1 * 3
        h.other = h.other - 0.25
        h.params["w"] = h.params["w"] + 0.5
        return h.total.compute()

    holder = Holder()
    holder.total.update(values=jnp.array(99.0))
    program, state = trace(step, holder)
    result, _, additions = run(program, state)
    assert result == (99 + 2 + 4) / 3
    assert additions.pop("params/w").tolist() == [0.5, 0.5]
    assert additions == {
        "model/average": pytest.approx(0.2),
        "model/count": 5,
        "other": -0.25,
        "total/count": 2,
        "total/total": 6,
    }


def test_random_numbers_differ_between_calls_and_keys_stay():
    def step(h, strategy):
        return jax.random.normal(h.rngs.params(), (3,))

    program, state = trace(step)
    first, again, second = (run(program, state, call)[0] for call in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.any(np.asarray(first) == np.asarray(second))
    assert [state.paths[i][-5:] for i in program.spec.additions] == ["count"]


def round_trip(x):
    return x.astype(jnp.int32).astype(jnp.float32)


def clip_besides(h):
    h.optimizer.update(h.model, grad(h.model))
    h.model.kernel[...] = jnp.clip(h.model.kernel[...], -1, 1)


@mistakes(
    {
        StateStructureError: {
            "other: set to a value": lambda h: setattr(h, "other", jnp.zeros(())),
            "other: set": lambda h: setattr(h, "other", 2 * h.other),
            "kernel: set to a value": lambda h: h.model.kernel.set_value(
                jnp.ones((3,))
            ),
            "other: the added amount depends on": lambda h: setattr(
                h, "other", h.other + h.other
            ),
            "total/count: set to .*Use a metric, or a variable with `aggregation": (
                lambda h: h.total.reset()
            ),
            "other: set to": lambda h: setattr(h, "other", round_trip(h.other + 0.7)),
            "kernel: changed besides": clip_besides,
        },
        ValueError: {
            "without `params`": lambda h: h.tx.update(h.params, h.state),
            "state or parameters that no variable holds": lambda h: h.tx.update(
                h.params, h.state, jax.tree.map(lambda w: w + 1, h.params)
            ),
            "was given value in a scheduled": lambda h: h.optimizer.update(
                h.model, grad(h.model), value=1.0
            ),
        },
        RuntimeError: {
            "`init` of an Optax transformation": lambda h: h.tx.init(h.params),
        },
    }
)
def test_operations_that_servers_cannot_do_are_refused(call, error, message):
    def step(h, strategy):
        call(h)

    with pytest.raises(error, match=re.compile(message, re.DOTALL)):
        trace(step)


@pytest.mark.skipif(FLAX < (0, 12, 7), reason="Flax returns no updates.")
def test_using_updates_is_refused():
    def step(h, strategy):
        return optax.tree.norm(h.optimizer.update(h.model, grad(h.model)))

    with pytest.raises(StateStructureError, match="uses the updates that an optimizer"):
        trace(step)
