"""Tests that metrics of pure steps are exact under every strategy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import metrics
from armillary.data import from_arrays
from armillary.errors import DoubleReductionError
from tests.tiers import slow_after_first
from tests.trainer.metric_steps import (
    DATA,
    NUM,
    STRATEGIES,
    expect,
    make_trainer,
    measure,
    step,
)


def check(output, expected):
    assert jax.tree.structure(output) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True)
    for found, right in pairs:
        np.testing.assert_allclose(found, right, rtol=2e-6)


@slow_after_first("strategy", STRATEGIES)
def test_metrics_cover_all_examples_in_training(strategy):
    trainer = make_trainer(STRATEGIES[strategy]())
    rows = np.arange(NUM)
    check(trainer.train(1), expect(rows[:16]))
    check(trainer.train(3), expect(rows[16:]))  # the last batch has 4 rows


@slow_after_first("strategy", STRATEGIES)
@pytest.mark.parametrize("batch_size", [7])
def test_metrics_cover_all_examples_in_an_evaluation(strategy, batch_size):
    trainer = make_trainer(STRATEGIES[strategy]())
    data = from_arrays(DATA, batch_size=batch_size)  # 7 rows for 4 replicas, and 3
    evaluator = armillary.StepEvaluator(lambda _, batch: measure(batch), trainer, data)
    for _ in range(2):
        check(evaluator.evaluate(-1), expect(np.arange(NUM)))


@pytest.mark.slow
@slow_after_first("options", [{"compile_loop": False}, {"compile_step": False}])
def test_metrics_are_the_same_in_steps_of_other_kinds(options):
    strategy = STRATEGIES["one device"]()
    options = armillary.StandardTrainerOptions(**options)
    check(make_trainer(strategy, options=options).train(4), expect(np.arange(NUM)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_parts_of_a_batch_add_up_in_the_step(strategy):
    def in_parts(state, batch):
        parts = jax.tree.map(lambda leaf: leaf.reshape(2, -1, *leaf.shape[1:]), batch)

        def add(carry, part):
            total, weight = carry
            total += (part["loss"] * part["weight"]).sum()
            return (total, weight + part["weight"].sum()), None

        sums, _ = jax.lax.scan(add, (0.0, 0), parts)
        return state, {"loss": metrics.Ratio(*sums)}

    even = {name: array[:48] for name, array in DATA.items()}
    trainer = make_trainer(STRATEGIES[strategy](), in_parts, even)
    expected = expect(np.arange(48))["ratio"]
    assert trainer.train(3)["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
def test_metrics_with_accumulated_gradients_cover_the_whole_batch():
    class Trainer(armillary.StandardTrainer):
        def __init__(self, strategy):
            options = armillary.StandardTrainerOptions(accumulate_steps=2)
            even = {name: array[:48] for name, array in DATA.items()}
            super().__init__(from_arrays(even, batch_size=16, repeat=True), options)
            self.strategy = strategy
            self.w = nnx.Param(jnp.zeros(()))
            self.loss = metrics.WeightedMean()
            self.tokens = metrics.Sum()

        def train_loop_begin(self):
            self.loss.reset()
            self.tokens.reset()

        def train_step(self, iterator):
            def step_fn(batch):
                def loss_fn(batch):
                    self.tokens.update(values=batch["weight"])
                    losses = batch["loss"].mean(-1) * self.w[...]
                    return armillary.compute_average_loss(losses)

                _, (gradient,) = armillary.value_and_grad(
                    loss_fn, [self.w], batch=batch
                )
                self.w[...] += armillary.all_reduce("sum", gradient)
                self.loss.update(values=batch["loss"], weights=batch["weight"])

            self.strategy.run(step_fn, args=(next(iterator),))

        def train_loop_end(self):
            return {"loss": self.loss.compute(), "tokens": self.tokens.compute()}

    expected = expect(np.arange(48))
    for make_strategy in STRATEGIES.values():
        output = Trainer(make_strategy()).train(3)
        assert output["tokens"] == expected["tokens"]
        assert output["loss"] == pytest.approx(expected["weighted"], rel=1e-6)


@pytest.mark.slow
def test_means_over_many_small_batches_are_exact():
    count = 2_000
    data = {"value": np.full(count, 0.7, "float32")}
    source = from_arrays(data, batch_size=2, repeat=True)

    def constant(state, batch):
        rate = jnp.float32(1e-3)
        return state, {"of each": batch["value"], "rate": rate}

    trainer = armillary.StepTrainer(constant, jnp.zeros(()), source)
    output = trainer.train(50_000)
    assert output == {
        "of each": float(np.float32(0.7)),
        "rate": float(np.float32(1e-3)),
    }


def test_counts_beyond_what_floats_and_integers_hold_are_exact():
    def count(state, batch):
        pixels = nnx.metrics.Average()
        pixels.total[...] = jnp.float32(2**29)
        pixels.count[...] = jnp.int32(2**30)
        one = metrics.Sum(jnp.int32(2**24 + 1))
        return state, {
            "pixels": pixels,
            "all": metrics.Sum(pixels.count[...]),
            "one": one,
        }

    output = make_trainer(None, count).train(4)
    assert output == {"pixels": 0.5, "all": 2.0**32, "one": 4 * (2**24 + 1)}


@pytest.mark.slow
def test_any_number_of_metrics_has_room():
    def many(state, batch):
        return state + 1, {f"m{i}": batch["loss"] * i for i in range(100)}

    trainer = make_trainer(STRATEGIES["one device"](), many)
    output = trainer.train(4)
    mean = expect(np.arange(NUM))["of each"]
    np.testing.assert_allclose(output["m99"], 99 * mean, rtol=1e-5)
    assert len(output) == 100
    assert int(trainer.state) == int(trainer.global_step[...]) == 4


def test_many_metrics_of_a_step_in_python_lose_no_batch_of_a_generator():
    def many(state, batch):
        return state + batch.sum(), {f"m{i}": batch * i for i in range(20)}

    def generate():
        yield from np.arange(1.0, 5.0, dtype=np.float32).reshape(4, 1)

    options = armillary.StandardTrainerOptions(compile_step=False)
    trainer = armillary.StepTrainer(many, jnp.zeros(()), generate, options=options)

    output = trainer.train(4)

    assert (float(trainer.state), int(trainer.global_step[...])) == (10, 4)
    assert output["m19"] == 19 * 2.5


def test_a_step_without_metrics_has_an_empty_output():
    trainer = make_trainer(None, lambda state, batch: (state + 1, {}))
    assert trainer.train(2) == {}
    trainer = make_trainer(None, lambda state, batch: (state + 1, None))
    assert trainer.train(2) in ({}, None)


@pytest.mark.slow
def test_a_loop_that_resumes_has_the_metrics_of_its_own_steps(tmp_path):
    def run(directory, *stops):
        outputs = []
        for stop in stops:
            trainer = armillary.StepTrainer(
                step,
                jnp.zeros((), jnp.int32),
                from_arrays(DATA, batch_size=16, shuffle_seed=1, repeat=True),
                strategy=STRATEGIES["4 replicas"](),
            )
            controller = armillary.Controller(
                trainer=trainer,
                global_step=trainer.global_step,
                steps_per_loop=3,
                checkpoint_manager=armillary.CheckpointManager(
                    armillary.Checkpoint(trainer=trainer), directory
                ),
                train_actions=[outputs.append],
            )
            controller.train(stop)
        return outputs

    whole = run(tmp_path / "a", 9)
    assert run(tmp_path / "b", 3, 9) == whole
    assert len(whole) == 3


@pytest.mark.slow
def test_no_checkpoint_has_the_totals_of_a_loop(tmp_path):
    trainer = make_trainer(None)
    trainer.train(1)
    checkpoint = armillary.Checkpoint(trainer=trainer)
    report = checkpoint.read(checkpoint.write(tmp_path / "a"))
    assert not [path for path in report.restored if "_metrics" in path]
    assert "trainer/state" in report.restored


def test_a_checkpoint_with_the_totals_of_an_older_release_can_be_restored(tmp_path):
    class Older:
        """As a trainer of 0.3 was saved, with float32 totals."""

        def __init__(self):
            self.state = jnp.int32(7)
            self.global_step = jnp.int32(7)
            self._metrics = {"total": jnp.zeros(64), "weight": jnp.zeros(64)}

    path = armillary.Checkpoint(trainer=Older()).write(tmp_path / "old")
    trainer = make_trainer(None)
    armillary.Checkpoint(trainer=trainer).read(path)
    assert int(trainer.state) == 7


def test_arrays_in_half_precision_and_numbers_of_python_are_means():
    def measure(state, batch):
        half = batch["loss"].astype(jnp.bfloat16)
        return state, {"half": half, "flag": True, "two": 2, "empty": jnp.zeros((0, 3))}

    output = make_trainer(None, measure).train(4)
    half = np.asarray(jnp.asarray(DATA["loss"]).astype(jnp.bfloat16), "float64")
    np.testing.assert_allclose(output["half"], half.mean(), rtol=1e-6)
    assert output["flag"] == 1 and output["two"] == 2
    assert np.isnan(output["empty"])


@slow_after_first("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_shows(value):
    def measure(state, batch):
        mean = jnp.where(state == 1, value, 1.0)
        return state + 1, {"mean": mean, "sum": metrics.Sum(mean)}

    output = make_trainer(None, measure).train(3)
    np.testing.assert_equal([output["mean"], output["sum"]], [value, value])


OUTSIDE = nnx.metrics.Average()


def keep_outside(state, batch):
    OUTSIDE.update(values=batch["loss"])
    return state, {"loss": OUTSIDE}


class Largest(nnx.metrics.Metric):
    def __init__(self):
        self.has_any = nnx.metrics.MetricState(jnp.zeros((), bool))

    def reset(self): ...

    def compute(self):
        return self.has_any[...]


def return_metric(make):
    def measure(state, batch):
        metric = make()
        if isinstance(metric, nnx.metrics.Welford):
            metric.update(values=batch["loss"])
        return state, {"part": {"own": metric}}

    return measure


@pytest.mark.parametrize(
    ("train", "error", "message"),
    [
        (keep_outside, ValueError, r"`loss`, a `Average` that was made outside of"),
        (return_metric(nnx.metrics.Welford), TypeError, "has a running mean, so"),
        (
            return_metric(lambda: nnx.MultiMetric(x=nnx.metrics.Welford())),
            TypeError,
            "a `MultiMetric`, but it has a running mean",
        ),
        (return_metric(Largest), TypeError, r"`part/own`, a `Largest`, but it holds"),
        (lambda s, b: (s, {"z": 1j * b["loss"]}), TypeError, "the dtype complex64"),
        (
            lambda s, b: (s, {"a": {"b": "x"}}),
            TypeError,
            r"""`metrics\["a/b"\]` of `step` is 'x' of type str""",
        ),
        (
            lambda s, b: (s, {"a" if b["loss"].shape[0] == 16 else "b": 1.0}),
            ValueError,
            "other metrics for batches of another shape, .*: a before, and b now",
        ),
    ],
)
def test_metrics_that_do_not_add_up_are_errors(train, error, message):
    with pytest.raises(error, match=message):
        make_trainer(None, train).train(4)


def test_metrics_may_change_between_loops():
    names = ["first"]

    def measure(state, batch):
        return state, {names[0]: batch["loss"]}

    even = {name: array[:48] for name, array in DATA.items()}
    trainer = make_trainer(None, measure, even)
    assert list(trainer.train(2)) == ["first"]
    names[0] = "second"
    assert list(trainer.train(2)) == ["second"]


REDUCE = functools.partial(armillary.all_reduce, "sum")


@slow_after_first(
    ("measure", "message"),
    [
        (lambda b: metrics.Sum(REDUCE(b["loss"].sum())), "would be 4 times too large"),
        (
            lambda b: metrics.Ratio(REDUCE(b["loss"].sum()), b["weight"].sum()),
            "only one of them was reduced",
        ),
        (
            lambda b: metrics.Ratio(b["loss"].sum(), REDUCE(b["weight"].sum())),
            "only one of them was reduced",
        ),
    ],
)
def test_sums_that_were_reduced_before_are_errors(measure, message):
    def train(state, batch):
        return state, {"metric": measure(batch)}

    with pytest.raises(DoubleReductionError, match=message):
        make_trainer(STRATEGIES["4 replicas"](), train).train(1)
    assert np.isfinite(make_trainer(None, train).train(1)["metric"])


@pytest.mark.slow
def test_a_ratio_of_two_reduced_sums_is_right():
    def train(state, batch):
        weighted = batch["loss"] * batch["weight"]
        sums = REDUCE((weighted.sum(), batch["weight"].sum()))
        return state, {"ratio": metrics.Ratio(*sums)}

    output = make_trainer(STRATEGIES["4 replicas"](), train).train(4)
    expected = expect(np.arange(NUM))["ratio"]
    assert output["ratio"] == pytest.approx(expected, rel=1e-6)
