"""Arguments of `Controller` are checked before anything runs or is written.

`tests/meta/test_arguments.py` gives wrong values to each; here are those that must fit
each other, and what methods need.
"""

import jax.numpy as jnp
import pytest

from tests.controller.loops import Loops, make_controller
from tests.mistakes import mistakes


def wrong(**options):
    return lambda directory: make_controller(summary_dir=directory / "run", **options)


@mistakes(
    {
        TypeError: {
            "`trainer` is <class .*Pass an instance of": wrong(trainer=Loops),
            "`evaluator` is {} of type dict, but it must have `evaluate`": (
                wrong(evaluator={})
            ),
            r"`evaluator` is \[.*\] of type list, but it must have `evaluate`.*"
            r'`evaluator=\{"validation": a, "test": b\}`': wrong(evaluator=[Loops()]),
            r"`evaluator\['test'\]` is 1 of type int": wrong(evaluator={"test": 1}),
            "`strategy` is .* of type object, but it must have `scope`": (
                wrong(strategy=object())
            ),
            "`checkpoint_manager` is .* it must have `save`, `restore`": (
                wrong(checkpoint_manager=object())
            ),
            "`train_actions` is 3 of type int.*callable": wrong(train_actions=3),
            r"`eval_actions\[1\]` is 3 of type int.*callable": (
                wrong(eval_actions=[print, 3])
            ),
        },
        ValueError: {
            r"`trainer` and `evaluator` are both None.*Pass `trainer=\.\.\.`": (
                wrong(trainer=None, evaluator=None)
            ),
            "`evaluator` has the name 'a/b', but each": wrong(
                evaluator={"a/b": Loops()}
            ),
            "`evaluator` has the name '..', but each": wrong(evaluator={"..": Loops()}),
            "`evaluator` has the name 3, but each": wrong(evaluator={3: Loops()}),
            "`steps_per_loop` is None.*steps_per_loop=100`": wrong(steps_per_loop=None),
            r"`summary_interval` is 15.*multiple of `steps_per_loop` \(10\).*"
            "`summary_interval=20`": wrong(summary_interval=15),
            r"`log_interval` is 15.*`log_interval=20`": wrong(log_interval=15),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message, tmp_path):
    with pytest.raises(error, match=message):
        call(tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_one_action_needs_no_list_and_an_interval_fits_a_function_of_the_step():
    outputs = []
    make_controller(
        train_actions=outputs.append,
        steps_per_loop=lambda step: 10,
        summary_interval=15,
    ).train(20)
    assert [output["loss"] for output in outputs] == [1 / 10, 1 / 20]


@pytest.mark.parametrize("num_steps", [0, 2.5, True])
def test_steps_are_positive_integers_or_minus_one(num_steps):
    controller = make_controller(steps_per_loop=lambda step: num_steps)
    match = f"`steps_per_loop` is {num_steps}, but it must be a positive integer"
    with pytest.raises(ValueError, match=match):
        controller.train(10)
    for call, name in (
        (controller.train, "steps"),
        (controller.evaluate, "steps"),
        (controller.train_and_evaluate, "train_steps"),
        (lambda n: controller.train_and_evaluate(10, eval_steps=n), "eval_steps"),
    ):
        with pytest.raises(ValueError, match=rf"`{name}` is .*or -1"):
            call(num_steps)
    assert controller.trainer.step == 0


def test_steps_to_train_up_to_lie_ahead():
    controller = make_controller()
    with pytest.raises(ValueError, match=r"`steps=int\(...\)` takes the value out of"):
        controller.train(jnp.int32(20))
    with pytest.raises(ValueError, match=r"`eval_interval` is 0.*positive integer"):
        controller.train_and_evaluate(10, eval_interval=0)
    controller.train(20)
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
