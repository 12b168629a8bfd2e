"""The classes of JAX's operations, by which the analyses of a step follow numbers."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute.analysis._operations import (
    COLLECTIVES,
    CURVED,
    LINEAR,
    SCALING,
    is_collective,
)
from armillary.errors import ReplicaMismatchError

# Operations of one number whose class does not matter: they give integers or flags, or
# random bits.
OTHER = {"is_finite", "population_count", "clz", "not", "bitcast_convert_type"}


def find_operations():
    """Returns the function of each operation of one number, by its name."""
    found = {}
    for name, fn in inspect.getmembers(jax.lax, callable):
        if name.startswith("_") or inspect.isclass(fn):
            continue
        try:
            program = jax.make_jaxpr(fn)(0.5)
        except Exception:  # It is not a function of one number.
            continue
        equations = program.jaxpr.eqns
        is_one = len(equations) == 1 and len(equations[0].invars) == 1
        if is_one and [each.dtype for each in program.out_avals] == [np.float32]:
            found[equations[0].primitive.name] = fn
    return found


OPERATIONS = find_operations()


def test_operations_of_one_number_have_a_class():
    assert len(OPERATIONS) > 30
    assert OPERATIONS.keys() <= LINEAR | SCALING | CURVED | OTHER


@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - OTHER))
def test_only_curved_operations_lose_a_factor(name):
    fn = OPERATIONS[name]
    one = fn(jnp.float32(0.3))

    # Two factors, because `ceil(0.6)` is `2 * ceil(0.3)` by chance, and `floor` is 0.
    scaled = [fn(jnp.float32(0.3 * factor)) for factor in (2.0, 5.0)]
    keeps = np.allclose(scaled, [2 * one, 5 * one], rtol=1e-5)

    assert keeps == (name not in CURVED)


@pytest.mark.parametrize("fn", [jnp.tan, jnp.sinh, jnp.floor, jax.lax.erfc, jnp.tanh])
def test_a_function_of_a_divided_loss_may_be_averaged(fn):
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    (batch,) = strategy.distribute_dataset([np.arange(4.0, dtype=np.float32)])

    def step(x):
        loss = armillary.compute_average_loss(x)
        return armillary.all_reduce("mean", fn(loss))

    value = strategy.reduce("mean", strategy.run(step, args=(batch,)))
    np.testing.assert_allclose(value, np.mean([fn(0.25), fn(1.25)]), rtol=1e-5)


PAIRS = [(0, 1), (1, 0)]
RECEIVED = jax.ShapeDtypeStruct((2,), np.float32)
# Calls of the functions of JAX with an axis, for a value of shape (2,) on each replica.
CALLS = {
    "all_gather": lambda x, axis: jax.lax.all_gather(x, axis),
    "all_to_all": lambda x, axis: jax.lax.all_to_all(x, axis, 0, 0, tiled=True),
    "pbroadcast": lambda x, axis: jax.lax.pbroadcast(x, axis, 0),
    "pmax": jax.lax.pmax,
    "pmean": jax.lax.pmean,
    "pmin": jax.lax.pmin,
    "ppermute": lambda x, axis: jax.lax.ppermute(x, axis, PAIRS),
    "precv": lambda x, axis: jax.lax.precv(
        jax.lax.create_token(), RECEIVED, axis, PAIRS
    ),
    "psend": lambda x, axis: jax.lax.psend(x, axis, PAIRS),
    "pshuffle": lambda x, axis: jax.lax.pshuffle(x, axis, [1, 0]),
    "psum": jax.lax.psum,
    "psum_scatter": lambda x, axis: jax.lax.psum_scatter(x, axis),
    "pswapaxes": lambda x, axis: jax.lax.pswapaxes(x, axis, 0),
    "ragged_all_to_all": lambda x, axis: jax.lax.ragged_all_to_all(
        x, x, *jnp.ones((4, 2), int), axis_name=axis
    ),
}
CALLS = {name: call for name, call in CALLS.items() if hasattr(jax.lax, name)}
NO_COLLECTIVES = {"axis_index", "axis_size", "pcast", "pvary"}


def trace(call):
    """Returns the equations of a call on one of two replicas."""
    make = jax.make_jaxpr(lambda x: call(x, ("replica",)), axis_env=[("replica", 2)])
    return make(jnp.ones(2)).jaxpr.eqns


def test_every_function_of_an_axis_is_known():
    found = set()
    for name, fn in inspect.getmembers(jax.lax, inspect.isfunction):
        if "axis_name" in inspect.signature(fn).parameters:
            found.add(name)

    assert len(found) > 10
    assert found <= CALLS.keys() | NO_COLLECTIVES


@pytest.mark.parametrize("name", CALLS)
def test_every_collective_has_a_class(name):
    collectives = [
        each for each in trace(CALLS[name]) if is_collective(each, "replica")
    ]

    assert collectives
    for each in collectives:
        assert each.primitive.name.startswith(COLLECTIVES)


@pytest.mark.parametrize("name", sorted(CALLS.keys() & {"pbroadcast", "psend", "psum"}))
def test_replicas_that_would_wait_for_each_other_are_an_error(name):
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    (batch,) = strategy.distribute_dataset([np.arange(4.0, dtype=np.float32)])

    def step(x):
        def send():
            CALLS[name](x, ("replica",))
            return x

        is_first = jax.lax.axis_index("replica") == 0
        return jax.lax.cond(is_first, send, lambda: x)

    with pytest.raises(ReplicaMismatchError, match="would wait there forever"):
        strategy.run(step, args=(batch,))


@pytest.mark.skipif("precv" not in CALLS, reason="this JAX has no `precv`")
def test_received_values_may_differ():
    strategy = armillary.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        variable = nnx.Variable(jnp.zeros(2))

    def step():
        variable[...] = CALLS["precv"](None, ("replica",))

    with pytest.raises(ReplicaMismatchError, match="left different values"):
        strategy.run(step)
