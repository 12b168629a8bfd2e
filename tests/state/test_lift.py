"""Tests of lifting: a step's changes become outputs, and objects keep identity."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from armillary.state._lift import State
from tests.problems import Holder


def linear(seed: int = 0) -> nnx.Linear:
    return nnx.Linear(2, 2, rngs=nnx.Rngs(seed))


def test_variables_and_modules_keep_their_identity(run_lifted):
    model = linear()
    root = Holder(model=model, items=[model])
    kernel, before = model.kernel, np.asarray(model.kernel[...])

    def step():
        assert root.model is model and root.items[0] is model
        model.kernel[...] = model.kernel[...] + 1

    run_lifted(step, root)
    assert root.model is model and model.kernel is kernel
    np.testing.assert_array_equal(kernel[...], before + 1)


def test_a_module_may_be_differentiated_eagerly_after_a_step_that_did(run_lifted):
    model = linear()

    def loss_fn(model):
        return jnp.sum(model(jnp.ones((1, 2))))

    def step():
        grads = nnx.grad(loss_fn)(model)
        model.bias[...] = model.bias[...] - grads["bias"][...]

    run_lifted(step, model)
    grads = nnx.grad(loss_fn)(model)
    np.testing.assert_array_equal(grads["bias"][...], [1, 1])
    np.testing.assert_array_equal(model.bias[...], [-1, -1])
    model.extra = nnx.Param(jnp.ones(1))


@pytest.mark.parametrize("container", [{0: jnp.ones(2)}, [jnp.ones(2)]], ids=type)
def test_items_of_containers_in_a_closure_are_places(run_lifted, container):
    def step():
        container[0] = container[0] * 2

    run_lifted(step, step)
    np.testing.assert_array_equal(container[0], [2, 2])


@pytest.mark.slow
def test_an_optax_state_is_rebound(run_lifted):
    optimizer = optax.adam(0.1)
    params = {"w": jnp.ones(3)}
    root = Holder(params=params, opt_state=optimizer.init(params))

    def step():
        grads = jax.grad(lambda p: jnp.sum(p["w"] ** 2))(root.params)
        updates, root.opt_state = optimizer.update(grads, root.opt_state)
        root.params = optax.apply_updates(root.params, updates)

    run_lifted(step, root)
    expected = optax.apply_updates(
        params, optimizer.update({"w": 2 * params["w"]}, optimizer.init(params))[0]
    )
    np.testing.assert_allclose(root.params["w"], expected["w"], rtol=1e-6)
    assert int(root.opt_state[0].count) == 1
    np.testing.assert_array_equal(params["w"], [1, 1, 1])


@pytest.mark.slow
def test_an_equinox_module_is_rebound(run_lifted):
    eqx = pytest.importorskip("equinox", reason="equinox is not installed")

    root = Holder(net=eqx.nn.Linear(2, 1, key=jax.random.key(0)))

    def step():
        root.net = jax.tree.map(
            lambda leaf: leaf + 1 if eqx.is_array(leaf) else leaf, root.net
        )

    before = np.asarray(root.net.weight)
    state = run_lifted(step, root)
    assert sorted(state.paths) == ["net/bias", "net/weight"]
    np.testing.assert_array_equal(root.net.weight, before + 1)


def test_a_registered_dataclass_is_a_value(run_lifted):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Layer:
        weight: Any
        name: str = dataclasses.field(metadata={"static": True}, default="layer")

    root = Holder(layer=Layer(jnp.ones(2)))

    def step():
        root.layer = dataclasses.replace(root.layer, weight=root.layer.weight * 2)

    state = run_lifted(step, root)
    assert state.paths == ("layer/weight",)
    np.testing.assert_array_equal(root.layer.weight, [2, 2])
    assert root.layer.name == "layer"


def test_shared_parameters_stay_shared(run_lifted):
    first, second = linear(0), linear(1)
    second.kernel = first.kernel
    root = Holder(first=first, second=second)

    def step():
        first.kernel[...] = first.kernel[...] * 0 + 7
        second.bias[...] = second.kernel[...][0]

    run_lifted(step, root)
    assert first.kernel is second.kernel
    np.testing.assert_array_equal(second.bias[...], [7, 7])


def test_numpy_values_of_variables_become_arrays(run_lifted):
    variable = nnx.Variable(np.zeros(2, np.float32))

    def step():
        variable[...] = variable[...] + 1

    run_lifted(step, Holder(v=variable))
    np.testing.assert_array_equal(variable[...], [1, 1])


@pytest.mark.parametrize("initial", [jnp.asarray(0.0), jnp.asarray(2.0) * 1])
def test_weak_types_become_strong(run_lifted, initial):
    assert initial.weak_type
    root = Holder(scale=initial)

    def step():
        root.scale = root.scale + 1.0

    run_lifted(step, root)
    run_lifted(step, root)
    assert float(root.scale) == float(initial) + 2
    assert not root.scale.weak_type


def test_a_python_number_may_replace_an_array_of_its_dtype():
    root = Holder(v=nnx.Variable(jnp.asarray(1.0)))
    state = State([(root, "")])
    before = state.read()
    with state.swapped(before):
        root.v.set_value(2.0)
        (after,) = state.collect(before, "step")
    assert (after.dtype, after.weak_type) == (jnp.float32, False)


def test_a_container_of_variables_may_be_made_again(run_lifted):
    # `nnx.grad` makes new dictionaries for a module, with their keys in order.
    first, second = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(()))
    root = Holder(variables={"b": first, "a": second})

    def step():
        root.variables = dict(sorted(root.variables.items()))
        root.variables["a"][...] += 1

    run_lifted(step, root)
    assert float(second[...]) == 1 and root.variables["b"] is first


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deque", "UserDict", "mixed keys", "cycle"])
def test_arrays_in_containers_that_are_no_pytrees_are_state(run_lifted, kind):
    containers: dict[str, Any] = {
        "deque": collections.deque([jnp.zeros(())]),
        "UserDict": collections.UserDict({0: jnp.zeros(())}),
        "mixed keys": {0: jnp.zeros(()), "a": 1},
        "cycle": [jnp.zeros(())],
    }
    held = containers[kind]
    if kind == "cycle":
        held.append(held)
    root = Holder(held=held)

    def step():
        root.held[0] = root.held[0] + 1

    for _ in range(3):
        run_lifted(step, root)
    assert root.held is held and float(held[0]) == 3


def test_a_queue_of_arrays_may_move_on(run_lifted):
    root = Holder(recent=collections.deque([jnp.zeros(()), jnp.ones(())], maxlen=2))

    def step():
        root.recent.append(root.recent[0] + root.recent[1])

    for _ in range(4):
        run_lifted(step, root)
    assert list(map(float, root.recent)) == [3, 5]


def test_a_value_that_a_step_sets_every_time_is_set(run_lifted):
    root = Holder(model=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), w=jnp.ones(2), mode=None)
    root.model.eval()

    def step():
        root.model.train()
        root.mode = "train"
        root.w = root.model(root.w) + root.w

    run_lifted(step, root)
    assert root.mode == "train" and root.model.deterministic is False


def test_a_value_that_a_step_caches_is_kept(run_lifted):
    class Cached(Holder):
        @functools.cached_property
        def scale(self):
            return 2.0

    root = Holder(part=Cached(), w=jnp.ones(2))

    def step():
        root.w = root.w * root.part.scale

    run_lifted(step, root)
    assert vars(root.part) == {"scale": 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "transform",
    [
        optax.masked(
            optax.adam(0.1), lambda params: jax.tree.map(lambda a: a.ndim > 1, params)
        ),
        optax.sm3(0.1),
        optax.contrib.muon(0.1),
    ],
    ids=["masked", "sm3", "muon"],
)
def test_an_optimizer_whose_state_is_no_plain_tree_of_arrays_trains(
    run_lifted, transform
):
    def make() -> Any:
        model = linear()
        return Holder(m=model, o=nnx.Optimizer(model, transform, wrt=nnx.Param))

    def update(root: Any) -> None:
        gradients = nnx.grad(lambda model: jnp.sum(model(jnp.ones((1, 2))) ** 2))(
            root.m
        )
        root.o.update(root.m, gradients)

    root, eager = make(), make()
    for _ in range(3):
        run_lifted(lambda: update(root), root)
        update(eager)
    np.testing.assert_allclose(root.m.kernel[...], eager.m.kernel[...], rtol=1e-5)
