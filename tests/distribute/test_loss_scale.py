import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import ReduceOp
from armillary.distribute.replica import _loss_scale

ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    monkeypatch.setattr(_loss_scale, "_said", set())


def differentiate(strategy, loss_fn):
    (batch,) = strategy.distribute_dataset([ROWS])

    def step_fn(w, x):
        return jax.grad(loss_fn)(w, x)

    return strategy.run(step_fn, args=(jnp.ones(3), batch))


def losses(w, x):
    return (x @ w) ** 2


def mean_of_all(x):
    return jax.lax.pmean(x.mean(0), "replica")


def token_mean(w, x):
    count = armillary.get_replica_context().all_reduce(ReduceOp.SUM, jnp.sum(x > 0))
    return jnp.sum(losses(w, x)) / count


MEANS = {
    "mean": lambda w, x: jnp.mean(losses(w, x)),
    "inside jit": jax.jit(lambda w, x: jnp.mean(losses(w, x))),
    "of all entries": lambda w, x: jnp.mean(x * w[None]),
    "of a vmap": lambda w, x: jax.vmap(lambda row: row @ w)(x).mean(),
    "of many entries": lambda w, x: jnp.mean(jnp.tile(x * w[None], (1, 2))),
    "of what was divided": lambda w, x: jnp.mean((x @ w / 16) ** 2),
    "of what was reduced": lambda w, x: jnp.mean(losses(w, x - mean_of_all(x)[None])),
    "of weighted losses": lambda w, x: jnp.mean(losses(w, x) * x[:, 0]),
    "of masked losses": lambda w, x: -jnp.where(x[:, 0] > 0, losses(w, x), 0).mean(),
    "beside another": lambda w, x: jnp.sum(losses(w, x)) / 8 + jnp.mean(losses(w, x)),
    "beside an average": lambda w, x: (
        armillary.compute_average_loss(losses(w, x)) + jnp.mean(losses(w, x))
    ),
}
RIGHT = {
    "average": lambda w, x: armillary.compute_average_loss(losses(w, x)),
    "divided by hand": lambda w, x: jnp.mean(losses(w, x)) / 2,
    "scaled by hand": lambda w, x: jnp.mean(losses(w, x)) * (1 / 2),
    "by the global batch": lambda w, x: jnp.sum(losses(w, x)) / 8,
    "a sum": lambda w, x: jnp.sum(losses(w, x)),
    "reduced": lambda w, x: jax.lax.pmean(jnp.mean(losses(w, x)), "replica"),
    "by what all counted": token_mean,
    "by infinity": lambda w, x: jnp.mean(losses(w, x)) / jnp.inf,
    "by the global batch, of two": lambda w, x: jnp.sum((x * w[None])[:, :2]) / 8,
    "by the global batch, of many": lambda w, x: jnp.sum(x * w[None]) / 24,
    "by the global batch and decay": lambda w, x: (
        jnp.sum(losses(w, x)) / 8 + 1e-4 * jnp.sum(w**2)
    ),
    "weight decay": lambda w, x: armillary.scale_regularization_loss(w**2),
}


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_one_replica_is_said_once(name, make_mirrored, caplog):
    for _ in range(2):
        differentiate(make_mirrored(2), MEANS[name])
    assert len(caplog.messages) == 1
    assert "is a mean over one replica's share of the batch" in caplog.text
    assert "test_loss_scale.py" in caplog.text and "2 times that of one" in caplog.text


@pytest.mark.each_case
@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_loss_that_was_scaled_says_nothing(name, make_mirrored, caplog):
    differentiate(make_mirrored(2), RIGHT[name])
    assert not caplog.messages


def test_a_loss_without_data_is_said_once(make_mirrored, caplog):
    strategy = make_mirrored(2)
    for _ in range(2):
        differentiate(strategy, lambda w, x: jnp.sum(w**2) / 2)
    assert len(caplog.messages) == 1
    assert "holds no data and is equal on all 2 replicas" in caplog.text
    assert "use `armillary.scale_regularization_loss`" in caplog.text


def test_one_replica_is_told_nothing(make_mirrored, caplog):
    differentiate(make_mirrored(1), MEANS["mean"])
    differentiate(armillary.DefaultStrategy(), MEANS["mean"])
    assert not caplog.messages
