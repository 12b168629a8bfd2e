"""Tests of distributed datasets: iteration, passes, positions and resuming."""

import json
import threading
import time

import grain
import numpy as np
import pytest

from armillary.data import DistributedDataset, InputOptions, from_arrays
from armillary.errors import DatasetStateError
from tests import problems
from tests.data.contract import make_grain_loader
from tests.feeds import open_reader, wait_until
from tests.patience import patience

pytestmark = pytest.mark.usefixtures("prefetch_threads")

NUM_BATCHES = 5


class Positioned(problems.Positioned):
    batches = np.arange(4 * NUM_BATCHES).reshape(NUM_BATCHES, 4)


SOURCES = {
    "arrays": lambda: from_arrays(np.arange(20), batch_size=4, shuffle_seed=3),
    "repeated arrays": lambda: from_arrays(
        np.arange(7), batch_size=4, shuffle_seed=3, repeat=True
    ),
    "grain map": lambda: grain.MapDataset.range(20).shuffle(seed=3).batch(4),
    "grain iter": lambda: grain.MapDataset.range(20).to_iter_dataset().batch(4),
    "grain loader": lambda: make_grain_loader(20, shuffle_seed=3),
    "function": lambda: Positioned,
    "iterator": Positioned,
}


def make_batches(count=NUM_BATCHES, size=4):
    return [np.arange(size) + size * index for index in range(count)]


@pytest.fixture
def make_dataset(make_layout):
    def make(source, num_replicas=2, prefetch=2, **arguments):
        options = InputOptions(
            prefetch=prefetch, remainder=arguments.pop("remainder", None)
        )
        layout = make_layout(num_replicas)
        return DistributedDataset(source, layout, options=options, **arguments)

    return make


def read(iterator, count=100):
    batches = []
    for _ in range(count):
        try:
            batches.append(next(iterator).arrays.reshape(-1).tolist())
        except StopIteration:
            break
    return batches


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_iteration_gives_wrapped_batches_and_ends_again_and_again(
    make_dataset, prefetch
):
    iterator = iter(make_dataset(make_batches(2), prefetch=prefetch))
    first = next(iterator)
    assert (first.arrays.tolist(), first.active) == ([[0, 1], [2, 3]], (0, 1))
    assert len(list(iterator)) == 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_each_iter_is_the_next_epoch(make_dataset):
    dataset = make_dataset(SOURCES["arrays"]())
    epochs = [read(iter(dataset)) for _ in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert all(sorted(np.ravel(epoch)) == list(range(20)) for epoch in epochs)
    assert dataset.get_state()["epoch"] == 2


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("count", range(NUM_BATCHES + 1))
@pytest.mark.parametrize("kind", SOURCES)
def test_resume_in_a_new_program_equals_continuing(make_dataset, kind, count, prefetch):
    dataset = make_dataset(SOURCES[kind](), prefetch=prefetch)
    iterator = iter(dataset)
    read(iterator, count)
    state = json.loads(json.dumps(dataset.get_state()))
    rest = read(iterator, NUM_BATCHES)

    resumed = make_dataset(SOURCES[kind](), num_replicas=4, prefetch=prefetch)
    resumed.set_state(state)
    assert resumed.get_state() == state
    assert read(iter(resumed), NUM_BATCHES) == rest
    assert len(rest) == NUM_BATCHES - (0 if "repeated" in kind else count)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("kind", SOURCES)
def test_a_living_iterator_goes_back_and_forth(make_dataset, kind, prefetch):
    dataset = make_dataset(SOURCES[kind](), prefetch=prefetch)
    start = dataset.get_state()
    iterator = iter(dataset)
    everything = read(iterator, NUM_BATCHES)
    dataset.set_state(start)
    assert read(iterator, 2) == everything[:2]
    middle = dataset.get_state()
    assert read(iterator, NUM_BATCHES - 2) == everything[2:]
    dataset.set_state(middle)
    assert dataset.get_state() == middle
    assert read(iterator, NUM_BATCHES - 2) == everything[2:]


def test_the_state_counts_used_batches_and_not_batches_read_ahead(make_dataset):
    dataset = make_dataset(SOURCES["arrays"](), prefetch=3)
    assert dataset.get_state()["source"] is None
    iterator = iter(dataset)
    read(iterator, 1)
    time.sleep(0.02)
    state = dataset.get_state()
    assert state["source"] == {"epoch": 0, "index": 4, "num_examples": 20}
    assert (state["kind"], state["epoch"], state["full_size"]) == ("arrays", 0, 4)
    assert not state["exhausted"]


def test_a_thread_that_is_stuck_does_not_keep_the_old_pass(make_dataset):
    release = threading.Event()

    class Slow(Positioned):
        def __next__(self):
            if self.state["index"] == 3:
                assert release.wait(patience(120))
            return super().__next__()

    dataset = make_dataset(Slow)
    iterator = iter(dataset)
    first = read(iterator, 2)
    state = dataset.get_state()
    del iterator
    # The thread that watches a program may hold its last frame for a moment.
    wait_until(lambda: dataset._loan.feed() is None)
    dataset.set_state(state)
    release.set()
    assert first + read(iter(dataset)) == [batch.tolist() for batch in make_batches()]


@pytest.mark.parametrize("prefetch", [0, 2])
def test_errors_of_the_source_keep_their_traceback(make_dataset, prefetch):
    def read_file():
        raise OSError("no such file")

    def generate():
        yield np.arange(4)
        read_file()

    iterator = iter(make_dataset(generate, prefetch=prefetch))
    next(iterator)
    with pytest.raises(OSError, match="no such file") as caught:
        next(iterator)
    assert "read_file" in [entry.name for entry in caught.traceback]


def test_element_spec_of_a_pass_that_was_saved_at_its_last_batch(make_dataset):
    dataset = make_dataset(SOURCES["arrays"]())
    iterator = iter(dataset)
    read(iterator, NUM_BATCHES)
    restored = make_dataset(SOURCES["arrays"]())
    restored.set_state(dataset.get_state())
    assert restored.element_spec == dataset.element_spec
    assert read(iter(restored)) == []
    assert len(read(iter(restored))) == NUM_BATCHES


def test_element_spec_of_no_data_is_an_error(make_dataset):
    for source, name in [([], "iterable list"), (iter([]), "iterator")]:
        with pytest.raises(ValueError, match=rf"source \({name}\) has no batches"):
            _ = make_dataset(source).element_spec


def test_after_a_finished_pass_training_has_no_data_and_others_begin_the_next(
    make_dataset,
):
    dataset = make_dataset(SOURCES["arrays"]())
    read(iter(dataset))
    state = dataset.get_state()

    def resume():
        resumed = make_dataset(SOURCES["arrays"]())
        resumed.set_state(state)
        return resumed

    assert read(iter(resume())) == read(iter(dataset))
    assert list(open_reader(resume())) == []
    assert len(list(open_reader(resume(), in_pieces=True))) == NUM_BATCHES


@pytest.mark.parametrize(("remainder", "num_left"), [("drop", 0), ("pad", 1)])
def test_remainder_rules_survive_a_resume_before_the_short_batch(
    make_dataset, remainder, num_left
):
    def make():
        source = grain.MapDataset.range(10).batch(4).map(lambda rows: {"x": rows})
        return make_dataset(source, remainder=remainder)

    dataset = make()
    iterator = iter(dataset)
    for _ in range(2):
        next(iterator)
    resumed = make()
    resumed.set_state(dataset.get_state())
    assert [batch.arrays["x"].shape for batch in resumed] == [(2, 2)] * num_left


def test_states_that_do_not_fit_change_nothing(make_dataset):
    dataset = make_dataset(SOURCES["grain map"]())
    everything = read(iter(make_dataset(SOURCES["grain map"]())))
    iterator = iter(dataset)
    read(iterator, 2)
    state = dataset.get_state()
    message = (
        r"(?s)does not fit the source \(grain.MapDataset\).*"
        r"state: +{'next_index': 99}.*says: IndexError"
    )
    with pytest.raises(DatasetStateError, match=message):
        dataset.set_state(state | {"source": {"next_index": 99}})
    assert dataset.get_state() == state
    assert read(iterator) == everything[2:]


def test_sources_without_a_position_say_so(make_dataset):
    dataset = make_dataset(iter(make_batches()))
    message = r"The source \(iterator\) cannot be repositioned.*from_arrays"
    for ask in [
        dataset.check_repositionable,
        dataset.get_state,
        lambda: dataset.set_state({}),
    ]:
        with pytest.raises(DatasetStateError, match=message):
            ask()
    assert len(read(iter(dataset))) == NUM_BATCHES


def test_threads_end_with_the_pass_with_close_and_with_the_iterator(
    make_dataset, prefetch_threads
):
    dataset = make_dataset(SOURCES["repeated arrays"]())
    iterator = iter(dataset)
    for is_closed in (True, False):
        next(iterator)
        assert len(prefetch_threads()) == 1
        if is_closed:
            iterator.close()
            assert not prefetch_threads()
        iterator = iter(dataset)
        wait_until(lambda: not prefetch_threads())
    finite = iter(make_dataset(make_batches()))
    read(finite)
    wait_until(lambda: not prefetch_threads())
    for _ in dataset:
        break
    wait_until(lambda: not prefetch_threads())


@pytest.mark.parametrize("make", [make_batches, lambda: iter(make_batches())])
@pytest.mark.parametrize("count", [0, 1])
def test_element_spec_does_not_use_a_batch(make_dataset, make, count):
    dataset = make_dataset(make())
    if not count:
        assert dataset.element_spec.shape == (4,)
    iterator = iter(dataset)
    read(iterator, count)
    assert dataset.element_spec.dtype == np.int32
    assert len(read(iterator)) == NUM_BATCHES - count
