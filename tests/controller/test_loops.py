"""Tests that outputs are reported while the next loop runs, and none is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import from_arrays
from armillary.errors import GlobalStepError


class Counting(armillary.StandardTrainer):
    """Counts steps, and notes when each loop begins."""

    def __init__(self, events, dataset=None):
        x = np.ones((4, 1), np.float32)
        if dataset is None:
            dataset = from_arrays({"x": x}, batch_size=4, repeat=True)
        super().__init__(dataset)
        self.step = jnp.int32(0)
        self.by = jnp.int32(1)
        self._notes = Notes(events)

    def train_loop_begin(self):
        self._notes.add("begin")

    def train_step(self, iterator):
        next(iterator)
        self.step = self.step + self.by

    def train_loop_end(self):
        return {"seen": self.step}


class Notes:
    """Takes notes, some of which fail."""

    def __init__(self, events):
        self.events, self.fail_at = events, None

    def add(self, event):
        if self.fail_at is not None and len(self.events) >= self.fail_at:
            raise RuntimeError("The data is on strike.")
        self.events.append(event)


class Summaries:
    """A summary manager that takes notes."""

    def __init__(self, events):
        self.events = events

    def write_summaries(self, values, step):
        self.events.append((step, int(values["seen"])))

    def flush(self):
        pass


def make(events, trainer=None, **options):
    trainer = trainer or Counting(events)
    controller = armillary.Controller(
        trainer=trainer,
        global_step=lambda: trainer.step,
        steps_per_loop=2,
        summary_manager=Summaries(events),
        **options,
    )
    return trainer, controller


def test_a_loop_is_looked_at_while_the_next_one_runs():
    events = []
    _, controller = make(events)

    controller.train(8)

    # The first loop is looked at before the second, in case its step is wrong.
    assert events == [
        "begin",
        (2, 2),
        "begin",
        "begin",
        (4, 4),
        "begin",
        (6, 6),
        (8, 8),
    ]


def test_a_loop_is_reported_before_its_checkpoint_is_saved(tmp_path, caplog):
    caplog.set_level("INFO", "armillary")
    events = []
    trainer = Counting(events)
    manager = armillary.CheckpointManager(
        armillary.Checkpoint(trainer=trainer), tmp_path, checkpoint_interval=4
    )
    trainer, controller = make(events, trainer, checkpoint_manager=manager)

    controller.train(8)

    lines = [
        line for line in caplog.messages if "steps/sec" in line or "saving" in line
    ]
    kinds = ["saving" if "saving" in line else "train" for line in lines]
    # The first save is due at once, the others after four steps.
    assert kinds == [*["train", "saving", "train"] * 2, "saving"]


def test_outputs_before_a_failing_loop_are_reported():
    events = []
    trainer, controller = make(events)
    trainer._notes.fail_at = 4

    with pytest.raises(RuntimeError, match="on strike"):
        controller.train(8)

    assert events == ["begin", (2, 2), "begin", "begin", (4, 4), (6, 6)]
    assert int(trainer.step) == 6


def test_a_step_that_goes_wrong_later_is_noticed_one_loop_later():
    events = []
    trainer, controller = make(events)
    controller.train(2)
    trainer.by = jnp.int32(3)

    with pytest.raises(GlobalStepError, match=r"advanced `global_step` from 2 to 8"):
        controller.train(8)


def test_a_wrong_step_is_noticed_where_the_data_ends_in_the_first_loop():
    data = {"x": np.ones((4, 1), np.float32)}
    trainer, controller = make([], Counting([], from_arrays(data, batch_size=4)))
    trainer.by = jnp.int32(0)
    expected = r"from 0 to 0, but its data ended, and it must advance it by 1, to 1\."
    with pytest.raises(GlobalStepError, match=expected):
        controller.train(100)


@pytest.mark.parametrize("is_method", [True, False])
def test_a_loop_written_by_hand_is_looked_at_before_it_continues(is_method):
    events = []

    class ByHand(Counting):
        def train(self, num_steps):
            output = super().train(num_steps)
            events.append("end")
            return output

    trainer = ByHand(events)
    if not is_method:
        trainer = Counting(events)
        run = trainer.train
        trainer.train = lambda n: (run(n), events.append("end"))[0]
    _, controller = make(events, trainer)

    controller.train(6)

    own = [event for event in events if event != "begin"]
    assert own == ["end", (2, 2), "end", (4, 4), "end", (6, 6)]
