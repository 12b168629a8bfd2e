"""Tests that state stays correct after edits by users and failed programs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import from_arrays
from armillary.distribute.program._flat_state import FlatState
from armillary.state._lift import State
from armillary.trainer._program import Program

STRATEGIES = {
    "default": armillary.distribute.DefaultStrategy,
    "mirrored": lambda: armillary.MirroredStrategy(jax.devices()[:2]),
}


class Holder:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Point:
    x: Any
    y: Any
    name: str = dataclasses.field(metadata={"static": True}, default="")


def make_root() -> Holder:
    a, b, c, d, e, f, g = (jnp.full(2, i, jnp.float32) for i in range(7))
    return Holder(
        array=a,
        params={"w": b, "scale": 2.0, "nested": [c, None]},
        point=Point(d, e, "origin"),
        model=nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        pair=nnx.Variable((f, g)),
        state=optax.adam(1e-3).init({"w": b}),
    )


def make_flat(root: Any) -> FlatState:
    return FlatState(State([(root, "")]), armillary.distribute.DefaultStrategy())


def run(flat: FlatState, changed: tuple[int, ...], values: list[Any]) -> None:
    """Does what a program does that puts out these values."""
    with flat.lent(changed):
        flat.give(values, ())
    flat.write_back()


def are_same(a: list[Any], b: list[Any]) -> bool:
    return all(old is new for old, new in zip(a, b, strict=True))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.data())
def test_slots_hold_what_programs_put_out_and_give_it_to_the_next(data):
    flat = make_flat(make_root())
    expected = flat.state.read()
    for _ in range(2):
        indices = st.integers(0, len(expected) - 1)
        changed = tuple(data.draw(st.lists(indices, unique=True)))
        parts = flat.take(changed)
        assert are_same(flat.join(changed, *parts), flat.arrays)
        values = [expected[i] + 1 for i in changed]
        run(flat, changed, values)
        for i, value in zip(changed, values, strict=True):
            expected[i] = value
        assert are_same(flat.state.read(), expected)
        flat.take(changed)
        assert are_same(flat.arrays, expected)


def test_only_what_was_put_into_a_container_is_taken_again():
    root = make_root()
    flat = make_flat(root)
    everything = tuple(range(len(flat.arrays)))
    run(flat, everything, [leaf + 1 for leaf in flat.state.read()])
    before, index = list(flat.arrays), flat.state.paths.index("params/w")
    root.params["w"] = mine = jnp.zeros(2)
    flat.take(everything)
    np.testing.assert_array_equal(flat.arrays[index], [0, 0])
    assert flat.arrays[index] is not mine
    del before[index], flat.arrays[index]
    assert are_same(before, flat.arrays)


@pytest.mark.parametrize("place", ["params", "point", "pair"])
def test_another_structure_in_a_place_does_not_fit(place):
    root = make_root()
    flat = make_flat(root)
    run(flat, (), [])
    assert flat.fits()
    changed = {"params": {"w": jnp.ones(2)}, "point": None, "pair": jnp.ones(2)}[place]
    if place == "pair":
        root.pair.set_value(changed)
    else:
        setattr(root, place, changed)
    assert not flat.fits()


class Trainer(armillary.StandardTrainer):
    """Adds what it reads to a total, in plain places and in NNX variables."""

    def __init__(self, strategy=None):
        strategy = strategy or armillary.distribute.DefaultStrategy()
        data = from_arrays({"x": np.ones(80, np.float32)}, batch_size=2)
        super().__init__(strategy.distribute_dataset(data))
        self.strategy = strategy
        self.plain, self.rate = jnp.zeros(2), nnx.Variable(jnp.ones(2))
        self.both = nnx.Variable({"total": jnp.zeros(2), "rate": jnp.ones(2)})

    def train_step(self, iterator):
        next(iterator)
        self.plain = self.plain + self.rate[...]
        self.both["total"] = self.both["total"] + self.both["rate"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_values_written_after_a_failed_program_are_used(strategy, monkeypatch):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)
    plain, rate = trainer.plain, trainer.rate.get_value()

    trainer.plain = jnp.full(2, 100.0)
    trainer.rate.set_value(jnp.full(2, 50.0))
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="too full"):

        def fail(*_):
            raise RuntimeError("The device is too full.")

        patch.setattr(Program, "__call__", fail)
        trainer.train(1)
    trainer.plain = plain
    trainer.rate.set_value(rate)
    trainer.train(1)

    np.testing.assert_array_equal(trainer.plain, [2, 2])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_change_inside_the_container_of_a_variable_is_used(strategy):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)

    trainer.both["total"] = mine = jnp.full(2, 10.0)
    trainer.train(1)
    np.testing.assert_array_equal(trainer.both["total"], [11, 11])
    trainer.both["rate"] = jnp.full(2, 5.0)
    trainer.train(1)

    np.testing.assert_array_equal(trainer.both["total"], [16, 16])
    np.testing.assert_array_equal(mine, [10, 10])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_writes_into_a_variable_with_a_numpy_array_are_used(strategy):
    trainer = Trainer(STRATEGIES[strategy]())
    trainer.train(1)
    mine = np.full(2, 10, np.float32)
    trainer.rate.set_value(mine)
    trainer.train(1)

    trainer.rate[0] = 20
    trainer.train(1)

    np.testing.assert_array_equal(trainer.plain, [31, 21])


class Layer:
    """An object with an array, equal to others of its name."""

    def __init__(self, weight):
        self.name, self.weight = "layer", jnp.full(2, weight)

    def __eq__(self, other):
        return self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Nest(Trainer):
    """Adds up what a dictionary holds: arrays, numbers, and objects with arrays."""

    def __init__(self):
        super().__init__()
        self.nest = {"array": jnp.ones(2)}

    def train_step(self, iterator):
        next(iterator)
        values = [getattr(value, "weight", value) for value in self.nest.values()]
        self.plain = self.plain + sum(values)


@pytest.mark.parametrize("added", [jnp.full(2, 10.0), 10.0, Layer(10.0)], ids=type)
def test_a_key_that_is_added_to_a_dictionary_of_arrays_is_used(added):
    trainer = Nest()
    trainer.train(1)
    trainer.nest["added"] = added
    trainer.train(1)
    np.testing.assert_array_equal(trainer.plain, [12, 12])


def test_an_object_next_to_arrays_that_is_replaced_by_an_equal_one_is_used():
    trainer = Nest()
    trainer.nest["layer"] = Layer(10.0)
    trainer.train(1)
    trainer.nest["layer"] = Layer(100.0)
    trainer.train(1)
    np.testing.assert_array_equal(trainer.plain, [112, 112])


def test_arrays_that_a_program_only_reads_may_be_assigned_while_it_runs():
    class Trainer(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(self.make_batches)
            self.rate, self.total = (
                nnx.Variable(jnp.ones(2)),
                nnx.Variable(jnp.zeros(())),
            )

        def make_batches(self):
            for number in range(4):
                if number == 2:
                    self.rate[...] = jnp.full(2, 100.0)
                yield np.ones(2, np.float32)

        def train_step(self, iterator):
            self.total[...] = self.total[...] + jnp.sum(self.rate[...] * next(iterator))

    trainer = Trainer()
    for _ in range(2):
        trainer.train(2)
    np.testing.assert_array_equal(trainer.rate[...], [100.0, 100.0])


def test_a_variable_may_hold_a_python_number():
    counter = nnx.Variable(0)

    @armillary.function
    def count(variable):
        variable[...] = variable[...] + 1

    for _ in range(3):
        count(counter)
    assert int(counter[...]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["keys", "numbers"])
@pytest.mark.parametrize("place", ["free", "second device", "both devices"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_arrays_that_a_user_put_into_a_state_stay_whole_and_in_place(name, place, kind):
    class Trainer(armillary.StandardTrainer):
        def __init__(self, strategy):
            source = from_arrays({"x": np.ones((4, 1), np.float32)}, batch_size=2)
            super().__init__(strategy.distribute_dataset(source))
            self.strategy, self.held = strategy, jnp.zeros(())

        def train_step(self, iterator):
            next(iterator)
            held = self.held
            self.held = jax.vmap(lambda x: change(x))(held)

    def change(x):
        return jax.random.fold_in(x, 1) if kind == "keys" else x + 1

    held = jax.random.split(jax.random.key(0), 3)
    held = held if kind == "keys" else jnp.arange(3.0)
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    if place != "free":
        held = jax.device_put(held, jax.devices()[1] if "second" in place else both)
    homes, expected = held.sharding, jax.jit(jax.vmap(change))(held)
    trainer = Trainer(STRATEGIES[name]())
    trainer.held = held
    trainer.train(1)
    assert not held.is_deleted()
    if name == "default":
        assert trainer.held.sharding == homes
    found, expected = (
        np.asarray(jax.random.key_data(x) if kind == "keys" else x)
        for x in (trainer.held, expected)
    )
    np.testing.assert_array_equal(found, expected)
