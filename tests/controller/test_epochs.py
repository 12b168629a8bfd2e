"""Tests of `epochs`: passes over the data, counted by its position."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary import Controller
from armillary.data import from_arrays
from armillary.errors import DatasetStateError
from tests.mistakes import mistakes
from tests.problems import Notes


class Sum(armillary.StandardTrainer):
    """Adds its data up."""

    def __init__(self, dataset, options=None):
        super().__init__(dataset, options)
        self.total, self.step = jnp.zeros(()), jnp.zeros((), jnp.int32)

    def train_step(self, iterator):
        self.total += next(iterator).sum()
        self.step += 1


class Last(armillary.AbstractEvaluator):
    """Returns the step."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def evaluate(self, num_steps):
        self.steps.append(int(self.trainer.step))
        return {"step": self.steps[-1]}


def make_sum(dataset, **options):
    trainer = Sum(dataset)
    return Controller(
        trainer=trainer,
        evaluator=Last(trainer),
        global_step=lambda: trainer.step,
        steps_per_loop=2,
        **options,
    )


BATCHES = [np.full(2, float(number)) for number in range(1, 5)]


@pytest.mark.parametrize("dataset", [BATCHES, lambda: iter(BATCHES), BATCHES[:3]])
def test_each_epoch_is_evaluated_at_its_end(dataset, caplog):
    caplog.set_level("INFO", "armillary")
    controller = make_sum(dataset)
    num_steps = 3 if dataset is not BATCHES and isinstance(dataset, list) else 4

    output = controller.train_and_evaluate(epochs=3)

    assert controller.evaluator.steps == [num_steps, 2 * num_steps, 3 * num_steps]
    assert output == {"step": 3 * num_steps}
    assert controller.trainer.total == 3 * 2 * sum(range(1, num_steps + 1))
    for line in ("epoch 1 of 3", "epoch 3 of 3", "3 of 3 epochs are done."):
        assert caplog.text.count(line) == 1
    # Finished training is still evaluated, once.
    controller.train_and_evaluate(epochs=2)
    assert controller.evaluator.steps[3:] == [3 * num_steps]


def test_steps_and_intervals_cut_epochs():
    controller = make_sum(BATCHES)
    controller.train_and_evaluate(7, eval_interval=3, epochs=9)
    assert controller.evaluator.steps == [3, 4, 6, 7]
    assert controller.trainer.total == 2 * (10 + 6)
    controller.train(epochs=2)
    assert controller.trainer.step == 8


def test_a_stop_request_between_epochs_ends_them():
    controller = make_sum(
        BATCHES, eval_actions=[lambda _: controller.request_stop("enough")]
    )
    controller.train_and_evaluate(epochs=3)
    assert controller.trainer.step == 4


def test_other_data_begins_with_its_first_epoch():
    controller = make_sum(BATCHES)
    controller.train(epochs=2)
    controller.trainer.train_dataset = BATCHES[:1]
    controller.train(epochs=1)
    assert controller.trainer.step == 9


class Pairs(Sum):
    """Takes two batches in each step."""

    def train_step(self, iterator):
        self.total += next(iterator).sum() + next(iterator).sum()
        self.step += 1


@pytest.mark.parametrize("compile_step", [True, False])
@pytest.mark.parametrize("num_batches", [1, 4, 5])
def test_the_rest_of_a_step_ends_an_epoch(compile_step, num_batches):
    options = armillary.StandardTrainerOptions(compile_step=compile_step)
    trainer = Pairs([*BATCHES, np.full(2, 5.0)][:num_batches], options)
    controller = Controller(
        trainer=trainer, global_step=lambda: trainer.step, steps_per_loop=1
    )
    controller.train(epochs=3)
    num_steps = 3 * (num_batches // 2)
    assert (trainer.step, trainer.total) == (num_steps, 10 * num_steps)


def test_an_iterator_has_one_epoch():
    controller = make_sum(iter(BATCHES))
    with pytest.raises(DatasetStateError, match="the program needs a second pass"):
        controller.train(epochs=2)
    assert controller.trainer.step == 4


class Own(Sum):
    """A trainer with a loop of its own."""

    def train(self, num_steps):
        raise NotImplementedError


def train_own():
    trainer = Own(BATCHES)
    Controller(trainer=trainer, global_step=lambda: 0, steps_per_loop=1).train(epochs=2)


@mistakes(
    {
        ValueError: {
            "`epochs` is 2, but `train_dataset` repeats its data forever": lambda: (
                make_sum(from_arrays(BATCHES[0], batch_size=1, repeat=True)).train(
                    epochs=2
                )
            ),
            "`epochs` is 2, but `train_dataset` has 2 datasets, which": lambda: (
                make_sum({"a": BATCHES, "b": BATCHES}).train(epochs=2)
            ),
            "`epochs` is 2, but Own does not count the passes": train_own,
        }
    }
)
def test_epochs_that_cannot_be_counted_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


class Noted(Sum):
    """Notes each trace of its step."""

    def __init__(self, dataset):
        super().__init__(dataset)
        self.traces = Notes()

    def train_step(self, iterator):
        self.traces.append(None)
        super().train_step(iterator)


def test_a_save_outside_of_the_strategy_traces_nothing_again(tmp_path):
    """A save once distributed the data over another strategy, which ended the loop."""
    trainer = Noted(from_arrays(np.arange(24.0, dtype=np.float32), batch_size=4))
    controller = Controller(
        trainer=trainer,
        global_step=lambda: trainer.step,
        steps_per_loop=3,
        strategy=armillary.OneDeviceStrategy("cpu:1"),
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), tmp_path, checkpoint_interval=3
        ),
    )
    controller.train(epochs=1)
    num_traces = len(trainer.traces)

    controller.train(epochs=3)

    assert len(trainer.traces) == num_traces
    assert int(trainer.step) == 18
