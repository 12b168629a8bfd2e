"""Tests that the noise of an optimizer equals the noise of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import armillary
from armillary import all_reduce
from armillary.errors import DoubleReductionError
from tests.tiers import slow_after_first

# `dpsgd` of Optax passes `seed` to its own aggregate.
pytestmark = pytest.mark.filterwarnings('ignore:"seed" is deprecated')

ROWS = np.ones((16, 1), np.float32)
SIZE = 20_000


def zero_gradients(weights, batch):
    """Returns a gradient of 0 for each example, so that an update is noise alone."""
    return jax.vmap(jax.grad(lambda w, x: 0.0 * jnp.sum(w) * x[0]), (None, 0))(
        weights, batch
    )


def gather(tree):
    return armillary.get_replica_context().all_gather(tree, axis=0)


def private(optimizer, weights, batch, state):
    return optimizer.update(gather(zero_gradients(weights, batch)), state, weights)


def noise_after(optimizer, weights, batch, state):
    gradients = jnp.mean(zero_gradients(weights, batch), axis=0)
    return optimizer.update(all_reduce("mean", gradients), state, weights)


def noise_before(optimizer, weights, batch, state, op="mean"):
    gradients = jnp.mean(zero_gradients(weights, batch), axis=0)
    updates, state = optimizer.update(gradients, state, weights)
    return all_reduce(op, updates), state


def noise_in_a_chain(optimizer, weights, batch, state):
    gradients = jnp.mean(zero_gradients(weights, batch), axis=0)
    return optimizer.update(gradients, state, weights)


def clipped_sum(optimizer, weights, batch, state):
    """Sums clipped gradients over all examples; the noise has its size in advance."""
    clipped, _ = optax.per_example_global_norm_clip([zero_gradients(weights, batch)], 1)
    return optimizer.update(all_reduce("sum", clipped[0]) / 16, state, weights)


def add_noise():
    # The variance of a sum over 16 examples with a noise of 1, as their mean has it.
    return optax.add_noise(1 / 16**2, 0.0, jax.random.key(3))


RIGHT = {
    "dpsgd": (lambda: optax.contrib.dpsgd(1.0, 1.0, 1.0, 3), private),
    "aggregate": (
        lambda: optax.contrib.differentially_private_aggregate(
            1.0, 1.0, jax.random.key(3)
        ),
        private,
    ),
    "add_noise after": (add_noise, noise_after),
    "add_noise before a mean": (add_noise, noise_before),
    "noisy_sgd": (
        lambda: optax.noisy_sgd(1.0, 1 / 16**2, 0.0, jax.random.key(3)),
        noise_after,
    ),
    "add_noise in a chain": (
        lambda: optax.chain(armillary.all_reduce_gradients("mean"), add_noise()),
        noise_in_a_chain,
    ),
    "a sum of clipped gradients": (add_noise, clipped_sum),
}


def train(strategy, optimizer, update, num_steps=2):
    weights = jnp.zeros(SIZE)

    def step(state, batch):
        weights, optimizer_state = state
        updates, optimizer_state = update(optimizer, weights, batch, optimizer_state)
        return (optax.apply_updates(weights, updates), optimizer_state), {}

    source = armillary.data.from_arrays(ROWS, batch_size=16, repeat=True)
    state = (weights, optimizer.init(weights))
    trainer = armillary.StepTrainer(step, state, source, strategy=strategy)
    trainer.train(num_steps)
    return np.asarray(trainer.state[0])


@slow_after_first("kind", RIGHT)
def test_replicas_add_the_noise_of_one_device(kind):
    make, update = RIGHT[kind]
    expected = train(armillary.OneDeviceStrategy("cpu:0"), make(), update)

    found = train(armillary.MirroredStrategy(jax.devices()[:4]), make(), update)

    np.testing.assert_array_equal(found, expected)
    # Two steps, each with the noise of 1 over 16 examples.
    assert found.std() == pytest.approx(2**0.5 / 16, rel=0.02)


def private_alone(optimizer, weights, batch, state):
    gradients = zero_gradients(weights, batch)
    updates, state = optimizer.update(gradients, state, weights)
    return all_reduce("mean", updates), state


def private_with_own_noise(optimizer, weights, batch, state):
    key = jax.random.fold_in(state.rng_key, jax.lax.axis_index("replica"))
    own = state._replace(rng_key=key)
    updates, _ = optimizer.update(zero_gradients(weights, batch), own, weights)
    return all_reduce("mean", updates), state


@pytest.mark.parametrize(
    ("kind", "update"),
    [
        ("dpsgd", private_alone),
        ("aggregate", private_alone),
        ("aggregate", private_with_own_noise),
    ],
)
def test_private_gradients_of_one_replica_are_refused(kind, update):
    make, _ = RIGHT[kind]

    message = (
        r"dpsgd.*test_noise\.py:.*, so each of 4 replicas would add the noise"
        r".*`gradients = armillary\.get_replica_context\(\)\.all_gather\("
    )
    with pytest.raises(DoubleReductionError, match=message):
        train(armillary.MirroredStrategy(jax.devices()[:4]), make(), update)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: armillary.MirroredStrategy(jax.devices()[:1]),
        lambda: armillary.ShardedStrategy({"data": 8}),
    ],
    ids=["mirrored", "sharded"],
)
def test_private_gradients_of_the_only_replica_are_right(strategy):
    make, _ = RIGHT["dpsgd"]
    expected = train(armillary.OneDeviceStrategy("cpu:0"), make(), private_alone)

    found = train(strategy(), make(), private_alone)

    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.std() == pytest.approx(2**0.5 / 16, rel=0.02)


def adam_of_noise():
    return optax.chain(add_noise(), optax.scale(-0.5), optax.clip(10.0))


@pytest.mark.parametrize("make", [add_noise, adam_of_noise])
def test_a_sum_of_gradients_with_equal_noise_is_refused(make):
    def update(*arguments):
        return noise_before(*arguments, op="sum")

    message = r"added the same random numbers \(at .*test_noise\.py.*count 4 times"
    with pytest.raises(DoubleReductionError, match=message):
        train(armillary.MirroredStrategy(jax.devices()[:4]), make(), update)


def test_a_norm_of_noisy_gradients_may_be_summed():
    def update(optimizer, weights, batch, state):
        gradients = jnp.mean(zero_gradients(weights, batch), axis=0)
        noisy, state = optimizer.update(gradients, state, weights)
        norm = all_reduce("sum", jnp.sum(noisy * noisy))
        return all_reduce("mean", noisy) * jnp.where(norm < 0, 2, 1), state

    found = train(armillary.MirroredStrategy(jax.devices()[:4]), add_noise(), update)

    assert found.std() == pytest.approx(2**0.5 / 16, rel=0.02)
