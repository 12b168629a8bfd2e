"""Globals and class attributes are constants of a step, what hangs on a trainer is not.

The rule is the same in `armillary.function`, and that of `jax.jit`.
"""

import types

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from tests.problems import make_strategy

NUMBER = 1.0
CONFIG = types.SimpleNamespace(rate=1.0)
ARRAY = np.ones(1, np.float32)
TABLE = {"rate": [1.0]}
MODEL = types.SimpleNamespace(kernel=jnp.ones(()), rate=1.0)


def helper():
    return NUMBER * CONFIG.rate * ARRAY[0] * TABLE["rate"][0]


class Trainer(armillary.StandardTrainer):
    factor = 1.0

    def __init__(self, strategy):
        super().__init__([np.ones((4, 1), np.float32)] * 16)
        self.strategy, self.total = strategy, jnp.zeros(())
        self.config = types.SimpleNamespace(rate=1.0)
        self.array, self.table = np.ones(1, np.float32), {"rate": [1.0]}
        self.helper = lambda: self.config.rate * helper()

    def train_step(self, iterator):
        next(iterator)
        rate = self.array[0] * self.table["rate"][0] * self.helper()
        self.total = self.total + rate * self.factor


def set_globals(value):
    globals()["NUMBER"] = CONFIG.rate = ARRAY[0] = TABLE["rate"][0] = value
    Trainer.factor = value


@pytest.fixture
def change_globals():
    yield lambda: set_globals(2.0)
    set_globals(1.0)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_globals_and_class_attributes_are_constants_of_a_trainer(
    num_replicas, change_globals, caplog, no_retrace
):
    trainer = Trainer(make_strategy(num_replicas))
    trainer.train(2)
    change_globals()

    with no_retrace():
        trainer.train(2)

    assert float(trainer.total) == 4
    assert not caplog.records


def test_globals_are_constants_of_a_function_too(change_globals, caplog):
    fn = armillary.function(lambda x: x * helper() * Trainer.factor)
    assert fn(jnp.ones(())) == 1
    change_globals()

    assert fn(jnp.ones(())) == 1
    assert not caplog.records


def test_what_a_function_holds_itself_is_read_anew():
    config, array = types.SimpleNamespace(rate=1.0), np.ones(1, np.float32)
    fn = armillary.function(lambda x: x * config.rate * array[0])
    assert fn(jnp.ones(())) == 1
    config.rate = 2.0
    array[0] = 3.0

    assert fn(jnp.ones(())) == 6


def test_a_global_that_holds_state_is_read_anew_with_all_that_it_holds(monkeypatch):
    fn = armillary.function(lambda x: x * MODEL.kernel * MODEL.rate)
    assert fn(jnp.ones(())) == 1
    monkeypatch.setattr(MODEL, "rate", 2.0)
    monkeypatch.setattr(MODEL, "kernel", jnp.full((), 3.0))

    assert fn(jnp.ones(())) == 6


def test_what_run_is_given_outside_a_step_sees_globals_as_they_are(
    change_globals,
):
    strategy = make_strategy(2)

    def run():
        return strategy.local_results(strategy.run(helper))[0]

    assert run() == 1
    change_globals()
    assert run() == 16
