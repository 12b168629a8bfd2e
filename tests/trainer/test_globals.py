"""Tests that a step is traced again if a global or a class attribute changed.

The rule is the same in trainers, in `armillary.function` and in a loop of your own that
calls `strategy.run`, under every strategy.
"""

import sys
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.state._code import Code
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
def test_globals_and_class_attributes_count_from_the_next_loop_on(
    num_replicas, change_globals, caplog, no_retrace
):
    trainer = Trainer(make_strategy(num_replicas))
    trainer.train(2)
    with no_retrace():
        trainer.train(2)
    assert float(trainer.total) == 4
    change_globals()

    trainer.train(2)
    assert float(trainer.total) == 4 + 2 * 2**5
    (record,) = caplog.records
    for name in ("NUMBER", "CONFIG/rate", "TABLE/rate/0", "Trainer/factor", "ARRAY"):
        assert name in record.getMessage()

    with no_retrace():
        trainer.train(2)
    assert float(trainer.total) == 4 + 4 * 2**5


def test_globals_count_from_the_next_call_of_a_function_on(change_globals, no_retrace):
    fn = armillary.function(lambda x: x * helper() * Trainer.factor)
    assert fn(jnp.ones(())) == 1
    change_globals()

    assert fn(jnp.ones(())) == 2**5
    with no_retrace():
        assert fn(jnp.ones(())) == 2**5


class Scale:
    """Code that a step calls, in a class."""

    unused = 1.0

    @property
    def rate(self):
        return CONFIG.rate

    def __call__(self, x):
        return x * self.rate * self.named("number")

    def named(self, name):
        return {"number": NUMBER}[name]

    def never_called(self):
        UNREAD.append(1)


UNREAD = []
SETTINGS: Any = None


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_loop_of_ones_own_reads_what_methods_read(
    num_replicas, change_globals, no_retrace
):
    strategy, scale = make_strategy(num_replicas), Scale()
    total = nnx.Variable(jnp.zeros(()))

    def step():
        total[...] = total[...] + scale(1.0)

    strategy.run(step)
    # Names that no code of the step mentions may change.
    UNREAD.append(2)
    Scale.unused = 2.0
    with no_retrace():
        strategy.run(step)
    assert float(total[...]) == 2
    change_globals()

    strategy.run(step)

    assert float(total[...]) == 2 + 4


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_number_in_the_closure_of_a_helper_is_read_again(num_replicas):
    strategy, total = make_strategy(num_replicas), nnx.Variable(jnp.zeros(()))
    rate = 1.0

    class Helper:
        def __call__(self):
            return rate

    helper = Helper()

    def step():
        total[...] = total[...] + helper()

    strategy.run(step)
    rate = 10.0
    strategy.run(step)

    assert float(total[...]) == 11


def test_a_module_of_the_users_is_read_again(monkeypatch):
    module = types.ModuleType("settings_of_the_user")
    module.rate = 1.0
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", module)
    fn = armillary.function(lambda x: x * SETTINGS.rate)
    assert fn(jnp.ones(())) == 1

    module.rate = 3.0

    assert fn(jnp.ones(())) == 3


def test_a_function_that_was_replaced_in_a_module_runs(monkeypatch, no_retrace):
    module = types.ModuleType("settings_of_the_user")
    module.fn = lambda x: x
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", module)
    fn = armillary.function(lambda x: SETTINGS.fn(x))
    assert fn(jnp.ones(())) == 1

    module.fn = lambda x: 3 * x

    assert fn(jnp.ones(())) == 3
    with no_retrace():
        assert fn(jnp.ones(())) == 3


@pytest.mark.parametrize(
    ("name", "new"),
    [
        ("named", lambda self, name: 5.0),
        ("rate", property(lambda self: 5.0)),
        ("named", staticmethod(lambda name: 5.0)),
        ("__call__", lambda self, x: 5 * x),
    ],
)
def test_a_method_that_was_replaced_in_a_class_runs(name, new, monkeypatch):
    scale = Scale()
    fn = armillary.function(lambda x: scale(x))
    assert fn(jnp.ones(())) == 1

    monkeypatch.setattr(Scale, name, new)

    assert fn(jnp.ones(())) == 5


def test_values_that_a_function_holds_are_read_again():
    config, array = types.SimpleNamespace(rate=1.0), np.ones(1, np.float32)
    fn = armillary.function(lambda x: x * config.rate * array[0])
    assert fn(jnp.ones(())) == 1
    config.rate = 2.0
    array[0] = 3.0

    assert fn(jnp.ones(())) == 6


def test_a_global_that_holds_state_is_read_again_with_all_that_it_holds(monkeypatch):
    fn = armillary.function(lambda x: x * MODEL.kernel * MODEL.rate)
    assert fn(jnp.ones(())) == 1
    monkeypatch.setattr(MODEL, "rate", 2.0)
    monkeypatch.setattr(MODEL, "kernel", jnp.full((), 3.0))

    assert fn(jnp.ones(())) == 6


def test_a_function_given_to_run_outside_a_step_reads_current_globals(
    change_globals,
):
    strategy = make_strategy(2)

    def run():
        return strategy.local_results(strategy.run(helper))[0]

    assert run() == 1
    change_globals()
    assert run() == 16


def test_installed_packages_are_not_followed():
    code = Code([lambda: (np.zeros(1), pytest.main(), helper())], [])

    names = {lookup.path for lookup in code.lookups.values()}
    assert {"np", "pytest", "helper", "CONFIG", "NUMBER"} <= names
    assert len(names) < 10


def test_the_class_of_an_object_in_a_module_is_looked_into(monkeypatch):
    class Settings:
        rate = 1.0

    module = types.ModuleType("settings_of_the_user")
    module.rate = Settings()
    monkeypatch.setattr(sys.modules[__name__], "SETTINGS", module)

    code = Code([lambda: SETTINGS.rate.rate], [])

    assert "Settings/rate" in {lookup.path for lookup in code.lookups.values()}
