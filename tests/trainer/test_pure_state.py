"""Tests of the state and the results that a pure step may have."""

import re
from typing import Any

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.training.dynamic_scale import DynamicScale

import armillary
from armillary.data import from_arrays
from armillary.errors import StateStructureError
from tests.problems import read_leaves

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
DATA = {"x": X, "y": X @ np.array([1.0, -2.0, 3.0], "float32")}


class Counter(equinox.Module):
    """A layer that counts its calls, and keeps a mean and a flag next to the count."""

    index: equinox.nn.StateIndex

    def __init__(self):
        first = (jnp.zeros((), "int32"), jnp.zeros(()), jnp.array(True))
        self.index = equinox.nn.StateIndex(first)

    def __call__(self, x, state):
        count, mean, _ = state.get(self.index)
        mean = mean + jnp.mean(x)
        return x, state.set(self.index, (count + 1, mean, jnp.array(False)))


class Outer(equinox.Module):
    inner: Counter
    rest: Counter

    def __init__(self):
        self.inner = Counter()
        self.rest = Counter()

    def __call__(self, x, state):
        x, inner_state = self.inner(x, state.substate(self.inner))
        state = state.update(inner_state)
        return self.rest(x, state)


def make_data():
    return from_arrays(DATA, batch_size=16, repeat=True)


def make_trainer(step, state, num_replicas=1):
    strategy = armillary.MirroredStrategy(jax.devices()[:num_replicas])
    return armillary.StepTrainer(step, state, make_data(), strategy=strategy)


def call_model(state, batch):
    model, counts = state
    x, counts = model(batch["x"], counts)
    return (model, counts), {"mean": jnp.mean(x)}


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("kind", [Counter, Outer])
def test_a_step_may_use_a_state_of_equinox_up(kind, num_replicas):
    given = equinox.nn.make_with_state(kind)()
    trainer = make_trainer(call_model, given, num_replicas)
    trainer.train(2)
    trainer.train(1)
    model, counts = trainer.state
    index = model.index if kind is Counter else model.inner.index
    count, mean, flag = counts.get(index)
    assert count == 3
    np.testing.assert_allclose(mean, np.mean(X[:48]) * 3, rtol=1e-5)
    assert not flag
    assert type(counts) is equinox.nn.State
    # The state that was given is neither used up nor changed.
    assert given[1].get(index)[0] == 0


def test_an_evaluation_leaves_a_state_of_equinox_as_it_is():
    trainer = make_trainer(call_model, equinox.nn.make_with_state(Counter)(), 2)
    trainer.train(1)
    evaluator = armillary.StepEvaluator(
        lambda state, batch: call_model(state, batch)[1],
        trainer,
        from_arrays(DATA, batch_size=16),
    )
    for _ in range(2):
        output = evaluator.evaluate(-1)
        np.testing.assert_allclose(output["mean"], np.mean(X), rtol=1e-4)
    model, counts = trainer.state
    assert counts.get(model.index)[0] == 1


def test_equinox_still_refuses_a_value_of_another_shape():
    def step(state, batch):
        model, counts = state
        return (model, counts.set(model.index, jnp.zeros(batch["x"].shape[0]))), {}

    trainer = make_trainer(step, equinox.nn.make_with_state(Counter)(), 2)
    with pytest.raises(ValueError, match="Old and new values have different"):
        trainer.train(1)


def scaled_step(state, batch):
    params, scale = state

    def loss_fn(params):
        return jnp.mean((batch["x"] @ params - batch["y"]) ** 2)

    gradient_fn = scale.value_and_grad(loss_fn, axis_name="replica")
    scale, is_finite, loss, gradients = gradient_fn(params)
    new = jnp.where(is_finite, params - 0.1 * gradients, params)
    return (new, scale), {"loss": loss}


def test_dynamic_scale_trains_as_flax_makes_it():
    scale = DynamicScale(growth_interval=2)
    trainer = make_trainer(scaled_step, (jnp.zeros(3), scale), 4)
    trainer.train(3)
    state = (jnp.zeros(3), jax.tree.map(jnp.asarray, scale))
    batches = make_data()
    for _, batch in zip(range(3), batches, strict=False):
        rows = jax.tree.map(lambda array: array[None], batch)
        state, _ = jax.vmap(
            scaled_step, in_axes=(None, 0), out_axes=0, axis_name="replica"
        )(state, rows)
        state = jax.tree.map(lambda leaf: leaf[0], state)
    np.testing.assert_allclose(trainer.state[0], state[0], rtol=1e-5)
    assert trainer.state[1].scale == state[1].scale == 2**17
    assert trainer.state[1].fin_steps == state[1].fin_steps


@pytest.mark.slow
def test_a_run_with_a_dynamic_scale_continues_bit_for_bit(tmp_path):
    def run(directory, *stops):
        leaves = []
        for stop in stops:
            state = (jnp.zeros(3), DynamicScale(growth_interval=2))
            trainer = make_trainer(scaled_step, state, 2)
            checkpoint = armillary.Checkpoint(trainer=trainer)
            armillary.Controller(
                trainer=trainer,
                global_step=trainer.global_step,
                steps_per_loop=2,
                checkpoint_manager=armillary.CheckpointManager(checkpoint, directory),
            ).train(stop)
            leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trainer.state)]
        return leaves

    pairs = zip(run(tmp_path / "a", 5), run(tmp_path / "b", 2, 5), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)


def test_numbers_in_other_nodes_stay_constants():
    class Settings(struct.PyTreeNode):
        rates: Any
        rate: float = 0.5

    def step(state, batch):
        assert type(state.rates["rate"]) is float
        return state.replace(rate=state.rate * state.rates["rate"]), {}

    trainer = make_trainer(step, Settings(rates={"rate": 0.5}))
    trainer.train(2)
    assert trainer.state.rate == 0.5**3


def test_functional_nnx_trains_as_in_jax():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    optimizer = optax.adam(0.05)
    graphdef, params = nnx.split(model, nnx.Param)

    def step(state, batch):
        params, opt_state = state

        def loss_fn(params):
            model = nnx.merge(graphdef, params)
            return jnp.mean((model(batch["x"])[:, 0] - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_fn)(params)
        gradients = jax.lax.pmean(gradients, "replica")
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    state = (params, optimizer.init(params))
    trainers = [make_trainer(step, state, count) for count in (1, 4)]
    for trainer in trainers:
        trainer.train(3)
        assert isinstance(trainer.state[0]["kernel"], nnx.Param)
    by_hand = jax.jit(jax.vmap(step, in_axes=(None, 0), axis_name="replica"))
    for _, batch in zip(range(3), make_data(), strict=False):
        after, _ = by_hand(state, jax.tree.map(lambda rows: rows[None], batch))
        state = jax.tree.map(lambda leaf: leaf[0], after)
    wanted = state[0]["kernel"][...]
    for trainer in trainers:
        found = trainer.state[0]["kernel"][...]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert model.kernel[...] is params["kernel"][...]


class Tied(nnx.Module):
    """Two layers with one kernel."""

    def __init__(self):
        self.first = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.second = nnx.Linear(3, 3, rngs=nnx.Rngs(1))
        self.second.kernel = self.first.kernel

    def __call__(self, x):
        return self.second(jnp.tanh(self.first(x)))


def test_a_module_that_shares_a_variable_is_refused():
    with pytest.raises(ValueError, match="one variable of NNX") as caught:
        make_trainer(lambda state, batch: (state, {}), {"model": Tied()})

    message = str(caught.value)
    assert "`state['model'].first.kernel`" in message
    assert "`state['model'].second.kernel`" in message
    assert "nnx.split(model)" in message


def test_a_split_module_keeps_a_shared_variable():
    graph, state = nnx.split(Tied())

    def step(state, batch):
        def loss_fn(state):
            return (nnx.merge(graph, state)(batch["x"]) ** 2).mean()

        gradients = armillary.all_reduce("mean", jax.grad(loss_fn)(state))
        return jax.tree.map(lambda old, by: old - 0.1 * by, state, gradients), {}

    trainer = make_trainer(step, state)
    trainer.train(2)

    model = nnx.merge(graph, trainer.state)
    assert model.first.kernel is model.second.kernel
    assert not np.array_equal(model.first.kernel[...], Tied().first.kernel[...])


def test_a_state_may_hold_a_module_twice():
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    trainer = make_trainer(
        lambda state, batch: (state, {}), {"model": model, "average": model}
    )

    trainer.train(1)
    assert trainer.state["model"].kernel is not trainer.state["average"].kernel


def test_paths_of_variables_follow_their_places():
    state = nnx.State({"dense": {"kernel": nnx.Param(jnp.zeros(2))}})
    trainer = make_trainer(lambda state, batch: (state, {}), (state,))
    assert "state/0/dense/kernel" in read_leaves(trainer)


@struct.dataclass
class Params:
    kernel: Any
    name: str = struct.field(pytree_node=False, default="a")


@pytest.mark.parametrize(
    ("state", "change", "message"),
    [
        (
            {"net": nnx.State({"kernel": nnx.Param(jnp.zeros(2))})},
            lambda state: {"net": nnx.State({"kernel": jnp.zeros(2)})},
            "`state['net']['kernel']` was a `Param` and became float32 (2,)",
        ),
        (
            {"net": Params(jnp.zeros(2))},
            lambda state: {"net": state["net"].replace(name="b")},
            "`state['net']`, a `Params`, has different static fields now",
        ),
        (
            [jnp.zeros(2), None],
            lambda state: [state[0], jnp.zeros(2)],
            "`state[1]` was None and became float32 (2,)",
        ),
        (
            {"flag": jnp.array(True)},
            lambda state: armillary.all_reduce("mean", state),
            "`state['flag']` was bool () and became float32 (): cast it in the step "
            "(`.astype(bool)`)",
        ),
        (
            {"a": jnp.zeros(2), "b": jnp.zeros(2, "int32"), "c": ()},
            lambda state: {"a": jnp.zeros(3), "b": state["b"] * 0.5, "d": ()},
            "4 places differ:\n"
            "  `state['a']` was float32 (2,) and became float32 (3,)\n"
            "  `state['b']` was int32 (2,) and became float32 (2,): begin with that "
            "dtype (`.astype('float32')`), or cast it in the step\n",
        ),
    ],
)
def test_a_state_of_another_kind_is_refused_by_place(state, change, message):
    trainer = make_trainer(lambda state, batch: (change(state), {}), state)
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.train(1)


def grow(state, batch):
    def body(carry, _):
        return carry + batch["x"][:2, 0], None

    total, _ = jax.lax.scan(body, state["total"], None, 3)
    return {**state, "total": total}, {}


def test_a_leaf_that_grows_in_a_loop_is_named_with_its_cast():
    weak = jax.vmap(lambda _: 0)(jnp.arange(2))
    assert weak.weak_type
    trainer = make_trainer(grow, {"total": weak, "step": 0})
    message = "state['total']: int32 became float32, so give `state['total'].astype"
    with pytest.raises(StateStructureError, match=re.escape(message)):
        trainer.train(1)
    make_trainer(grow, {"total": weak.astype("float32"), "step": 0}).train(1)


def test_another_error_of_types_stays_as_it_is():
    trainer = make_trainer(grow, {"total": jnp.zeros(2, "int32"), "step": 0})
    with pytest.raises(TypeError, match="must have equal types"):
        trainer.train(1)
