"""Tests of `StepTrainer` and `StepEvaluator` with pure functions."""

import dataclasses
import functools
import re

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import armillary
from armillary.data import from_arrays
from armillary.errors import ReplicaMismatchError, StateStructureError
from tests.problems import train_with_stops
from tests.tiers import slow_after_first

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "float32")}
ADAM = optax.adam(0.05)


class Net(equinox.Module):
    """A module with leaves of all kinds: arrays, a function, a rate and a flag."""

    layer: equinox.nn.Linear
    dropout: equinox.nn.Dropout
    activation: object

    def __init__(self, key):
        self.layer = equinox.nn.Linear(3, 1, key=key)
        self.dropout, self.activation = equinox.nn.Dropout(0.0), jax.nn.tanh

    def __call__(self, x):
        return self.dropout(self.activation(self.layer(x)), key=jax.random.key(0))[0]


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenNumbers:
    values: list[float]


def loss_of(predictions, batch):
    return jnp.mean((predictions - batch["y"]) ** 2)


def plain_step(state, batch, reduce):
    def loss_fn(params):
        return loss_of(batch["x"] @ params["w"], batch)

    loss, gradients = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt_state = ADAM.update(reduce(gradients), state["opt_state"])
    key, _ = jax.random.split(state["key"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, {"loss": loss}


def equinox_step(state, batch, reduce):
    net, opt_state = state

    def loss_fn(net):
        return loss_of(jax.vmap(net)(batch["x"]), batch)

    loss, gradients = equinox.filter_value_and_grad(loss_fn)(net)
    updates, opt_state = ADAM.update(reduce(gradients), opt_state)
    return (equinox.apply_updates(net, updates), opt_state), {"loss": loss}


def linen_step(state, batch, reduce):
    def loss_fn(params):
        return loss_of(state.apply_fn({"params": params}, batch["x"])[:, 0], batch)

    loss, gradients = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=reduce(gradients)), {"loss": loss}


def make_plain():
    params = {"w": jnp.zeros(3)}
    key = jax.random.key(0)
    return {"params": params, "opt_state": ADAM.init(params), "key": key}


def make_equinox():
    net = Net(jax.random.key(1))
    return net, ADAM.init(equinox.filter(net, equinox.is_array))


def make_linen():
    model = linen.Dense(1)
    params = model.init(jax.random.key(1), X[:1])["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=ADAM)


KINDS = {
    "plain": (plain_step, make_plain),
    "equinox": (equinox_step, make_equinox),
    "linen": (linen_step, make_linen),
}
MEAN = functools.partial(armillary.all_reduce, "mean")


def make_trainer(kind, num_replicas=1, **options):
    step, make_state = KINDS[kind]
    return armillary.StepTrainer(
        functools.partial(step, reduce=MEAN),
        make_state(),
        from_arrays(DATA, batch_size=8, shuffle_seed=3, repeat=True),
        strategy=armillary.MirroredStrategy(jax.devices()[:num_replicas]),
        **options,
    )


def leaves_of(state):
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    is_key = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in arrays]
    return [
        np.asarray(jax.random.key_data(leaf) if key else leaf)
        for leaf, key in zip(arrays, is_key, strict=True)
    ]


@slow_after_first("kind", KINDS)
def test_it_equals_a_loop_by_hand_bit_for_bit(kind):
    step, make_state = KINDS[kind]
    trainer = make_trainer(kind)
    outputs = [trainer.train(num_steps) for num_steps in (5, 1, 7)]

    state, losses = make_state(), []
    if kind == "linen":  # Its number of steps is none of the constants of Equinox.
        state = state.replace(step=jnp.asarray(0))
    by_hand = equinox.filter_jit(functools.partial(step, reduce=lambda tree: tree))
    batches = from_arrays(DATA, batch_size=8, shuffle_seed=3, repeat=True)
    for _, batch in zip(range(13), batches, strict=False):
        state, metrics = by_hand(state, batch)
        losses.append(metrics["loss"])

    assert int(trainer.global_step[...]) == 13
    pairs = zip(leaves_of(trainer.state), leaves_of(state), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    means = [np.mean(losses[:5]), losses[5], np.mean(losses[6:])]
    np.testing.assert_allclose([each["loss"] for each in outputs], means, rtol=1e-6)
    replicated = make_trainer(kind, 4)
    again = [replicated.train(num_steps) for num_steps in (5, 1, 7)]
    np.testing.assert_allclose([each["loss"] for each in again], means, rtol=1e-5)
    for a, b in zip(leaves_of(replicated.state), leaves_of(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@slow_after_first("kind", KINDS)
def test_a_run_that_is_stopped_continues_bit_for_bit(kind, tmp_path):
    def run(directory, *stops):
        trainer = train_with_stops(lambda: make_trainer(kind, 2), directory, stops)
        return leaves_of(trainer.state)

    pairs = zip(run(tmp_path / "a", 11), run(tmp_path / "b", 3, 6, 11), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_arrays_that_were_given_stay():
    state = make_plain()
    trainer = armillary.StepTrainer(
        functools.partial(plain_step, reduce=MEAN),
        {**state, "params": {"w": np.zeros(3, "float32")}},
        from_arrays(DATA, batch_size=8),
    )
    trainer.train(2)
    assert not state["opt_state"][0].mu["w"].is_deleted()
    assert trainer.data_exhausted is False
    assert int(trainer.state["opt_state"][0].count) == 2


@slow_after_first("num_replicas", [1, 4])
def test_each_example_counts_once_in_an_evaluation(num_replicas):
    trainer = make_trainer("plain", num_replicas)

    def evaluate(state, batch):
        errors = batch["x"] @ state["params"]["w"] - batch["y"]
        return {"error": {"of each": errors**2, "of batch": jnp.mean(errors**2)}}

    data = from_arrays(DATA, batch_size=7)
    evaluator = armillary.StepEvaluator(evaluate, trainer, data)
    for _ in range(2):
        w = np.asarray(trainer.state["params"]["w"])
        expected = np.mean((DATA["x"] @ w - DATA["y"]) ** 2)
        error = evaluator.evaluate(-1)["error"]
        np.testing.assert_allclose([*error.values()], [expected] * 2, rtol=1e-5)
        trainer.train(10)


def test_metrics_of_flax_take_what_a_step_returns():
    def evaluate(state, batch):
        logits = jnp.stack([batch["x"] @ state["params"]["w"], batch["y"]], axis=-1)
        return {"logits": logits, "labels": (batch["y"] > 0).astype(jnp.int32)}

    evaluator = armillary.StepEvaluator(
        evaluate,
        make_trainer("plain"),
        from_arrays(DATA, batch_size=7),
        metrics=nnx.MultiMetric(accuracy=nnx.metrics.Accuracy()),
    )
    # With weights of zero, the second logit wins where it is above zero.
    assert evaluator.evaluate(-1) == {"accuracy": 1.0}


def test_several_loops_are_one_program():
    fused, single = make_trainer("plain"), make_trainer("plain")
    single.train(5)  # the first start comes before there is a program to fuse
    fused.train(5)
    started = fused.start(5, 3)
    assert started.num_steps == 15
    assert started.fetch() == [single.train(5) for _ in range(3)]


def test_a_value_in_a_tuple_of_a_step_may_change():
    settings = ({"rate": 1.0}, FrozenNumbers([2.0]))

    def step(state, batch):
        rate = settings[0]["rate"] * settings[1].values[0]
        return state + rate + 0 * jnp.mean(batch["y"]), {}

    trainer = armillary.StepTrainer(
        step, jnp.zeros(()), from_arrays(DATA, batch_size=8)
    )
    trainer.train(2)
    settings[0]["rate"] = 10.0
    trainer.train(1)
    settings[1].values[0] = 100.0
    trainer.train(1)
    assert trainer.state == 2 * 2 + 20 + 1000


def test_an_update_without_a_reduction_is_refused():
    trainer = armillary.StepTrainer(
        functools.partial(plain_step, reduce=lambda tree: tree),
        make_plain(),
        from_arrays(DATA, batch_size=8),
        strategy=armillary.MirroredStrategy(jax.devices()[:2]),
    )
    with pytest.raises(ReplicaMismatchError, match="all_reduce"):
        trainer.train(1)


def drop(state, batch):
    return {"w": state["w"]}, {}


def widen(state, batch):
    return {**state, "w": jnp.zeros(4)}, {}


def count(state, batch):
    return {**state, "rate": state["rate"] * 0.9}, {}


@pytest.mark.parametrize(
    ("step", "error", "message"),
    [
        (drop, StateStructureError, "`state['rate']` is gone"),
        (widen, StateStructureError, "`state['w']` was float32 (3,) and became"),
        (count, StateStructureError, "`state['rate']`, which is not an array but 0.5"),
        (lambda s, _: ({}, s), StateStructureError, "Are the two swapped? Write "),
        (lambda s, _: ({}, s["w"]), StateStructureError, "`state['w']` is gone"),
        (lambda state, batch: state, TypeError, "the state alone, without metrics"),
        (lambda state, batch: None, TypeError, "nothing, but it must return a pair"),
        (lambda state, batch: (state, 0, 1), TypeError, "returned 3 values, but it"),
        (lambda state, batch: (state, 3.0), TypeError, "must be a dictionary"),
    ],
)
def test_wrong_results_of_a_step_are_errors(step, error, message):
    state = {"w": jnp.zeros(3), "rate": 0.5}
    trainer = armillary.StepTrainer(step, state, from_arrays(DATA, batch_size=8))
    with pytest.raises(error, match=re.escape(message)):
        trainer.train(1)


def test_a_state_of_two_parts_without_metrics_is_not_taken_for_a_pair():
    state = {"w": jnp.zeros(3)}, jnp.zeros(2)
    data = from_arrays(DATA, batch_size=8)
    alone = armillary.StepTrainer(lambda state, batch: state, state, data)
    with pytest.raises(TypeError, match=r"the state alone, .* with `\{\}` if"):
        alone.train(1)

    swapped = armillary.StepTrainer(lambda state, _: ({"n": 1}, state), state, data)
    with pytest.raises(StateStructureError, match=r"the state second, .* swapped"):
        swapped.train(1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"step": 3}, TypeError, "`step` is 3"),
        ({"state": {"rate": 0.1}}, ValueError, "which has no array"),
        ({"metrics": {"loss": 0}}, TypeError, "`metrics` is .* it must have `reset`"),
    ],
)
def test_bad_arguments(arguments, error, message):
    data = from_arrays(DATA, batch_size=8)
    given = {"step": drop, "state": make_plain(), "train_dataset": data, **arguments}
    with pytest.raises(error, match=message):
        armillary.StepTrainer(**given)


def test_an_error_of_a_step_speaks_of_the_step():
    def step(state, batch):
        return state, {"sum": float(batch["x"].sum())}

    trainer = armillary.StepTrainer(step, {"w": jnp.zeros(1)}, [{"x": np.ones(4)}])
    with pytest.raises(jax.errors.ConcretizationTypeError) as caught:
        trainer.train(1)
    assert "`step` uses the value of an array" in "".join(caught.value.__notes__)


def test_several_datasets_are_saved_with_the_trainer(tmp_path, caplog):
    def step(state, batches):
        return {"sum": state["sum"] + batches[0]["x"].sum() + batches[1]["x"].sum()}, {}

    def run(stop):
        data = [from_arrays(DATA, batch_size=size, repeat=True) for size in (8, 4)]
        trainer = armillary.StepTrainer(step, {"sum": jnp.zeros(())}, data)
        checkpoint = armillary.Checkpoint(trainer=trainer)
        armillary.Controller(
            trainer=trainer,
            global_step=trainer.global_step,
            steps_per_loop=1,
            checkpoint_manager=armillary.CheckpointManager(checkpoint, tmp_path),
        ).train(stop)
        return float(trainer.state["sum"])

    run(2)
    rows = [np.resize(X, (96, 3))[: 5 * size] for size in (8, 4)]
    assert run(5) == pytest.approx(sum(each.sum() for each in rows), rel=1e-4)
    assert "position of the training data" not in caplog.text
