"""Tests that two threads never run steps with the same state at once."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from armillary.errors import ThreadError
from armillary.trainer import _claims

SECONDS = 300  # Much longer than any wait takes, so that a mistake ends the test.
# The work of the second thread. Not in the trainer, which would reach its state.
_meanwhile: list[Callable[[], object]] = []


@pytest.fixture(autouse=True)
def nothing_meanwhile() -> None:
    _meanwhile[:] = [lambda: None]


def make_data(*, repeat: bool) -> Any:
    arrays = {"x": np.ones((8, 3), np.float32)}
    return from_arrays(arrays, batch_size=4, repeat=repeat)


class Trainer(armillary.StandardTrainer):
    """Lets another thread run a function at the end of each loop, and waits for it."""

    def __init__(self, model: nnx.Linear) -> None:
        options = armillary.StandardTrainerOptions(compile_hooks=False)
        super().__init__(make_data(repeat=True), options)
        self.model = model
        self.optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        self.errors: list[Exception] = []

    def train_step(self, iterator: Any) -> None:
        batch = next(iterator)
        gradients = nnx.grad(lambda m: (m(batch["x"]) ** 2).mean())(self.model)
        self.optimizer.update(self.model, gradients)

    def train_loop_end(self) -> None:
        thread = threading.Thread(target=self._try, name="second")
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive()

    def _try(self) -> None:
        try:
            _meanwhile[-1]()
        except ThreadError as error:
            self.errors.append(error)


class Evaluator(armillary.StandardEvaluator):
    def __init__(self, model: nnx.Linear) -> None:
        super().__init__(make_data(repeat=False))
        self.model = model
        self.loss = nnx.metrics.Average("loss")

    def eval_step(self, iterator: Any) -> None:
        self.loss.update(loss=(self.model(next(iterator)["x"]) ** 2).mean())

    def eval_end(self, *state: Any) -> Any:
        return {"loss": self.loss.compute()}


def make_model() -> nnx.Linear:
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def test_a_second_thread_that_trains_gets_an_error_and_the_first_trains_on():
    trainer, alone = Trainer(make_model()), Trainer(make_model())
    _meanwhile.append(lambda: None)
    alone.train(6)
    _meanwhile.append(lambda: trainer.train(5))
    for _ in range(3):
        trainer.train(2)

    (error, *_) = trainer.errors
    assert len(trainer.errors) == 3
    for part in ("'second' trains `Trainer`", "'MainThread' trains `Trainer`"):
        assert part in str(error)
    assert int(trainer.optimizer.step[...]) == 6
    expected = alone.model.kernel[...]
    np.testing.assert_array_equal(trainer.model.kernel[...], expected)


def test_a_thread_that_evaluates_a_model_in_training_gets_an_error():
    trainer = Trainer(make_model())
    evaluator = Evaluator(trainer.model)
    _meanwhile.append(lambda: evaluator.evaluate(-1))
    controller = armillary.Controller(
        trainer=trainer, global_step=trainer.optimizer.step, steps_per_loop=2
    )
    controller.train(4)
    assert len(trainer.errors) == 2
    assert "Both use `model/bias`, `model/kernel`" in str(trainer.errors[0])

    # Afterwards, any thread may.
    assert evaluator.evaluate(-1) is not None


def test_a_controller_holds_its_trainer_between_loops():
    trainer = Trainer(make_model())
    evaluator = Evaluator(trainer.model)
    errors = []

    def evaluate() -> None:
        try:
            evaluator.evaluate(-1)
        except ThreadError as error:
            errors.append(error)

    def action(_: object) -> None:
        thread = threading.Thread(target=evaluate)
        thread.start()
        thread.join(SECONDS)

    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=trainer.optimizer.step,
        steps_per_loop=2,
        train_actions=[action],
    )
    # Its own evaluation is in the same thread.
    controller.train_and_evaluate(4)
    assert len(errors) == 2


def test_threads_with_models_of_their_own_run_together():
    trainer, other = Trainer(make_model()), Trainer(make_model())
    _meanwhile.append(lambda: other.train(3))
    trainer.train(2)
    trainer.train(2)
    assert not trainer.errors
    assert int(other.optimizer.step[...]) == 6


def test_a_model_that_was_replaced_is_shared_no_longer():
    trainer = Trainer(make_model())
    evaluator = Evaluator(trainer.model)
    _meanwhile.append(lambda: evaluator.evaluate(-1))
    trainer.train(2)
    assert len(trainer.errors) == 1

    evaluator.model = make_model()
    trainer.train(2)
    assert len(trainer.errors) == 1


def test_a_model_that_two_trainers_share_later_is_refused():
    trainer, other = Trainer(make_model()), Evaluator(make_model())
    _meanwhile.append(lambda: other.evaluate(-1))
    trainer.train(2)
    assert not trainer.errors

    other.model = trainer.model
    trainer.train(2)
    assert len(trainer.errors) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_gives_the_trainer_back(error):
    trainer = Trainer(make_model())

    def fail() -> None:
        raise error

    trainer.train_loop_end = fail
    with pytest.raises(error):
        trainer.train(1)
    assert not _claims._claims


def test_the_main_thread_gets_the_error_if_it_comes_second():
    trainer = Trainer(make_model())
    has_begun, may_end = threading.Event(), threading.Event()

    def hold() -> None:
        has_begun.set()
        may_end.wait(SECONDS)

    _meanwhile.append(hold)
    first = threading.Thread(target=trainer.train, args=(2,), name="first")
    first.start()
    assert has_begun.wait(SECONDS)
    try:
        with pytest.raises(ThreadError, match=r"'MainThread' trains .* 'first' trains"):
            trainer.train(1)
    finally:
        may_end.set()
        first.join(SECONDS)
    assert int(trainer.optimizer.step[...]) == 2
