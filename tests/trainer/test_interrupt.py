"""Tests that Ctrl-C at any line of a loop leaves state that can be saved."""

import contextlib
import signal
import sys
import weakref
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import feed, from_arrays
from armillary.data.sources import _arrays
from armillary.distribute.program import _flat_state
from armillary.trainer import _loop, _program, _tracer

LOOP = {module.__file__ for module in (_loop, _program, _tracer, _flat_state)}
READING = {str(path) for path in Path(feed.__file__).parent.glob("*.py")}
READING.add(_arrays.__file__)

NUMBERS = np.arange(1, 9, dtype=np.float32)


class Sum(armillary.StandardTrainer):
    def __init__(self, data=None, **options):
        if data is None:
            data = from_arrays({"x": NUMBERS}, batch_size=1, repeat=True)
        options = armillary.StandardTrainerOptions(steps_per_chunk=2, **options)
        super().__init__(data, options)
        self.total = jnp.zeros(1)
        self.num_steps = jnp.zeros((), int)

    def train_step(self, iterator):
        self.total = self.total + next(iterator)["x"]
        self.num_steps = self.num_steps + 1

    def is_exact(self):
        taken = np.resize(NUMBERS, int(self.num_steps))
        return float(self.total[0]) == taken.sum()


def make_data(prefetch):
    options = armillary.data.InputOptions(prefetch=prefetch)
    data = from_arrays({"x": NUMBERS}, batch_size=1, repeat=True)
    return armillary.distribute.DefaultStrategy().distribute_dataset(data, options)


def is_finalizing(frame):
    """Returns whether Python would print an interrupt here, and go on."""
    while frame is not None and frame.f_code.co_filename != weakref.__file__:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def interrupted(files, num_lines):
    """Sends Ctrl-C after some lines of files."""
    lines = iter(range(num_lines))

    def trace(frame, event, _):
        if frame.f_code.co_filename not in files or is_finalizing(frame):
            return None
        if event == "line" and next(lines, None) is None:
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def train_interrupted(trainer, files, num_lines):
    """Trains, with Ctrl-C after some lines of files; returns whether it came."""
    with interrupted(files, num_lines):
        try:
            trainer.train(4 if files is LOOP else 2)
        except KeyboardInterrupt:
            # Here, where the traceback still holds what the loop left behind.
            assert trainer.is_exact()
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("files", [LOOP, READING], ids=["loop", "reading"])
def test_an_interrupt_at_any_line_of_a_loop_leaves_an_exact_state(files, prefetch):
    trainer = Sum(make_data(prefetch))
    trainer.train(4)

    num_lines = 0
    while train_interrupted(trainer, files, num_lines):
        trainer.train(1)
        assert trainer.is_exact()
        num_lines += 1

    assert num_lines > (20 if prefetch else 40)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_interrupt_at_any_line_loses_no_batch_of_an_iterator(prefetch):
    num_lines, is_interrupted = 0, True
    while is_interrupted:
        iterator, seen, is_interrupted = iter(make_data(prefetch)), [], False
        seen.append(float(next(iterator)["x"][0]))
        try:
            with interrupted(READING, num_lines):
                seen.append(float(next(iterator)["x"][0]))
        except KeyboardInterrupt:
            is_interrupted = True
        seen += [float(next(iterator)["x"][0]) for _ in range(3)]
        iterator.close()
        assert seen == NUMBERS[: len(seen)].tolist()
        num_lines += 1

    assert num_lines > 10
