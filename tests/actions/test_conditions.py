"""Tests of `NewBestMetric`, `EarlyStopping`, and the actions that they trigger."""

import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from armillary.actions import EarlyStopping, NewBestMetric


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
def test_early_stopping_stops_after_outputs_without_improvement(
    losses, options, expected
):
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
        "the best value was 2, the last one 2.5"
    ]
    # A call after one that was stopped gets its patience back.
    stopping({"loss": 3})
    assert len(reasons) == 1
    stopping({"loss": 3})
    assert len(reasons) == 2


def test_the_reason_shows_values_as_log_lines_do():
    reasons = []
    stopping = stop_early(reasons.append, patience=1)
    for loss in (np.float32(0.8875), np.float32(0.8876)):
        stopping({"loss": loss})

    assert reasons[0].endswith("the best value was 0.8875, the last one 0.8876")


def test_a_run_that_is_never_finite_stops_without_a_best_value():
    reasons = []
    stopping = stop_early(reasons.append, patience=1)
    stopping({"loss": float("nan")})

    assert reasons[0].endswith("the best value was None, the last one nan")


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
