"""Tests of the question about metrics that are sums over a batch."""

import logging

import jax
import jax.numpy as jnp

import armillary
from armillary import metrics
from armillary.data import from_arrays
from tests.tiers import slow_after_first
from tests.trainer.metric_steps import DATA, STRATEGIES, make_trainer


def get_questions(caplog):
    return [
        each.getMessage()
        for each in caplog.records
        if "counts as the mean over its batch" in each.getMessage()
    ]


@slow_after_first("strategy", STRATEGIES)
def test_sums_that_are_returned_as_numbers_are_asked_about_once(strategy, caplog):
    def evaluate(state, batch):
        total = jnp.sum(batch["loss"] * batch["weight"])
        return {"loss": total, "denominator": jnp.sum(batch["weight"])}

    trainer = make_trainer(STRATEGIES[strategy]())
    data = from_arrays(DATA, batch_size=16)
    evaluator = armillary.StepEvaluator(evaluate, trainer, data)
    with caplog.at_level(logging.WARNING):
        evaluator.evaluate(-1)
        evaluator.evaluate(-1)
    (question,) = get_questions(caplog)
    assert "returns `loss` (" in question
    assert "as a plain number" in question
    assert '`"loss": armillary.metrics.Ratio(loss, denominator)`' in question
    assert "test_batch_sums.py" in question


def test_all_sums_are_named(caplog):
    def step(state, batch):
        return state, {"loss": batch["loss"].sum(), "right": batch["label"].sum()}

    with caplog.at_level(logging.WARNING):
        make_trainer(STRATEGIES["one device"](), step).train(1)
    (question,) = get_questions(caplog)
    assert "`loss` (" in question
    assert "and `right` (" in question
    assert '`"right": armillary.metrics.Ratio(right, denominator)`' in question


def flax_lm1b(batch):
    """Sums of weighted losses, over examples and replicas."""
    losses = jnp.where(batch["weight"], batch["loss"], 0)
    sums = {"loss": losses.sum(), "denominator": batch["weight"].sum()}
    return jax.lax.psum(sums, "replica")


def in_function(batch):
    @jax.jit
    def total(loss):
        return -0.5 * jnp.sum(loss.reshape(-1))

    return {"elbo": total(batch["loss"] / 255.0)}


SUMS = {
    "psum": flax_lm1b,
    "a function": in_function,
    "a dot product": lambda b: {"x": jnp.vdot(b["loss"][:, 0], b["loss"][:, 1])},
    "a vmap": lambda b: {"x": jax.vmap(jnp.sum)(b["loss"]).sum()},
    "correct": lambda b: {"x": jnp.sum(b["score"].argmax(-1) == b["label"])},
    "cross entropy": lambda b: {"x": cross_entropy(b).sum()},
    "by parts": lambda b: {"x": sum_in_parts(b["loss"].T)},
}


RIGHT = {
    "a mean": lambda b: {"x": jnp.mean(b["loss"]), "y": cross_entropy(b).mean()},
    "a sum over a count": lambda b: {"x": b["loss"].sum() / b["loss"].size},
    "a masked mean": lambda b: {
        "x": (b["loss"] * b["weight"]).sum() / b["weight"].sum()
    },
    "normal weights": lambda b: {"x": normalized(b)},
    "divided losses": lambda b: {"x": (b["loss"] / b["loss"].size).sum()},
    "averaged by Armillary": lambda b: {
        "x": armillary.compute_average_loss(b["loss"]),
        "y": armillary.weighted_mean(b["loss"], b["weight"]),
    },
    "a norm": lambda b: {"x": jnp.linalg.norm(b["loss"]), "y": gradient_norm(b)},
    "a maximum": lambda b: {"x": b["loss"].max(), "y": jax.nn.logsumexp(b["loss"])},
    "a deviation": lambda b: {"x": b["loss"].std(), "y": b["loss"].var(0).sum()},
    "contrast over a batch": lambda b: {"x": jax.nn.softmax(b["loss"], 0).max()},
    "each example": lambda b: {"x": b["loss"].sum(1)},
    "objects": lambda b: {"x": metrics.Sum(b["loss"])},
    "a batch statistic": lambda b: {"x": jnp.mean(centered(b) ** 2)},
    "a number of the state": lambda b: {"x": jnp.float32(3), "n": b["loss"].shape[0]},
}


def cross_entropy(batch):
    logits = jax.nn.log_softmax(batch["score"])
    return -jnp.take_along_axis(logits, batch["label"][:, None], axis=1)[:, 0]


def sum_in_parts(rows):
    _, sums = jax.lax.scan(lambda sum_, row: (sum_, row.sum()), 0.0, rows)
    return sums.sum()


def normalized(batch):
    weights = batch["weight"] / batch["weight"].sum()
    return (batch["loss"] * weights).sum()


def centered(batch):
    return batch["loss"] - batch["loss"].mean(0, keepdims=True)


def gradient_norm(batch):
    def loss_fn(w):
        return jnp.mean((batch["score"] @ w["a"] + w["b"] - 1) ** 2)

    gradients = jax.grad(loss_fn)({"a": jnp.ones(3), "b": jnp.zeros(())})
    return sum((leaf**2).sum() for leaf in jax.tree.leaves(gradients))


@slow_after_first("name", [*SUMS, *RIGHT])
def test_only_sums_over_a_batch_are_asked_about(name, caplog):
    measure = {**SUMS, **RIGHT}[name]
    trainer = make_trainer(
        STRATEGIES["one device"](), lambda state, batch: (state, measure(batch))
    )
    with caplog.at_level(logging.WARNING):
        trainer.train(1)
    assert bool(get_questions(caplog)) == (name in SUMS)
