"""`ConditionalAction` runs its actions exactly when the condition holds."""

import pytest

from armillary.actions import ConditionalAction


def test_action_runs_only_if_the_condition_holds():
    seen = []
    action = ConditionalAction(lambda output: output["loss"] < 1, seen.append)

    for loss in (2.0, 0.5, 1.5):
        action({"loss": loss})

    assert seen == [{"loss": 0.5}]


def test_several_actions_run_in_order():
    seen = []
    action = ConditionalAction(
        lambda output: True,
        [lambda output: seen.append("first"), lambda output: seen.append("second")],
    )

    action({})

    assert seen == ["first", "second"]


def test_what_is_not_callable_is_an_error():
    with pytest.raises(TypeError, match=r"`condition` is True of type bool.*callable"):
        ConditionalAction(True, print)
    with pytest.raises(TypeError, match=r"`action` is 3 of type int.*callable"):
        ConditionalAction(bool, 3)
    with pytest.raises(TypeError, match=r"`action\[1\]` is 3 of type int.*callable"):
        ConditionalAction(bool, [print, 3])
