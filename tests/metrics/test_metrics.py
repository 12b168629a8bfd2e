"""Tests of the arguments, errors and results of each metric."""

import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from armillary import metrics
from tests.mistakes import mistakes
from tests.problems import read_leaves
from tests.tiers import slow_after_first

LOGITS = jnp.array([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3], [0.2, 0.2, 0.6]])
LABELS = jnp.array([1, 0, 1])


@pytest.mark.parametrize(
    ("metric", "empty"),
    [
        (metrics.ConfusionMatrix(3), np.zeros((3, 3), int)),
        (metrics.Recall(3, average=None), np.full(3, math.nan)),
        (metrics.F1Score(threshold=0.0), math.nan),
        (metrics.TopKAccuracy(2), math.nan),
        (metrics.AUC("PR"), math.nan),
        (metrics.MeanAbsoluteError(), math.nan),
    ],
)
def test_a_metric_without_examples_has_no_value(metric, empty):
    np.testing.assert_array_equal(metric.compute(), empty)


def test_a_mask_of_examples_holds_for_all_their_elements():
    metric = metrics.MeanSquaredError()
    targets = jnp.arange(6.0).reshape(3, 2)

    metric.update(
        predictions=targets.at[2].set(jnp.nan) + 2,
        targets=targets,
        mask=jnp.array([True, True, False]),
    )

    assert metric.compute() == 4.0


@slow_after_first(
    ("make", "labels", "logits", "counted"),
    [
        (lambda: metrics.ConfusionMatrix(3), LABELS.at[0].set(3), LOGITS, (1, 0)),
        (lambda: metrics.Recall(3), LABELS, LOGITS.at[:2, 1].set(jnp.nan), (0, 2)),
        (lambda: metrics.AUC(), LABELS + 1, LOGITS[:, 0], (2, 0)),
        (lambda: metrics.AUC(from_logits=False), LABELS, LOGITS[:, 0] * 2.5, (0, 1)),
        (
            lambda: metrics.F1Score(threshold=0.5),
            jnp.array([1, 2**31 + 1, 0], jnp.uint32),
            LOGITS[:, 0],
            (1, 0),
        ),
    ],
)
def test_examples_without_a_meaning_are_an_error(make, labels, logits, counted):
    metric = make()
    metric.update(logits=logits, labels=labels)

    with pytest.raises(
        ValueError,
        match=rf"`{type(metric).__name__}` has no value.*{counted[0]} labels.*"
        rf"{counted[1]} examples.*mask",
    ):
        metric.compute()


def test_masked_examples_need_no_meaning():
    metric = metrics.ConfusionMatrix(3)
    metric.update(
        logits=LOGITS.at[0].set(jnp.nan),
        labels=LABELS.at[0].set(-1),
        mask=jnp.array([False, True, True]),
    )
    assert metric.compute().sum() == 2


def update(metric, **changes):
    metric.update(**({"logits": LOGITS, "labels": LABELS} | changes))


@mistakes(
    {
        ValueError: {
            r"`num_classes` is 3 and `threshold` is 0\.5": (
                lambda: metrics.Precision(num_classes=3, threshold=0.5)
            ),
            r"`logits` of `Precision.update` has the shape \(3, 3\), and `labels` \(": (
                lambda: update(metrics.Precision(3), labels=LABELS[:2])
            ),
            r"must have the shape of `labels`, and then 4 classes\.": (
                lambda: update(metrics.Precision(4))
            ),
            r"must have the shape of `labels`\. Index.*`logits\[\.\.\., 1\]`": (
                lambda: update(metrics.AUC(), logits=LOGITS[:, :2])
            ),
            "and then 4 or more classes": lambda: update(metrics.TopKAccuracy(4)),
            r"`mask` of `Recall.update` has the shape \(2,\).* \(3,\)": (
                lambda: update(metrics.Recall(3), mask=jnp.ones(2, bool))
            ),
            r"`predictions` of `MeanSquaredError.update` has the shape \(3, 1\), and "
            r"`targets` \(3,\)": (
                lambda: metrics.MeanSquaredError().update(
                    predictions=jnp.ones((3, 1)), targets=jnp.ones(3)
                )
            ),
        },
        TypeError: {
            "`labels` of `Precision.update` has the dtype float32.*argmax": (
                lambda: update(metrics.Precision(3), labels=LABELS.astype("float32"))
            ),
            "`mask` of `Recall.update` has the dtype float32.*`mask > 0`": (
                lambda: update(metrics.Recall(3), mask=jnp.ones(3))
            ),
        },
    }
)
def test_values_that_a_metric_cannot_use_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_the_area_of_continuous_scores_is_within_its_buckets(curve, caplog):
    rng = np.random.default_rng(0)
    labels = (rng.uniform(size=20_000) < 0.02).astype(np.int32)
    logits = (rng.normal(size=20_000) + 1.5 * labels - 5).astype(np.float32)
    metric, other = metrics.AUC(curve), metrics.AUC(curve, from_logits=False)

    metric.update(logits=logits, labels=labels)
    other.update(logits=jax.nn.sigmoid(logits), labels=labels)

    score = {"ROC": roc_auc_score, "PR": average_precision_score}[curve]
    assert metric.compute() == pytest.approx(score(labels, logits), abs=1e-3)
    assert other.compute() == pytest.approx(metric.compute(), abs=1e-3)
    assert not caplog.records


def test_scores_in_few_buckets_are_reported(caplog):
    metric = metrics.AUC(num_buckets=1000)
    metric.update(logits=np.arange(100) / 1e4, labels=np.arange(100) % 2)
    with caplog.at_level(logging.WARNING, "armillary"):
        assert metric.compute() == 0.5
    assert "100.0 % of the pairs" in caplog.text
    assert "`AUC(num_buckets=10000)`" in caplog.text


@pytest.mark.parametrize("metric", [metrics.AUC(), metrics.MeanSquaredError()])
def test_state_is_nothing_but_small_integers(metric):
    leaves = read_leaves(metric)
    assert {leaf.dtype for leaf in leaves.values()} == {jnp.dtype("int32")}
