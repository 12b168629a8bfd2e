"""`NewBestMetric` and `EarlyStopping`, and what runs when they hold."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from armillary.actions import ConditionalAction, EarlyStopping, NewBestMetric


def best(metric="loss", *, higher=True, **options):
    return NewBestMetric(metric, higher_is_better=higher, **options)


@pytest.mark.parametrize(
    ("higher", "values", "expected"),
    [
        (True, (0.5, 0.5, 0.4, 0.6), [True, False, False, True]),
        (False, (3.0, 4.0, 2.0), [True, False, True]),
        (False, (np.nan, 3.0, np.nan, 2.0), [False, True, False, True]),
    ],
)
def test_only_strictly_better_values_are_new(higher, values, expected):
    condition = best(higher=higher)
    assert [condition({"loss": value}) for value in values] == expected
    assert condition.best_value == values[-1]


@pytest.mark.parametrize(
    ("metric", "output"),
    [
        ("a/b", {"a": {"b": jnp.float32(0.25)}}),
        (lambda output: output["a"]["b"], {"a": {"b": jnp.float32(0.25)}}),
        ("a/b", {"a/b": 0.25}),
    ],
)
def test_outputs_are_read_by_key_path_or_function(metric, output):
    assert best(metric).metric_value(output) == 0.25


def test_best_values_survive_a_restart_and_do_not_mix(tmp_path):
    folder = tmp_path / "new"
    best("a/b", directory=folder)({"a": {"b": 0.5}})

    restarted = best("a/b", directory=folder)
    assert restarted.best_value == 0.5
    assert not restarted({"a": {"b": 0.5}})
    assert best("loss", directory=folder).best_value is None
    assert [file.name for file in folder.iterdir()] == ["best_a%2Fb.json"]


def test_interrupted_write_leaves_the_old_value(tmp_path, monkeypatch):
    condition = best(directory=tmp_path)
    condition({"loss": 1.0})

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        condition({"loss": 2.0})

    assert best(directory=tmp_path).best_value == 1.0
    assert [file.name for file in tmp_path.iterdir()] == ["best_loss.json"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"best_value": 1.0, "higher_is_better": false}', "another `higher_is_bet"),
    ],
)
def test_a_file_of_something_else_is_an_error_that_names_it(tmp_path, text, reason):
    (tmp_path / "best_loss.json").write_text(text)
    with pytest.raises(ValueError, match=rf"best_loss\.json cannot .*{reason}.*Delete"):
        best(directory=tmp_path)


def test_several_actions_run_in_order_only_if_the_condition_holds():
    seen = []
    actions = [lambda _: seen.append("first"), lambda _: seen.append("second")]
    action = ConditionalAction(lambda output: output["loss"] < 1, actions)
    for loss in (2.0, 0.5, 1.5):
        action({"loss": loss})
    assert seen == ["first", "second"]


def test_failed_action_is_tried_again_when_commit_comes_last():
    condition = best()
    exports = []

    def export(output):
        exports.append(output["loss"])
        if len(exports) == 1:
            raise OSError("disk full")

    action = ConditionalAction(condition.test, [export, condition.commit])
    with pytest.raises(OSError, match="disk full"):
        action({"loss": 0.5})
    action({"loss": 0.5})
    action({"loss": 0.5})

    assert exports == [0.5, 0.5]


def stop_early(request_stop, *, higher=False, **options):
    return EarlyStopping(request_stop, "loss", higher_is_better=higher, **options)


@pytest.mark.parametrize(
    ("losses", "options", "expected"),
    [
        ([3, 2, 2, 2.5, 1], {"patience": 2}, 4),
        # Improvement starts the count again.
        ([3, 4, 2, 4, 1, 4], {"patience": 2}, None),
        ([3, 2.9, 2.8], {"patience": 2}, None),
        ([3, 2.9, 2.8], {"patience": 2, "min_delta": 0.5}, 3),
        ([1, 2, 3], {"patience": 1, "higher": True}, None),
        ([np.nan, np.nan], {"patience": 2}, 2),
    ],
)
def test_it_stops_after_outputs_without_improvement(losses, options, expected):
    reasons = []
    stopping = stop_early(reasons.append, **options)
    count = None
    for index, loss in enumerate(losses, start=1):
        stopping({"loss": loss})
        if reasons and count is None:
            count = index
    assert count == expected


def test_the_reason_names_the_values():
    reasons = []
    # It takes a controller.
    stopping = stop_early(SimpleNamespace(request_stop=reasons.append), patience=2)
    for loss in (3, 2, 2, 2.5):
        stopping({"loss": loss})
    assert reasons == [
        "`loss` has not improved by more than 0 for 2 outputs in a row; "
        "the best value was 2.0, the last one 2.5"
    ]


def test_a_later_run_gets_its_patience_back():
    reasons = []
    stopping = stop_early(reasons.append, patience=2)
    for _ in range(4):
        stopping({"loss": 1.0})
    assert len(reasons) == 1
    stopping({"loss": 1.0})

    assert len(reasons) == 2


def test_states_go_through_a_checkpoint():
    condition, reasons = best(), []
    stopping = stop_early(reasons.append, patience=2)
    for action in (condition, stopping, stopping):
        action({"loss": 1.0})

    for action in (condition, stopping):
        state = json.loads(json.dumps(action.get_state()))
        restored = stop_early(reasons.append, patience=2)
        restored = best() if action is condition else restored
        restored.set_state(state)
        restored({"loss": 1.0})
        assert restored.best_value == 1.0
    assert len(reasons) == 1
