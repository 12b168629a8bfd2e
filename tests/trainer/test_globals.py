"""A global value that a step reads is watched between loops."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from tests.problems import make_strategy

RATE = 1.0
FACTOR = 1
LEVEL = 0
NAME = "step"


def helper(x):
    return FACTOR * x


class Trainer(armillary.StandardTrainer):
    def __init__(self, strategy):
        super().__init__([np.ones((4, 1), np.float32)] * 8)
        self.strategy, self.total = strategy, jnp.zeros(())

    def train_loop_begin(self):
        self.level = (LEVEL, NAME)[:0]

    def train_step(self, iterator):
        def step_fn(x):
            return RATE * self.look(x)

        total = self.strategy.run(step_fn, args=(next(iterator),))
        self.total = self.total + self.strategy.reduce("sum", total, axis=0)[0] / 4

    def look(self, x):
        return helper(x)


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize(("name", "value"), [("RATE", 0.5), ("FACTOR", 3)])
def test_a_change_of_a_global_value_is_followed_with_a_warning(
    name, value, num_replicas, monkeypatch, caplog
):
    strategy = armillary.DefaultStrategy()
    if num_replicas is not None:
        strategy = make_strategy(num_replicas)
    trainer = Trainer(strategy)
    trainer.train(2)
    before = globals()[name]
    monkeypatch.setitem(globals(), name, value)

    trainer.train(2)
    trainer.train(2)

    assert float(trainer.total) == 2 + 4 * value
    (record,) = caplog.records
    assert record.getMessage() == (
        "`train_step` is compiled again, because global values that its code names "
        f"have changed ({name}: {before} became {value}). Hold a value that changes "
        "often in an array of the trainer."
    )


def test_a_value_that_the_step_does_not_name_may_change(
    monkeypatch, caplog, no_retrace
):
    trainer = Trainer(armillary.DefaultStrategy())
    trainer.train(2)
    monkeypatch.setitem(globals(), "LEVEL", 7)
    monkeypatch.setitem(globals(), "NAME", "other")

    with no_retrace():
        trainer.train(2)
    assert not caplog.records
