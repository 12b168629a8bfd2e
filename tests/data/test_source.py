"""Tests of the contract of all sources, and of the errors of each."""

import itertools
import subprocess
import sys

import grain
import jax.numpy as jnp
import numpy as np
import pytest

import armillary
from armillary.data import (
    DistributedDataset,
    FixedLenFeature,
    as_source,
    from_arrays,
    from_tfrecords,
)
from armillary.errors import DatasetStateError
from tests import problems
from tests.data.contract import BATCHES, check_source, make_grain_loader, read
from tests.records import make_record, write_records


def make_list():
    return [np.array(batch) for batch in BATCHES]


def generate():
    yield from make_list()


class Positioned(problems.Positioned):
    batches = BATCHES


class PositionedIterable:
    def __iter__(self):
        return Positioned()


class Stateful:
    """A loader with a position of its own, as loaders of other libraries have it."""

    def __init__(self):
        self._begin = self._next = 0

    def __iter__(self):
        self._next, self._begin = self._begin, 0
        while self._next < len(BATCHES):
            self._next += 1
            yield {"x": np.array(BATCHES[self._next - 1])}

    def state_dict(self):
        return {"next": self._next}

    def load_state_dict(self, state):
        self._begin = state["next"]


def make_tfrecords(folder):
    parts = [range(3), range(3, 9), range(9, 10)]
    paths = [
        write_records(folder / str(place), [make_record({"x": x}) for x in part])
        for place, part in enumerate(parts)
    ]
    return from_tfrecords(paths, {"x": FixedLenFeature((), np.int64)}, batch_size=4)


REPOSITIONABLE = {
    "arrays": lambda _: from_arrays(np.arange(10), batch_size=4),
    "grain map": lambda _: grain.MapDataset.range(10).batch(4),
    "grain iter": lambda _: grain.MapDataset.range(10).to_iter_dataset().batch(4),
    "grain loader": lambda _: make_grain_loader(),
    "positioned iterable": lambda _: PositionedIterable(),
    "positioned iterator": lambda _: Positioned(),
    "positioned function": lambda _: Positioned,
    "stateful iterable": lambda _: Stateful(),
    "made source": lambda _: as_source(PositionedIterable()),
    "tfrecord": make_tfrecords,
}
OTHERS = {
    "list": lambda _: make_list(),
    "list of jax arrays": lambda _: [jnp.array(batch) for batch in BATCHES],
    "generator function": lambda _: generate,
}
EVERY = REPOSITIONABLE | OTHERS


@pytest.mark.parametrize("kind", EVERY)
def test_sources_keep_the_contract(kind, tmp_path, make_layout):
    is_repositionable = kind in REPOSITIONABLE
    check_source(lambda: EVERY[kind](tmp_path), is_repositionable, make_layout(4))


def test_a_function_that_needs_arguments_is_an_error():
    def generate(batch_size):
        yield np.arange(batch_size)

    message = r"the function `generate\(batch_size\)`, but.*`lambda: fn\(\.\.\.\)`"
    with pytest.raises(TypeError, match=message):
        as_source(generate)


class Shuffled:
    """Draws the order of each pass from one generator."""

    def __init__(self):
        self._begin = self._next = 0
        self.rng, self.order = np.random.default_rng(0), []

    def __iter__(self):
        if not self._begin:
            self.order = self.rng.permutation(8).tolist()
        self._next, self._begin = self._begin, 0
        while self._next < 4:
            self._next += 1
            yield np.array(self.order[2 * self._next - 2 : 2 * self._next])

    def state_dict(self):
        state = self.rng.bit_generator.state
        return {"next": self._next, "order": self.order, "rng": state}

    def load_state_dict(self, state):
        self._begin = state["next"]
        self.order, self.rng.bit_generator.state = state["order"], state["rng"]


@pytest.mark.parametrize("num_batches", [3, 4, 5, 8, 9])
@pytest.mark.parametrize("is_seen", [False, True])
def test_a_loader_with_an_order_of_its_own_continues_in_it(num_batches, is_seen):
    strategy = armillary.distribute.DefaultStrategy()

    def read_on(dataset):
        while True:
            yield from dataset
            if is_seen:  # The end of the pass is, before the next one begins.
                yield None

    dataset = strategy.distribute_dataset(Shuffled())
    batches = read_on(dataset)
    num_read = num_batches + (num_batches // 4 if is_seen else 0)
    last = list(itertools.islice(batches, num_read))[-1]
    assert (last is None) == (is_seen and num_batches % 4 == 0)
    position = dataset.get_state()
    assert position["exhausted"] == (last is None)
    rest = [np.ravel(b).tolist() for b in itertools.islice(batches, 9) if b is not None]
    again = strategy.distribute_dataset(Shuffled())
    again.set_state(position)
    restored = (np.ravel(b).tolist() for b in read_on(again) if b is not None)
    assert list(itertools.islice(restored, len(rest))) == rest


def test_a_map_of_grain_may_use_its_buffer_again():
    buffer = np.zeros(2, np.int64)

    def fill(batch):
        buffer[:] = batch
        return buffer

    # Not below: threads of Grain read ahead there.
    source = as_source(grain.MapDataset.range(8).to_iter_dataset().batch(2).map(fill))
    iterator = source.make_iterator(0)
    batches = [next(iterator) for _ in range(4)]
    assert np.concatenate(batches).tolist() == list(range(8))


def test_a_generator_can_be_read_once():
    source = as_source(generate())
    assert not source.is_repositionable
    assert read(source.make_iterator(0)) == BATCHES
    with pytest.raises(
        DatasetStateError, match=r"iterator of type generator.*once.*function"
    ):
        source.make_iterator(1)


def test_unbatched_arrays_point_to_from_arrays(make_layout):
    for arrays in [
        {"x": np.zeros(3)},
        np.zeros(3),
        jnp.zeros(3),
        (np.zeros(3), np.zeros(3)),
    ]:
        with pytest.raises(TypeError, match="of arrays, but it must give batches"):
            as_source(arrays)
    dataset = DistributedDataset(make_list(), make_layout())
    with pytest.raises(TypeError, match="The dataset is already a distributed dataset"):
        as_source(dataset)


class Numbered:
    """Examples by number, such as a map-style dataset of PyTorch."""

    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"x": np.float32(number)}


def test_examples_by_number_point_to_from_random_access():
    rows = [np.arange(size) for size in (2, 3)]
    packed = armillary.data.pack(rows, row_length=4)
    for examples in (Numbered(), packed):
        match = r"single examples by index.*from_random_access\(dataset"
        with pytest.raises(TypeError, match=match):
            as_source(examples)
        with pytest.raises(TypeError, match=r"by index.*from_random_access"):
            armillary.data.from_arrays(examples, batch_size=2)
    # A string has numbers, too, but no examples.
    with pytest.raises(TypeError, match="of type str, but it must give batches"):
        as_source("rows.csv")


@pytest.mark.slow
def test_libraries_are_not_imported_for_other_sources():
    program = (
        "import sys, armillary.data; armillary.data.as_source([1]); "
        "print({'datasets', 'grain', 'tensorflow', 'torch'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert ended.stdout == b"set()\n", ended.stderr
