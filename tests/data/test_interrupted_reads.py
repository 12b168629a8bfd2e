"""Ctrl-C while a source reads: the next call goes on, and no batch is lost."""

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import DistributedDataset, InputOptions
from armillary.errors import DatasetStateError


class Counter:
    """Gives 0, 1, 2, ...; Ctrl-C comes once, before one of them."""

    def __init__(self, interrupts):
        self.index = 0
        self.interrupts = interrupts

    def __iter__(self):
        return self

    def __next__(self):
        if self.index in self.interrupts:
            self.interrupts.remove(self.index)
            raise KeyboardInterrupt
        if self.index == 8:
            raise StopIteration
        self.index += 1
        return {"x": np.full(2, self.index, np.float32)}


class PositionedCounter(Counter):
    def get_state(self):
        return self.index

    def set_state(self, state):
        self.index = state


def generate(interrupts):
    yield from Counter(interrupts)


def read(iterator):
    """Returns what is read in the end, whatever comes between."""
    values, num_interrupts = [], 0
    while True:
        try:
            for batch in iterator:
                values.append(batch)
            return values, num_interrupts
        except KeyboardInterrupt:
            num_interrupts += 1
            assert num_interrupts < 9, "An interrupt comes again and again."


def as_numbers(batches):
    return [float(np.ravel(batch["x"])[0]) for batch in batches]


@pytest.mark.parametrize("kind", [Counter, PositionedCounter])
@pytest.mark.parametrize("per_replica", [False, True])
def test_a_reader_goes_on_behind_the_last_batch_taken(make_layout, kind, per_replica):
    dataset = DistributedDataset(
        lambda: kind(interrupts),
        make_layout(2),
        per_replica_batches=per_replica,
    )
    interrupts = [0, 3]
    batches, num_interrupts = read(dataset.make_reader(exact=False))
    assert num_interrupts == 2
    expected = range(1, 9, 1 + per_replica)
    assert as_numbers(batch.arrays for batch in batches) == list(expected)


@pytest.mark.parametrize("kind", [Counter, PositionedCounter])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_iterator_goes_on_behind_the_last_batch(make_layout, kind, prefetch):
    dataset = DistributedDataset(
        lambda: kind(interrupts),
        make_layout(2),
        options=InputOptions(prefetch=prefetch),
    )
    interrupts = [0, 3]
    batches, num_interrupts = read(iter(dataset))
    assert num_interrupts == 2
    assert as_numbers(batch.arrays for batch in batches) == list(range(1, 9))


class Sum(armillary.StandardTrainer):
    def __init__(self, source, num_batches=1, **options):
        strategy = armillary.get_strategy()
        dataset = strategy.distribute_dataset(source, InputOptions(prefetch=0))
        options = armillary.StandardTrainerOptions(steps_per_chunk=3, **options)
        super().__init__(dataset, options)
        self.total = jnp.zeros(())
        self.num_steps = jnp.zeros((), int)
        self.num_batches = num_batches

    def train_step(self, iterator):
        for _ in range(self.num_batches):
            # Digits of one number: the order counts too.
            self.total = self.total * 10 + next(iterator)["x"][0]
        self.num_steps = self.num_steps + 1


def train(trainer, num_steps):
    num_interrupts = 0
    while int(trainer.num_steps) < num_steps:
        try:
            trainer.train(num_steps - int(trainer.num_steps))
        except KeyboardInterrupt:
            num_interrupts += 1
            assert num_interrupts < 9, "An interrupt comes again and again."
    return num_interrupts


@pytest.mark.parametrize("kind", [Counter, PositionedCounter])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_training_takes_each_batch_once(kind, num_batches):
    interrupts = [0, 2, 5]
    trainer = Sum(lambda: kind(interrupts), num_batches)
    assert train(trainer, 6 // num_batches) == 3
    assert float(trainer.total) == 123456


def test_training_without_a_compiler_goes_on():
    interrupts = [0, 2]
    trainer = Sum(lambda: Counter(interrupts), compile_step=False)
    assert train(trainer, 3) == 2
    assert float(trainer.total) == 123


@pytest.mark.parametrize("index", [0, 4])
def test_a_generator_that_was_interrupted_is_an_error_that_says_so(index):
    interrupts = [index]
    trainer = Sum(lambda: generate(interrupts))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(6)
    for _ in range(2):
        with pytest.raises(DatasetStateError, match="has no more batches since it was"):
            trainer.train(6)
    assert float(trainer.total) in (0, 123, 1234)
