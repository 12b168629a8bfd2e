"""Tests of JAX reductions in evaluations whose last batch leaves replicas idle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from tests.problems import make_strategy

ROWS = np.arange(27.0, dtype=np.float32)


def evaluate(reduce, num_rows):
    trainer = armillary.StepTrainer(
        lambda state, batch: (state, {}),
        {"w": jnp.zeros(())},
        armillary.data.from_arrays(ROWS, batch_size=8),
        strategy=make_strategy(4),
    )

    def step(state, batch):
        # The array says for each replica how its part of the batch weighs.
        return {"loss": jnp.full(batch.shape, reduce(jnp.mean(batch)))}

    data = armillary.data.from_arrays(ROWS[:num_rows], batch_size=8)
    return armillary.StepEvaluator(step, trainer, data).evaluate(-1)["loss"]


def test_a_mean_of_jax_over_idle_replicas_is_warned_of_by_its_line(caplog):
    evaluate(lambda value: jax.lax.pmean(value, "replica"), 27)
    messages = [record.getMessage() for record in caplog.records]
    (message,) = [each for each in messages if "without examples" in each]
    assert "test_idle_replicas.py" in message
    assert "4 replicas" in message
    assert "only 3" in message
    assert "armillary.all_reduce" in message


@pytest.mark.parametrize(
    ("reduce", "num_rows"),
    [
        (lambda value: armillary.all_reduce("mean", value), 27),
        (lambda value: jax.lax.pmean(value, "replica"), 24),
    ],
    ids=["all_reduce", "full batches"],
)
def test_right_reductions_are_not_warned_of(caplog, reduce, num_rows):
    evaluate(reduce, num_rows)
    assert "without examples" not in caplog.text
