"""Tests of `pack`: every token once, a plan from lengths, and few places left empty."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import from_arrays, from_random_access, pack, select
from armillary.data.sources import _packing_plan
from armillary.data.sources._packing_plan import find_dtype, make_plan
from armillary.errors import DatasetStateError
from tests.mistakes import mistakes
from tests.problems import make_strategy

length_lists = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


def make_documents(lengths):
    """Returns documents in which each token has a number of its own, from 1."""
    ends = np.cumsum(lengths)
    return [
        np.arange(end - length, end, dtype=np.int32) + 1
        for end, length in zip(ends, lengths, strict=True)
    ]


class Documents:
    """Documents that count their reads."""

    def __init__(self, lengths):
        self.documents = make_documents(lengths)
        self.reads = Counter()

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, number):
        self.reads[number] += 1
        return self.documents[number]


def count_rows_of_best_fit(sizes, row_length):
    """Returns the number of rows of best-fit decreasing, one piece at a time."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            room = min(fitting)
            rooms.remove(room)
        else:
            room = row_length
        rooms.append(room - size)
    return len(rooms)


# Plans


@settings(deadline=None, max_examples=150)
@given(
    lengths=length_lists,
    row_length=st.integers(1, 20),
    window=st.none() | st.integers(1, 9),
)
def test_a_plan_has_every_token_once(lengths, row_length, window):
    plan = make_plan(np.asarray(lengths), row_length, window)
    found = Counter()
    for row in range(plan.num_rows):
        own = slice(plan.bounds[row], plan.bounds[row + 1])
        assert 0 < plan.sizes[own].sum() <= row_length
        documents = plan.documents[own]
        if window is not None:
            assert len(set(documents // window)) == 1
        pieces = zip(documents, plan.starts[own], plan.sizes[own], strict=True)
        for document, start, size in pieces:
            found.update((document, place) for place in range(start, start + size))
    assert found == Counter(
        (document, place)
        for document, length in enumerate(lengths)
        for place in range(length)
    )


@settings(deadline=None, max_examples=150)
@given(lengths=length_lists, row_length=st.integers(1, 20))
def test_a_plan_has_the_rows_of_best_fit_decreasing(lengths, row_length):
    plan = make_plan(np.asarray(lengths), row_length)
    expected = count_rows_of_best_fit(plan.sizes.tolist(), row_length)
    assert plan.num_rows == expected


def test_a_plan_of_typical_documents_fills_its_rows():
    lengths = np.random.default_rng(0).lognormal(5, 1, 5000).astype(int)
    for window, least in ((None, 0.999), (200, 0.98)):
        plan = make_plan(lengths, 1024, window)
        assert lengths.sum() / (plan.num_rows * 1024) > least


def test_a_plan_has_32_bits_if_its_numbers_fit(monkeypatch):
    lengths = np.array([5, 0, 30, 9, 12, 7])
    documents = make_documents(lengths)
    narrow = make_plan(lengths, 8)
    text = pack(documents, row_length=8).fingerprints()
    assert (find_dtype(2**31 - 1), find_dtype(2**31)) == (np.int32, np.int64)

    monkeypatch.setattr(_packing_plan, "find_dtype", lambda most: np.int64)
    wide = make_plan(lengths, 8)
    assert pack(documents, row_length=8).fingerprints() == text
    for name, numbers in vars(wide).items():
        own = getattr(narrow, name)
        assert (own.dtype, numbers.dtype) == (np.int32, np.int64)
        np.testing.assert_array_equal(own, numbers)


def test_a_document_may_have_more_tokens_than_32_bits_count():
    plan = make_plan(np.array([2**31 + 5]), 2**30)
    assert plan.starts.tolist() == [0, 2**30, 2**31]
    assert plan.sizes.tolist() == [2**30, 2**30, 5]


# Rows


@settings(deadline=None, max_examples=100)
@given(
    lengths=length_lists,
    row_length=st.integers(1, 20),
    window=st.none() | st.integers(1, 9),
)
def test_rows_hold_every_token_once(lengths, row_length, window):
    packed = pack(make_documents(lengths), row_length=row_length, window=window)
    rows = list(packed)
    used = [row["tokens"][row["segment_ids"] > 0] for row in rows]
    assert sorted(np.concatenate(used).tolist()) == list(range(1, sum(lengths) + 1))
    for row in rows:
        segments = row["segment_ids"]
        assert not row["tokens"][segments == 0].any()
        assert not row["positions"][segments == 0].any()
        for segment in range(1, segments.max() + 1):
            own = segments == segment
            assert np.all(np.diff(np.flatnonzero(own)) == 1)
            assert row["positions"][own].tolist() == list(range(own.sum()))
            assert np.all(np.diff(row["tokens"][own]) == 1)
    share = sum(lengths) / (len(rows) * row_length)
    assert packed.efficiency == share == np.mean([r["segment_ids"] > 0 for r in rows])


@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(
        lambda lengths: max(lengths) > 1
    ),
    row_length=st.integers(1, 20),
)
def test_targets_are_every_next_token_once(lengths, row_length):
    packed = pack(make_documents(lengths), row_length=row_length, targets=True)
    found = []
    for row in packed:
        used = row["segment_ids"] > 0
        found += zip(row["tokens"][used], row["targets"][used], strict=True)
    expected = [
        pair
        for document in make_documents(lengths)
        for pair in itertools.pairwise(document)
    ]
    assert sorted(found) == expected


def test_a_row_reads_only_its_own_documents():
    lengths = [3, 9, 2, 4, 17, 1, 8]
    documents = Documents(lengths)
    packed = pack(documents, row_length=8, lengths=lengths)
    for number in range(len(packed)):
        documents.reads.clear()
        row = packed[number]
        tokens = row["tokens"][row["segment_ids"] > 0]
        ends = np.cumsum(lengths)
        own = set(np.searchsorted(ends, tokens - 1, side="right").tolist())
        assert documents.reads == Counter(own)
    # A document in several rows is read once for all of them.
    documents.reads.clear()
    packed.__getitems__(range(len(packed)))
    assert documents.reads == Counter(range(7))


def test_lengths_are_read_once():
    documents = Documents([3, 9, 2, 0])
    packed = pack(documents, row_length=8)
    assert documents.reads == Counter({0: 2, 1: 1, 2: 1, 3: 1})
    given_lengths = pack(Documents([3, 9, 2, 0]), row_length=8, lengths=[3, 9, 2, 0])
    for own, other in zip(packed, given_lengths, strict=True):
        np.testing.assert_array_equal(own["tokens"], other["tokens"])


def test_documents_may_have_several_arrays():
    documents = [
        {"ids": np.arange(size), "vectors": np.full((size, 2), size, np.float32)}
        for size in (2, 3)
    ]
    (row,) = pack(documents, row_length=6)
    assert row["ids"].tolist() == [0, 1, 0, 1, 2, 0]
    assert row["vectors"][:, 1].tolist() == [2, 2, 3, 3, 3, 0]


@pytest.mark.parametrize("row_length", [2, 3, 16])
def test_the_weight_of_a_target_is_the_weight_of_the_next_token(row_length):
    weights = np.array([0.0, 0.0, 1.0, 1.0, 0.5], np.float32)
    shifted = np.append(weights[1:], np.float32(0))
    tokens = np.array([10, 11, 12, 13, 14])
    document = {"tokens": tokens, "weights": shifted}
    rows = list(pack([document] * 2, row_length=row_length, targets=True))
    found = Counter()
    for row in rows:
        own = row["segment_ids"] > 0
        pairs = zip(row["targets"][own], row["weights"][own], strict=True)
        found.update((int(target), float(weight)) for target, weight in pairs)
    assert found == {(11, 0): 2, (12, 1): 2, (13, 1): 2, (14, 0.5): 2}


def test_packed_rows_show_their_share():
    packed = pack(make_documents([8, 6]), row_length=8)
    assert repr(packed) == "PackedExamples(2 rows of 8 places, 87.5% filled)"
    assert packed[-1]["segment_ids"].tolist() == [1, 1, 1, 1, 1, 1, 0, 0]
    with pytest.raises(IndexError):
        packed[2]


def test_packed_rows_are_read_by_number_and_shuffled():
    packed = pack(make_documents([5, 8, 3, 8, 2]), row_length=8)
    source = from_random_access(packed, batch_size=4, shuffle_seed=0, repeat=True)
    strategy = make_strategy(4)
    iterator = iter(strategy.distribute_dataset(source))
    tokens = [
        strategy.gather(next(iterator)["tokens"], axis=0).ravel() for _ in range(2)
    ]
    counts = Counter(np.concatenate(tokens).tolist())
    assert {counts[token] for token in range(1, 27)} == {2}


def test_a_position_of_another_plan_is_refused():
    documents = make_documents([5, 8, 3, 8, 2, 6])

    def make(**options):
        packed = pack(documents, **({"row_length": 8} | options))
        return from_random_access(packed, batch_size=1)

    saved = make_strategy(1).distribute_dataset(make())
    next(iter(saved))
    state = saved.get_state()
    other = make_strategy(1).distribute_dataset(make(window=2))
    with pytest.raises(DatasetStateError, match=r"packing: 4 rows of 8 #.*in the s"):
        other.set_state(state)


# Mistakes


@mistakes(
    {
        TypeError: {
            "`documents` is .* of type int, which has no `__len__`": (
                lambda: pack(3, row_length=8)
            ),
            "Document 0 of `documents` is 'text' of type str, but": (
                lambda: pack(["text"], row_length=8)
            ),
            r"Document 1 of `documents` has tokens: float64 \(\), but other docu": (
                lambda: pack([np.arange(3), np.ones(3)], row_length=8)[0]
            ),
        },
        ValueError: {
            "`row_length` is 0": lambda: pack([np.arange(3)], row_length=0),
            "`window` is 0": lambda: pack([np.arange(3)], row_length=3, window=0),
            "`targets` is 3": lambda: pack([np.arange(3)], row_length=3, targets=3),
            "2 documents, of which none has 2 or more tokens": (
                lambda: pack([np.arange(1)] * 2, row_length=8, targets=True)
            ),
            "Document 0 of `documents` has arrays of different lengths": (
                lambda: pack([{"a": np.ones(2), "b": np.ones(3)}], row_length=8)
            ),
            "has an array `positions`, a name that `pack` gives": (
                lambda: pack([{"positions": np.ones(2)}], row_length=8)
            ),
            "`targets` is True, but document 0 of `documents` has no array `tokens`": (
                lambda: pack([{"ids": np.ones(2)}], row_length=8, targets=True)
            ),
            "`lengths` has 2 entries, but `documents` has 1": (
                lambda: pack([np.arange(3)], row_length=8, lengths=[3, 3])
            ),
            "`lengths` is .-1., but it must be a list of whole numbers": (
                lambda: pack([np.arange(3)], row_length=8, lengths=[-1])
            ),
            "Document 0 of `documents` has 3 tokens, but it had 4 when": (
                lambda: pack([np.arange(3)], row_length=8, lengths=[4])[0]
            ),
            "`documents` is a dataset with `repeat=True`": (
                lambda: pack(
                    from_arrays(np.ones((3, 2)), batch_size=1, repeat=True),
                    row_length=8,
                )
            ),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_document_with_masked_tokens_is_an_error():
    tokens = np.ma.masked_array([1, 2, 3], mask=[False, False, True])
    with pytest.raises(TypeError, match=r"Document 1 .*masked.*`tokens\.filled\(0\)`"):
        pack([np.arange(3), tokens], row_length=4)


def test_selected_documents_are_packed():
    documents = Documents([3, 9, 2, 4])
    packed = pack(select(documents, [1, 3]), row_length=16)
    (row,) = packed
    assert row["tokens"].tolist() == [*range(4, 13), *range(15, 19), 0, 0, 0]
