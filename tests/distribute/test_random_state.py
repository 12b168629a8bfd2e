"""Every replica draws its own random numbers, from one stored key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary


@pytest.fixture
def strategy(make_mirrored):
    return make_mirrored(4)


def masks_of(strategy, dropout):
    result = strategy.run(lambda: dropout(jnp.ones(64)))
    return [tuple(np.asarray(row)) for row in strategy.local_results(result)]


def test_dropout_masks_differ_between_replicas_and_steps(strategy):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    first, second = masks_of(strategy, dropout), masks_of(strategy, dropout)
    assert len(set(first + second)) == 8
    assert all(0 < sum(mask) / 2 < 64 for mask in first)


def test_the_key_stays_and_the_count_advances(strategy):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = np.asarray(jax.random.key_data(dropout.rngs.key[...]))
    for count in (1, 2):
        masks_of(strategy, dropout)
        assert int(dropout.rngs.count[...]) == count
    np.testing.assert_array_equal(jax.random.key_data(dropout.rngs.key[...]), key)


def test_random_numbers_are_reproducible(strategy):
    def draw():
        dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(3))
        return masks_of(strategy, dropout) + masks_of(strategy, dropout)

    assert draw() == draw()


def test_streams_are_those_of_folded_keys(strategy):
    rngs = nnx.Rngs(dropout=7)
    result = strategy.run(lambda: jax.random.uniform(rngs.dropout()))
    base = nnx.Rngs(dropout=7).dropout.key[...]
    for replica, value in enumerate(strategy.local_results(result)):
        key = jax.random.fold_in(jax.random.fold_in(base, replica), 0)
        assert float(value) == float(jax.random.uniform(key))


def test_a_new_key_that_all_replicas_share_is_stored(strategy):
    stream = nnx.Rngs(0).default
    fresh = jax.random.key(9)

    def step_fn():
        stream.key[...] = jax.random.fold_in(fresh, stream.count[...])

    strategy.run(step_fn)
    expected = jax.random.fold_in(fresh, 0)
    assert jnp.all(
        jax.random.key_data(stream.key[...]) == jax.random.key_data(expected)
    )


def test_a_key_that_each_replica_splits_moves_on_for_all(strategy):
    stream = nnx.Rngs(0).default
    before = np.asarray(jax.random.key_data(stream.key[...]))

    def step_fn():
        stream.key[...] = stream()
        return jax.random.uniform(stream.key[...])

    values = strategy.local_results(strategy.run(step_fn))
    assert len({float(value) for value in values}) == 4
    after = np.asarray(jax.random.key_data(stream.key[...]))
    assert after.shape == before.shape and (after != before).any()
    copies = [shard.data for shard in stream.key[...].addressable_shards]
    assert len({tuple(np.asarray(jax.random.key_data(c))) for c in copies}) == 1


def test_random_state_advances_inside_a_compiled_function(strategy):
    rngs = nnx.Rngs(0)

    @armillary.function
    def step():
        return strategy.run(lambda: jax.random.uniform(rngs()))

    values = [float(v) for _ in range(2) for v in strategy.local_results(step())]
    assert len(set(values)) == 8


def test_split_streams_differ_between_replicas(strategy):
    rngs = nnx.Rngs(0).split(3)

    def step_fn():
        return jax.vmap(jax.random.uniform)(rngs.default.key[...])

    values = strategy.gather(strategy.run(step_fn), axis=0)
    assert len(set(np.asarray(values).tolist())) == 12


def test_plain_keys_are_streams_too(strategy):
    class Holder:
        key = None

    holder = Holder()
    holder.key = jax.random.key(0)

    def step_fn():
        holder.key, key = jax.random.split(holder.key)
        return jax.random.uniform(key, (1,))

    values = [strategy.gather(strategy.run(step_fn), axis=0) for _ in range(2)]
    assert len(set(np.concatenate(values).tolist())) == 8
