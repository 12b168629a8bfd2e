"""Tests of `CentralStorageStrategy`: the place of variables, and equal numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.patience import wait_until
from tests.problems import MLP, Classifier, read_leaves


def make_trainer(strategy, **options):
    return Classifier(strategy, MLP(nnx.Rngs(0)), optax.adam(1e-2), **options)


def make_central():
    return armillary.distribute.CentralStorageStrategy(jax.devices()[1:5])


def count_on(devices, shape):
    """Returns how many arrays of a shape some devices hold, whoever refers to them."""
    return sum(
        shard.device in devices
        for array in jax.live_arrays()
        for shard in array.addressable_shards
        if shard.data.shape == shape
    )


def state_arrays(trainer):
    leaves = read_leaves(trainer).values()
    return [leaf for leaf in leaves if isinstance(leaf, jax.Array)]


@pytest.mark.slow
def test_a_step_without_a_compiler_leaves_state_in_its_place():
    optimizer = optax.sgd(1e-2, momentum=0.9)  # Each operation is a program.
    model = MLP(nnx.Rngs(0))
    trainer = Classifier(make_central(), model, optimizer, compile_step=False)
    trainer.train(1)
    assert {device for a in state_arrays(trainer) for device in a.devices()} == {
        jax.devices()[0]
    }


def test_no_device_of_a_replica_holds_state_between_steps():
    strategy = make_central()
    # No other test has arrays of this shape: threads may hold on to theirs for a while.
    shape = (61, 67)
    model = nnx.Linear(*shape, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @armillary.function
    def step():
        def step_fn():
            gradients = armillary.all_reduce(
                "sum", nnx.grad(lambda model: jnp.sum(model.kernel[...]))(model)
            )
            optimizer.update(model, gradients)

        strategy.run(step_fn)

    devices = set(jax.devices()[1:5])
    for _ in range(3):
        step()
        state = [*jax.tree.leaves(nnx.state(optimizer)), model.kernel[...]]
        assert len(state) > 5
        assert all(leaf.devices() == {jax.devices()[0]} for leaf in state)
        # Not even through a reference that is hidden somewhere; the thread that watches
        # the program has its frames for a moment.
        wait_until(lambda: count_on(devices, shape) == 0, "no array is left")
    mirrored = armillary.MirroredStrategy(jax.devices()[1:5])
    armillary.function(lambda: mirrored.run(lambda: model.kernel[...] * 2))()
    wait_until(lambda: count_on(devices, shape) == 4, "the result is gone")


def test_an_array_of_the_user_outlives_the_step_that_takes_it_in():
    strategy = armillary.distribute.CentralStorageStrategy(jax.devices()[:2])
    mine = jax.device_put(jnp.arange(64.0), jax.devices()[0])
    variable = nnx.Variable(mine)

    def step_fn():
        variable[...] = variable[...] + 1

    kept = []
    for _ in range(3):
        strategy.run(step_fn)
        kept.append(variable[...])
    np.testing.assert_array_equal(mine, np.arange(64))
    for count, values in enumerate(kept):
        np.testing.assert_array_equal(values, np.arange(64) + count + 1)


def test_results_and_variables_meet_outside_of_run():
    strategy = make_central()
    seen = nnx.Variable(jnp.zeros(()))
    ids = strategy.distribute_values_from_function(
        lambda context: jnp.float32(context.replica_id_in_sync_group)
    )
    doubled = strategy.run(lambda x: seen[...] + 2 * x, args=(ids,))
    seen[...] = seen[...] + strategy.reduce("sum", doubled)
    assert float(seen[...]) == 12.0 and seen[...].devices() == {jax.devices()[0]}
    # A value of a variable is an argument like any other.
    again = strategy.run(lambda x, y: x + y, args=(ids, seen[...]))
    assert float(strategy.reduce("sum", again)) == 4 * 12 + 6


def test_the_parameter_device_is_a_choice():
    strategy = armillary.distribute.CentralStorageStrategy(["cpu:1", "cpu:2"], "cpu:3")
    variable = nnx.Variable(jnp.zeros(2))

    def step_fn():
        variable[...] = variable[...] + 1

    strategy.run(step_fn)
    assert variable[...].devices() == {jax.devices()[3]}
    assert strategy.parameter_device == jax.devices()[3]
    assert repr(strategy) == "CentralStorageStrategy(2 x cpu, state on cpu:3)"
