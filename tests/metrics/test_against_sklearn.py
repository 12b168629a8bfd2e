"""Metrics of a complete evaluation equal scikit-learn's on the whole dataset."""

import functools
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn

import armillary
from armillary import metrics
from tests.problems import make_strategy

NUM_CLASSES = 4
BOUNDED = settings(
    deadline=None,
    derandomize=True,
    # A failure is a number of one metric, so no smaller example explains it better.
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.too_slow],
)


class Evaluation(armillary.StandardEvaluator):
    def __init__(self, strategy, read):
        options = armillary.StandardEvaluatorOptions(steps_per_chunk=1)
        super().__init__(strategy.distribute_dataset(read), options)
        self.strategy = strategy
        self.classes = nnx.MultiMetric(
            matrix=metrics.ConfusionMatrix(NUM_CLASSES),
            precision=metrics.Precision(NUM_CLASSES),
            recall=metrics.Recall(NUM_CLASSES, average="weighted"),
            f1=metrics.F1Score(NUM_CLASSES, average=None),
            top=metrics.TopKAccuracy(2),
        )
        self.binary = nnx.MultiMetric(
            precision=metrics.Precision(threshold=0.5),
            recall=metrics.Recall(threshold=0.5),
            f1=metrics.F1Score(threshold=0.5),
            roc=metrics.AUC(from_logits=False),
            pr=metrics.AUC("PR", from_logits=False),
        )
        self.numbers = nnx.MultiMetric(
            absolute=metrics.MeanAbsoluteError(),
            squared=metrics.MeanSquaredError(),
            values=metrics.Distribution(),
        )

    def eval_begin(self):
        for metric in (self.classes, self.binary, self.numbers):
            metric.reset()

    def eval_step(self, iterator):
        self.strategy.run(self.add, args=(next(iterator),))

    def add(self, batch):
        label, keep = batch["label"], batch["keep"]
        self.classes.update(logits=batch["scores"], labels=label, mask=keep)
        self.binary.update(
            logits=batch["probability"], labels=label > 1, mask=batch["keep"]
        )
        self.numbers.update(
            predictions=batch["image"],
            targets=jnp.ones_like(batch["image"]),
            values=batch["image"],
            mask=keep,
        )

    def eval_end(self, *_):
        return {
            "classes": self.classes.compute(),
            "binary": self.binary.compute(),
            "numbers": self.numbers.compute(),
        }


@functools.cache
def make_evaluation(num_replicas):
    """Returns an evaluator that many examples share, and the list of its batches."""
    batches = []
    return Evaluation(make_strategy(num_replicas), lambda: iter(batches)), batches


def make_arrays(num_examples, num_levels, seed):
    """Returns examples with scores of few levels: many of them are equal."""
    rng = np.random.default_rng(seed)
    levels = rng.integers(0, num_levels, (num_examples, NUM_CLASSES)) / num_levels
    return {
        "scores": levels.astype(np.float32),
        "probability": levels[:, 0].astype(np.float32),
        "label": rng.integers(0, NUM_CLASSES, num_examples).astype(np.uint8),
        "keep": rng.uniform(size=num_examples) < 0.8,
        "image": rng.normal(size=(num_examples, 3, 2)).astype(np.float32),
    }


def cut(arrays, batch_size):
    starts = range(0, len(arrays["keep"]), batch_size)
    return [
        {name: array[start : start + batch_size] for name, array in arrays.items()}
        for start in starts
    ]


def compute_expected(arrays):
    kept = {name: array[arrays["keep"]] for name, array in arrays.items()}
    label, scores, probability = kept["label"], kept["scores"], kept["probability"]
    predicted, classes = scores.argmax(1), range(NUM_CLASSES)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :2]
    binary, positive = label > 1, probability >= 0.5
    exact = kept["image"].astype(np.float64)
    zero = {"zero_division": 0.0}
    has_both = 0 < binary.sum() < len(binary)
    return {
        "classes": {
            "matrix": sklearn.confusion_matrix(label, predicted, labels=classes),
            "precision": sklearn.precision_score(
                label, predicted, average="macro", **zero
            ),
            "recall": sklearn.recall_score(
                label, predicted, average="weighted", **zero
            ),
            "f1": sklearn.f1_score(
                label, predicted, average=None, labels=classes, **zero
            ),
            "top": (order == label[:, None]).any(1).mean(),
        },
        "binary": {
            "precision": sklearn.precision_score(binary, positive, **zero),
            "recall": sklearn.recall_score(binary, positive, **zero),
            "f1": sklearn.f1_score(binary, positive, **zero),
            "roc": sklearn.roc_auc_score(binary, probability) if has_both else np.nan,
            "pr": (
                sklearn.average_precision_score(binary, probability)
                if has_both
                else np.nan
            ),
        },
        "numbers": {
            "absolute": np.abs(exact - 1).mean(),
            "squared": np.square(exact - 1).mean(),
        },
    }


@pytest.mark.slow
@settings(BOUNDED, max_examples=12)
@given(
    # Few, since each size of a last batch is a program for each number of replicas.
    num_examples=st.sampled_from([13, 24]),
    num_replicas=st.sampled_from([1, 4]),
    num_levels=st.integers(1, 9),
    seed=st.integers(0, 9),
)
def test_a_complete_evaluation_equals_scikit_learn(
    num_examples, num_replicas, num_levels, seed
):
    evaluation, batches = make_evaluation(num_replicas)
    arrays = make_arrays(num_examples, num_levels, seed)
    arrays["keep"][:4] = True
    batches[:] = cut(arrays, 8)

    output = evaluation.evaluate(-1)

    assert output["numbers"].pop("values").counts.sum() == 6 * num_examples
    with warnings.catch_warnings():
        # Labels of one class only, which is not what is tested here.
        warnings.simplefilter("ignore")
        expected = compute_expected(arrays)
    np.testing.assert_array_equal(
        output["classes"].pop("matrix"), expected["classes"].pop("matrix")
    )
    for group, rtol in (("classes", 1e-12), ("binary", 1e-12), ("numbers", 1e-6)):
        assert output[group].keys() == expected[group].keys()
        for name, value in expected[group].items():
            np.testing.assert_allclose(
                output[group][name], value, rtol=rtol, err_msg=f"{group}/{name}"
            )
