"""Tests of `loop_end`: numbers derived from the metrics of a loop."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary import metrics
from armillary.data import from_arrays
from armillary.errors import NonFiniteError
from tests.mistakes import mistakes
from tests.tiers import slow_after_first
from tests.trainer.metric_steps import DATA, NUM, STRATEGIES, expect


def step(state, batch):
    rows = jnp.mean(batch["loss"], axis=0)
    loss = metrics.WeightedMean(batch["loss"], batch["weight"])
    return {"w": state["w"] + armillary.all_reduce("mean", rows)}, {"loss": loss}


def add(values, state):
    return {"perplexity": np.exp(values["loss"]), "norm": jnp.linalg.norm(state["w"])}


def make_trainer(strategy=None, train=step, **arguments):
    data = {name: array[:48] for name, array in DATA.items()}
    return armillary.StepTrainer(
        train,
        {"w": jnp.zeros(6)},
        from_arrays(data, batch_size=16, repeat=True),
        strategy=strategy,
        **arguments,
    )


@slow_after_first("strategy", STRATEGIES)
def test_a_loop_and_an_evaluation_have_derived_numbers(strategy):
    trainer = make_trainer(STRATEGIES[strategy](), loop_end=add)
    w = np.zeros(6)
    for count in (3, 1):
        rows = np.arange(16 * count)
        output = trainer.train(count)
        loss = DATA["loss"].astype("float64")
        w = w + sum(loss[i * 16 : i * 16 + 16].mean(0) for i in range(count))
        mean = expect(rows)["weighted"]
        assert sorted(output) == ["loss", "norm", "perplexity"]
        np.testing.assert_allclose(output["loss"], mean, rtol=1e-6)
        np.testing.assert_allclose(output["perplexity"], np.exp(mean), rtol=1e-6)
        np.testing.assert_allclose(output["norm"], np.linalg.norm(w), rtol=1e-5)

    evaluator = armillary.StepEvaluator(
        lambda state, batch: step(state, batch)[1],
        trainer,
        from_arrays(DATA, batch_size=10),
        loop_end=add,
    )
    output = evaluator.evaluate(-1)
    mean = expect(np.arange(NUM))["weighted"]
    np.testing.assert_allclose(output["perplexity"], np.exp(mean), rtol=1e-6)
    np.testing.assert_allclose(output["norm"], np.linalg.norm(w), rtol=1e-5)


def test_loop_end_runs_once_for_each_loop_and_its_arrays_stay():
    seen = []

    def take_state(values, state):
        seen.append(values)
        return {"w": state["w"]}

    trainer = make_trainer(loop_end=take_state)
    controller = armillary.Controller(
        trainer=trainer, global_step=trainer.global_step, steps_per_loop=1
    )
    outputs = []
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=1,
        train_actions=[outputs.append],
    )
    controller.train(3)
    assert len(seen) == 3
    rows = DATA["loss"][:48].reshape(3, 16, 6).mean(1).cumsum(0)
    np.testing.assert_allclose([each["w"] for each in outputs], rows, rtol=1e-5)


def test_loop_end_adds_to_the_results_of_metrics():
    trainer = make_trainer(
        train=lambda state, batch: (state, {"values": batch["loss"]}),
        metrics=nnx.MultiMetric(loss=nnx.metrics.Average()),
        loop_end=lambda values, _: {"double": 2 * values["loss"]},
    )
    output = trainer.train(3)
    mean = DATA["loss"][:48].mean()
    np.testing.assert_allclose(
        [output["loss"], output["double"]], [mean, 2 * mean], rtol=1e-5
    )


def test_methods_that_override_the_end_of_a_loop_get_numbers_by_name():
    def with_perplexity(output):
        return {**output, "perplexity": np.exp(output["loss"])}

    class Trainer(armillary.StepTrainer):
        def train_loop_end(self):
            return with_perplexity(super().train_loop_end())

    class Evaluator(armillary.StepEvaluator):
        def eval_end(self, *state):
            return with_perplexity(super().eval_end(*state))

    data = {name: array[:48] for name, array in DATA.items()}
    source = from_arrays(data, batch_size=16, repeat=True)
    trainer = Trainer(step, {"w": jnp.zeros(6)}, source)
    evaluator = Evaluator(
        lambda state, batch: step(state, batch)[1],
        trainer,
        from_arrays(data, batch_size=16),
    )
    mean = expect(np.arange(48))["weighted"]
    for output in (trainer.train(3), evaluator.evaluate(-1)):
        np.testing.assert_allclose(output["loss"], mean, rtol=1e-6)
        np.testing.assert_allclose(output["perplexity"], np.exp(mean), rtol=1e-6)


def test_a_step_that_is_not_finite_is_the_error_and_not_what_follows():
    def refuse(values, state):
        raise RuntimeError("the loss is not a number")

    trainer = make_trainer(
        train=lambda state, batch: ({"w": state["w"] / 0}, {"loss": state["w"]}),
        loop_end=refuse,
        options=armillary.StandardTrainerOptions(on_non_finite="raise"),
    )
    with pytest.raises(NonFiniteError):
        trainer.train(1)


def make_evaluator(loop_end):
    return armillary.StepEvaluator(
        lambda state, batch: {"loss": batch["loss"]},
        make_trainer(),
        from_arrays(DATA, batch_size=16),
        loop_end=loop_end,
    )


@mistakes(
    {
        TypeError: {
            "`loop_end` is 3": lambda: make_trainer(loop_end=3),
            "`loop_end` is 'x'": lambda: make_evaluator("x"),
            r"`loop_end` is `<lambda>\(m\)`.*`metrics` and `state`.*fn\(metrics, s": (
                lambda: make_trainer(loop_end=lambda m: m)
            ),
            r"`loop_end` is `<lambda>\(m\)`, but": lambda: make_evaluator(lambda m: m),
            "`loop_end` returned float 3.0, but it must return a dictionary": (
                lambda: make_trainer(loop_end=lambda *_: 3.0).train(1)
            ),
            "`loop_end` returned NoneType": (
                lambda: make_evaluator(lambda *_: None).evaluate(1)
            ),
            "takes metrics by name, but `metrics` computed": lambda: make_trainer(
                train=lambda state, batch: (state, {"values": batch["loss"]}),
                metrics=nnx.metrics.Average(),
                loop_end=add,
            ).train(1),
            "`options` is 3": lambda: make_trainer(loop_end=add, options=3),
        },
        ValueError: {
            "`loop_end` returned 'loss', which the step returns": (
                lambda: make_evaluator(lambda values, _: values).evaluate(1)
            ),
            "`compile_hooks` of `options` is True, but `loop_end` runs in Python": (
                lambda: make_trainer(
                    loop_end=add,
                    options=armillary.StandardTrainerOptions(compile_hooks=True),
                )
            ),
        },
    }
)
def test_mistakes_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
