"""Tests that arguments of `Controller` fit each other and its methods.

`tests/meta/test_arguments.py` gives wrong values to each argument.
"""

import pytest

from tests.controller.loops import Loops, make_controller
from tests.mistakes import mistakes


def wrong(**options):
    return lambda directory: make_controller(summary_dir=directory / "run", **options)


@mistakes(
    {
        TypeError: {
            r"`evaluator` is \[.*\] of type list, but it must have `evaluate`.*"
            r'`evaluator=\{"validation": a, "test": b\}`': wrong(evaluator=[Loops()]),
            r"`evaluator\['test'\]` is 1 of type int": wrong(evaluator={"test": 1}),
        },
        ValueError: {
            r"`trainer` and `evaluator` are both None.*Pass `trainer=\.\.\.`": (
                wrong(trainer=None, evaluator=None)
            ),
            "`evaluator` has the name 'a/b'": wrong(evaluator={"a/b": Loops()}),
            "`evaluator` has the name '..'": wrong(evaluator={"..": Loops()}),
            "`steps_per_loop` is None.*steps_per_loop=100`": wrong(steps_per_loop=None),
            r"`summary_interval` is 15.*multiple of `steps_per_loop` \(10\).*"
            "`summary_interval=20`": wrong(summary_interval=15),
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


def test_steps_to_train_up_to_lie_ahead_and_loops_have_some():
    controller = make_controller(steps_per_loop=lambda step: 0 if step else 20)
    controller.train(20)
    for train, name in (
        (controller.train, "steps"),
        (controller.train_and_evaluate, "train_steps"),
    ):
        with pytest.raises(ValueError, match=rf"`{name}` is 10.*already 20.*=20`"):
            train(10)
        with pytest.raises(ValueError, match=r"`steps_per_loop` is 0, but"):
            train(30)


@pytest.mark.parametrize(
    ("missing", "method"),
    [
        ("trainer", lambda controller: controller.train(1)),
        ("evaluator", lambda controller: controller.train_and_evaluate(1)),
        ("checkpoint_manager", lambda controller: controller.evaluate_continuously()),
        ("checkpoint_manager", lambda controller: controller.save_checkpoint()),
    ],
)
def test_missing_arguments_of_a_method_are_named(missing, method):
    controller = make_controller(**{missing: None})

    with pytest.raises(ValueError, match=rf"`{missing}` is None.*Pass `{missing}="):
        method(controller)


def test_none_is_no_action_as_in_orbit():
    controller = make_controller(train_actions=None, eval_actions=None)
    assert controller.train_actions == controller.eval_actions == ()
    controller.train_and_evaluate(10, eval_steps=1)


def test_methods_of_other_libraries_are_answered():
    controller = make_controller()
    with pytest.raises(AttributeError, match=r"attribute 'fit'\. .*controller\.train"):
        controller.fit()
    with pytest.raises(AttributeError, match=r"`armillary\.Controller\(trainer="):
        Loops().fit()
    assert not hasattr(controller, "fit")
