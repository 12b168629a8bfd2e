"""Tests that `PeriodicAction` runs after an interval of steps or seconds."""

from unittest.mock import Mock

import pytest

from armillary.actions import ConditionalAction, PeriodicAction
from armillary.actions._combined import notify
from tests.controller.loops import make_controller


def run(steps, *, start=0, **options):
    def output(step):
        return {"step": step}

    controller = make_controller(output, output, **options)
    controller.trainer.step = start
    notify(controller.train_actions, "bind_step_counter", controller.global_step)
    controller.train_and_evaluate(steps, eval_interval=30)


def collect(seen):
    return lambda output: seen.append(output["step"])


def test_a_periodic_action_runs_at_the_first_output_after_each_multiple():
    seen, evaluated = [], []

    run(
        100,
        train_actions=[PeriodicAction(collect(seen), 25)],
        eval_actions=[PeriodicAction(collect(evaluated), 60)],
    )

    assert seen == [30, 50, 80, 100]
    assert evaluated == [60]


def test_a_run_that_resumes_continues_with_the_same_multiples():
    seen = []
    run(100, start=40, train_actions=[PeriodicAction(collect(seen), 25)])
    assert seen == [50, 80, 100]


def test_an_action_that_failed_runs_at_the_next_output():
    step = Mock(return_value=0)
    action = Mock(side_effect=[OSError("no space left"), None])
    periodic = PeriodicAction(action, 25)
    periodic.bind_step_counter(step)

    step.return_value = 30
    with pytest.raises(OSError, match="no space left"):
        periodic({})
    for step.return_value in (40, 45):
        periodic({})

    assert action.call_count == 2


def test_a_periodic_action_combines_with_other_actions():
    seen = []
    inner = PeriodicAction([collect(seen), collect(seen)], interval=20)
    outer = ConditionalAction(lambda output: output["step"] > 20, inner)
    run(60, train_actions=[outer])
    # At 30, a multiple has passed since it was asked last.
    assert seen == [30, 30, 40, 40, 60, 60]


def test_all_actions_receive_the_end_of_training():
    first, second = Mock(), Mock()
    first.end_training.side_effect = OSError("no space left")
    with pytest.raises(OSError, match="no space left"):
        run(10, train_actions=[PeriodicAction([first, second], 20)])
    second.end_training.assert_called_once_with()
