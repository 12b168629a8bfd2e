"""Tests of the kinds that a user gives to leaves of a pure step."""

import functools
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import VariableAggregation
from armillary.data import from_arrays
from armillary.errors import ReplicaMismatchError
from tests.tiers import slow_after_first
from tests.trainer.pure_programs import (
    DATA,
    NUM_REPLICAS,
    SGD,
    NnxNet,
    Program,
    X,
    arrays_of,
    loss_of,
    make_data,
    make_keras,
    make_linen,
    make_trainer,
    mean_over_replicas,
    train_by_hand,
)


class Total(NamedTuple):
    value: jax.Array


def add_rows(state, batch):
    """Adds the sum of the rows to every number of a state."""
    return jax.tree.map(lambda leaf: leaf + jnp.sum(batch["x"]), state), {}


SUM_OF_BATCH = float(np.sum(X[:16]))


SUM_OF_FIRST_SHARE = float(np.sum(X[:4]))


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"total": "sum"}, 1 + SUM_OF_BATCH),
        ({"^state/total/value$": VariableAggregation.SUM}, 1 + SUM_OF_BATCH),
        ({Total: "sum", "state": "mean"}, 1 + SUM_OF_BATCH),
        ({"total": "mean", Total: "sum"}, 1 + SUM_OF_BATCH / 4),
        ({"value": "only_first_replica"}, 1 + SUM_OF_FIRST_SHARE),
    ],
)
def test_a_leaf_has_the_kind_that_it_is_given(kinds, expected):
    trainer = armillary.StepTrainer(
        add_rows,
        {"total": Total(jnp.ones(()))},
        from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:NUM_REPLICAS]),
        kinds=kinds,
    )
    trainer.train(1)
    np.testing.assert_allclose(trainer.state["total"].value, expected, rtol=1e-5)


def test_a_given_kind_comes_before_the_kind_of_the_library():
    trainer = armillary.StepTrainer(
        add_rows,
        {"batch_stats": {"mean": jnp.zeros(())}},
        from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:2]),
        kinds={"batch_stats": "none"},
    )
    with pytest.raises(ReplicaMismatchError, match="batch statistic, mirrored"):
        trainer.train(1)


def test_flags_and_keys_keep_their_kind_among_numbers_that_are_averaged():
    def step(state, batch):
        key, _ = jax.random.split(state["key"])
        mean = state["mean"] + jnp.mean(batch["x"])
        return {"key": key, "is_first": jnp.array(False), "mean": mean}, {}

    state = {"key": jax.random.key(0), "is_first": True, "mean": jnp.zeros(())}
    state["is_first"] = jnp.array(True)
    trainer = armillary.StepTrainer(
        step,
        state,
        from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:2]),
        kinds={"state": "mean"},
    )
    trainer.train(1)
    assert not trainer.state["is_first"]
    key, _ = jax.random.split(jax.random.key(0))
    assert trainer.state["key"] == key
    np.testing.assert_allclose(trainer.state["mean"], np.mean(X[:16]), rtol=1e-5)


def test_variables_of_nnx_keep_their_own_aggregation():
    seen = nnx.Variable(jnp.zeros(()), aggregation=VariableAggregation.SUM)
    last = nnx.Variable(
        jnp.zeros(()), aggregation=VariableAggregation.ONLY_FIRST_REPLICA
    )
    trainer = armillary.StepTrainer(
        add_rows,
        nnx.State({"seen": seen, "last": last}),
        from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:NUM_REPLICAS]),
    )
    trainer.train(1)
    seen_value = trainer.state["seen"][...]
    last_value = trainer.state["last"][...]
    np.testing.assert_allclose(seen_value, SUM_OF_BATCH, rtol=1e-5)
    np.testing.assert_allclose(last_value, SUM_OF_FIRST_SHARE, rtol=1e-5)


def test_metrics_of_nnx_add_up_and_welford_is_refused():
    def train(metric):
        graphdef, state = nnx.split(metric)

        def step(state, batch):
            metric = nnx.merge(graphdef, state)
            metric.update(values=batch["y"])
            return nnx.split(metric)[1], {}

        trainer = armillary.StepTrainer(
            step,
            state,
            from_arrays(DATA, batch_size=16),
            strategy=armillary.MirroredStrategy(jax.devices()[:NUM_REPLICAS]),
        )
        trainer.train(2)
        return nnx.merge(graphdef, trainer.state).compute()

    expected = np.mean(DATA["y"][:32])
    np.testing.assert_allclose(train(nnx.metrics.Average()), expected, rtol=1e-4)
    with pytest.raises(ReplicaMismatchError, match=r"state\['mean'\]"):
        train(nnx.metrics.Welford())


def test_replicas_draw_their_own_numbers_from_an_nnx_state():
    graphdef, state = nnx.split(nnx.Rngs(0))

    def step(state, batch):
        total, rngs_state = state
        rngs = nnx.merge(graphdef, rngs_state)
        drawn = jax.random.normal(rngs(), batch["x"].shape[:1])
        total = armillary.all_reduce("sum", jnp.sum(drawn)) + total
        return (total, nnx.split(rngs)[1]), {}

    def train(num_replicas):
        trainer = armillary.StepTrainer(
            step,
            (jnp.zeros(()), state),
            from_arrays(DATA, batch_size=16),
            strategy=armillary.MirroredStrategy(jax.devices()[:num_replicas]),
        )
        trainer.train(2)
        return trainer.state

    total, rngs_state = train(2)
    rngs = nnx.merge(graphdef, rngs_state)
    assert rngs.default.count[...] == 2
    assert rngs.default.key[...] == jax.random.key(0)
    first_share = sum(
        jnp.sum(jax.random.normal(key, (8,)))
        for key in map(functools.partial(jax.random.fold_in, jax.random.key(0)), (0, 1))
    )
    assert not np.isclose(total, 2 * first_share)


class NoisyNet(nnx.Module):
    def __init__(self, rngs):
        self.net = NnxNet(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.net(self.dropout(x))


class NnxTrainer(armillary.StandardTrainer):
    """Trains a model, an optimizer that draws noise, and a metric in place."""

    def __init__(self, num_replicas):
        super().__init__(make_data())
        self.strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
        self.objects = make_objects()

    def train_step(self, iterator):
        update = functools.partial(update_in_place, self.objects)
        self.strategy.run(update, args=(next(iterator),))


def make_objects():
    model = NoisyNet(nnx.Rngs(1))
    noise = optax.add_noise(0.1, 0.5, key=jax.random.key(2))
    optimizer = nnx.Optimizer(model, optax.chain(noise, SGD), wrt=nnx.Param)
    return model, optimizer, nnx.metrics.Average("loss")


def update_in_place(objects, batch):
    model, optimizer, metric = objects
    loss, gradients = nnx.value_and_grad(lambda m: loss_of(m(batch["x"]), batch))(model)
    optimizer.update(model, mean_over_replicas(gradients))
    metric.update(loss=loss)


@slow_after_first("num_replicas", [2, 1, 4])
def test_functional_nnx_equals_the_modules_in_place_bit_for_bit(num_replicas):
    def step(state, batch):
        objects = nnx.merge(*state)
        update_in_place(objects, batch)
        return nnx.split(objects), {}

    program = Program(step, nnx.split(make_objects()), None)
    trainer = make_trainer(program, num_replicas)
    in_place = NnxTrainer(num_replicas)
    for each in (trainer, in_place):
        each.train(3)
        each.train(1)
    found = jax.tree.leaves(trainer.state)
    wanted = jax.tree.leaves(nnx.split(in_place.objects))
    pairs = list(zip(found, wanted, strict=True))
    assert len(pairs) > 20
    for a, b in pairs:
        assert jnp.array_equal(a, b)


def test_a_module_may_be_the_state_and_stays_the_same_object():
    def step(model, batch):
        def loss_fn(model):
            return loss_of(model(batch["x"]), batch)

        loss, gradients = jax.value_and_grad(loss_fn)(model)
        gradients = mean_over_replicas(gradients)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, model, gradients)
        return new, {"loss": loss}

    model = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
    trainer = make_trainer(Program(step, model, None), 2)
    held = trainer.state
    trainer.train(3)
    assert trainer.state is held
    expected = train_by_hand(Program(step, model, None), 1, 3)
    np.testing.assert_allclose(held.kernel[...], expected.kernel[...], rtol=1e-5)


def forget_to_reduce(state, batch):
    return jax.tree.map(lambda leaf: leaf + jnp.mean(batch["x"]), state), {}


def test_an_unreduced_leaf_is_named_with_the_kind_to_give():
    class Layer(NamedTuple):
        kernel: jax.Array

    state = {"params": {"dense": Layer(jnp.zeros(3))}, "rest": [jnp.zeros(())] * 2}

    def train(**options):
        armillary.StepTrainer(
            forget_to_reduce,
            state,
            from_arrays(DATA, batch_size=16),
            strategy=armillary.MirroredStrategy(jax.devices()[:2]),
            **options,
        ).train(1)

    with pytest.raises(ReplicaMismatchError) as caught:
        train()
    message = str(caught.value)
    assert "state['params']['dense'].kernel (plain, mirrored)" in message
    assert "state['rest'][1]" in message
    assert "aggregation=" not in message
    kinds = re.search(r"StepTrainer\(\.\.\., kinds=(\{.*?\})\)", message)
    train(kinds=eval(kinds.group(1)))  # The text can be pasted.


@pytest.mark.usefixtures("keras")
def test_a_leaf_of_keras_has_the_name_of_its_variable():
    program = make_keras()

    def step(state, batch):
        (params, others, momentum), _ = program.step(state, batch)
        momentum[2] = momentum[2] + jnp.sum(batch["x"])
        return (params, others, momentum), {}

    with pytest.raises(ReplicaMismatchError, match=r"state\[2\]\[2\] \('.*/.*' of Ker"):
        make_trainer(program._replace(step=step), 2).train(1)


def test_a_raw_key_is_answered_with_its_kind():
    def step(state, batch):
        noise = jax.random.normal(state[1], batch["x"].shape[:1])
        total = state[0] + jnp.mean(noise * batch["y"])
        return (mean_over_replicas(total), state[1]), {}

    def train(**options):
        armillary.StepTrainer(
            step,
            (jnp.zeros(()), jax.random.PRNGKey(0)),
            from_arrays(DATA, batch_size=16),
            strategy=armillary.MirroredStrategy(jax.devices()[:2]),
            **options,
        ).train(1)

    with pytest.raises(ValueError, match=r"`state\[1\]` holds a key") as caught:
        train()
    assert 'StepTrainer(..., kinds={r"state/1$": "none"})' in str(caught.value)
    assert "nnx.Variable" not in str(caught.value)
    train(kinds={r"state/1$": "none"})


@pytest.mark.parametrize(
    ("kinds", "error", "message"),
    [
        (["batch_stats"], TypeError, "`kinds` is ['batch_stats'] of type list"),
        ({3: "mean"}, TypeError, "`kinds` has the key 3 of type int"),
        ({"(": "mean"}, ValueError, "`kinds` has '(', which is not a regular"),
        ({"stats": "means"}, ValueError, "Write `kinds={'stats': \"mean\"}`"),
        ({"stats": 3}, ValueError, '"none", "sum", "mean", "only_first_replica"'),
        ({"bach_stats": "mean"}, ValueError, "paths:\n  state/batch_stats/norm\n"),
        ({nnx.State: "mean"}, ValueError, "`State`, found in none of these types"),
        ({"flag": "sum"}, ValueError, "holds bool, which has no sum"),
    ],
)
def test_bad_kinds(kinds, error, message):
    state = {
        "batch_stats": {"norm": jnp.zeros(3)},
        "flag": jnp.array(True),
        "params": {"kernel": jnp.zeros(3)},
    }
    with pytest.raises(error, match=re.escape(message)):
        armillary.StepTrainer(add_rows, state, make_data(), kinds=kinds)


def test_statistics_in_a_standard_trainer_are_averaged_too():
    program = make_linen()

    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_data())
            self.strategy = armillary.MirroredStrategy(jax.devices()[:NUM_REPLICAS])
            self.variables = program.state

        def train_step(self, iterator):
            self.strategy.run(self.update, args=(next(iterator),))

        def update(self, batch):
            self.variables, _ = program.step(self.variables, batch)

    trainer = Trainer()
    trainer.train(3)
    expected = train_by_hand(program, NUM_REPLICAS, 3)
    pairs = zip(arrays_of(trainer.variables), arrays_of(expected), strict=True)
    for actual, wanted in pairs:
        np.testing.assert_allclose(actual, wanted, rtol=2e-4, atol=1e-5)
