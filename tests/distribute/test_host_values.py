"""Tests that a step with random numbers from the host is refused."""

import random
import threading

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.errors import CapturedStateError
from tests.problems import make_strategy

global_generator = np.random.default_rng(0)


class Trainer(armillary.StandardTrainer):
    def __init__(self, use, num_replicas=None):
        super().__init__([{"x": np.ones(4, np.float32)}] * 4)
        self.strategy = armillary.distribute.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.use, self.generator = use, np.random.default_rng(1)
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        drawn = self.strategy.run(self.look, args=(next(iterator),))
        self.total = self.total + self.strategy.reduce("mean", drawn)

    def look(self, batch):
        return jnp.sum(self.use(self, batch["x"]))


def helper():
    return global_generator.normal()


@pytest.mark.parametrize(
    ("use", "name"),
    [
        (lambda _, x: x + np.random.normal(size=len(x)), "np.random"),
        (lambda _, x: x * random.random(), "random"),
        (lambda trainer, x: trainer.generator.normal(), "generator"),
        (lambda _, x: helper(), "global_generator"),
    ],
    ids=["numpy", "random", "attribute", "global"],
)
def test_random_numbers_of_the_host_are_an_error(use, name):
    trainer = Trainer(use, 2)

    with pytest.raises(
        CapturedStateError,
        match=rf"`train_step` draws from `\S*{name}` while it is traced, so the same "
        r"numbers would be a constant.*a key of JAX that the trainer carries from step",
    ):
        trainer.train(1)


def test_a_step_that_is_not_compiled_may_draw():
    class Eager(Trainer):
        def __init__(self):
            super().__init__(lambda _, x: x + np.random.normal())
            self._train_setup.options = armillary.StandardTrainerOptions(
                compile_step=False
            )

    Eager().train(2)


def test_a_seeded_generator_made_in_the_step_gives_a_constant():
    trainer = Trainer(lambda _, x: x + np.random.default_rng(0).normal())
    trainer.train(2)
    constant = np.random.default_rng(0).normal()
    np.testing.assert_allclose(trainer.total, 2 * 4 * (1 + constant), rtol=1e-6)


def test_others_may_draw_meanwhile():
    def use(_, x):
        thread = threading.Thread(target=np.random.normal)
        thread.start()
        thread.join()
        return x

    trainer = Trainer(use)
    trainer.train(1)
    assert trainer.total == 4


def test_a_function_is_watched_as_well():
    @armillary.function
    def draw(x):
        return x + random.gauss()

    with pytest.raises(CapturedStateError, match="`draw` draws from `random`"):
        draw(jnp.ones(()))
