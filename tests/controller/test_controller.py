"""The loops of `Controller`: what runs when, in which order, and how it ends."""

import contextlib
import threading
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.actions import EarlyStopping
from armillary.controller._controller import Controller
from armillary.errors import GlobalStepError
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer


class Trainer(AbstractTrainer):
    """Counts steps until its data ends, and remembers the loops it ran."""

    def __init__(self, num_batches=10**6):
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))
        self.num_batches = num_batches
        self.loops = []

    def train(self, num_steps) -> Any:
        done = min(num_steps, self.num_batches)
        self.num_batches -= done
        self.data_exhausted = done < num_steps
        self.step.set_value(self.step.get_value() + done)
        self.loops.append(done)
        return {"loss": 1 / self.step.get_value()}


class Evaluator(AbstractEvaluator):
    """Remembers the global steps it was called at."""

    def __init__(self, step):
        self.step = step
        self.steps = []

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
    controller = make_controller()

    controller.train(10)
    controller.train(11)

    assert controller.trainer.loops == [4, 4, 2, 1]


def test_steps_per_loop_may_depend_on_the_global_step():
    controller = make_controller(steps_per_loop=lambda step: 1 if step < 2 else 5)

    controller.train(10)

    assert controller.trainer.loops == [1, 1, 5, 3]
    assert controller.steps_per_loop == 5


def test_global_step_may_be_a_function():
    trainer = Trainer()
    controller = Controller(
        trainer=trainer,
        global_step=lambda: trainer.step.get_value(),
        steps_per_loop=4,
    )

    controller.train(6)

    assert trainer.loops == [4, 2]


def test_training_at_its_target_does_nothing(caplog):
    caplog.set_level("INFO", "armillary")
    controller = make_controller()
    controller.train(4)

    controller.train(4)

    assert controller.trainer.loops == [4]
    assert "train | step:      4 | already at step 4, nothing to train." in caplog.text


def test_end_of_data_ends_training(caplog):
    caplog.set_level("INFO", "armillary")
    controller = make_controller(Trainer(num_batches=6))

    controller.train(100)

    assert controller.trainer.loops == [4, 2]
    assert controller.trainer.step.get_value() == 6
    assert caplog.text.count("the data ended, training ends here.") == 1
    assert "train | step:      6 | the data ended" in caplog.text


def test_training_after_the_end_of_the_data_says_what_to_do(caplog):
    caplog.set_level("INFO", "armillary")
    controller = make_controller(Trainer(num_batches=2))

    for _ in range(3):
        controller.train(-1)

    assert controller.trainer.step.get_value() == 2
    assert caplog.text.count("the data ended, training ends here.") == 1
    assert caplog.text.count("the data had ended before, and without `epochs`") == 2
    assert "`controller.train(epochs=epoch + 1)`" in caplog.text


def test_train_without_a_target_runs_until_the_data_ends():
    outputs = []
    controller = make_controller(Trainer(num_batches=8), train_actions=[outputs.append])

    controller.train()

    assert controller.trainer.loops == [4, 4, 0]
    assert len(outputs) == 2  # A loop without steps has no output.


def test_training_goes_on_with_new_data():
    controller = make_controller(Trainer(num_batches=6))
    controller.train(-1)

    controller.trainer.num_batches = 100
    controller.train(12)

    assert controller.trainer.step.get_value() == 12


@pytest.mark.parametrize("advance", [3, 5, 0, -1])
def test_wrong_advance_of_the_global_step_is_an_error(advance):
    class Wrong(Trainer):
        def train(self, num_steps):
            self.step.set_value(self.step.get_value() + advance)

    trainer = Wrong()
    trainer.step.set_value(jnp.int32(20))
    expected = (
        rf"`trainer.train\(4\)` advanced `global_step` from 20 to {20 + advance}, but "
        r"it must advance it by 4, to 24\. Pass what every step.*data_exhausted"
    )

    with pytest.raises(GlobalStepError, match=expected):
        make_controller(trainer).train(30)


def test_output_reaches_actions_as_numpy_values():
    class Nested(Trainer):
        def train(self, num_steps):
            super().train(num_steps)
            return {"b": jnp.float32(0.5), "a": {"count": jnp.int32(3), "rate": 0.1}}

    outputs = []
    controller = make_controller(Nested(), train_actions=[outputs.append])

    controller.train(4)

    assert outputs == [{"b": 0.5, "a": {"count": 3, "rate": 0.1}}]
    assert list(outputs[0]) == ["b", "a"]
    assert isinstance(outputs[0]["b"], np.float32)
    assert isinstance(outputs[0]["a"]["count"], np.int32)


def test_output_of_none_is_empty():
    class Silent(Trainer):
        def train(self, num_steps):
            super().train(num_steps)

    outputs = []
    make_controller(Silent(), train_actions=[outputs.append]).train(4)

    assert outputs == [{}]


def test_output_that_is_no_dictionary_is_an_error():
    class Wrong(Trainer):
        def train(self, num_steps):
            super().train(num_steps)
            return 0.5

    with pytest.raises(
        TypeError, match=r"`trainer.train` returned 0.5 of type float.*dictionary"
    ):
        make_controller(Wrong()).train(4)


class Computed:
    def compute(self):
        return 0.5


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ({"loss": Computed()}, "an object of type Computed as 'loss'"),
        ({"a": {"loss": Computed().compute}}, "an object of type method as 'loss'"),
        ({"loss": nnx.metrics.Average()}, "an object of type Average as 'loss'"),
    ],
    ids=["metric", "method", "nnx"],
)
def test_output_that_was_not_computed_is_an_error(output, message):
    class Uncalled(Trainer):
        def train(self, num_steps):
            super().train(num_steps)
            return output

    with pytest.raises(TypeError) as info:
        make_controller(Uncalled()).train(4)
    assert str(info.value) == (
        f"`trainer.train` returned {message}, but it must return scalars. Call what "
        'computes it, such as `{"loss": self.loss.compute()}`.'
    )


def test_actions_run_in_order_after_summaries():
    events = []
    controller = make_controller(
        train_actions=[
            lambda output: events.append("first"),
            lambda output: events.append(len(controller.summary_manager.written)),
        ]
    )

    controller.train(8)

    assert events == ["first", 1, "first", 2]


def test_summaries_hold_output_and_speed():
    controller = make_controller()

    controller.train(8)

    (first, values), (second, _) = controller.summary_manager.written
    assert (first, second) == (4, 8)
    assert values["loss"] == 0.25
    assert values["steps_per_second"] > 0


def test_summary_interval_thins_summaries_out():
    controller = make_controller(summary_interval=8)

    controller.train(26)

    assert [step for step, _ in controller.summary_manager.written] == [8, 16, 24]


def test_summary_interval_holds_for_loops_that_do_not_end_on_it():
    trainer = Trainer()
    trainer.step.set_value(jnp.int32(3))
    controller = make_controller(trainer, summary_interval=8)

    controller.train(26)

    assert [step for step, _ in controller.summary_manager.written] == [11, 19, 26]


def test_speed_counts_training_time_only():
    controller = make_controller(train_actions=[lambda output: time.sleep(0.1)])

    controller.train(12)

    speeds = [x["steps_per_second"] for _, x in controller.summary_manager.written]
    assert max(speeds) > 4 / 0.1  # With the action's time, none could reach this.


def test_evaluate_returns_and_writes_the_output():
    outputs = []
    controller = make_controller(eval_actions=[outputs.append])
    controller.train(4)

    assert controller.evaluate(3) == {"num_steps": 3}
    assert controller.evaluate() == {"num_steps": -1}

    assert outputs == [{"num_steps": 3}, {"num_steps": -1}]
    assert controller.eval_summary_manager.written[-1] == (4, {"num_steps": -1})


def test_evaluation_summaries_may_go_elsewhere():
    elsewhere = Summaries()
    controller = make_controller(eval_summary_manager=elsewhere)

    controller.train_and_evaluate(4)

    assert [step for step, _ in controller.summary_manager.written] == [4]
    assert elsewhere.written == [(4, {"num_steps": -1})]


def test_train_and_evaluate_takes_turns():
    controller = make_controller()

    output = controller.train_and_evaluate(14, eval_steps=2, eval_interval=6)

    assert controller.trainer.loops == [4, 2, 4, 2, 2]
    assert controller.evaluator.steps == [6, 12, 14]
    assert output == {"num_steps": 2}


def test_the_end_is_evaluated_exactly_once():
    controller = make_controller()

    controller.train_and_evaluate(12, eval_interval=6)
    assert controller.evaluator.steps == [6, 12]

    controller.train_and_evaluate(16)
    assert controller.evaluator.steps == [6, 12, 16]


def test_finished_training_is_still_evaluated():
    controller = make_controller()
    controller.train(8)

    assert controller.train_and_evaluate(8) == {"num_steps": -1}
    assert controller.evaluator.steps == [8]


@pytest.mark.parametrize(
    ("num_batches", "steps"), [(12, [5, 10, 12]), (10, [5, 10]), (0, [0])]
)
def test_train_and_evaluate_until_the_data_ends(num_batches, steps):
    controller = make_controller(Trainer(num_batches))

    controller.train_and_evaluate(-1, eval_interval=5)

    assert controller.evaluator.steps == steps


def test_stop_request_ends_training_at_the_loop_boundary(caplog):
    caplog.set_level("INFO", "armillary")
    controller = make_controller(
        train_actions=[lambda output: controller.request_stop("the loss diverged")]
    )

    controller.train(100)
    assert controller.trainer.loops == [4]
    assert "stopped at step 4: the loss diverged" in caplog.text

    controller.train(100)
    assert controller.trainer.loops == [4, 4]


def test_first_of_several_stop_requests_is_logged(caplog):
    caplog.set_level("INFO", "armillary")

    def request_twice(output):
        controller.request_stop("first")
        controller.request_stop("second")

    controller = make_controller(train_actions=[request_twice])
    controller.train(100)

    assert "stopped at step 4: first" in caplog.text
    assert "second" not in caplog.text


def test_stop_request_of_an_evaluation_needs_no_further_one():
    controller = make_controller(
        eval_actions=[
            EarlyStopping(
                lambda x: controller.request_stop(x),
                "num_steps",
                patience=2,
                higher_is_better=False,
            )
        ]
    )

    controller.train_and_evaluate(100, eval_interval=5)

    assert controller.evaluator.steps == [5, 10, 15]
    assert controller.trainer.step.get_value() == 15


def test_stop_request_while_training_is_followed_by_an_evaluation():
    controller = make_controller(train_actions=[lambda x: controller.request_stop("x")])

    assert controller.train_and_evaluate(100, eval_interval=50) == {"num_steps": -1}
    assert controller.evaluator.steps == [4]


def test_stop_request_from_another_thread():
    started = threading.Event()
    controller = make_controller(train_actions=[lambda output: started.set()])

    def request():
        started.wait()
        controller.request_stop("enough")

    thread = threading.Thread(target=request)
    thread.start()
    controller.train()
    thread.join()

    assert controller.trainer.step.get_value() % 4 == 0


def test_stop_request_before_a_run_does_not_concern_it():
    controller = make_controller()

    controller.request_stop("early")
    controller.train(8)

    assert controller.trainer.step.get_value() == 8


def test_exception_leaves_summaries_flushed():
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


def test_failing_flush_does_not_hide_the_first_error():
    class Failing(Trainer):
        def train(self, num_steps):
            raise RuntimeError("out of memory")

    class FailingSummaries(Summaries):
        def flush(self):
            raise OSError("disk full")

    controller = make_controller(Failing(), summary_manager=FailingSummaries())

    with pytest.raises(RuntimeError, match="out of memory") as caught:
        controller.train(8)

    assert caught.value.__notes__ == [
        "Pending writes failed as well: OSError('disk full')"
    ]


def test_an_error_that_is_repeated_is_no_note_on_itself(caplog):
    class FailingSummaries(Summaries):
        def flush(self):
            raise OSError("disk full")

    controller = make_controller(Trainer(), summary_manager=FailingSummaries())

    with pytest.raises(OSError, match="disk full") as caught:
        controller.train(8)

    assert not hasattr(caught.value, "__notes__")
    assert "Pending writes" not in caplog.text


def test_user_code_runs_in_the_scope_of_the_strategy():
    class Strategy:
        depth = 0

        @contextlib.contextmanager
        def scope(self):
            self.depth += 1
            yield
            self.depth -= 1

    class Scoped(Trainer):
        def train(self, num_steps):
            depths.append(strategy.depth)
            return super().train(num_steps)

    depths = []
    strategy = Strategy()
    controller = make_controller(
        Scoped(),
        strategy=strategy,
        train_actions=[lambda output: depths.append(strategy.depth)],
        eval_actions=[lambda output: depths.append(strategy.depth)],
    )

    controller.train_and_evaluate(4)

    assert depths == [1, 1, 1]
    assert strategy.depth == 0


def test_attributes_exist_without_their_arguments():
    trainer = Trainer()
    controller = Controller(evaluator=Evaluator(trainer.step), global_step=trainer.step)

    assert controller.global_step is trainer.step
    assert controller.trainer is None
    assert controller.strategy is None
    assert controller.checkpoint_manager is None
    assert controller.steps_per_loop is None
    assert controller.summary_interval is None
    assert controller.train_actions == controller.eval_actions == ()
    assert controller.eval_summary_manager is controller.summary_manager
    assert controller.evaluate(2) == {"num_steps": 2}
