"""Tests of `from_random_access`: rows by number, one read for each, and mistakes."""

import copy
import itertools
import json
import pickle
import threading
import time
from collections import Counter

import jax
import numpy as np
import pytest

import armillary
from armillary.data import (
    DistributedDataset,
    InputOptions,
    from_arrays,
    from_random_access,
)
from armillary.errors import BatchSizeError, DatasetStateError
from tests.data.contract import check_source
from tests.feeds import open_chunks, read_chunks
from tests.problems import make_strategy

REMAINDERS = [None, "exact", "drop", "pad"]


def make_arrays(count=23):
    numbers = np.arange(count)
    return {
        "image": np.sin(np.arange(count * 6, dtype=np.float32)).reshape(count, 2, 3),
        "pair": (numbers.astype(np.int64), numbers / 2),
    }


class Rows:
    """The rows of arrays as examples, with a count of the reads of each."""

    def __init__(self, arrays=None):
        self.arrays = make_arrays() if arrays is None else arrays
        self.reads = Counter()
        self.threads = set()
        self._lock = threading.Lock()

    def __len__(self):
        return len(jax.tree.leaves(self.arrays)[0])

    def __getitem__(self, number):
        assert type(number) is int
        with self._lock:
            self.reads[number] += 1
            self.threads.add(threading.current_thread().name)
        return jax.tree.map(lambda array: array[number], self.arrays)


class ManyRows(Rows):
    """Gives several examples at once, as `torch.utils.data.Subset` does."""

    def __init__(self, arrays=None):
        super().__init__(arrays)
        self.requests = []

    def __getitems__(self, numbers):
        self.requests.append(len(numbers))
        return [self[number] for number in numbers]


def list_values(batch):
    return [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(batch)]


def read(dataset, strategy):
    """Returns the batches of a pass, as lists, with the position after each."""
    found = []
    for batch in dataset:
        leaves = [strategy.gather(leaf, axis=0) for leaf in jax.tree.leaves(batch)]
        found.append((list_values(leaves), dataset.get_state()["source"]))
    return found


@pytest.mark.parametrize("make", [Rows, ManyRows])
def test_random_access_keeps_the_contract(make, make_layout):
    check_source(
        lambda: from_random_access(make({"x": np.arange(10)}), batch_size=4),
        True,
        make_layout(4),
    )


@pytest.mark.parametrize("make", [Rows, ManyRows])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_equal_the_batches_of_arrays(make, num_threads):
    options = {"batch_size": 7, "shuffle_seed": 3, "repeat": True}
    rows = from_random_access(make(), **options, num_threads=num_threads)
    batches = zip(rows, from_arrays(make_arrays(), **options), strict=True)
    for batch, expected in itertools.islice(batches, 12):
        assert jax.tree.structure(batch) == jax.tree.structure(expected)
        for leaf, other in zip(*map(jax.tree.leaves, (batch, expected)), strict=True):
            assert leaf.dtype == other.dtype
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("num_replicas", [1, 8])
@pytest.mark.parametrize("batch_size", [8, 16])
def test_a_strategy_gives_what_it_gives_for_arrays(remainder, num_replicas, batch_size):
    strategy = make_strategy(num_replicas)
    # Without a rule for remainders, all batches must be full.
    options = {"batch_size": batch_size, "shuffle_seed": 1}
    if remainder is None:
        options["drop_remainder"] = True
    arrays = {**make_arrays(), "pair": np.arange(23)}
    found, expected = (
        read(
            strategy.distribute_dataset(source, InputOptions(remainder=remainder)),
            strategy,
        )
        for source in (
            from_random_access(Rows(arrays), **options),
            from_arrays(arrays, **options),
        )
    )
    assert found == expected
    assert len(found) >= 1


@pytest.mark.parametrize("repeat", [False, True])
def test_positions_equal_the_positions_of_arrays(repeat):
    def make(kind, batch_size):
        data = Rows() if kind is from_random_access else make_arrays()
        source = kind(data, batch_size=batch_size, shuffle_seed=2, repeat=repeat)
        return source.make_iterator(0)

    saved = make(from_arrays, 4)
    for _ in range(3):
        next(saved)
    iterator = make(from_random_access, 11)
    iterator.set_state(saved.get_state())
    other = make(from_arrays, 11)
    other.set_state(saved.get_state())
    assert list_values(next(iterator)) == list_values(next(other))
    assert iterator.get_state() == other.get_state()


def test_each_row_is_read_once_in_each_pass():
    rows = Rows()
    dataset = make_strategy(8).distribute_dataset(
        from_random_access(rows, batch_size=8, shuffle_seed=0),
        InputOptions(remainder="pad"),
    )
    rows.reads.clear()
    assert len(list(dataset)) == 3
    assert rows.reads == Counter(range(23))


def test_threads_read_the_rows_of_a_batch():
    rows = Rows()
    source = from_random_access(rows, batch_size=20, num_threads=4)
    rows.threads.clear()
    next(iter(source))
    assert all(name.startswith("armillary-rows") for name in rows.threads)


class OneAtATime(Rows):
    """Fails if two threads read at the same time, as many files do."""

    def __init__(self):
        super().__init__()
        self.is_busy = threading.Lock()

    def __getitem__(self, number):
        assert self.is_busy.acquire(blocking=False), "two threads read"
        try:
            time.sleep(0.002)
            return super().__getitem__(number)
        finally:
            self.is_busy.release()


def test_one_thread_at_a_time_reads_a_source():
    source = from_random_access(OneAtATime(), batch_size=2)
    dataset = armillary.distribute.DefaultStrategy().distribute_dataset(source)
    iterator = iter(dataset)
    next(iterator)  # The thread that reads ahead continues.
    assert "rows" in dataset.get_state()["order"]
    assert len(list(iterator)) == 11


def test_a_dataset_can_be_copied_and_sent():
    for num_threads in (1, 2):
        source = from_random_access(
            list(range(4)), batch_size=2, num_threads=num_threads
        )
        for made in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
            assert [batch.tolist() for batch in made] == [[0, 1], [2, 3]]


def test_several_rows_are_asked_for_at_once():
    rows = ManyRows()
    source = from_random_access(rows, batch_size=20, num_threads=4)
    rows.requests.clear()
    next(iter(source))
    assert rows.requests == [5, 5, 5, 5]


def test_the_batches_before_a_bad_row_are_used():
    class Bad(Rows):
        def __getitem__(self, number):
            if number == 9:
                raise OSError("file 9 is gone")
            return super().__getitem__(number)

    dataset = make_strategy(4).distribute_dataset(
        from_random_access(Bad(), batch_size=4)
    )
    feed = open_chunks(dataset, steps_per_chunk=20)
    with pytest.raises(OSError, match="file 9 is gone"):
        read_chunks(feed)
    assert dataset.get_state()["source"]["index"] == 8


# Fingerprints


def save(source):
    dataset = armillary.distribute.DefaultStrategy().distribute_dataset(source)
    next(iter(dataset))
    return json.loads(json.dumps(dataset.get_state()))


def test_a_position_of_other_data_is_refused():
    state = save(from_random_access(Rows(), batch_size=4, shuffle_seed=0))
    changed = make_arrays()
    changed["image"][22] = 0
    for other, text in (
        (from_random_access(Rows(changed), batch_size=4, shuffle_seed=0), "rows: #"),
        (from_random_access(Rows(), batch_size=4, shuffle_seed=1), "shuffle_seed: 0"),
        (from_random_access(Rows(make_arrays(24)), batch_size=4), "examples: 23"),
    ):
        dataset = armillary.distribute.DefaultStrategy().distribute_dataset(other)
        with pytest.raises(DatasetStateError, match=text):
            dataset.set_state(state)


def test_examples_with_random_changes_have_no_fingerprint():
    class Noisy(Rows):
        def __getitem__(self, number):
            return np.random.default_rng().random(3)

    source = from_random_access(Noisy(), batch_size=4)
    assert source.order_of_examples == {"examples": 23, "shuffle_seed": None}


# Mistakes


class Examples:
    def __init__(self, *examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, number):
        return self.examples[number]


class OfLength:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return number


class OnlyLength:
    def __len__(self):
        return 3


class TooFew(Rows):
    def __getitems__(self, numbers):
        return [self[number] for number in numbers[:-1]]


class NoList(Rows):
    def __getitems__(self, numbers):
        return jax.tree.map(lambda array: array[numbers], self.arrays)


MISTAKES = {
    "an iterator": (
        iter([1, 2]),
        TypeError,
        r"no `__len__` and no `__getitem__`.*dist",
    ),
    "a length alone": (
        OnlyLength(),
        TypeError,
        r"OnlyLength.* has no `__getitem__`, ",
    ),
    "a class": (Rows, TypeError, r"no `__len__` and no `__getitem__`"),
    "arrays": ({"x": np.ones(3)}, TypeError, r"dict of arrays.*Use `armillary.data.fr"),
    "no example": (OfLength(0), ValueError, r"`source` has 0 examples"),
    "a negative length": (
        OfLength(-1),
        ValueError,
        r"`len\(source\)` of the OfLen",
    ),
    "no whole number": (OfLength(1.5), ValueError, r"TypeError: 'float'.*`__len__`"),
    "no end": (OfLength(2**63 - 1), ValueError, r"repeats forever.*, repeat=True\)`"),
    "text": (Examples({"x": "a"}), TypeError, r"(?s)Example 0 of `source`.*x: ndarray"),
    "nothing": (Examples({}), TypeError, r"Example 0 of `source`.*holds no array"),
    "objects": (Examples(object()), TypeError, r"(?s)Example 0.*of dtype object"),
    "too few examples": (
        TooFew(),
        TypeError,
        r"called with 1 numbers.*list of 0 exa",
    ),
    "a batch": (
        NoList(),
        TypeError,
        r"returned dict, but.*one example for each number",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_source_that_gives_no_examples_is_an_error(mistake):
    source, error, text = MISTAKES[mistake]
    with pytest.raises(error, match=text):
        from_random_access(source, batch_size=2)


DIFFERENT = {
    "shape": (
        {"x": np.ones(3), "y": 2},
        r"\n  x: float64 \(3,\), but float64 \(2,\) ",
    ),
    "dtype": (
        {"x": np.ones(2), "y": 2.5},
        r"\n  y: float64 \(\), but int64 \(\) in",
    ),
    "more": (
        {"x": np.ones(2), "y": 2, "z": 1},
        r"\n  z: int64 \(\), but missing in",
    ),
    "fewer": ({"x": np.ones(2)}, r"\n  y: missing, but int64 \(\) in example 0\n"),
    "structure": (
        [("x", np.ones(2)), 2],
        r"\n  x: missing, but float64 \(2,\) in exam",
    ),
}


@pytest.mark.parametrize("difference", DIFFERENT)
def test_an_example_of_other_types_is_named(difference):
    other, text = DIFFERENT[difference]
    good = {"x": np.ones(2), "y": 1}
    source = from_random_access(Examples(good, good, other, good), batch_size=4)
    with pytest.raises(TypeError, match=rf"(?s)^Example 2 of `source` has.*{text}"):
        next(iter(source))


def test_an_example_with_masked_values_is_an_error():
    good = np.ma.masked_array([1.0, 2.0], mask=[False, False])
    masked = np.ma.masked_array([1.0, 2.0], mask=[False, True])
    message = (
        r"(?s)Example 1 of `source`, as a batch,.*MaskedArray.*values\.filled\(0\)"
    )
    with pytest.raises(TypeError, match=message):
        next(iter(from_random_access([good, masked], batch_size=2)))
    batch = next(iter(from_random_access([good, good], batch_size=2)))
    assert batch.tolist() == [[1.0, 2.0]] * 2


def test_wrong_options_are_errors():
    with pytest.raises(BatchSizeError, match="`batch_size` is 30, but there are 23"):
        from_random_access(Rows(), batch_size=30, drop_remainder=True)
    with pytest.raises(ValueError, match="`num_threads` is 0, but it must be a"):
        from_random_access(Rows(), batch_size=3, num_threads=0)
    with pytest.raises(TypeError, match=r"source \(random access\) has no arrays"):
        make_strategy(2).distribute_dataset(
            from_random_access(Rows(), batch_size=4),
            InputOptions(place_on_device=True),
        )


def test_a_value_that_does_not_fit_names_its_source(make_layout):
    class Wide(Rows):
        def __getitem__(self, number):
            return {"id": 2**40}

    dataset = DistributedDataset(
        from_random_access(Wide(), batch_size=2), make_layout(1)
    )
    with pytest.raises(ValueError, match="id: 1099511627776 in example 0, int64 that"):
        next(iter(dataset))
