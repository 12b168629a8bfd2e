"""Tests that every replica draws its own random numbers from one stored key."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.distribute import VariableAggregation
from tests.problems import Holder
from tests.tiers import slow_after_first


def masks_of(strategy, dropout):
    result = strategy.run(lambda: dropout(jnp.ones(64)))
    return [tuple(np.asarray(row)) for row in strategy.local_results(result)]


def test_the_key_stays_and_the_count_advances(strategy):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    key = np.asarray(jax.random.key_data(dropout.rngs.key[...]))
    for count in (1, 2):
        masks_of(strategy, dropout)
        assert int(dropout.rngs.count[...]) == count
    np.testing.assert_array_equal(jax.random.key_data(dropout.rngs.key[...]), key)


@pytest.mark.slow
def test_the_first_replica_draws_what_one_replica_alone_draws(make_mirrored):
    def draw(strategy):
        rngs = nnx.Rngs(dropout=7)
        streams = (rngs, nnx.Rngs(0).split(3))
        holder = Holder(key=jax.random.key(1))

        def step_fn():
            holder.key = jax.random.split(holder.key)[1]
            keys = [rngs.dropout(), *streams[1].default.key[...], holder.key]
            return jnp.stack([jax.random.uniform(key) for key in keys])

        strategy.run(step_fn)
        values = strategy.run(step_fn)
        return [np.asarray(value) for value in strategy.local_results(values)]

    (alone,) = draw(armillary.OneDeviceStrategy("cpu:0"))
    for num_replicas in (1, 2, 4):
        values = draw(make_mirrored(num_replicas))
        np.testing.assert_array_equal(values[0], alone)
        assert len({value.tobytes() for value in values}) == num_replicas


def test_streams_come_from_folded_keys(strategy):
    rngs = nnx.Rngs(dropout=7)
    result = strategy.run(lambda: jax.random.uniform(rngs.dropout()))
    base = nnx.Rngs(dropout=7).dropout.key[...]
    others = jax.random.fold_in(base, np.uint32(0xA5B111A2))
    for replica, value in enumerate(strategy.local_results(result)):
        own = jax.random.fold_in(others, replica) if replica else base
        key = jax.random.fold_in(own, 0)
        assert float(value) == float(jax.random.uniform(key))


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


def test_a_legacy_key_of_nnx_is_a_stream_too(strategy):
    stream = nnx.RngKey(jax.random.PRNGKey(0))

    def step_fn():
        key, sub = jax.random.split(stream[...])
        stream[...] = key
        return jax.random.uniform(sub, (1,))

    values = [strategy.gather(strategy.run(step_fn), axis=0) for _ in range(2)]
    assert len(set(np.concatenate(values).tolist())) == 8
    expected = jax.random.split(jax.random.split(jax.random.PRNGKey(0))[0])[0]
    np.testing.assert_array_equal(stream[...], expected)


LEGACY = {
    "directly": lambda key: jax.random.uniform(key),
    "after a split": lambda key: jax.random.uniform(jax.random.split(key)[1]),
    "in jit": lambda key: jax.jit(jax.random.normal)(jax.random.split(key)[1]),
    "in a scan": lambda key: jax.lax.scan(
        lambda key, _: (jax.random.split(key)[0], jax.random.uniform(key)), key, None, 2
    )[1],
    "in a loop": lambda key: jax.lax.fori_loop(
        0, 2, lambda i, x: x + jax.random.uniform(key), 0.0
    ),
    "in a branch": lambda key: jax.lax.cond(
        key[0] > 1, lambda: 0.0, lambda: jax.random.uniform(key)
    ),
    "after jit": lambda key: jax.random.gamma(jax.jit(jax.random.split)(key)[0], 2.0),
}


@slow_after_first("draw", LEGACY.values(), ids=LEGACY)
def test_a_legacy_key_that_gives_all_replicas_the_same_is_an_error(strategy, draw):
    holder = Holder(key=jax.random.PRNGKey(0))
    with pytest.raises(ValueError) as caught:
        strategy.run(lambda: draw(holder.key))
    message = str(caught.value)
    assert message.startswith("`holder/key` holds a key of `jax.random.PRNGKey`, from ")
    assert re.search(r"test_random_state\.py:\d+ ", message)


def fold(key):
    replica = armillary.get_replica_context().replica_id_in_sync_group
    return jax.random.uniform(jax.random.fold_in(jax.random.split(key)[1], replica))


def test_a_legacy_key_that_the_step_folds_itself_is_fine(strategy):
    holder = Holder(key=jax.random.PRNGKey(0))
    values = strategy.local_results(strategy.run(lambda: fold(holder.key)))
    assert len({float(value) for value in values}) == 4


def test_an_array_like_a_legacy_key_is_an_array(strategy):
    holder = Holder(pair=jnp.asarray([1, 2], jnp.uint32), key=jax.random.key(0))

    def step_fn():
        holder.pair = holder.pair + 1
        return jax.random.uniform(jax.random.fold_in(holder.key, holder.pair[0]))

    values = strategy.local_results(strategy.run(step_fn))
    assert len({float(value) for value in values}) == 4
    assert holder.pair.tolist() == [2, 3]


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_without_aggregation_all_replicas_draw_the_same(strategy, make_key):
    key = nnx.Variable(make_key(0), aggregation=VariableAggregation.NONE)
    values = strategy.run(lambda: jax.random.uniform(key[...]))
    expected = float(jax.random.uniform(make_key(0)))
    assert [float(value) for value in strategy.local_results(values)] == [expected] * 4


@pytest.mark.slow
@pytest.mark.parametrize("held_by", ["nnx.Optimizer", "an attribute"])
def test_the_noise_of_an_optimizer_is_equal_on_all_replicas(
    make_mirrored, put_rows, held_by
):
    def train(strategy, batch):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        noise = optax.add_noise(0.01, 0.55, key=jax.random.key(0))
        optimizer = optax.chain(optax.sgd(0.1), noise)
        if held_by == "nnx.Optimizer":
            own = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        else:
            own = Holder(state=optimizer.init(nnx.state(model, nnx.Param)))

        def step_fn(x):
            grads = armillary.all_reduce(
                "sum",
                nnx.grad(lambda model: armillary.compute_average_loss(model(x)[:, 0]))(
                    model
                ),
            )
            if isinstance(own, nnx.Optimizer):
                own.update(model, grads)
            else:
                updates, own.state = optimizer.update(grads, own.state)
                nnx.update(model, optax.apply_updates(nnx.state(model), updates))

        for _ in range(2):
            strategy.run(step_fn, args=(batch,))
        return np.asarray(model.kernel[...])

    rows = np.arange(8, dtype=np.float32).reshape(4, 1, 2)
    alone = train(armillary.distribute.DefaultStrategy(), rows.reshape(4, 2))
    strategy = make_mirrored(4)
    np.testing.assert_allclose(train(strategy, put_rows(strategy, rows)), alone, 1e-6)
