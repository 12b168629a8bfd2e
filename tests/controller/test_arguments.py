"""Arguments of `Controller` are checked before anything runs or is written."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary.controller._controller import Controller
from armillary.trainer._contract import AbstractEvaluator, AbstractTrainer
from tests.mistakes import mistakes


class Trainer(AbstractTrainer):
    """Counts steps."""

    def __init__(self):
        self.step = nnx.Variable(jnp.zeros((), jnp.int32))

    def train(self, num_steps):
        self.step.set_value(self.step.get_value() + num_steps)


class Evaluator(AbstractEvaluator):
    """Evaluates nothing."""

    def evaluate(self, num_steps):
        return None


def make_controller(**options):
    trainer = Trainer()
    options = {
        "trainer": trainer,
        "evaluator": Evaluator(),
        "global_step": trainer.step,
        "steps_per_loop": 10,
        **options,
    }
    return Controller(**options)


def wrong(**options):
    return lambda directory: make_controller(summary_dir=directory / "run", **options)


@mistakes(
    {
        TypeError: {
            "`trainer` is <class .*Pass an instance of": wrong(trainer=Trainer),
            "`trainer` is .* of type Evaluator, but it must be a `AbstractTrainer`": (
                wrong(trainer=Evaluator())
            ),
            "`evaluator` is .* of type object, but it must have `evaluate`": (
                wrong(evaluator=object())
            ),
            "`strategy` is .* of type object, but it must have `scope`": (
                wrong(strategy=object())
            ),
            "`checkpoint_manager` is .* it must have `save`, `restore`": (
                wrong(checkpoint_manager=object())
            ),
            "`global_step` is 3 of type int": wrong(global_step=3),
            "`global_step` is array": wrong(global_step=np.zeros(())),
            "`train_actions` is 3 of type int.*callable": wrong(train_actions=3),
            r"`eval_actions\[1\]` is 3 of type int.*callable": (
                wrong(eval_actions=[print, 3])
            ),
        },
        ValueError: {
            r"`trainer` and `evaluator` are both None.*Pass `trainer=\.\.\.`": (
                wrong(trainer=None, evaluator=None)
            ),
            "`steps_per_loop` is None.*steps_per_loop=100`": wrong(steps_per_loop=None),
            "`steps_per_loop` is 0.*positive integer": wrong(steps_per_loop=0),
            r"`steps_per_loop` is 2\.0": wrong(steps_per_loop=2.0),
            "`summary_interval` is 0.*positive": wrong(summary_interval=0),
            r"`summary_interval` is 15.*multiple of `steps_per_loop` \(10\).*"
            "`summary_interval=20`": wrong(summary_interval=15),
            "`log_interval` is 0.*positive": wrong(log_interval=0),
            r"`log_interval` is 15.*`log_interval=20`": wrong(log_interval=15),
            r"`progress` is 'auto'.*True, False": wrong(progress="auto"),
            "`hang_timeout_seconds` is 0.*posit": wrong(hang_timeout_seconds=0),
            "is inf.*or `None` to": wrong(hang_timeout_seconds=float("inf")),
            "is '1m'.*positive num": wrong(hang_timeout_seconds="1m"),
            "is True.*positive num": wrong(hang_timeout_seconds=True),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_summary_interval_fits_a_function_of_the_step():
    make_controller(steps_per_loop=lambda step: 10, summary_interval=15).train(20)


@pytest.mark.parametrize("num_steps", [0, -1, 2.5, None, True])
def test_steps_are_positive_integers_or_minus_one(num_steps):
    controller = make_controller(steps_per_loop=lambda step: num_steps)
    match = f"`steps_per_loop` returned {num_steps} at global step 0.*positive integer"
    with pytest.raises(ValueError, match=match):
        controller.train(10)
    if num_steps != -1:
        for call, name in (
            (controller.train, "steps"),
            (controller.evaluate, "steps"),
            (controller.train_and_evaluate, "train_steps"),
            (lambda n: controller.train_and_evaluate(10, eval_steps=n), "eval_steps"),
        ):
            with pytest.raises(ValueError, match=rf"`{name}` is .*or -1"):
                call(num_steps)
    assert controller.trainer.step.get_value() == 0


def test_steps_out_of_an_array_are_converted():
    controller = make_controller()
    steps = jnp.int32(20)

    with pytest.raises(ValueError, match=r"`steps=int\(...\)` takes the value out of"):
        controller.train(steps)
    with pytest.raises(ValueError, match=r"`eval_interval=int\(...\)` takes the value"):
        controller.train_and_evaluate(20, eval_interval=steps)
    with pytest.raises(ValueError, match=r"`eval_interval` is 0.*positive integer"):
        controller.train_and_evaluate(10, eval_interval=0)
    controller.train(int(steps))
    with pytest.raises(ValueError, match=r"`steps` is 10.*already 20.*`steps=20`"):
        controller.train(10)
    with pytest.raises(ValueError, match=r"`train_steps` is 10.*already 20"):
        controller.train_and_evaluate(10)


@pytest.mark.parametrize(
    ("missing", "method"),
    [
        ("trainer", lambda controller: controller.train(1)),
        ("trainer", lambda controller: controller.train_and_evaluate(1)),
        ("evaluator", lambda controller: controller.evaluate()),
        ("evaluator", lambda controller: controller.train_and_evaluate(1)),
        ("evaluator", lambda controller: controller.evaluate_continuously()),
        ("checkpoint_manager", lambda controller: controller.evaluate_continuously()),
        ("checkpoint_manager", lambda controller: controller.save_checkpoint()),
        ("checkpoint_manager", lambda controller: controller.restore_checkpoint()),
    ],
)
def test_what_a_method_needs_is_named(missing, method):
    controller = make_controller(**{missing: None})

    with pytest.raises(
        ValueError, match=rf"`{missing}` is None.*Pass `{missing}=\.\.\."
    ):
        method(controller)


def test_stop_reason_is_a_string():
    with pytest.raises(TypeError, match=r"`reason` is 15 of type int.*a `str`"):
        make_controller().request_stop(15)


@pytest.mark.parametrize(
    ("evaluator", "error", "message"),
    [
        ({}, TypeError, "`evaluator` is {} of type dict, but it must have `evaluate`"),
        (
            [Evaluator(), Evaluator()],
            TypeError,
            r"`evaluator` is \[.*\] of type list, but it must have `evaluate`.*"
            r'`evaluator=\{"validation": a, "test": b\}`',
        ),
        (
            {"a/b": Evaluator()},
            ValueError,
            "`evaluator` has the name 'a/b', but each evaluator",
        ),
        (
            {"..": Evaluator()},
            ValueError,
            "`evaluator` has the name '..', but each evaluator",
        ),
        (
            {3: Evaluator()},
            ValueError,
            "`evaluator` has the name 3, but each evaluator",
        ),
        ({"test": 1}, TypeError, r"`evaluator\['test'\]` is 1 of type int"),
    ],
)
def test_evaluators_have_names_and_methods(evaluator, error, message):
    with pytest.raises(error, match=message):
        make_controller(evaluator=evaluator)
