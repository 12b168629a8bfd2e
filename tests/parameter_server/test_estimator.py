"""Tests of estimators under a `ParameterServerStrategy`."""

from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import armillary
from armillary import estimator
from armillary.errors import NonFiniteError
from tests.estimator.problems import X, Y, features_of, make_input_fn, predict

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("ray"),
]

COLUMNS = [
    estimator.numeric_column("a"),
    estimator.numeric_column("b", shape=(2,)),
]


def make_regressor(folder, strategy, **options):
    config = estimator.RunConfig(train_distribute=strategy, **options)
    return estimator.LinearRegressor(COLUMNS, folder, optimizer="SGD", config=config)


def predictions_of(made):
    return np.array([row["predictions"] for row in made.predict(make_input_fn())])


def test_one_worker_gives_the_numbers_of_one_device(tmp_path, alone):
    options = {"log_step_count_steps": 4, "save_checkpoints_steps": 4}
    found = make_regressor(tmp_path / "servers", alone.strategy, **options)
    expected = make_regressor(
        tmp_path / "device", armillary.OneDeviceStrategy("cpu:0"), **options
    )
    for made in (found, expected):
        made.train(make_input_fn(repeat=True), max_steps=8)

    assert found.global_step == 8
    result = expected.evaluate(make_input_fn())
    assert found.evaluate(make_input_fn()) == pytest.approx(result, rel=1e-4)
    np.testing.assert_allclose(
        predictions_of(found), predictions_of(expected), rtol=1e-4, atol=1e-5
    )
    names = {path.name for path in (tmp_path / "servers").glob("checkpoint_*")}
    assert names == {"checkpoint_4", "checkpoint_8"}

    manager = armillary.actions.ExportFileManager(tmp_path / "export")
    found.export_model(manager, features_of(X[:3]))
    data = Path(manager.managed_files[-1]).read_bytes()
    exported = jax.export.deserialize(bytearray(data))
    np.testing.assert_allclose(
        exported.call(features_of(X[:5]))["predictions"],
        predictions_of(found)[:5],
        rtol=1e-5,
        atol=1e-6,
    )

    # A new object continues at the checkpoint.
    again = make_regressor(tmp_path / "servers", alone.strategy, **options)
    again.train(make_input_fn(repeat=True), max_steps=10)
    assert again.global_step == 10


def test_a_loss_that_is_no_number_ends_training(tmp_path, alone):
    options = {"log_step_count_steps": 2, "save_checkpoints_steps": 2}
    made = make_regressor(tmp_path, alone.strategy, **options)
    made.train(make_input_fn(repeat=True), steps=2)
    labels = np.full_like(Y, np.nan)
    with pytest.raises(NonFiniteError, match="The loss of a loop is nan"):
        made.train(make_input_fn(X, labels, repeat=True), steps=4)
    names = {path.name for path in tmp_path.glob("checkpoint_*")}
    assert names == {"checkpoint_2"}


def model_fn(features, labels, mode, params, modules):
    """Linear regression with a metric, as a model function of the user's."""
    from tests.estimator.problems import linear_model_fn

    return linear_model_fn(features, labels, mode, optax.adam(params), modules)


def test_workers_train_and_the_chief_evaluates_in_turns(tmp_path, coordinator):
    config = estimator.RunConfig(
        train_distribute=coordinator.strategy,
        save_checkpoints_steps=100,
        log_step_count_steps=100,
    )
    made = estimator.Estimator(model_fn, tmp_path, config, params=0.05)
    losses = []
    result, _ = estimator.train_and_evaluate(
        made,
        estimator.TrainSpec(make_input_fn(shuffle_seed=0, repeat=True), max_steps=300),
        estimator.EvalSpec(
            make_input_fn(), hooks=lambda output: losses.append(output["average_loss"])
        ),
    )
    assert result is not None
    assert result["global_step"] == 300
    assert len(losses) == 3
    assert losses[-1] < 0.1 * np.mean(Y**2)
    assert predict(made).shape == (72,)
