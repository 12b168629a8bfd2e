import threading
import time

import jax
import jax.numpy as jnp
import pytest

from armillary.data.feed._stream import Prefetcher
from tests.feeds import wait_until

pytestmark = pytest.mark.usefixtures("prefetch_threads")


class Owner:
    pass


OWNER = Owner()


def note_numbers(count, read):
    for number in range(count):
        read.append(number)
        yield number


@pytest.mark.parametrize("size", [0, 1, 2, 100])
def test_items_come_in_order_and_the_end_stays(size):
    prefetcher = Prefetcher(iter(range(20)), size, OWNER)
    assert list(prefetcher) == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(prefetcher)


def test_reads_no_further_than_size():
    read = []
    prefetcher = Prefetcher(note_numbers(10, read), 3, OWNER)
    assert read == []
    next(prefetcher)
    wait_until(lambda: len(read) == 4)
    time.sleep(0.02)
    assert len(read) == 4
    prefetcher.close()


def test_close_ends_the_thread_and_the_items(prefetch_threads):
    prefetcher = Prefetcher(iter(range(1000)), 2, OWNER)
    next(prefetcher)
    prefetcher.close()
    assert not prefetch_threads()
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_the_thread_ends_with_its_owner(prefetch_threads):
    owner = Owner()
    prefetcher = Prefetcher(iter(range(1000)), 2, owner)
    next(prefetcher)
    assert len(prefetch_threads()) == 1
    del owner
    wait_until(lambda: not prefetch_threads())


def test_close_does_not_wait_longer_than_told():
    release = threading.Event()

    def items():
        yield 1
        release.wait(10)
        yield 2

    prefetcher = Prefetcher(items(), 1, OWNER)
    next(prefetcher)
    start = time.monotonic()
    prefetcher.close(timeout_seconds=0.01)
    assert time.monotonic() - start < 5
    release.set()


def test_tells_whether_the_next_item_is_there():
    go_on = threading.Event()

    def read():
        yield 1
        assert go_on.wait(60)
        yield 2

    prefetcher = Prefetcher(read(), 1, OWNER)
    assert not prefetcher.is_ready
    assert next(prefetcher) == 1
    assert not prefetcher.is_ready
    go_on.set()
    wait_until(lambda: prefetcher.is_ready)
    assert next(prefetcher) == 2
    wait_until(lambda: prefetcher.is_ready)  # The end is there.
    prefetcher.close()


@pytest.mark.parametrize("size", [0, 1])
def test_the_head_stays_until_it_is_popped(size):
    prefetcher = Prefetcher(iter("ab"), size, OWNER)
    assert prefetcher.current is None
    assert [prefetcher.head(), prefetcher.head(), prefetcher.current] == ["a"] * 3
    prefetcher.pop()
    assert prefetcher.current is None
    assert next(prefetcher) == "b"
    prefetcher.close()


def test_the_thread_is_asleep_until_it_is_to_read_on():
    read = []
    prefetcher = Prefetcher(note_numbers(4, read), 1, OWNER)
    assert prefetcher.head() == 0
    prefetcher.read_on()
    wait_until(lambda: len(read) == 2)
    time.sleep(0.05)  # It falls asleep.
    prefetcher.pop()
    assert prefetcher.head() == 1
    time.sleep(0.05)
    assert len(read) == 2
    prefetcher.read_on()
    wait_until(lambda: len(read) == 3)
    prefetcher.pop()
    assert prefetcher.head() == 2
    prefetcher.pop()
    assert prefetcher.head() == 3, "A missing item wakes it."
    prefetcher.pop()
    with pytest.raises(StopIteration):
        prefetcher.head()


@pytest.mark.parametrize("size", [0, 2])
def test_jax_settings_of_the_caller_hold_while_items_are_read(size):
    device = jax.devices()[1]
    items = (jnp.asarray([2**40 + number]) for number in range(3))
    prefetcher = Prefetcher(items, size, OWNER)
    with jax.enable_x64(True), jax.default_device(device):
        arrays = list(prefetcher)
    assert [int(array[0]) - 2**40 for array in arrays] == [0, 1, 2]
    assert all(array.devices() == {device} for array in arrays)
