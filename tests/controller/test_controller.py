"""Tests of the loops of `Controller`: their order and their end."""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary import AbstractEvaluator, AbstractTrainer, Controller
from armillary.errors import GlobalStepError
from armillary.summary import read_metrics


class Trainer(AbstractTrainer):
    """Counts steps until its data ends, and remembers the loops it ran."""

    def __init__(self, num_batches=10**6, output=None):
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.num_batches, self.output = num_batches, output
        self.loops = []

    def train(self, num_steps) -> Any:
        done = min(num_steps, self.num_batches)
        self.num_batches -= done
        self.data_exhausted = done < num_steps
        self.step.set_value(self.step.get_value() + done)
        self.loops.append(done)
        return self.output or {"loss": 1 / self.step.get_value()}


class Evaluator(AbstractEvaluator):
    """Remembers the global steps it was called at."""

    def __init__(self, step):
        self.step, self.steps = step, []

    def evaluate(self, num_steps):
        self.steps.append(int(self.step.get_value()))
        return {"num_steps": num_steps}


class Summaries:
    """Remembers what was written."""

    def __init__(self):
        self.written = []
        self.num_flushes = 0

    def write_summaries(self, values, *, step):
        self.written.append((step, values))

    def flush(self):
        self.num_flushes += 1


def make_controller(trainer=None, **options):
    trainer = trainer or Trainer()
    options = {
        "steps_per_loop": 4,
        "evaluator": Evaluator(trainer.step),
        "summary_manager": Summaries(),
        **options,
    }
    return Controller(trainer=trainer, global_step=trainer.step, **options)


def test_train_runs_loops_up_to_the_global_step():
    trainer = Trainer()
    controller = make_controller(trainer)
    controller.train(10)
    for _ in range(2):
        controller.train(11)
    assert trainer.loops == [4, 4, 2, 1]

    controller = make_controller(steps_per_loop=lambda step: 1 if step < 2 else 5)
    controller.train(10)
    assert controller.trainer.loops == [1, 1, 5, 3]
    assert controller.steps_per_loop == 5


def test_the_end_of_the_data_ends_training_and_names_the_fix(caplog):
    caplog.set_level("INFO", "armillary")
    trainer = Trainer(num_batches=6)
    controller = make_controller(trainer)

    for _ in range(3):
        controller.train(100)

    assert trainer.loops == [4, 2, 0, 0]
    assert caplog.text.count("train | step:      6 | the data ended, training") == 1
    assert "before step 100. To train on, make the data with `repeat=True`" in (
        caplog.text
    )
    assert caplog.text.count("the data had ended before. Use `train(epochs=") == 2
    trainer.num_batches = 100  # There is new data.
    controller.train(12)
    assert trainer.step.get_value() == 12


class InUnitsOf(Trainer):
    """Advances the global step by a number of steps for each that is asked for."""

    def __init__(self, advance):
        super().__init__()
        self.advance = advance

    def train(self, num_steps):
        self.loops.append(num_steps)
        self.step.set_value(self.step.get_value() + num_steps * self.advance)


@pytest.mark.parametrize("advance", [0, -1])
def test_a_global_step_that_does_not_advance_is_an_error(advance):
    trainer = InUnitsOf(advance)
    trainer.step.set_value(jnp.int32(20))
    expected = (
        rf"`InUnitsOf.train\(4\)` took `global_step` from 20 to {20 + 4 * advance}, "
        r"but every call must advance it.*data_exhausted"
    )
    with pytest.raises(GlobalStepError, match=expected):
        make_controller(trainer).train(30)


def test_a_trainer_may_decide_what_a_step_is(caplog):
    caplog.set_level("INFO", "armillary")
    epoch = 7
    trainer, steps = InUnitsOf(epoch), []
    controller = make_controller(
        trainer,
        steps_per_loop=1,
        eval_actions=lambda _: steps.append(trainer.step.get_value()),
    )
    controller.train_and_evaluate(train_steps=30, eval_interval=10)

    # The first ends of epochs at or after 10, 20 and 30.
    assert steps == [14, 21, 35]
    assert trainer.loops == [1] * 5
    logged = [line for line in caplog.messages if "steps/sec" in line]
    assert [int(line.split(":")[1].split("|")[0]) for line in logged] == [
        *range(7, 36, 7)
    ]
    assert caplog.text.count("train(1)` advances the global step by 7") == 1

    # The run is over, also for a program that is started again.
    controller.train(30)
    make_controller(trainer, steps_per_loop=1).train(30)
    assert trainer.loops == [1] * 5
    assert caplog.text.count("already at step 35, nothing to train") == 2


def test_output_reaches_actions_as_numpy_values():
    output = {"b": jnp.float32(0.5), "a": {"count": jnp.int32(3), "rate": 0.1}}
    outputs = []
    trainer = Trainer(output=output)
    make_controller(trainer, train_actions=[outputs.append]).train(4)

    assert outputs == [{"b": 0.5, "a": {"count": 3, "rate": 0.1}}]
    assert list(outputs[0]) == ["b", "a"]
    assert isinstance(outputs[0]["b"], np.float32)
    assert isinstance(outputs[0]["a"]["count"], np.int32)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (0.5, "0.5 of type float, but it must return a dictionary"),
        (
            {"a": {"loss": nnx.metrics.Average().compute}},
            "an object of type method as 'loss'",
        ),
        ({"loss": nnx.metrics.Average()}, "type Average as 'loss'.*loss.compute"),
    ],
    ids=["number", "method", "metric"],
)
def test_output_that_is_no_dictionary_of_scalars_is_an_error(output, message):
    with pytest.raises(TypeError, match=f"`trainer.train` returned.*{message}"):
        make_controller(Trainer(output=output)).train(4)


@pytest.mark.parametrize(
    ("interval", "start", "steps"),
    [
        (None, 0, [*range(4, 25, 4), 26]),
        (8, 0, [8, 16, 24]),
        (8, 3, [11, 19, 26]),  # Loops do not end on it.
    ],
)
def test_summaries_come_at_their_interval(interval, start, steps):
    trainer = Trainer()
    trainer.step.set_value(jnp.int32(start))
    controller = make_controller(trainer, summary_interval=interval)

    controller.train(26)

    written = controller.summary_manager.written
    assert [step for step, _ in written] == steps
    assert all(values["steps_per_second"] > 0 for _, values in written)
    assert written[0][1]["loss"] == pytest.approx(1 / steps[0])


def test_evaluate_returns_and_writes_the_output():
    outputs, elsewhere = [], Summaries()
    controller = make_controller(
        eval_actions=[outputs.append], eval_summary_manager=elsewhere
    )
    controller.train(4)

    assert controller.evaluate(3) == {"num_steps": 3}
    assert controller.evaluate() == {"num_steps": -1}

    assert outputs == [{"num_steps": 3}, {"num_steps": -1}]
    assert elsewhere.written == [(4, {"num_steps": 3}), (4, {"num_steps": -1})]
    assert [step for step, _ in controller.summary_manager.written] == [4]


def test_train_and_evaluate_takes_turns_and_evaluates_the_end_once():
    controller = make_controller()

    output = controller.train_and_evaluate(14, eval_steps=2, eval_interval=6)

    assert controller.trainer.loops == [4, 2, 4, 2, 2]
    assert controller.evaluator.steps == [6, 12, 14]
    assert output == {"num_steps": 2}
    controller.train_and_evaluate(18, eval_interval=6)
    assert controller.evaluator.steps[3:] == [18]


@pytest.mark.parametrize(
    ("num_batches", "steps"), [(12, [5, 10, 12]), (10, [5, 10]), (0, [0])]
)
def test_without_a_target_training_runs_until_the_data_ends(num_batches, steps):
    outputs = []
    controller = make_controller(Trainer(num_batches), train_actions=outputs.append)

    controller.train_and_evaluate(-1, eval_interval=5)

    assert controller.evaluator.steps == steps
    # A loop without steps has no output.
    assert len(outputs) == len([n for n in controller.trainer.loops if n])


def test_stop_request_ends_training_at_the_loop_boundary(caplog):
    caplog.set_level("INFO", "armillary")

    def request_twice(output):
        controller.request_stop("the loss diverged")
        controller.request_stop("second")

    controller = make_controller(train_actions=[request_twice])
    controller.request_stop("early")  # It concerns no call.

    for num_loops in (1, 2):
        controller.train(100)
        assert controller.trainer.loops == [4] * num_loops
    assert "stopped at step 4: the loss diverged" in caplog.text
    assert "second" not in caplog.text and "early" not in caplog.text


def test_the_first_error_is_reported():
    def fail():
        raise OSError("disk full")

    class Failing(Trainer):
        def train(self, num_steps):
            if self.loops:
                flushed.append(controller.summary_manager.num_flushes)
                raise RuntimeError("out of memory")
            return super().train(num_steps)

    flushed = []
    controller = make_controller(Failing())
    with pytest.raises(RuntimeError, match="out of memory"):
        controller.train(8)
    assert controller.summary_manager.num_flushes > flushed[0]

    trainer = Failing()
    trainer.loops = [0]
    controller = make_controller(trainer)
    controller.summary_manager.flush = fail
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        controller.train(8)
    note = "Pending writes failed as well: OSError('disk full')"
    assert caught.value.__notes__ == [note]


def test_user_code_runs_in_the_scope_of_the_strategy():
    inside, depths = [], []

    @contextlib.contextmanager
    def scope():
        inside.append(None)
        yield
        inside.pop()

    def note(*_):
        depths.append(len(inside))

    controller = make_controller(
        strategy=SimpleNamespace(scope=scope), train_actions=note, eval_actions=note
    )
    evaluate = controller.evaluator.evaluate
    controller.evaluator.evaluate = lambda n: (note(), evaluate(n))[1]
    controller.train_and_evaluate(4)

    assert depths == [1, 1, 1] and not inside


class Losses(AbstractEvaluator):
    """Returns one loss after the other."""

    def __init__(self, *losses):
        self.losses = list(losses)

    def evaluate(self, num_steps):
        return {"loss": np.float32(self.losses.pop(0))}


def make_two(*actions, **options):
    evaluators = {"validation": Losses(3, 2, 1), "test": Losses(4, 5, 6)}
    return make_controller(evaluator=evaluators, eval_actions=actions, **options)


def test_outputs_of_several_evaluators_are_nested_and_logged_by_name(caplog):
    caplog.set_level("INFO", "armillary")
    outputs, summaries = [], Summaries()
    controller = make_two(outputs.append, eval_summary_manager=summaries)

    output = controller.train_and_evaluate(8, eval_interval=4)

    assert outputs == [
        {"validation": {"loss": 3}, "test": {"loss": 4}},
        {"validation": {"loss": 2}, "test": {"loss": 5}},
    ]
    assert output == outputs[-1]
    lines = [line.split(" | ") for line in caplog.messages if " eval |" in line]
    assert [line[2] for line in lines] == 2 * [*2 * ["validation"], *2 * ["test"]]
    assert lines[3][-1] == "output: {'loss': 4.0}"
    written = [(step, name) for step, values in summaries.written for name in values]
    assert written == [(s, name) for s in (4, 8) for name in ("validation", "test")]


def test_summaries_of_several_go_to_directories_of_their_names(tmp_path):
    make_two(eval_summary_dir=tmp_path).evaluate()

    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["test", "validation"]
    records = [record for record in read_metrics(tmp_path) if "values" in record]
    assert [(each["name"], each["values"]) for each in records] == [
        ("validation", {"loss": 3}),
        ("test", {"loss": 4}),
    ]
