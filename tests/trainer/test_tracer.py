"""Tests of changes that trace a step again, and of changes that are refused."""

import queue
import types

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.data import from_arrays
from armillary.errors import CapturedStateError, RetraceError, StateStructureError


class Trainer(armillary.StandardTrainer):
    """Adds up batches, scaled by a plain number, and counts how often it is traced."""

    def __init__(self, dataset=None, **options):
        if dataset is None:
            dataset = from_arrays(
                {"x": np.ones(2, np.float32)}, batch_size=2, repeat=True
            )
        super().__init__(dataset, armillary.StandardTrainerOptions(**options))
        self.total = jnp.zeros(())
        self.scale = 1.0
        self.num_epochs = 0
        self.history = []
        self.traces = queue.SimpleQueue()  # which is not searched

    def train_step(self, iterator):
        self.traces.put(None)
        self.total = self.total + self.scale * next(iterator)["x"].sum()


def as_batches(*arrays):
    return [{"x": np.asarray(array)} for array in arrays]


def test_a_step_that_takes_all_data_is_an_error():
    class Greedy(Trainer):
        def train_step(self, iterator):
            for batch in iterator:
                del batch

    with pytest.raises(
        RetraceError,
        match=r"`train_step` took over 64 batches in one step.*Take a fixed number "
        r"with `next\(iterator\)`",
    ):
        Greedy().train(1)


def test_a_step_that_takes_another_number_of_batches_later_is_an_error():
    class Changes(Trainer):
        num_batches = 1

        def train_loop_begin(self):
            self.count = self.num_batches

        def train_step(self, iterator):
            for _ in range(self.count):
                super().train_step(iterator)

    trainer = Changes()
    trainer.train(2)
    trainer.num_batches = 2

    with pytest.raises(
        RetraceError,
        match=r"took \[1\] batches of its datasets in one step, and now takes \[2\]"
        ".*take the same number in every step, or make a new trainer",
    ):
        trainer.train(2)


def test_a_plain_value_that_the_step_reads_makes_it_compile_again(caplog):
    trainer = Trainer()
    trainer.train(3)
    trainer.scale = 10.0

    trainer.train(1)

    assert float(trainer.total) == 6 + 20
    assert (
        "`train_step` is compiled again, because it read plain values that have "
        "changed (scale). Hold a value that changes often in an array"
    ) in caplog.text


def test_a_plain_value_that_the_step_does_not_read_changes_nothing(no_retrace):
    trainer = Trainer()
    trainer.train(1)

    with no_retrace():
        for epoch in range(3):
            trainer.num_epochs = epoch + 1
            trainer.history.append({"loss": float(epoch)})
            trainer.train(1)

    assert trainer.traces.qsize() == 1


def test_an_attribute_that_is_removed_between_loops_is_missed():
    class Optional(Trainer):
        def train_step(self, iterator):
            super().train_step(iterator)
            if not hasattr(self, "history"):
                self.total = self.total + 100

    trainer = Optional()
    trainer.train(1)

    del trainer.history
    trainer.train(1)

    assert float(trainer.total) == 2 + 2 + 100


@pytest.mark.slow
def test_a_step_that_fails_when_it_is_traced_again_fails_in_the_next_loop_too():
    class Strict(Trainer):
        def train_step(self, iterator):
            if self.scale < 0:
                raise ValueError("a negative scale")
            super().train_step(iterator)

    trainer = Strict()
    trainer.train(1)

    trainer.scale = -1.0
    for _ in range(2):
        with pytest.raises(ValueError, match="a negative scale"):
            trainer.train(1)
    trainer.scale = 10.0
    trainer.train(1)

    assert float(trainer.total) == 2 + 20


def test_a_plain_value_that_the_step_counts_up_is_an_error():
    class Counts(Trainer):
        def train_step(self, iterator):
            super().train_step(iterator)
            self.num_epochs += 1

    with pytest.raises(
        StateStructureError,
        match=r"changed plain values(.|\n)*num_epochs: int 0 became 1, once, while",
    ):
        Counts().train(1)


def test_state_that_the_trainer_does_not_reach_is_an_error():
    linear = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Reads(Trainer):
        def train_step(self, iterator):
            self.total = self.total + hidden(next(iterator)["x"]).sum()

    def hidden(x):
        return linear(x)

    trainer = Reads()

    with pytest.raises(
        CapturedStateError,
        match=r"`train_step` reads 2 variables that the trainer does not reach(.|\n)*"
        r"hidden/linear/kernel \(nnx.Param \(2, 2\)\)(.|\n)*Assign what holds them to",
    ):
        trainer.train(1)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["model first", "model last"])
def test_a_flag_of_a_model_that_two_attributes_lead_to_is_seen(order):
    class Shared(Trainer):
        def __init__(self):
            super().__init__()
            model = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
            if order == "model first":
                self.model = model
            self.wrapper = types.SimpleNamespace(inner=[model])
            self.model = model

        def train_step(self, iterator):
            self.total = self.total + 1
            self.wrapper.inner[0](self.total + next(iterator)["x"][:, None])

    trainer = Shared()
    trainer.train(2)
    mean = float(trainer.model.mean[...][0])
    trainer.model.eval()
    trainer.train(2)

    assert mean == 3
    assert float(trainer.model.mean[...][0]) == mean


@pytest.mark.slow
def test_a_parameter_that_is_frozen_by_its_metadata_between_loops_stays(caplog):
    class Selective(Trainer):
        def __init__(self):
            super().__init__()
            self.model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))

        def train_step(self, iterator):
            next(iterator)
            for parameter in (self.model.kernel, self.model.bias):
                if not hasattr(parameter, "frozen"):
                    parameter[...] += 1

    trainer = Selective()
    trainer.train(1)
    trainer.model.kernel.set_metadata(frozen=True)
    kernel = np.array(trainer.model.kernel[...])
    trainer.train(1)

    np.testing.assert_array_equal(trainer.model.kernel[...], kernel)
    assert trainer.model.bias[...].tolist() == [2]
    assert "(model/kernel/frozen)" in caplog.text


def test_a_metric_made_again_for_every_loop_is_the_same_to_a_program(no_retrace):
    class Anew(Trainer):
        def train_loop_begin(self):
            self.loss = nnx.metrics.Average("loss")

        def train_step(self, iterator):
            super().train_step(iterator)
            self.loss.update(loss=self.total)

        def train_loop_end(self):
            return {"loss": self.loss.compute()}

    trainer = Anew()
    losses = [float(trainer.train(2)["loss"])]
    with no_retrace():
        losses += [float(trainer.train(2)["loss"]) for _ in range(3)]

    assert losses == [3, 7, 11, 15]
    assert trainer.traces.qsize() == 1


def test_a_step_that_looks_at_all_attributes_sees_all_changes():
    class Looks(Trainer):
        def train_step(self, iterator):
            self.total = self.total + len(vars(self)) * next(iterator)["x"].sum()

    trainer = Looks()
    trainer.train(1)
    count, total = len(vars(trainer)), float(trainer.total)
    trainer.another = 1
    trainer.train(1)

    assert float(trainer.total) == total + 2 * (count + 1)
