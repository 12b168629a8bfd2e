import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import DefaultStrategy, OneDeviceStrategy, get_strategy
from armillary.state._lift import State


def test_the_default_strategy_is_one_object():
    assert DefaultStrategy() is DefaultStrategy()
    assert get_strategy() is DefaultStrategy()
    assert repr(DefaultStrategy()) == "DefaultStrategy(1 replica)"


def test_the_default_strategy_changes_nothing():
    strategy, seen = DefaultStrategy(), object()
    assert strategy.run(lambda x: x, args=(seen,)) is seen
    assert strategy.reduce("sum", 3.5) == 3.5
    array = jnp.ones((2, 3))
    assert strategy.gather(array, axis=0) is array
    np.testing.assert_array_equal(strategy.reduce("sum", array, axis=0), [2, 2, 2])
    assert strategy.local_results(array)[0] is array
    state = State([({"w": jnp.ones(2)}, "")])
    assert strategy.state_shardings(state) == [None] and strategy.mesh is None


def test_run_under_the_default_strategy_is_eager():
    values = []
    DefaultStrategy().run(lambda: values.append(float(jnp.ones(()) * 2)))
    assert values == [2.0]


@pytest.mark.parametrize("name", ["cpu:3", "/device:CPU:3"])
def test_a_device_may_be_named(name):
    strategy = OneDeviceStrategy(name)
    assert strategy.run(lambda: jnp.ones(2) * 2).devices() == {jax.devices()[3]}
    assert "OneDeviceStrategy" in repr(strategy)


def test_state_moves_to_the_device():
    strategy = OneDeviceStrategy("cpu:5")
    count = armillary.create_global_step()

    @armillary.function
    def step():
        count[...] = count[...] + 1

    with strategy.scope():
        step()
    assert count[...].devices() == {jax.devices()[5]}


@pytest.mark.parametrize("name", ["gpu:0", "cpu:99", "cpu", "", 7])
def test_an_unknown_device_is_an_error(name):
    with pytest.raises(ValueError, match=r"no such device\. Its devices are cpu:0"):
        OneDeviceStrategy(name)
