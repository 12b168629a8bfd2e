"""Estimators against loops in NumPy and NNX, on one replica and on several."""

import logging
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import estimator
from tests.estimator.problems import (
    BATCH_SIZE,
    FailingData,
    Net,
    X,
    Y,
    batches_of,
    check_linear,
    features_of,
    linear_model_fn,
    make_input_fn,
    make_net,
    make_regressor,
    make_strategy,
    predict,
)
from tests.patience import patience
from tests.problems import assert_identical, read_state
from tests.tiers import slow_after_first


def state_of(made: estimator.Estimator) -> dict[str, np.ndarray]:
    """Returns all arrays of an estimator: of its modules and of its optimizer."""
    model = made._model
    return read_state({"modules": model.modules, "optimizer": model.optimizer})


def assert_same(first: estimator.Estimator, second: estimator.Estimator) -> None:
    state = state_of(first)
    assert state
    assert_identical(state, state_of(second))


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_n_replicas_take_n_batches_as_one_replica_takes_them_joined(tmp_path, replicas):
    made = make_regressor(tmp_path, replicas).train(make_input_fn(), steps=4)
    check_linear(made, list(batches_of(X, Y, replicas * BATCH_SIZE))[:4])


@pytest.mark.slow
def test_batches_of_any_sizes_are_joined_and_the_last_ones_train_too(tmp_path):
    def input_fn():
        start = 0
        for size in (4, 3, 4, 4, 2, 4, 4, 1):
            rows = slice(start, start + size)
            yield features_of(X[rows]), Y[rows]
            start += size

    made = make_regressor(tmp_path, 4).train(input_fn)
    check_linear(made, [(X[:15], Y[:15]), (X[15:26], Y[15:26])])
    assert made.global_step == 2


@pytest.mark.slow
def test_the_strategy_in_effect_is_used_if_none_is_given(tmp_path):
    with make_strategy(2).scope():
        made = estimator.Estimator(linear_model_fn, tmp_path)
        made.train(make_input_fn(), steps=2)
        assert made.evaluate(make_input_fn())["global_step"] == 2
    check_linear(made, list(batches_of(X, Y, 8))[:2])


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 4])
def test_an_evaluation_counts_every_example_and_every_batch_once(tmp_path, replicas):
    made = make_regressor(tmp_path, replicas).train(make_input_fn(), steps=3)
    errors = (predict(made)[:22] - Y[:22]) ** 2

    result = made.evaluate(make_input_fn(X[:22], Y[:22]))

    losses = [part.mean() for part, _ in batches_of(errors, errors, 4)]
    expected = {
        "average_loss": errors.mean(),
        "loss": np.mean(losses),
        "global_step": 3,
    }
    assert result == pytest.approx(expected, rel=1e-4)
    assert expected["loss"] != pytest.approx(expected["average_loss"], rel=1e-3)


@pytest.mark.slow
def test_a_model_function_trains_as_a_loop_in_nnx_does(tmp_path):
    made = make_net(tmp_path).train(make_input_fn(), steps=5)

    # Its modules begin with a seed that follows from their name: take it over.
    other = make_net(tmp_path / "untrained")
    other.evaluate(make_input_fn())
    net = other._model.modules.net
    assert isinstance(net, Net)
    # The call that made it has changed nothing in it.
    assert not np.any(net.norm.mean[...])
    assert np.all(net.norm.var[...] == 1)
    assert other.global_step == 0
    optimizer = nnx.Optimizer(net, optax.adam(0.01), wrt=nnx.Param)
    for x, y in list(batches_of(X, Y, BATCH_SIZE))[:5]:

        def loss_fn(net, x=x, y=y):
            return ((net(jnp.asarray(x), training=True) - y) ** 2).mean()

        optimizer.update(net, nnx.grad(loss_fn)(net))
    for kind in (nnx.Param, nnx.BatchStat):
        found, wanted = (
            jax.tree.leaves(nnx.state(each, kind))
            for each in (made._model.modules.net, net)
        )
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_metrics_of_a_model_function_equal_metrics_of_its_predictions(tmp_path):
    made = make_net(tmp_path, 2).train(make_input_fn(), steps=3)
    result = made.evaluate(make_input_fn())
    predictions = predict(made)
    assert predictions.shape == (72,)
    assert result["error"] == pytest.approx(np.mean((predictions - Y) ** 2), rel=1e-5)
    distance = np.mean(np.abs(predictions - Y))
    assert result["distance"] == pytest.approx(distance, rel=1e-5)


@slow_after_first("replicas", [1, 2])
def test_training_that_was_stopped_ends_bit_for_bit_as_if_it_was_not(
    tmp_path, replicas
):
    input_fn = make_input_fn(shuffle_seed=3, repeat=True)
    whole = make_net(tmp_path / "whole", replicas).train(input_fn, max_steps=25)

    make_net(tmp_path / "parts", replicas).train(input_fn, max_steps=7)
    parts = make_net(tmp_path / "parts", replicas).train(input_fn, max_steps=25)

    assert_same(whole, parts)
    assert parts.global_step == 25


OFTEN = {"save_checkpoints_steps": 5, "log_step_count_steps": 5}
KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.estimator.problems import FailingData, make_net
from tests.estimator.test_estimator import OFTEN

folder = Path(sys.argv[1])

def kill():
    while not list(folder.glob("checkpoint_*[0-9]")):
        time.sleep(0.01)  # Batches are read ahead.
    os.kill(os.getpid(), signal.SIGKILL)

data = FailingData(22, kill)
make_net(folder, **OFTEN).train(lambda: data, max_steps=30)
"""


@pytest.mark.slow
def test_training_that_was_killed_ends_bit_for_bit_as_if_it_was_not(tmp_path):
    whole, broken = make_net(tmp_path / "whole", **OFTEN), tmp_path / "parts"
    whole.train(lambda: FailingData(100, list), max_steps=30)
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(broken)], timeout=patience(120)
    )
    assert ended.returncode == -signal.SIGKILL
    parts = make_net(broken, **OFTEN)
    latest = parts.latest_checkpoint()
    assert latest is not None
    assert 0 < int(Path(latest).name.partition("_")[2]) < 30
    parts.train(lambda: FailingData(100, list), max_steps=30)

    assert_same(whole, parts)


@pytest.mark.slow
def test_data_begin_again_in_each_call_and_steps_add_up(tmp_path):
    input_fn = make_input_fn(X[:8], Y[:8])
    made = make_regressor(tmp_path).train(make_input_fn(), steps=2)
    for _ in range(2):
        made.train(input_fn)
    made.train(input_fn, max_steps=7)
    # The last one ended with a step of the pass left, which the next one takes.
    made.train(input_fn, max_steps=100)
    made.train(input_fn, max_steps=100)
    assert made.global_step == 10
    check_linear(made, list(batches_of(X[:8], Y[:8], 4)) * 5)
    # A step that is reached is not trained again.
    before = state_of(made)
    made.train(make_input_fn(), max_steps=10)
    assert_identical(state_of(made), before)


@pytest.mark.slow
def test_other_data_begin_again_with_a_warning(tmp_path, caplog):
    make_regressor(tmp_path).train(make_input_fn(X[:8], Y[:8]), max_steps=1)
    with caplog.at_level(logging.WARNING):
        made = make_regressor(tmp_path).train(make_input_fn(), max_steps=3)
    assert "input" in caplog.text and "72 examples" in caplog.text
    batches = list(batches_of(X[:8], Y[:8], 4))
    check_linear(made, [batches[0], *batches])


@pytest.mark.slow
def test_intervals_and_directories(tmp_path):
    options = {"save_checkpoints_steps": 4, "keep_checkpoint_max": 2}
    options |= {"log_step_count_steps": 2, "save_summary_steps": 2}
    made = make_regressor(tmp_path, **options)
    assert made.latest_checkpoint() is None
    made.train(make_input_fn(), steps=10)
    made.evaluate(make_input_fn(), steps=2)
    made.evaluate(make_input_fn(), steps=2, name="other")
    names = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint_6", "checkpoint_10", "eval", "eval_other"} <= names
    assert "checkpoint_2" not in names
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert list((tmp_path / "eval").glob("events.out.tfevents.*"))
    assert made.latest_checkpoint() == str(tmp_path / "checkpoint_10")
    assert made.eval_dir("other") == str(tmp_path / "eval_other")


@pytest.mark.slow
def test_another_checkpoint_is_used_and_leaves_no_trace(tmp_path):
    first = make_regressor(tmp_path / "first").train(make_input_fn(), steps=2)
    path, expected = first.latest_checkpoint(), first.evaluate(make_input_fn())
    predictions = predict(first)
    first.train(make_input_fn(), steps=3)
    # The optimizer does not matter, and this one has nothing of its own saved.
    other = make_regressor(tmp_path / "other", optimizer=optax.adam(0.1))
    for made in (first, other):
        assert made.evaluate(make_input_fn(), checkpoint_path=path) == expected
        found = predict(made, checkpoint_path=path)
        np.testing.assert_array_equal(found, predictions)
    assert first.global_step == 5
    assert not np.array_equal(predict(first), predictions)
    assert not predict(other).any()
    assert other.train(make_input_fn(), steps=1).global_step == 1


@pytest.mark.slow
def test_parameters_are_those_that_the_estimator_was_made_with(tmp_path):
    params: dict[str, Any] = {"hidden": [4]}

    def model_fn(features, mode, modules, params):
        return estimator.EstimatorSpec(mode, features["a"] * params["hidden"][0])

    made = estimator.Estimator(model_fn, tmp_path, params=params)
    params["hidden"][0] = 0
    assert made.params == {"hidden": [4]}
    assert next(made.predict(make_input_fn())) == pytest.approx(4 * X[0, 0])


@pytest.mark.slow
def test_checkpoints_fit_any_number_of_replicas(tmp_path):
    made = make_regressor(tmp_path, 4).train(make_input_fn(), steps=2)
    predictions = predict(made)
    result = make_regressor(tmp_path, 1).evaluate(make_input_fn())
    assert result == pytest.approx(made.evaluate(make_input_fn()), rel=1e-5)
    fresh = make_regressor(tmp_path, 2)
    np.testing.assert_array_equal(predict(fresh), predictions)
    assert fresh.train(make_input_fn(), steps=1).global_step == 3


@pytest.mark.slow
def test_an_input_function_gets_what_it_asks_for(tmp_path):
    seen = {}

    def input_fn(input_context, mode, params, config):
        seen.update(context=input_context, mode=mode, params=params, config=config)
        yield features_of(X[:4]), Y[:4]

    made = make_net(tmp_path, 2)
    made.evaluate(input_fn)
    assert seen["context"] == armillary.data.InputContext(1, 0, 2)
    assert seen["mode"] == estimator.ModeKeys.EVAL == "eval"
    assert seen["params"] == {"rate": 0.01}
    assert seen["config"] is made.config


@pytest.mark.slow
def test_predictions_come_before_training_and_when_they_are_asked_for(tmp_path):
    def input_fn():
        calls.append(None)
        return [features_of(X[:3]), features_of(X[:2])]

    calls: list[None] = []
    made = make_regressor(tmp_path / "first")
    predictions = made.predict(input_fn)
    assert calls == []
    rows = list(predictions)
    assert len(calls) == 1
    assert rows == [{"y": 0.0}] * 5
    made.train(make_input_fn(), steps=3)
    other = make_regressor(tmp_path / "other").train(make_input_fn(), steps=3)
    assert_same(made, other)
    assert made.global_step == 3


@pytest.mark.slow
def test_training_and_evaluation_take_turns_under_strategies_of_their_own(
    tmp_path, caplog
):
    config = estimator.RunConfig(
        save_checkpoints_steps=4,
        log_step_count_steps=2,
        train_distribute=make_strategy(4),
        eval_distribute=make_strategy(2),
    )
    made = estimator.Estimator(linear_model_fn, tmp_path, config)
    train_spec = estimator.TrainSpec(make_input_fn(repeat=True), max_steps=10)
    eval_spec = estimator.EvalSpec(make_input_fn())
    with caplog.at_level(logging.INFO):
        result, exports = estimator.train_and_evaluate(made, train_spec, eval_spec)
    lines = [line for line in caplog.messages if "eval | step" in line]
    assert [line.split()[3] for line in lines if "running" in line] == ["4", "8", "10"]
    # The data are less than the 100 steps of an evaluation, which is nothing to say.
    assert [each for each in caplog.records if each.levelname == "WARNING"] == []
    assert exports == []
    assert result == made.evaluate(make_input_fn())
    assert result["global_step"] == 10

    again, _ = estimator.train_and_evaluate(made, train_spec, eval_spec)
    assert again == result
