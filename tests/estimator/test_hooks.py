"""Hooks, saving listeners, exporters and warm starts of estimators."""

import logging
from pathlib import Path

import jax
import numpy as np
import pytest

import armillary
from armillary import estimator
from armillary.errors import EstimatorError
from armillary.estimator._runners import InputPosition
from tests.estimator.problems import (
    X,
    Y,
    features_of,
    linear_model_fn,
    make_config,
    make_input_fn,
    make_regressor,
    predict,
)

OFTEN = {"save_checkpoints_steps": 2, "log_step_count_steps": 2}


def make_often(folder, **options):
    return make_regressor(folder, **{**OFTEN, **options})


@pytest.mark.slow
def test_hooks_get_the_output_of_each_loop_and_of_an_evaluation(tmp_path):
    made = make_often(tmp_path)
    losses: list[float] = []
    steps: list[int] = []
    made.train(
        make_input_fn(),
        steps=6,
        hooks=[
            lambda output: losses.append(float(output["loss"])),
            armillary.actions.PeriodicAction(
                lambda output: steps.append(made.global_step), interval=4
            ),
        ],
    )
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert steps == [4]

    results = []
    result = made.evaluate(make_input_fn(), hooks=results.append)
    assert [each["average_loss"] for each in results] == [
        pytest.approx(result["average_loss"])
    ]


@pytest.mark.slow
def test_a_hook_stops_training_and_its_state_survives_a_restart(tmp_path):
    def run():
        made = make_often(tmp_path)
        stopping = armillary.actions.EarlyStopping(
            made, "loss", patience=2, min_delta=1e9, higher_is_better=False
        )
        made.train(make_input_fn(repeat=True), max_steps=100, hooks=[stopping])
        return made.global_step

    # The first output is the best one, and two more are no better.
    assert run() == 6
    # The checkpoint describes the stopped run, so its restart must read the same.
    assert run() == 6


@pytest.mark.slow
def test_a_checkpoint_without_hooks_of_an_older_release_is_restored(tmp_path):
    model = make_often(tmp_path / "new").train(make_input_fn(), steps=2)._model
    checkpoint = armillary.Checkpoint(
        model=model.modules, optimizer=model.optimizer, input=InputPosition()
    )
    manager = armillary.CheckpointManager(checkpoint, tmp_path / "old")
    manager.save(checkpoint_number=2)
    manager.close()

    made = make_often(tmp_path / "old").train(make_input_fn(), steps=1)
    assert made.global_step == 3


@pytest.mark.slow
def test_listeners_get_the_path_of_each_complete_checkpoint(tmp_path):
    paths = []

    def listen(path):
        paths.append(Path(path).name)
        assert Path(path).is_dir()

    made = make_often(tmp_path)
    made.train(make_input_fn(), steps=5, saving_listeners=[listen])
    assert paths == ["checkpoint_2", "checkpoint_4", "checkpoint_5"]


@pytest.mark.slow
def test_hooks_and_exporters_of_specs_run(tmp_path):
    made = make_often(tmp_path)
    trained, evaluated, saved = [], [], []
    manager = armillary.actions.ExportFileManager(tmp_path / "exports" / "model")
    features = features_of(X[:2])

    def export(output):
        made.export_model(manager, features)
        return output["average_loss"]

    result, exports = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(
            make_input_fn(repeat=True),
            max_steps=4,
            hooks=[trained.append],
            saving_listeners=[saved.append],
        ),
        estimator.EvalSpec(
            make_input_fn(), hooks=[evaluated.append], exporters=[export]
        ),
    )
    assert result is not None
    assert (len(trained), len(evaluated), len(saved)) == (2, 2, 2)
    assert exports == [pytest.approx(result["average_loss"])]

    # The last file is the model as it was at the end.
    data = Path(manager.managed_files[-1]).read_bytes()
    exported = jax.export.deserialize(bytearray(data))
    found = exported.call(features_of(X[:7]))["y"]
    np.testing.assert_allclose(found, predict(made)[:7], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_is_exported(tmp_path):
    made = make_often(tmp_path / "model")
    manager = armillary.actions.ExportFileManager(tmp_path / "export")
    features = features_of(X[:3])
    with pytest.raises(EstimatorError, match="has no checkpoint to export"):
        made.export_model(manager, features)

    made.train(make_input_fn(), steps=2)
    first, expected = made.latest_checkpoint(), predict(made)
    made.train(make_input_fn(), steps=2)
    made.export_model(manager, features, checkpoint_path=first)
    data = Path(manager.managed_files[-1]).read_bytes()
    exported = jax.export.deserialize(bytearray(data))
    found = exported.call(features)["y"]
    np.testing.assert_allclose(found, expected[:3], rtol=1e-5, atol=1e-6)
    assert made.global_step == 4


@pytest.mark.slow
def test_hooks_of_a_spec_run(tmp_path):
    trained, evaluated = [], []

    def model_fn(features, labels, mode, modules):
        spec = linear_model_fn(features, labels, mode, None, modules)
        return estimator.EstimatorSpec(
            mode,
            spec.predictions,
            spec.loss,
            spec.train_op,
            spec.eval_metric_ops,
            training_hooks=[trained.append],
            training_chief_hooks=[trained.append],
            evaluation_hooks=[evaluated.append],
        )

    made = estimator.Estimator(model_fn, tmp_path, make_config(**OFTEN))
    made.train(make_input_fn(), steps=4)
    made.evaluate(make_input_fn())
    assert (len(trained), len(evaluated)) == (4, 1)


@pytest.mark.slow
def test_training_begins_with_the_weights_of_a_warm_start(tmp_path):
    first = make_regressor(tmp_path / "first").train(make_input_fn(), steps=5)

    def make(folder):
        config = make_config()
        start = tmp_path / "first"
        return estimator.Estimator(
            linear_model_fn, tmp_path / folder, config, warm_start_from=start
        )

    np.testing.assert_array_equal(predict(make("untrained")), predict(first))
    second = make("second").train(make_input_fn(), steps=1)
    assert second.global_step == 1
    first.train(make_input_fn(), steps=1)
    np.testing.assert_array_equal(predict(second), predict(first))
    # A checkpoint of its own goes before the warm start.
    again = make("second").train(make_input_fn(), steps=1)
    assert again.global_step == 2
    assert not np.array_equal(predict(again), predict(first))


@pytest.mark.slow
def test_predictions_can_be_chosen_and_come_in_batches(tmp_path):
    def model_fn(features, mode, modules):
        predictions = {"a": features["a"], "twice": 2 * features["a"]}
        return estimator.EstimatorSpec(mode, predictions)

    made = estimator.Estimator(model_fn, tmp_path)
    rows = list(made.predict(make_input_fn(X[:6], Y[:6]), predict_keys=["twice"]))
    assert [row.keys() for row in rows] == [{"twice"}] * 6
    batches = list(
        made.predict(make_input_fn(X[:6], Y[:6]), yield_single_examples=False)
    )
    assert [len(batch["a"]) for batch in batches] == [4, 2]
    np.testing.assert_allclose(batches[1]["twice"], 2 * X[4:6, 0])
    with pytest.raises(EstimatorError, match=r"`predict_keys` is .*no 'b'.*'twice'"):
        next(made.predict(make_input_fn(), predict_keys=["b"]))
    with pytest.raises(TypeError, match="`predict_keys` is 'a'"):
        next(made.predict(make_input_fn(), predict_keys="a"))  # pyright: ignore[reportArgumentType]


class StopAtStepHook:
    """A hook of TensorFlow, by its name."""


class MyHook(StopAtStepHook):
    """A hook that derives from TensorFlow's."""


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            [StopAtStepHook()],
            r"`hooks\[0\]` .* type StopAtStepHook.*`train\(input_fn, max",
        ),
        ([print, MyHook()], r"`hooks\[1\]` .* type MyHook.*max_steps"),
        ([3], r"`hooks\[0\]` is 3 of type int.*`hooks=\[print\]`"),
        (armillary.actions.Profile, "`hooks` is <class"),
    ],
)
def test_a_hook_that_is_no_function_is_refused(tmp_path, hooks, message):
    made = make_regressor(tmp_path)
    with pytest.raises(EstimatorError, match=message):
        made.train(make_input_fn(), steps=1, hooks=hooks)
    with pytest.raises(EstimatorError, match=message):
        made.evaluate(make_input_fn(), hooks=hooks)
    with pytest.raises(EstimatorError, match=message):
        estimator.TrainSpec(make_input_fn(), hooks=hooks)


def test_listeners_and_exporters_that_are_no_functions_are_refused(tmp_path):
    with pytest.raises(EstimatorError, match=r"`saving_listeners\[0\]` is 3"):
        make_regressor(tmp_path).train(
            make_input_fn(),
            steps=1,
            saving_listeners=[3],  # pyright: ignore[reportArgumentType]
        )
    with pytest.raises(EstimatorError, match="`exporters` is 'model'"):
        estimator.EvalSpec(make_input_fn(), exporters="model")  # pyright: ignore[reportArgumentType]


def test_nothing_is_stopped_where_nothing_runs(tmp_path):
    with pytest.raises(EstimatorError, match="`request_stop` was called"):
        make_regressor(tmp_path).request_stop("enough")


@pytest.mark.slow
def test_checkpoints_follow_each_loop_if_their_seconds_are_few(tmp_path):
    options = {"save_checkpoints_secs": 1e-9, "log_step_count_steps": 2}
    made = make_regressor(tmp_path / "often", **options)
    made.train(make_input_fn(), steps=6)
    names = {path.name for path in (tmp_path / "often").glob("checkpoint_*")}
    assert names == {"checkpoint_2", "checkpoint_4", "checkpoint_6"}

    options["save_checkpoints_secs"] = 1e9
    made = make_regressor(tmp_path / "rarely", **options)
    made.train(make_input_fn(), steps=6)
    names = {path.name for path in (tmp_path / "rarely").glob("checkpoint_*")}
    assert names == {"checkpoint_6"}


@pytest.mark.slow
def test_an_evaluation_follows_each_checkpoint_in_seconds(tmp_path):
    options = {"save_checkpoints_secs": 1e-9, "log_step_count_steps": 2}
    results = []

    def run(folder, **options):
        made = make_regressor(tmp_path / folder, 2, **options)
        result, _ = estimator.train_and_evaluate(
            made,
            estimator.TrainSpec(make_input_fn(repeat=True), max_steps=6),
            estimator.EvalSpec(make_input_fn(), hooks=[results.append]),
        )
        return result

    found = run("seconds", **options)
    assert len(results) == 3
    assert found == run("steps", **OFTEN)
    assert len(results) == 6


@pytest.mark.slow
def test_a_hook_of_an_evaluation_ends_turns_in_seconds(tmp_path):
    options = {"save_checkpoints_secs": 1e-9, "log_step_count_steps": 2}
    made = make_regressor(tmp_path, **options)
    result, _ = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(make_input_fn(repeat=True), max_steps=100),
        estimator.EvalSpec(
            make_input_fn(), hooks=[lambda output: made.request_stop("enough")]
        ),
    )
    assert result is not None
    assert result["global_step"] == 2


@pytest.mark.slow
def test_a_resumed_training_logs_nothing_about_its_data(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        make_regressor(tmp_path).train(make_input_fn(), max_steps=2)
        make_regressor(tmp_path).train(make_input_fn(), max_steps=4)
        make_regressor(tmp_path).train(make_input_fn(), steps=2)
    assert caplog.messages == []


@pytest.mark.slow
def test_an_evaluation_of_equal_batches_logs_nothing_about_their_size(tmp_path, caplog):
    # Ten batches on four replicas: the last step has two of them.
    made = make_regressor(tmp_path, 4)
    with caplog.at_level(logging.WARNING):
        result = made.evaluate(make_input_fn(X[:40], Y[:40]))
    assert caplog.messages == []
    assert result["loss"] == pytest.approx(result["average_loss"], rel=1e-6)
