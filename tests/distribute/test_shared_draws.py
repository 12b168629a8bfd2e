"""Tests of the warning about random numbers that are equal on all replicas."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute import VariableAggregation
from tests.tiers import slow_after_first

ROWS = np.random.default_rng(0).normal(size=(16, 6)).astype(np.float32)
KERNEL = jnp.ones((6, 6))
KEY = jax.random.key(0)


def uniform(*shape, key=KEY):
    return jax.random.uniform(key, shape)


def dropout(x):
    return jnp.where(jax.random.bernoulli(KEY, 0.5, x.shape), x, 0)


def dropout_of_attention(x):
    heads = x.reshape(len(x), 2, 3)
    scores = jax.nn.softmax(jnp.einsum("bhd,bgd->bhg", heads, heads))
    return scores * uniform(len(x), 2, 2)


def noise_in_a_loop(x):
    def add(x, key):
        return x + uniform(*x.shape, key=key), None

    return jax.lax.scan(add, x, jax.random.split(KEY, 3))[0]


def noise_for_each_example(x):
    keys = jax.random.split(KEY, len(x))
    return jax.vmap(lambda row, key: row * uniform(6, key=key))(x, keys)


def noise_of_examples_in_a_loop(x):
    keys = jax.random.split(KEY, len(x))
    return jax.lax.map(lambda pair: pair[0] * uniform(6, key=pair[1]), (x, keys))


def images_with_noise(x):
    images = x.reshape(len(x), 2, 3, 1)
    kernel = jnp.ones((2, 2, 1, 4))
    layout = ("NHWC", "HWIO", "NHWC")
    outputs = jax.lax.conv_general_dilated(
        images, kernel, (1, 1), "SAME", dimension_numbers=layout
    )
    return outputs + uniform(*outputs.shape)


def tokens_with_dropout(x):
    tokens = jnp.argmax(x, axis=1)
    return KERNEL[tokens] * uniform(len(x), 6)


MISTAKES = {
    "dropout": dropout,
    "dropout of attention": dropout_of_attention,
    "dropout of tokens": tokens_with_dropout,
    "noise in a loop": noise_in_a_loop,
    "noise for each example": noise_for_each_example,
    "noise of images": images_with_noise,
    "weights of examples": lambda x: x * uniform(len(x))[:, None],
    "a mix of pairs": lambda x: x * uniform(len(x), 1) + jnp.flip(x, 0),
    "time steps": lambda x: jnp.sin(jnp.sum(x, axis=1) * uniform(len(x))),
    "examples after others": lambda x: jnp.concatenate([x, uniform(*x.shape)]),
    "transposed": lambda x: x.T * uniform(6, len(x)),
    "rows of tokens": lambda x: x.reshape(-1, 3) * uniform(len(x) * 2, 1),
    "a seed of the step": lambda x: x * uniform(*x.shape, key=jax.random.key(len(x))),
    "a raw key": lambda x: x * uniform(*x.shape, key=jax.random.PRNGKey(3)),
    "gamma": lambda x: x * jax.random.gamma(KEY, 2.0, x.shape),
    "gathered": lambda x: armillary.get_replica_context().all_gather(uniform(4), 0),
    "checkpoint": lambda x: jax.checkpoint(dropout)(x),
    "compiled": lambda x: jax.jit(dropout)(x),
}
MEANT = {
    "noise of a kernel": lambda x: x @ (KERNEL + uniform(6, 6)),
    "noise of a bias": lambda x: x @ KERNEL + uniform(6)[None],
    "a mask for all examples": lambda x: x * uniform(1, 6),
    "one number": lambda x: x * uniform(),
    "noise of an embedding": lambda x: (KERNEL + uniform(6, 6))[jnp.argmax(x, 1)],
    "a kernel of images": lambda x: jax.lax.conv_general_dilated(
        x.reshape(len(x), 2, 3, 1),
        uniform(2, 2, 1, 4),
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    ),
    "noise after the reduction": lambda x: (
        armillary.all_reduce("mean", jnp.mean(x, axis=0)) + uniform(6)
    ),
    "noise of a sum": lambda x: jnp.sum(x, axis=0) + uniform(6),
    "noise of a column": lambda x: x * jnp.broadcast_to(uniform(6), x.shape),
    "an order of examples": lambda x: x[jax.random.permutation(KEY, len(x))],
    "a shuffled column": lambda x: jax.random.permutation(KEY, x[:, 0]),
    "noise of pairs of columns": lambda x: jnp.cov(x.T) + uniform(6, 6),
    "the number of the replica": lambda x: (
        x
        * uniform(*x.shape, key=jax.random.fold_in(KEY, jax.lax.axis_index("replica")))
    ),
    "a key of each example": lambda x: (
        x * jax.vmap(lambda row: uniform(6, key=jax.random.key(row[0].astype(int))))(x)
    ),
    "numbers for no example": lambda x: jnp.sum(uniform(*x.shape)),
}


def warnings_of(fn, caplog, num_replicas=4, rows=ROWS):
    strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
    (batch,) = strategy.distribute_dataset([rows])
    with caplog.at_level(logging.WARNING, "armillary"):
        strategy.run(lambda x: fn(x), args=(batch,))
    messages = [record.message for record in caplog.records]
    return [message for message in messages if "random numbers" in message]


@slow_after_first("kind", MISTAKES)
def test_equal_numbers_for_different_examples_are_found(kind, caplog):
    (message,) = warnings_of(MISTAKES[kind], caplog)

    assert "are the same on all 4 replicas" in message
    assert message.count("test_shared_draws.py:") == 2
    assert 'jax.random.fold_in(key, jax.lax.axis_index("replica"))' in message


@slow_after_first("kind", MEANT)
def test_numbers_that_all_examples_share_are_fine(kind, caplog):
    assert warnings_of(MEANT[kind], caplog) == []


def test_one_replica_is_fine(caplog):
    assert warnings_of(dropout, caplog, num_replicas=1) == []


def test_an_uneven_batch_is_looked_at(caplog):
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    options = armillary.data.InputOptions(remainder="exact")
    (batch,) = strategy.distribute_dataset([ROWS[:6]], options)

    strategy.run(dropout, args=(batch,))

    assert "are the same on all 2 replicas" in caplog.text


def test_a_line_is_named_once(caplog):
    strategy = armillary.MirroredStrategy(jax.devices()[:4], axis_name="batch")
    for rows in (ROWS, ROWS[:8], ROWS[:4]):
        (batch,) = strategy.distribute_dataset([rows])
        strategy.run(dropout, args=(batch,))

    (record,) = caplog.records
    assert 'jax.lax.axis_index("batch")' in record.message


def test_a_key_that_is_passed_to_all_replicas_is_found(caplog):
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(batch, key):
        return batch * jax.random.uniform(key, batch.shape)

    strategy.run(step_fn, args=(batch, KEY))

    assert "are the same on all 4 replicas" in caplog.text


@pytest.mark.parametrize("is_meant", [False, True])
def test_keys_of_the_state_are_fine(is_meant, caplog):
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    (batch,) = strategy.distribute_dataset([ROWS])
    rngs = nnx.Rngs(0)
    kind = {"aggregation": VariableAggregation.NONE} if is_meant else {}
    key = nnx.Variable(jax.random.key(1), **kind)

    def step_fn(batch):
        dropped = nnx.Dropout(0.5, rngs=rngs)(batch)
        step_key = jax.random.fold_in(key[...], rngs.default.count[...])
        return dropped * jax.random.uniform(step_key, batch.shape)

    numbers = strategy.run(step_fn, args=(batch,))

    assert strategy.num_replicas_in_sync == len(strategy.local_results(numbers))
    assert caplog.text == ""


def test_gradients_of_data_that_replicas_draw_alike_are_found(caplog):
    """As the generator of a GAN, or a step that makes its own data."""
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    weights = nnx.Param(jnp.ones((6, 1)))

    def step_fn():
        made = uniform(8, 6)
        gradient = jax.grad(lambda w: jnp.mean((made @ w) ** 2))(weights[...])
        weights[...] = weights[...] - armillary.all_reduce("mean", gradient)

    strategy.run(step_fn)

    (record,) = caplog.records
    assert "are the same on all 4 replicas" in record.message


def test_a_mask_of_dropout_differs_with_the_line_of_the_warning():
    strategy = armillary.MirroredStrategy(jax.devices()[:4])
    (batch,) = strategy.distribute_dataset([np.ones((16, 6), np.float32)])

    def step_fn(batch, is_folded):
        key = KEY
        if is_folded:
            key = jax.random.fold_in(key, jax.lax.axis_index("replica"))
        return jnp.where(jax.random.bernoulli(key, 0.5, batch.shape), batch, 0)

    for is_folded in (False, True):
        masks = strategy.run(step_fn, args=(batch, is_folded))
        shares = np.reshape(strategy.gather(masks, axis=0), (4, -1))
        assert len({share.tobytes() for share in shares}) == (4 if is_folded else 1)
