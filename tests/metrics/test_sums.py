"""Tests of `Sum`, `Ratio` and `WeightedMean`, updated or made in a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from armillary import metrics
from armillary.data import from_arrays
from tests.mistakes import mistakes
from tests.problems import make_strategy
from tests.tiers import slow_after_first

RNG = np.random.default_rng(0)
VALUES = RNG.normal(size=(40, 3)).astype("float32")
WEIGHTS = RNG.integers(0, 5, 40).astype("int32")


@slow_after_first("num_replicas", [4, 1])
def test_a_metric_that_replicas_update_covers_all_examples(num_replicas):
    strategy = make_strategy(num_replicas)
    total, ratio, mean = metrics.Sum(), metrics.Ratio(), metrics.WeightedMean()

    def step_fn(batch):
        values, weights = batch
        total.update(values=weights)
        ratio.update(sum=(values.sum(1) * weights).sum(), denominator=weights)
        mean.update(values=values, weights=weights)

    for start in (0, 16, 32):  # the last batch has 8 rows
        rows = slice(start, start + 16)
        arrays = (VALUES[rows], WEIGHTS[rows])
        source = from_arrays(arrays, batch_size=len(arrays[0]))
        for batch in strategy.distribute_dataset(source):
            strategy.run(step_fn, args=(batch,))

    wide = VALUES.astype("float64")
    assert total.compute() == WEIGHTS.sum()
    expected = (wide.sum(1) * WEIGHTS).sum() / WEIGHTS.sum()
    assert ratio.compute() == pytest.approx(expected, rel=1e-6)
    assert mean.compute() == pytest.approx(expected / 3, rel=1e-6)


def test_a_metric_made_with_numbers_has_them():
    assert metrics.Sum(VALUES).compute() == pytest.approx(VALUES.sum(), rel=1e-6)
    assert metrics.Ratio(6, 4).compute() == 1.5
    assert metrics.WeightedMean([1.0, 4.0], [2, 1]).compute() == 2.0


@pytest.mark.parametrize("make", [metrics.Sum, metrics.Ratio, metrics.WeightedMean])
def test_a_reset_forgets_all(make):
    metric = make(*[jnp.ones(3)] * (1 if make is metrics.Sum else 2))
    assert metric.compute() != 0
    metric.reset()
    np.testing.assert_equal(metric.compute(), 0.0 if make is metrics.Sum else np.nan)


def test_metrics_share_the_arguments_of_a_multi_metric():
    several = nnx.MultiMetric(total=metrics.Sum(), mean=metrics.WeightedMean())
    several.update(values=jnp.array([1.0, 3.0]), weights=jnp.array([1, 0]))
    assert several.compute() == {"total": 4.0, "mean": 1.0}


def test_a_value_without_weight_may_be_anything():
    values = jnp.array([[1.0, np.nan], [np.inf, 3.0]])
    mask = jnp.array([[True, False], [False, True]])
    for weights in (mask, mask.astype(jnp.float32), mask.astype(jnp.int32)):
        assert metrics.WeightedMean(values, weights).compute() == 2.0


@slow_after_first(
    ("values", "expected"),
    [
        (np.arange(-(2**16), 2**16, dtype="int32") * 2**14, -(2**30)),
        (np.full(5, 2**32 - 1, "uint32"), 5 * (2**32 - 1)),
        (np.full(1000, -128, "int8"), -128_000),
        (np.ones((1 << 12, 1 << 13), bool), 1 << 25),
        (np.int32(2**24 + 1), 2**24 + 1),
        (np.full(3, 0.1, "float16"), 3 * float(np.float16(0.1))),
    ],
)
def test_sums_of_every_type_are_exact(values, expected):
    if np.asarray(values).dtype == np.int32 and np.ndim(values):
        expected = int(values.astype("int64").sum())
    assert metrics.Sum(values).compute() == pytest.approx(expected, rel=1e-7)
    if not np.issubdtype(np.asarray(values).dtype, np.floating):
        assert metrics.Sum(values).compute() == expected


@pytest.mark.slow
def test_floats_of_64_bits_keep_their_digits():
    with jax.enable_x64(True):
        total = metrics.Sum(jnp.asarray(1 + 2.0**-40, jnp.float64))
        whole = metrics.Sum(jnp.asarray(2**60 + 1, jnp.int64))
        large = metrics.Sum(jnp.asarray(1e300, jnp.float64))
    assert total.compute() == 1 + 2.0**-40
    assert whole.compute() == float(2**60 + 1)
    assert large.compute() == np.inf


def test_a_metric_may_be_an_output_of_a_function_that_is_differentiated():
    def loss_fn(w, values):
        losses = (w * values) ** 2
        return losses.sum(), metrics.WeightedMean(losses, jnp.ones(len(values)))

    @jax.jit
    def step(w):
        (_, metric), gradient = jax.value_and_grad(loss_fn, has_aux=True)(
            w, jnp.array([1.0, 2.0])
        )
        return metric.total[...], metric.weight[...], gradient

    total, weight, gradient = step(3.0)
    metric = metrics.WeightedMean()
    metric.total[...], metric.weight[...] = total, weight
    assert metric.compute() == (9 + 36) / 2
    assert gradient == 2 * 3 * (1 + 4)


@mistakes(
    {
        TypeError: {
            "`values` of `Sum.update` is 'x' of type str": lambda: metrics.Sum("x"),
            "`values` of `Sum.update` has the dtype complex64": (
                lambda: metrics.Sum(1j * jnp.ones(2))
            ),
            "`denominator` of `Ratio` is None, but": lambda: metrics.Ratio(1.0),
            "`sum` of `Ratio` is None, but": lambda: metrics.Ratio(denominator=1.0),
            "`denominator` of `Ratio.update` is <object": (
                lambda: metrics.Ratio().update(sum=1, denominator=object())
            ),
            "`weights` of `WeightedMean` is None": lambda: metrics.WeightedMean(1.0),
            "`weights` of `WeightedMean.update` is 'x'": (
                lambda: metrics.WeightedMean().update(values=1.0, weights="x")
            ),
        },
        ValueError: {
            r"`weights` of `WeightedMean.update` has the shape \(3,\), but": (
                lambda: metrics.WeightedMean(jnp.ones((2, 3)), jnp.ones(3))
            ),
        },
    }
)
def test_mistakes_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
