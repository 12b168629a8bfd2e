"""Tests of Ctrl-C while a source is read: lost batches are read again."""

import signal
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import DistributedDataset, InputOptions
from armillary.errors import DatasetStateError
from tests.feeds import open_chunks
from tests.patience import patience


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

    def get_state(self):
        return self.index

    def set_state(self, state):
        self.index = state


def generate(interrupts):
    yield from Counter(interrupts)


@pytest.mark.parametrize("per_replica", [False, True])
def test_an_iterator_continues_behind_the_last_batch(make_layout, per_replica):
    interrupts = [0, 3]
    dataset = DistributedDataset(
        lambda: Counter(interrupts),
        make_layout(2),
        per_replica_batches=per_replica,
        options=InputOptions(prefetch=0),
    )
    iterator, numbers = iter(dataset), []
    for has_interrupts in (True, True, False):
        with pytest.raises(KeyboardInterrupt if has_interrupts else StopIteration):
            while True:
                numbers.append(int(np.ravel(next(iterator).arrays["x"])[0]))
    assert numbers == list(range(1, 9, 1 + per_replica))


class Sum(armillary.StandardTrainer):
    def __init__(self, source, num_batches=1, prefetch=0, **options):
        strategy = armillary.get_strategy()
        dataset = strategy.distribute_dataset(source, InputOptions(prefetch=prefetch))
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


@pytest.mark.parametrize(
    ("num_batches", "compile_step"), [(1, True), (2, True), (1, False)]
)
def test_training_takes_each_batch_once(num_batches, compile_step):
    interrupts = [0, 2, 5]
    trainer = Sum(lambda: Counter(interrupts), num_batches, compile_step=compile_step)
    assert train(trainer, 6 // num_batches) == 3
    assert float(trainer.total) == 123456


@pytest.mark.parametrize("compile_step", [True, False])
@pytest.mark.parametrize("index", [0, 4])
def test_a_source_that_cannot_go_back_is_an_error(index, compile_step):
    trainer = Sum(lambda: generate([index]), compile_step=compile_step)
    with pytest.raises(KeyboardInterrupt):
        trainer.train(6)
    message = (
        r"The source \(generator function\) was interrupted \(Ctrl-C\) while it was "
        "read, and cannot go back.*Make a new dataset, or use a source that can"
    )
    for _ in range(2):
        with pytest.raises(DatasetStateError, match=message):
            trainer.train(6)
    assert float(trainer.total) == float("1234"[: int(trainer.num_steps)] or 0)


def test_a_generator_that_a_thread_reads_continues():
    started, go_on = threading.Event(), threading.Event()

    def generate():
        for number in range(1, 5):
            if number == 3:
                started.set()
                assert go_on.wait(patience(120))
            yield {"x": np.full(2, number, np.float32)}

    trainer = Sum(generate, prefetch=1)
    interrupt = threading.Thread(
        target=lambda: started.wait(patience(120)) and press_ctrl_c()
    )
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        trainer.train(4)
    interrupt.join()
    go_on.set()
    trainer.train(4 - int(trainer.num_steps))
    assert float(trainer.total) == 1234


def press_ctrl_c():
    time.sleep(0.1)  # Then the loop waits for the thread that reads.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)


def test_data_that_cannot_go_back_stays_broken_if_other_data_moves(make_layout):
    moving = DistributedDataset(lambda: Counter([]), make_layout(2))
    broken = DistributedDataset(lambda: generate([1]), make_layout(2))
    feed = open_chunks(
        moving, broken, batches_per_step=(1, 1), steps_per_chunk=1, prefetch=0
    )
    start = moving.get_state()
    feed.next_chunk()
    feed.commit(1)
    with pytest.raises(KeyboardInterrupt):
        feed.next_chunk()
    moving.set_state(start)
    with pytest.raises(DatasetStateError, match="cannot go back to the batches"):
        feed.next_chunk()
