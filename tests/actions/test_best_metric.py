"""`NewBestMetric` finds new best values, and remembers them over restarts."""

import inspect
import json

import jax.numpy as jnp
import numpy as np
import pytest

from armillary.actions import ConditionalAction, EarlyStopping, NewBestMetric


def test_only_strictly_better_values_are_new():
    best = NewBestMetric("accuracy", higher_is_better=True)

    assert [best({"accuracy": x}) for x in (0.5, 0.5, 0.4, 0.6)] == [
        True,
        False,
        False,
        True,
    ]
    assert best.best_value == 0.6


def test_lower_values_are_better_on_request():
    best = NewBestMetric("loss", higher_is_better=False)

    assert [best({"loss": x}) for x in (3.0, 4.0, 2.0)] == [True, False, True]


def test_nan_is_never_best():
    best = NewBestMetric("loss", higher_is_better=False)

    assert [best({"loss": x}) for x in (np.nan, 3.0, np.nan, 2.0)] == [
        False,
        True,
        False,
        True,
    ]


def test_test_does_not_remember():
    best = NewBestMetric("accuracy", higher_is_better=True)

    assert best.test({"accuracy": 0.5})
    assert best.test({"accuracy": 0.5})
    assert best.best_value is None
    assert best.commit({"accuracy": 0.5})
    assert not best.test({"accuracy": 0.5})


@pytest.mark.parametrize(
    "metric", ["validation/loss", lambda output: output["validation"]["loss"]]
)
def test_nested_outputs_are_read_by_path_or_function(metric):
    best = NewBestMetric(metric, higher_is_better=True)

    assert best.metric_value({"validation": {"loss": jnp.float32(0.25)}}) == 0.25


def test_a_key_with_a_slash_is_read_as_it_is():
    assert NewBestMetric("a/b", higher_is_better=True).metric_value({"a/b": 1.0}) == 1.0


def test_best_value_survives_a_restart(tmp_path):
    NewBestMetric("a/b", directory=tmp_path / "new", higher_is_better=True)(
        {"a": {"b": 0.5}}
    )

    restarted = NewBestMetric("a/b", directory=tmp_path / "new", higher_is_better=True)

    assert restarted.best_value == 0.5
    assert not restarted({"a": {"b": 0.5}})
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["best_a%2Fb.json"]


def test_metrics_in_one_directory_do_not_mix(tmp_path):
    NewBestMetric("loss", directory=tmp_path, higher_is_better=True)({"loss": 1.0})

    assert (
        NewBestMetric("accuracy", directory=tmp_path, higher_is_better=True).best_value
        is None
    )


def test_a_reader_does_not_write(tmp_path):
    reader = NewBestMetric(
        "loss", directory=tmp_path, write_metric=False, higher_is_better=True
    )

    assert reader({"loss": 1.0})

    assert reader.best_value == 1.0
    assert list(tmp_path.iterdir()) == []


def test_interrupted_write_leaves_the_old_value(tmp_path, monkeypatch):
    best = NewBestMetric("loss", directory=tmp_path, higher_is_better=True)
    best({"loss": 1.0})

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        best({"loss": 2.0})

    assert (
        NewBestMetric("loss", directory=tmp_path, higher_is_better=True).best_value
        == 1.0
    )
    assert [file.name for file in tmp_path.iterdir()] == ["best_loss.json"]


def test_failed_action_is_tried_again_when_commit_comes_last():
    best = NewBestMetric("accuracy", higher_is_better=True)
    exports = []

    def export(output):
        exports.append(output["accuracy"])
        if len(exports) == 1:
            raise OSError("disk full")

    action = ConditionalAction(best.test, [export, best.commit])
    with pytest.raises(OSError, match="disk full"):
        action({"accuracy": 0.5})
    action({"accuracy": 0.5})
    action({"accuracy": 0.5})

    assert exports == [0.5, 0.5]


def test_state_goes_through_a_checkpoint():
    best = NewBestMetric("loss", higher_is_better=True)
    best({"loss": 1.0})
    restored = NewBestMetric("loss", higher_is_better=True)

    restored.set_state(json.loads(json.dumps(best.get_state())))

    assert restored.best_value == 1.0


@pytest.mark.parametrize("kind", [NewBestMetric, EarlyStopping])
def test_the_direction_has_no_default_and_is_given_by_name(kind):
    direction = inspect.signature(kind).parameters["higher_is_better"]

    assert direction.kind is inspect.Parameter.KEYWORD_ONLY
    assert direction.default is inspect.Parameter.empty


def test_unreadable_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "best_loss.json").write_text("{")

    with pytest.raises(ValueError, match=r"best_loss\.json cannot be read.*Delete"):
        NewBestMetric("loss", directory=tmp_path, higher_is_better=True)


def test_file_of_the_other_direction_is_an_error(tmp_path):
    NewBestMetric("loss", higher_is_better=False, directory=tmp_path)({"loss": 1.0})

    with pytest.raises(ValueError, match=r"`higher_is_better=True`.*has another"):
        NewBestMetric("loss", higher_is_better=True, directory=tmp_path)
