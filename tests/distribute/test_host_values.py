"""A step that asks the host for random numbers or the time is told so."""

import random
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.distribute.program._host_values import guarded_host_values
from armillary.errors import CapturedStateError
from tests.problems import make_strategy

global_generator = np.random.default_rng(0)


class Trainer(armillary.StandardTrainer):
    def __init__(self, use, num_replicas=None):
        super().__init__([{"x": np.ones(4, np.float32)}] * 4)
        self.strategy = armillary.DefaultStrategy()
        if num_replicas is not None:
            self.strategy = make_strategy(num_replicas)
        self.use, self.generator = use, np.random.default_rng(1)
        self.total = jnp.zeros(())

    def train_step(self, iterator):
        self.strategy.run(self.look, args=(next(iterator),))
        self.total = self.total + 1

    def look(self, batch):
        return self.use(self, batch["x"])


def helper():
    return global_generator.normal()


FIX = (
    r" while it is traced, so the same numbers would be a constant of the compiled "
    r"program in every step\. Draw from an `nnx.Rngs` that the trainer reaches "
    r"\(`jax.random.normal\(rngs\(\), shape\)`\), put random numbers into the batches, "
    r"or make a constant that is meant before the step\."
)


@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize(
    ("use", "verb"),
    [
        (lambda _, x: x + np.random.normal(size=4), "calls `numpy.random.normal` at "),
        (lambda _, x: x * random.random(), "calls `random.random` at "),
        (lambda trainer, x: trainer.generator.normal(), r"draws from `self.generator`"),
        (lambda _, x: helper(), "draws from `global_generator`"),
    ],
    ids=["numpy", "random", "attribute", "global"],
)
def test_random_numbers_of_the_host_are_an_error(use, verb, num_replicas):
    trainer = Trainer(use, num_replicas)
    place = r"\S+test_host_values.py:\d+" if verb.endswith("at ") else ""

    with pytest.raises(CapturedStateError, match=f"`train_step` {verb}{place}{FIX}"):
        trainer.train(1)


def test_the_functions_of_the_modules_are_as_before():
    before = np.random.normal, random.random, time.time
    with pytest.raises(CapturedStateError):
        Trainer(lambda _, x: np.random.normal()).train(1)
    assert before == (np.random.normal, random.random, time.time)


TAKEN = (
    r" takes a value with `next` at \S+test_host_values.py:\d+ while it is traced, and "
    r"another one when it is traced again, so the first one would be a constant of the "
    r"compiled program in every step\. Take it outside and pass it as an argument, or "
    r"give the data to the trainer and take it from the `iterator` of the step\."
)


@pytest.mark.parametrize("num_replicas", [None, 2])
@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([np.float32(2), np.float32(3)]),
        lambda: (np.float32(number) for number in range(5)),
        lambda: iter([np.float32(2)]),
        lambda: map(jnp.float32, range(5)),
    ],
    ids=["list", "generator", "used up", "map"],
)
def test_a_value_that_another_iterator_gives_is_an_error(make, num_replicas):
    other = make()
    trainer = Trainer(lambda _, x: x * next(other), num_replicas)
    with pytest.raises(CapturedStateError, match=f"`train_step`{TAKEN}"):
        trainer.train(1)
    assert float(trainer.total) == 0


def test_a_function_that_takes_a_batch_from_an_iterator_is_told():
    batches = iter([{"x": np.float32(number)} for number in range(5)])

    @armillary.function
    def step():
        return next(batches)["x"] + jnp.ones(())

    with pytest.raises(CapturedStateError, match=f"`step`{TAKEN}"):
        step()


def test_an_iterator_that_gives_the_same_again_may_be_used():
    names, before = iter("ab"), next
    scales = {"a": 2.0, "b": 2.0}

    @armillary.function
    def step(x):
        scale = scales[next(names)]
        return x * scale * next(iter([3.0])) + next((y for y in [4.0]), 0)

    assert step(jnp.ones(())) == step(jnp.ones(())) == 10
    assert next is before


def test_the_time_is_a_warning(caplog):
    Trainer(lambda _, x: x * time.time()).train(2)

    assert "`train_step` calls `time.time` at " in caplog.text
    assert (
        ", once, while it is traced: the time is a constant of the compiled program. "
        "Take the time around `train`, or in `train_loop_begin` and `train_loop_end`."
    ) in caplog.text
    assert caplog.text.count("time.time") == 1


def test_a_step_that_is_not_compiled_may_draw():
    class Eager(Trainer):
        def __init__(self):
            super().__init__(lambda _, x: x + np.random.normal())
            self._train_options = armillary.StandardTrainerOptions(compile_step=False)

    Eager().train(2)


def test_a_seeded_generator_made_in_the_step_gives_a_constant():
    Trainer(lambda _, x: x + np.random.default_rng(0).normal()).train(2)


def test_other_threads_may_draw_meanwhile():
    def step():
        drawn = []
        thread = threading.Thread(target=lambda: drawn.append(np.random.normal()))
        thread.start()
        thread.join()
        return drawn

    with guarded_host_values(step, "the trainer"):
        assert step()


def test_a_function_is_guarded_as_well():
    @armillary.function
    def draw(x):
        return x + random.gauss()

    with pytest.raises(CapturedStateError, match=r"`draw` calls `random.gauss` at \S+"):
        draw(jnp.ones(()))
