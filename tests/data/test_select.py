"""Tests of `select`: filters that run once, and are a part of the order."""

import re
import sys
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import from_arrays, from_random_access, pack, select
from armillary.errors import DatasetStateError
from tests.mistakes import mistakes
from tests.problems import make_strategy


def make_numbers(count=9):
    return [{"x": np.int32(10 * number)} for number in range(count)]


class Rows:
    """Examples that count their reads."""

    def __init__(self, examples):
        self.examples = examples
        self.reads = Counter()

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, number):
        self.reads[number] += 1
        return self.examples[number]


def read(examples):
    return [int(example["x"]) for example in examples]


@settings(deadline=None)
@given(kept=st.lists(st.booleans(), min_size=1, max_size=20).filter(any))
def test_all_forms_of_a_filter_keep_the_same_examples(kept):
    numbers = make_numbers(len(kept))
    expected = [10 * number for number in np.flatnonzero(kept)]
    forms = (
        select(numbers, lambda example: kept[example["x"] // 10]),
        select(numbers, lambda keep: keep, metadata=kept),
        select(numbers, kept),
        select(numbers, np.flatnonzero(kept)),
        select(numbers, lambda keep: bool(keep), metadata=np.array(kept)),
        select(
            numbers,
            lambda row: bool(row["keep"]),
            metadata=from_arrays({"keep": np.array(kept)}, batch_size=1),
        ),
        select(from_arrays({"x": np.arange(len(kept)) * 10}, batch_size=1), kept),
    )
    for selected in forms:
        assert read(selected) == expected
        assert len(selected) == len(expected)
        assert selected.numbers.tolist() == np.flatnonzero(kept).tolist()
        assert int(selected[-1]["x"]) == expected[-1]


def test_numbers_keep_their_order():
    assert read(select(make_numbers(), [4, 0, 7])) == [40, 0, 70]


def test_a_filter_of_metadata_reads_no_example():
    rows = Rows(make_numbers(23))
    selected = select(rows, lambda size: size > 20, metadata=list(range(23)))
    assert not rows.reads
    source = from_random_access(selected, batch_size=2)
    rows.reads.clear()
    next(iter(source))
    assert rows.reads == Counter([21, 22])
    assert repr(selected) == "SelectedExamples(2 of 23)"


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_arrays_are_examples_by_number(kind):
    rows = kind([[1, 2], [3, 4], [5, 6]])
    assert np.asarray([*select(rows, [2, 0])]).tolist() == [[5, 6], [1, 2]]
    (row,) = pack(rows, row_length=8)
    assert row["tokens"].tolist() == [1, 2, 3, 4, 5, 6, 0, 0]
    languages = np.array(["en", "de", "en"])
    english = select(rows, lambda language: language == "en", metadata=languages)
    assert english.numbers.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("name", "fix"), [("Series", "to_list()"), ("DataFrame", 'to_dict("records")')]
)
def test_data_that_is_found_by_labels_is_refused(name, fix, monkeypatch):
    kind = type(name, (list,), {"__module__": "pandas"})
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(**{name: kind}))
    message = re.escape(f"is a `pandas.{name}`") + ".*" + re.escape(f"metadata.{fix}`")
    with pytest.raises(TypeError, match=message):
        select([1, 2], bool, metadata=kind([1, 0]))


def test_filters_follow_one_another():
    first = select(make_numbers(), [1, 2, 5, 8])
    assert read(select(first, lambda example: example["x"] > 10)) == [20, 50, 80]


def test_a_position_of_another_filter_is_refused():
    # None of the examples that are compared by their content differ.
    numbers = make_numbers(100)
    kept = np.arange(100) % 3 == 0
    source = from_random_access(select(numbers, kept), batch_size=4)
    saved = make_strategy(1).distribute_dataset(source)
    next(iter(saved))
    state = saved.get_state()
    kept[[3, 4]] = False, True
    other = from_random_access(select(numbers, kept), batch_size=4)
    dataset = make_strategy(1).distribute_dataset(other)
    with pytest.raises(DatasetStateError, match=r"filter: #.* in the state, #"):
        dataset.set_state(state)
    # Nor if the filters come one after another.
    twice = from_random_access(select(select(numbers, kept), [0, 1, 2]), batch_size=1)
    once = from_random_access(select(numbers, [0, 4, 6]), batch_size=1)
    assert twice.order_of_examples != once.order_of_examples


@mistakes(
    {
        TypeError: {
            "`source` is 5 of type int, which has no `__len__`": (
                lambda: select(5, [0])
            ),
            "`source` is a dict of arrays": lambda: select({"x": np.ones(3)}, [0]),
            "`keep` is 'en' of type str, but it must be a filter": (
                lambda: select(make_numbers(), "en")
            ),
            "`keep` is 2 of type int": lambda: select(make_numbers(), 2),
            r"`keep` is \[\[0\], \[1, 2\]\] of type list, but": (
                lambda: select(make_numbers(), [[0], [1, 2]])
            ),
            "`keep` returned 0 of type int for example 0": (
                lambda: select(make_numbers(), lambda example: 0)
            ),
            "argument of a function `keep`, but `keep` is of type list": (
                lambda: select(make_numbers(), [0], metadata=[0] * 9)
            ),
            "`metadata` is 3 of type int, which has no": (
                lambda: select(make_numbers(), bool, metadata=3)
            ),
        },
        ValueError: {
            "`keep` keeps none of the 9 examples": (
                lambda: select(make_numbers(), [False] * 9)
            ),
            "`keep` keeps none of the 9 examples, but": (
                lambda: select(make_numbers(), [])
            ),
            "`keep` has the number 9, but `source` has the examples 0 to 8": (
                lambda: select(make_numbers(), [0, 9])
            ),
            "`keep` has the number 3 more than once.*armillary.data.mix": (
                lambda: select(make_numbers(), [3, 1, 3])
            ),
            "`keep` has length 2, but `source` has 9 examples": (
                lambda: select(make_numbers(), [True, False])
            ),
            "`metadata` has length 2, but `source` has 9 examples": (
                lambda: select(make_numbers(), bool, metadata=[True, False])
            ),
            "`source` is a dataset with `shuffle_seed=0`": (
                lambda: select(
                    from_arrays(np.ones(3), batch_size=1, shuffle_seed=0), [0]
                )
            ),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
