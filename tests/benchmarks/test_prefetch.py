import gc
import itertools
import threading

import pytest

from benchmarks.contestants.prefetch import Prefetch


def find_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "prefetch"}


def test_inputs_come_in_order_and_placed():
    inputs = Prefetch(itertools.count(), lambda number: 10 * number, 2)
    assert [next(inputs) for _ in range(5)] == [0, 10, 20, 30, 40]


def test_no_more_is_read_than_may_wait():
    read = []
    placed = threading.Event()

    def place(number: int) -> int:
        read.append(number)
        if number == 3:
            placed.set()
        return number

    inputs = Prefetch(itertools.count(), place, 3)
    assert placed.wait(60)
    assert not threading.Event().wait(0.05)
    # Three wait, and the thread holds one more in its hand.
    assert read == [0, 1, 2, 3]
    assert next(inputs) == 0


def test_an_error_of_the_thread_reaches_the_reader():
    inputs = Prefetch(itertools.count(), lambda number: 1 // number, 2)
    with pytest.raises(ZeroDivisionError):
        next(inputs)


def test_the_thread_ends_with_its_owner():
    before = find_threads()
    inputs = Prefetch(itertools.count(), lambda number: number, 2)
    assert next(inputs) == 0
    (thread,) = find_threads() - before
    del inputs
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()
