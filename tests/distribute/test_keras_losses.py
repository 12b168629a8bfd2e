import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary


def strategies():
    return [
        armillary.OneDeviceStrategy("cpu:0"),
        armillary.MirroredStrategy(jax.devices()[:2]),
    ]


@pytest.mark.parametrize("strategy", strategies(), ids=["one", "two"])
@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "mean"])
def test_a_mean_over_one_replica_is_an_error_in_run(keras, strategy, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction)

    def step():
        return loss(jnp.ones((2, 1)), jnp.zeros((2, 1)))

    with pytest.raises(ValueError, match=r"Make it with `reduction=None` and average"):
        strategy.run(step)


@pytest.mark.parametrize("strategy", strategies(), ids=["one", "two"])
def test_other_reductions_work_in_run(keras, strategy):
    none = keras.losses.MeanSquaredError(reduction=None)
    total = keras.losses.MeanSquaredError(reduction="sum")

    def step():
        ones = jnp.ones((2, 1))
        return jnp.sum(none(ones, 0 * ones)), total(ones, 0 * ones)

    for value in strategy.run(step):
        assert np.all(np.array(strategy.local_results(value)) == 2.0)


def test_a_mean_is_right_where_there_is_no_strategy(keras):
    loss = keras.losses.MeanSquaredError()
    armillary.MirroredStrategy(jax.devices()[:2]).run(lambda: jnp.zeros(()))
    assert loss(jnp.ones((2, 1)), jnp.zeros((2, 1))) == 1.0
    step = armillary.function(lambda: loss(jnp.ones((2, 1)), jnp.zeros((2, 1))))
    assert armillary.get_strategy().run(step) == 1.0
