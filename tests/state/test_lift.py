import argparse
import collections
import contextlib
import copy
import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.errors import StateStructureError
from armillary.state._lift import State, as_array, strong


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


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


def test_a_variable_may_be_used_and_written_eagerly_after_a_step(run_lifted):
    model = linear()

    def step():
        model.bias[...] = model.bias[...] + 1

    run_lifted(step, model)
    model.bias[...] = model.bias[...] + 1
    model.extra = nnx.Param(jnp.ones(1))
    np.testing.assert_array_equal(model.bias[...], [2, 2])


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


def test_plain_attributes_are_rebound(run_lifted):
    root = Holder(count=jnp.asarray(0.0))

    def step():
        root.count = root.count + 1

    run_lifted(step, root)
    run_lifted(step, root)
    assert float(root.count) == 2


def test_frozen_dataclasses_keep_their_identity(run_lifted):
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        model: Any
        weight: Any

    frozen = Frozen(linear(), jnp.ones(2))
    root = Holder(frozen=frozen)

    def step():
        root.frozen.model.bias[...] = root.frozen.weight * 3

    run_lifted(step, root)
    assert root.frozen is frozen
    np.testing.assert_array_equal(frozen.model.bias[...], [3, 3])


@pytest.mark.parametrize("where", ["closure dict", "closure list", "nested dict"])
def test_items_of_containers_are_places(run_lifted, where):
    if where == "nested dict":
        root = Holder(params={"a": {"w": jnp.ones(2)}})

        def step():
            root.params["a"]["w"] = root.params["a"]["w"] * 2

        run_lifted(step, root)
        np.testing.assert_array_equal(root.params["a"]["w"], [2, 2])
        return
    container: Any = {0: jnp.ones(2)} if where == "closure dict" else [jnp.ones(2)]
    same = container

    def step():
        container[0] = container[0] * 2

    run_lifted(step, step)
    assert container is same
    np.testing.assert_array_equal(container[0], [2, 2])


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


def test_everything_is_restored_when_a_step_raises(run_lifted):
    model = linear()
    root = Holder(model=model, params={"w": jnp.ones(2)}, count=jnp.asarray(1))
    before = (model.kernel[...], root.params, root.count)

    def step():
        model.kernel[...] = model.kernel[...] * 0
        root.params = {"w": root.params["w"] * 0}
        root.count = root.count + 1
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        run_lifted(step, root)
    assert model.kernel[...] is before[0]
    assert root.params is before[1]
    assert root.count is before[2]
    model.kernel[...] = model.kernel[...] + 1  # its trace state is the outer one again


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


def test_two_places_with_one_array_are_two_slots(run_lifted):
    weight = jnp.ones(2)
    root = Holder(params=weight, average=weight)

    def step():
        root.params = root.params + 1

    run_lifted(step, root)
    np.testing.assert_array_equal(root.params, [2, 2])
    np.testing.assert_array_equal(root.average, [1, 1])


def test_key_arrays_are_carried(run_lifted):
    root = Holder(key=jax.random.key(0))

    def step():
        root.key, _ = jax.random.split(root.key)

    run_lifted(step, root)
    expected = jax.random.split(jax.random.key(0))[0]
    assert jnp.all(jax.random.key_data(root.key) == jax.random.key_data(expected))


def test_numpy_values_of_variables_become_arrays(run_lifted):
    variable = nnx.Variable(np.zeros(2, np.float32))

    def step():
        variable[...] = variable[...] + 1

    run_lifted(step, Holder(v=variable))
    np.testing.assert_array_equal(variable[...], [1, 1])


def test_places_are_equal_for_the_same_state():
    root = Holder(model=linear(), w=jnp.ones(2))
    assert State([(root, "")]).places == State([(root, "")]).places
    other = Holder(model=root.model, w=root.w)
    assert State([(root, "")]).places != State([(other, "")]).places


def test_a_float_times_an_integer_is_an_error(run_lifted):
    root = Holder(step=jnp.asarray(0))

    def step():
        root.step = root.step * 1.0

    with pytest.raises(StateStructureError) as caught:
        run_lifted(step, root, "trainer")
    message = str(caught.value)
    assert message.startswith("`step` changed 1 of 1 slots, and a compiled loop needs")
    assert "  trainer/step: int32 () became float32 ()\n" in message
    assert "cast before assigning (`value.astype(jnp.float32)`)" in message
    assert int(root.step) == 0


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


def test_all_changes_are_reported_at_once(run_lifted):
    root = Holder(
        model=linear(),
        params={"w": jnp.ones(2)},
        items=(jnp.ones(1), "tag"),
        moved=jnp.ones((2, 3)),
        lost=jnp.ones(1),
    )

    def step():
        root.model.kernel.set_value(root.model.kernel[...].astype(jnp.bfloat16))
        root.params = {"w": root.params["w"], "b": jnp.ones(1)}
        root.items = (root.items[0], "other")
        root.moved = root.moved.T
        root.lost = None
        root.fresh = jnp.zeros(())

    with pytest.raises(StateStructureError) as caught:
        run_lifted(step, root)
    message = str(caught.value)
    assert message.startswith("`step` changed 6 of 7 slots")
    assert "  model/kernel: float32 (2, 2) became bfloat16 (2, 2)\n" in message
    assert "  params: tree structure PyTreeDef({'w': *}) became" in message
    assert "  items/1: str 'tag' became str 'other'\n" in message
    assert "  moved: float32 (2, 3) became float32 (3, 2)\n" in message
    assert "  lost: tree structure" in message
    assert "  fresh: made by the step, so nothing carries it to the next one" in message
    assert "and cast before assigning (`value.astype(jnp.float32)`)" in message


def test_an_array_that_becomes_a_number_is_reported(run_lifted):
    root = Holder(loss=jnp.ones(()))

    def step():
        root.loss = 0.0

    with pytest.raises(StateStructureError, match=r"loss: an array became float 0.0"):
        run_lifted(step, root)


def test_a_variable_that_changes_its_tree_is_reported(run_lifted):
    variable = nnx.Variable({"a": jnp.ones(1)})

    def step():
        variable.set_value({"a": jnp.ones(1), "b": jnp.ones(1)})

    with pytest.raises(StateStructureError, match=r"v: tree structure"):
        run_lifted(step, Holder(v=variable))


def test_a_new_variable_is_reported(run_lifted):
    model = linear()

    def step():
        model.cache = nnx.Variable(jnp.zeros(2))

    with pytest.raises(StateStructureError, match="model/cache: made by the step"):
        run_lifted(step, Holder(model=model))


def test_a_changed_python_number_is_reported(run_lifted):
    root = Holder(model=Holder(count=3), w=jnp.ones(1))

    def step():
        root.model.count += 1

    with pytest.raises(
        StateStructureError,
        match="model/count: int 3 became 4, once, while the step was traced",
    ):
        run_lifted(step, root)


def test_an_unchanged_python_number_is_fine(run_lifted):
    root = Holder(rate=0.5, w=jnp.ones(1))

    def step():
        root.w = root.w * root.rate

    run_lifted(step, root)
    assert float(root.w[0]) == 0.5


def test_strong_keeps_what_is_strong():
    array = jnp.ones(2, jnp.float32)
    assert strong(array) is array
    assert as_array(array) is array
    assert not strong(2.0).weak_type
    key = jax.random.key(0)
    assert strong(key) is key


def test_a_place_made_by_a_failed_step_is_removed(run_lifted):
    root = Holder(weight=jnp.ones(2))

    def step():
        root.fresh = root.weight * 2

    for _ in range(2):
        with pytest.raises(StateStructureError, match="fresh: made by the step"):
            run_lifted(step, root)
        assert not hasattr(root, "fresh")


@pytest.mark.parametrize("before", [None, [], 0.0, np.zeros(3)])
def test_a_place_that_held_no_array_says_what_it_held_and_holds_it_again(
    run_lifted, before
):
    root = Holder(history=before, weight=jnp.ones(3))

    def step():
        root.history = root.weight * 2

    message = (
        "`step` changed 1 of 2 slots, and a compiled loop needs the same places with "
        "the same shape and dtype after every step:\n"
        f"  history: held `{before!r}` before the step, and float32 (3,) after it\n"
        "Make every place in the constructor with its final shape and dtype"
    )
    for _ in range(2):
        with pytest.raises(StateStructureError, match=re.escape(message)):
            run_lifted(step, root)
        assert root.history is before


def test_a_place_that_becomes_a_nest_of_arrays_says_what_it_held(run_lifted):
    root = Holder(history=None, weight=jnp.ones(3))

    def step():
        root.history = {"a": root.weight, "b": [root.weight]}

    message = "history: held `None` before the step, and a nest of arrays after it"
    with pytest.raises(StateStructureError, match=message):
        run_lifted(step, root)


@pytest.mark.parametrize(
    ("before", "change", "kind"),
    [
        ([], lambda history, array: history.append(array), "list"),
        ({}, lambda history, array: history.update(a=array), "dict"),
    ],
)
def test_an_array_put_into_a_container_is_reported(run_lifted, before, change, kind):
    root = Holder(history=before, weight=jnp.ones(3))

    def step():
        change(root.history, root.weight * 2)

    message = f"history: the step put an array into this {kind}, which held none before"
    with pytest.raises(StateStructureError, match=message):
        run_lifted(step, root)


def test_a_step_that_fails_leaves_nothing_behind_in_any_container(run_lifted):
    root = Holder(
        last=None,
        queue=collections.deque([1]),
        space=argparse.Namespace(items=[{"a": 1}]),
        user=collections.UserDict(a=1),
        names={"a"},
        table=np.zeros(2),
        weight=jnp.ones(2),
        model=linear(),
    )

    def step():
        root.last = root.weight.sum()
        root.queue.append(root.weight)
        root.space.items[0]["b"] = root.weight
        root.space.items.append("more")
        root.user["a"] = root.weight
        root.names.add("b")
        root.table[0] = 5
        root.model.extra = nnx.Param(root.weight)
        root.model.kernel.set_metadata(frozen=True)
        del root.weight
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        run_lifted(step, root)
    assert root.last is None and list(root.queue) == [1] and root.names == {"a"}
    assert root.space.items == [{"a": 1}] and root.user == {"a": 1}
    assert root.table.tolist() == [0, 0] and root.weight.tolist() == [1, 1]
    assert not hasattr(root.model, "extra")
    assert "frozen" not in root.model.kernel.get_metadata()
    root.model.extra = nnx.Param(jnp.ones(1))


def test_an_error_in_run_that_the_step_handles_leaves_no_tracers(run_lifted):
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:2])
    root = Holder(last=None, weight=jnp.ones(2))

    def fail():
        root.last = root.weight * 2
        raise KeyError("handled")

    def step():
        with contextlib.suppress(KeyError):
            strategy.run(fail)
        assert root.last is None
        root.weight = root.weight + 1

    run_lifted(step, root)
    assert root.weight.tolist() == [2, 2]


def test_a_name_that_a_step_rebinds_to_an_array_is_named_and_bound_again(run_lifted):
    weight = before = jnp.ones(2)

    def step():
        nonlocal weight
        weight = weight + 1

    with pytest.raises(
        StateStructureError, match=r"weight: the step put an array into a name.*hold it"
    ):
        run_lifted(step, step)
    assert weight is before


def test_an_object_that_a_step_makes_anew_is_told_what_to_do(run_lifted):
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        weight: Any

    root = Holder(frozen=(before := Frozen(jnp.ones(2))))

    def step():
        root.frozen = Frozen(root.frozen.weight + 1)

    with pytest.raises(
        StateStructureError,
        match=r"frozen/weight: in a new object that the step made.*register_dataclass",
    ):
        run_lifted(step, root)
    assert root.frozen is before


def test_a_container_of_variables_may_be_made_anew(run_lifted):
    # `nnx.grad` makes the dictionaries of a module anew, with their keys in order.
    first, second = nnx.Variable(jnp.zeros(())), nnx.Variable(jnp.zeros(()))
    root = Holder(variables={"b": first, "a": second})

    def step():
        root.variables = dict(sorted(root.variables.items()))
        root.variables["a"][...] += 1

    run_lifted(step, root)
    assert float(second[...]) == 1 and root.variables["b"] is first


def test_a_number_in_a_tree_of_arrays_is_told_to_be_an_array(run_lifted):
    root = Holder(state={"step": 0, "w": jnp.ones(1)})

    def step():
        root.state = {"step": root.state["step"] + 1, "w": root.state["w"]}

    with pytest.raises(
        StateStructureError,
        match=r"state/step: int 0 became int 1, once.*begin with `jnp.asarray\(0\)`",
    ):
        run_lifted(step, root)


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


def test_what_a_step_sets_every_time_is_set(run_lifted):
    root = Holder(model=nnx.Dropout(0.5, rngs=nnx.Rngs(0)), w=jnp.ones(2), mode=None)
    root.model.eval()

    def step():
        root.model.train()
        root.mode = "train"
        root.w = root.model(root.w) + root.w

    run_lifted(step, root)
    assert root.mode == "train" and root.model.deterministic is False


def test_what_a_step_caches_is_kept(run_lifted):
    class Cached(Holder):
        @functools.cached_property
        def scale(self):
            return 2.0

    root = Holder(part=Cached(), w=jnp.ones(2))

    def step():
        root.w = root.w * root.part.scale

    run_lifted(step, root)
    assert vars(root.part) == {"scale": 2.0}


def test_a_flag_that_makes_the_next_step_another_one_is_refused(run_lifted):
    root = Holder(started=False, total=jnp.full((), 100.0))

    def step():
        if not root.started:
            root.total, root.started = jnp.zeros(()), True
        root.total = root.total + 1

    with pytest.raises(
        StateStructureError,
        match=r"`step` changed plain values, so that the next step would be another one"
        r"(.|\n)*  started: bool False became True, once, while the step was traced\n"
        r"Hold what a step counts or decides by in an array",
    ):
        run_lifted(step, root)
    assert root.started is False and float(root.total) == 100


def test_objects_that_change_places_are_refused(run_lifted):
    root = Holder(a=Holder(w=jnp.ones(1)), b=Holder(w=jnp.zeros(1)))

    def step():
        root.a, root.b = root.b, root.a

    with pytest.raises(StateStructureError, match="changed plain values"):
        run_lifted(step, root)
    assert root.a.w.tolist() == [1]


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({"x": {"n": 0}}, lambda r: r.held["x"].update(n=r.held["x"]["n"] + 1)),
        (np.int64(0), lambda r: setattr(r, "held", r.held + 1)),
        ((0,), lambda r: setattr(r, "held", (r.held[0] + 1,))),
        (argparse.Namespace(n=0), lambda r: setattr(r.held, "n", r.held.n + 1)),
        (np.zeros(2), lambda r: r.held.__iadd__(1)),
        (["a"], lambda r: r.held.append("b")),
        ({"a"}, lambda r: r.held.add(len(r.held))),
    ],
    ids=["nested", "NumPy scalar", "tuple", "Namespace", "NumPy", "list", "set"],
)  # fmt: skip
def test_a_plain_value_that_a_step_counts_is_refused_anywhere(
    run_lifted, before, change
):
    untouched = copy.deepcopy(before)
    root = Holder(held=before, w=jnp.ones(1))

    def step():
        change(root)

    with pytest.raises(StateStructureError, match=r"\n  held.*, once, while the step"):
        run_lifted(step, root)
    assert root.held is before
    np.testing.assert_array_equal(
        *[vars(x) if hasattr(x, "n") else x for x in (root.held, untouched)]
    )


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
