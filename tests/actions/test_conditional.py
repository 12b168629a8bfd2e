"""`ConditionalAction` runs its actions exactly when the condition holds."""

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
