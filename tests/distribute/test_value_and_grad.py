"""Tests of `armillary.value_and_grad`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.errors import CapturedStateError


def test_gradients_of_nnx_variables_and_what_the_loss_writes():
    weight, count = nnx.Param(jnp.asarray([1.0, 2.0])), nnx.Variable(jnp.zeros(()))

    def loss_fn():
        count[...] += 1
        return jnp.sum(weight[...] ** 2)

    loss, gradients = armillary.value_and_grad(loss_fn, [weight])
    assert loss == 5.0
    np.testing.assert_array_equal(gradients[0], [2.0, 4.0])
    assert count[...] == 1
    np.testing.assert_array_equal(weight[...], [1.0, 2.0])


def test_a_loss_with_something_else():
    weight = nnx.Param(jnp.asarray(3.0))
    (loss, double), gradients = armillary.value_and_grad(
        lambda: (weight[...] ** 2, 2 * weight[...]), [weight], has_aux=True
    )
    assert (loss, double, gradients) == (9.0, 6.0, [6.0])


def test_gradients_of_keras_variables_outside_of_any_step(keras):
    weight, other = keras.Variable([1.0, 2.0]), keras.Variable(2.0)
    loss, gradients = armillary.value_and_grad(
        lambda: other * jnp.sum(weight.value**2), [weight, other]
    )
    assert loss == 10.0
    np.testing.assert_array_equal(gradients[0], [4.0, 8.0])
    assert gradients[1] == 5.0


@pytest.mark.parametrize("num_replicas", [1, 4])
def test_gradients_in_run_belong_to_the_replica(keras, num_replicas):
    strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
    weight, seen = nnx.Param(jnp.asarray(2.0)), keras.metrics.Sum()
    keras_weight = keras.Variable(3.0)
    data = np.arange(8, dtype=np.float32)
    dataset = strategy.distribute_dataset(
        armillary.data.from_arrays(data, batch_size=8)
    )

    class Step:
        def __init__(self):
            self.weights, self.seen = [weight, keras_weight], seen
            self.sums = [jnp.zeros(()), jnp.zeros(())]

        def __call__(self, batch):
            def loss_fn():
                self.seen.update_state(batch)
                scale = self.weights[0][...] * self.weights[1].value
                return armillary.compute_average_loss(batch * scale)

            _, found = armillary.value_and_grad(loss_fn, self.weights)
            self.sums = armillary.all_reduce("sum", list(found))

    step = Step()
    run = armillary.function(lambda batch: strategy.run(step, args=(batch,)))
    run(next(iter(dataset)))
    np.testing.assert_allclose(step.sums, [3.5 * 3, 3.5 * 2])
    assert float(seen.result()) == data.sum()


def test_an_argument_that_is_no_variable_is_refused():
    with pytest.raises(TypeError, match="must be a list of variables of Keras or Flax"):
        armillary.value_and_grad(lambda: jnp.zeros(()), [jnp.zeros(())])


@pytest.mark.parametrize("variables", [[], ()])
def test_a_model_that_was_not_built_has_no_variables(variables):
    message = r"`variables` is .*at least one variable.*`model\(batch\)`"
    with pytest.raises(ValueError, match=message):
        armillary.value_and_grad(lambda: jnp.zeros(()), variables)


def test_a_variable_out_of_reach_is_named():
    hidden = nnx.Param(jnp.zeros(()))

    class Trainer(armillary.StandardTrainer):
        def train_step(self, iterator):
            batch = next(iterator)
            armillary.value_and_grad(lambda: jnp.sum(batch), [hidden])

    trainer = Trainer(armillary.data.from_arrays(np.ones(4), batch_size=1))
    with pytest.raises(CapturedStateError, match="the step does not reach"):
        trainer.train(1)
