"""Tests of loops over chunks: positions, programs, and state between loops."""

import weakref

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary import StandardTrainerOptions as Options
from armillary.data import InputOptions, from_arrays
from armillary.data.feed._feed import Feed
from armillary.trainer._program import Program
from tests.problems import (
    MLP,
    Classifier,
    Snapshot,
    assert_identical,
    make_strategy,
    read_state,
)
from tests.tiers import slow_after_first


class Trainer(armillary.StandardTrainer):
    """Keeps the numbers it saw, in order."""

    def __init__(self, dataset, **options):
        super().__init__(dataset, Options(**options))
        self.seen = jnp.full(64, -1)
        self.num_steps = armillary.create_global_step()

    def train_step(self, iterator):
        value = next(iterator)["x"][0]
        self.seen = self.seen.at[self.num_steps[...]].set(value)
        self.num_steps[...] += 1

    @property
    def values(self):
        return np.asarray(self.seen)[: int(self.num_steps[...])].tolist()


def make_dataset(num_examples=40, prefetch=2, shuffle_seed=None):
    source = from_arrays(
        {"x": np.arange(num_examples, dtype=np.int32)},
        batch_size=1,
        shuffle_seed=shuffle_seed,
    )
    options = InputOptions(prefetch=prefetch)
    strategy = armillary.distribute.DefaultStrategy()
    return strategy.distribute_dataset(source, options)


# Positions


@slow_after_first("prefetch", [0, 1, 2])
@slow_after_first("compile_loop", [True, False])
def test_the_position_counts_the_steps_that_ran(prefetch, compile_loop):
    dataset = make_dataset(prefetch=prefetch, shuffle_seed=5)
    trainer = Trainer(dataset, steps_per_chunk=7, compile_loop=compile_loop)

    for _ in range(3):
        trainer.train(3)
        resumed = make_dataset(shuffle_seed=5)
        resumed.set_state(dataset.get_state())
        rest = [int(batch["x"][0]) for batch in resumed]
        assert len(rest) == 40 - len(trainer.values)
        assert sorted(trainer.values + rest) == list(range(40))


def test_a_new_position_drops_the_rest_of_the_chunk():
    dataset = make_dataset()
    trainer = Trainer(dataset, steps_per_chunk=7)
    trainer.train(3)
    position = dataset.get_state()
    trainer.train(2)

    dataset.set_state(position)
    trainer.train(6)

    assert trainer.values == [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8]


# State between loops


def make_ones():
    return from_arrays({"x": np.ones(2, np.float32)}, batch_size=2, repeat=True)


def make_classifier(**options):
    return Classifier(make_strategy(2), MLP(nnx.Rngs(0)), optax.adam(1e-2), **options)


@pytest.mark.slow
def test_arrays_that_the_user_holds_stay_valid():
    trainer = make_classifier()
    model = trainer.model
    held = [model.first.kernel[...], trainer.losses, trainer.optimizer.step[...]]
    copies = [np.array(array) for array in held]

    trainer.train(3)
    held.append(model.first.kernel.get_value())
    copies.append(np.array(held[-1]))
    before = trainer.model

    assert not any(array.is_deleted() for array in held)
    for array, copy in zip(held, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
    assert before is model
    assert not np.array_equal(model.first.kernel[...], copies[0])


@pytest.mark.slow
def test_state_that_the_user_replaces_is_seen():
    trainer = make_classifier()
    start = Snapshot(trainer)
    trainer.train(5)
    expected = read_state(trainer)
    start.restore()
    trainer.train(2)
    kernel = np.array(trainer.model.first.kernel[...])
    trainer.train(1)

    # Undo the last step by hand, then repeat it.
    trainer.model.first.kernel[...] = jnp.zeros_like(kernel)
    trainer.train(1)
    assert not np.array_equal(trainer.model.first.kernel[...], kernel)
    start.restore()
    trainer.train(5)

    assert_identical(read_state(trainer), expected)


def test_state_that_becomes_trained_later_is_not_taken_from_the_user():
    class Unfreezes(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_ones())
            self.strategy, self.is_frozen = make_strategy(2), True
            self.weight = jnp.zeros(3)
            self.total = jnp.zeros(3)

        def train_step(self, iterator):
            next(iterator)
            self.total = self.total + self.weight
            if not self.is_frozen:
                self.weight = self.weight + 1

    trainer = Unfreezes()
    held = trainer.weight
    trainer.train(2)
    trainer.is_frozen = False

    trainer.train(2)

    np.testing.assert_array_equal(held, np.zeros(3))
    np.testing.assert_array_equal(trainer.weight, np.full(3, 2))


def test_two_attributes_may_share_an_array():
    class Average(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_ones())
            self.params = {"w": jnp.zeros(2)}
            self.ema = self.params

        def train_step(self, iterator):
            x = next(iterator)["x"]
            self.params = {"w": self.params["w"] + x}
            self.ema = {"w": 0.5 * self.ema["w"] + 0.5 * self.params["w"]}

    trainer = Average()

    trainer.train(2)
    trainer.ema = dict(trainer.params)
    trainer.train(1)

    np.testing.assert_array_equal(trainer.params["w"], [3, 3])
    np.testing.assert_array_equal(trainer.ema["w"], [2.5, 2.5])


def test_state_that_no_step_changes_is_not_copied_each_loop():
    class Frozen(armillary.StandardTrainer):
        def __init__(self):
            super().__init__(make_ones())
            self.teacher = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
            self.total = jnp.zeros(())

        def train_step(self, iterator):
            self.total = self.total + self.teacher(next(iterator)["x"]).sum()

    trainer = Frozen()
    trainer.train(1)
    kernel = trainer.teacher.kernel.get_value()
    values = np.array(kernel)

    trainer.train(2)

    assert trainer.teacher.kernel.get_value() is kernel
    assert not kernel.is_deleted()
    np.testing.assert_allclose(trainer.total, 3 * values.sum(), rtol=1e-6)


def test_memory_of_changed_state_is_reused():
    trainer = make_classifier()
    trainer.train(2)
    old = trainer.model.first.kernel.get_value()

    trainer.train(2)

    assert old.is_deleted()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "steps_per_chunk", "capacity"),
    [(1, None, 20), (50, None, 50), (300, None, 100), (300, 7, 7)],
)
def test_a_chunk_has_the_steps_of_the_first_loop_within_bounds(
    first, steps_per_chunk, capacity
):
    dataset = from_arrays({"x": np.arange(4)}, batch_size=1, repeat=True)
    trainer = Trainer(dataset, steps_per_chunk=steps_per_chunk)
    for num_steps in (first, 120):
        trainer.train(num_steps)
        if trainer._train_setup.loop.feed.chunk is not None:
            assert trainer._train_setup.loop.feed.chunk.capacity == capacity
    assert len(trainer._train_setup.loop._programs.current) == 1


def test_the_next_chunk_is_read_once_the_device_has_work(monkeypatch):
    events = []

    def noting(kind, name):
        own = getattr(kind, name)

        def call(self, *arguments):
            events.append(name)
            return own(self, *arguments)

        monkeypatch.setattr(kind, name, call)

    noting(Program, "__call__")
    noting(Feed, "next_chunk")
    noting(Feed, "read_on")
    trainer = Trainer(make_dataset(), steps_per_chunk=2)
    trainer.train(4)
    assert events == ["next_chunk", "__call__", "read_on"] * 2


@pytest.mark.slow
def test_arrays_that_a_loop_replaced_are_let_go():
    trainer = make_classifier()
    old = weakref.ref(trainer.model.first.kernel.get_value())

    trainer.train(2)

    assert old() is None
