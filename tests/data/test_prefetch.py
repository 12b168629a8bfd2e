"""Tests of the thread that reads items ahead."""

import time

import jax
import jax.numpy as jnp
import pytest

from armillary.data.feed._ahead import read_ahead
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
    prefetcher = read_ahead(iter(range(20)), size, OWNER)
    assert list(prefetcher) == list(range(20))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(prefetcher)


def test_the_thread_is_asleep_until_it_is_to_read_on():
    read = []
    prefetcher = read_ahead(note_numbers(4, read), 1, OWNER)
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
    prefetcher = read_ahead(items, size, OWNER)
    with jax.enable_x64(True), jax.default_device(device):
        arrays = list(prefetcher)
    assert [int(array[0]) - 2**40 for array in arrays] == [0, 1, 2]
    assert all(array.devices() == {device} for array in arrays)
