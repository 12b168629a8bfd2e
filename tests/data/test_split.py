import re

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import DistributedDataset, InputOptions, from_arrays
from armillary.errors import BatchSizeError
from tests.feeds import open_reader


@pytest.fixture
def split(make_layout, read_all):
    """Returns all host batches of `source` on `num_replicas` replicas."""

    def split(source, num_replicas, *, exact=False, remainder=None, stacked=True, **kw):
        dataset = DistributedDataset(
            source,
            make_layout(num_replicas, stacked),
            options=InputOptions(remainder=remainder),
            **kw,
        )
        return read_all(dataset, exact)

    return split


def sized(*sizes):
    ends = np.cumsum(sizes)
    return [
        {"x": np.arange(end - size, end)} for size, end in zip(sizes, ends, strict=True)
    ]


def test_replicas_get_contiguous_rows(split):
    (batch,) = split(sized(6), 3)
    assert batch.num_active == 3
    assert batch.arrays["x"].tolist() == [[0, 1], [2, 3], [4, 5]]


def test_replica_batches_are_stacked_in_order(split):
    batches = split(sized(2, 2, 2, 2), 2, per_replica_batches=True)
    assert [batch.arrays["x"].tolist() for batch in batches] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]


@settings(max_examples=150, deadline=None)
@given(
    size=st.integers(1, 50),
    batch_size=st.integers(1, 16),
    num_replicas=st.integers(1, 4),
    per_replica_batches=st.booleans(),
    seed=st.none() | st.integers(0, 3),
)
def test_exact_uses_every_example_once(
    size,
    batch_size,
    num_replicas,
    per_replica_batches,
    seed,
    make_layout,
    examples,
    read_all,
):
    dataset = DistributedDataset(
        from_arrays(np.arange(size), batch_size=batch_size, shuffle_seed=seed),
        make_layout(num_replicas),
        per_replica_batches=per_replica_batches,
    )
    seen = []
    for batch in read_all(dataset, True):
        assert batch.arrays.shape[0] == num_replicas
        assert 1 <= batch.num_active <= num_replicas
        assert np.isin(batch.arrays, np.arange(size)).all()
        seen += examples(batch.arrays, batch.num_active)
    assert sorted(seen) == list(range(size))


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), max_size=12),
    num_replicas=st.integers(1, 4),
    per_replica_batches=st.booleans(),
)
def test_exact_and_pad_use_every_example_once_for_any_sizes(
    sizes, num_replicas, per_replica_batches, make_layout, examples
):
    expected = list(range(sum(sizes)))
    for remainder, exact in [(None, True), ("pad", True), ("pad", False)]:
        dataset = DistributedDataset(
            sized(*sizes),
            make_layout(num_replicas),
            per_replica_batches=per_replica_batches,
            options=InputOptions(remainder=remainder),
        )
        seen = []
        for batch in open_reader(dataset, exact=exact):
            rows = examples(batch.arrays["x"], batch.num_active)
            if remainder == "pad":
                assert batch.num_active == num_replicas
                mask = examples(batch.arrays["mask"], batch.num_active)
                rows = [row for row, kept in zip(rows, mask, strict=True) if kept]
            seen += rows
        assert sorted(seen) == expected


def test_exact_splits_a_global_batch_into_two_pieces(split):
    first, second = split(sized(10), 4, exact=True)
    assert first.arrays["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert first.num_active == 4
    assert second.arrays["x"].tolist() == [[8], [9], [8], [8]]
    assert second.num_active == 2


def test_exact_gives_a_tiny_batch_to_the_first_replicas(split):
    (batch,) = split(sized(2), 4, exact=True)
    assert (batch.arrays["x"].tolist(), batch.num_active) == ([[0], [1], [0], [0]], 2)


def test_exact_splits_unequal_replica_batches_by_size(split):
    batches = split(sized(4, 4, 3), 4, exact=True, per_replica_batches=True)
    assert [(b.arrays["x"].shape, b.num_active) for b in batches] == [
        ((4, 4), 2),
        ((4, 3), 1),
    ]


def test_without_a_replica_axis_any_size_fits(split):
    for exact in [False, True]:
        batches = split(sized(5, 3), 2, exact=exact, stacked=False)
        assert [b.arrays["x"].shape for b in batches] == [(5,), (3,)]
        assert [b.num_active for b in batches] == [2, 2]


def test_one_replica_takes_any_size(split):
    assert [b.arrays["x"].shape for b in split(sized(5, 3), 1)] == [(1, 5), (1, 3)]


def test_batches_without_rows_are_left_out(split):
    assert [b.arrays["x"].shape for b in split(sized(0, 4, 0, 4), 2)] == [(2, 2)] * 2


def test_the_exact_option_runs_a_batch_on_as_many_replicas_as_can_share_it(split):
    batches = split(sized(8, 6, 5), 4, remainder="exact")
    assert [b.arrays["x"].tolist() for b in batches] == [
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[8, 9, 10], [11, 12, 13]],
        [[14, 15, 16, 17, 18]],
    ]
    assert [(b.num_active, b.num_replicas) for b in batches] == [(4, 4), (2, 2), (1, 1)]
    assert all(b.is_last for b in batches)


def test_the_exact_option_joins_replica_batches(split):
    batches = split(
        sized(2, 2, 2, 1, 3), 2, remainder="exact", per_replica_batches=True
    )
    assert [b.arrays["x"].tolist() for b in batches] == [
        [[0, 1], [2, 3]],
        [[4, 5, 6]],
        [[7, 8, 9]],
    ]


def test_the_exact_option_means_smaller_pieces_in_an_evaluation(split):
    pieces = split(sized(10), 4, remainder="exact", exact=True)
    assert [b.num_active for b in pieces] == [4, 2]
    assert [b.num_replicas for b in pieces] == [4, 4]


@pytest.mark.parametrize(("sizes", "count"), [((6, 6, 6), 1), ((8, 8, 6), 0)])
def test_batches_that_all_run_on_fewer_replicas_are_told_of(
    split, caplog, sizes, count
):
    split(sized(*sizes), 4, remainder="exact")
    message = "Batches of 6 examples run on 2 of 4 replicas, and the other devices"
    assert caplog.text.count(message) == count


UNEQUAL = (
    "A batch has 10 examples, which 4 replicas cannot share equally (10 % 4 = 2). "
    "Use a batch size that is a multiple of 4, such as `8` or `12`, with "
    "`drop_remainder=True` if this is the last batch, or "
    '`InputOptions(remainder="exact")` to run it on fewer replicas, `"drop"` to leave '
    'examples out, or `"pad"` to fill up and get a `mask`.'
)
OF_REPLICAS = {"per_replica_batches": True}


@pytest.mark.parametrize(
    ("sizes", "num_replicas", "options", "message"),
    [
        ([10], 4, {}, re.escape(UNEQUAL)),
        ([8, 6, 8], 4, {}, r"A batch has 6 .* such as `4` or `8`"),
        ([4, 3], 2, OF_REPLICAS, r'have 4, 3 examples\. Batch.*"exact"'),
        ([4, 4], 3, OF_REPLICAS, "have 4, 4 examples and the data ends th"),
        ([3], 4, {"remainder": "drop"}, "A batch has 3 examples, fewer than the 4 rep"),
    ],
)
def test_batches_that_replicas_cannot_share_are_errors(
    split, sizes, num_replicas, options, message
):
    with pytest.raises(BatchSizeError, match=message):
        split(sized(*sizes), num_replicas, **options)


def test_drop_leaves_out_short_batches_and_excess_rows(split):
    batches = split(sized(6, 7, 5, 6), 4, remainder="drop")
    assert [b.arrays["x"].tolist() for b in batches] == [
        [[0], [1], [2], [3]],
        [[6], [7], [8], [9]],
        [[18], [19], [20], [21]],
    ]


def test_drop_leaves_out_short_replica_batches_and_incomplete_groups(split):
    batches = split(
        sized(2, 3, 1, 2, 2, 2), 2, remainder="drop", per_replica_batches=True
    )
    assert [b.arrays["x"].tolist() for b in batches] == [
        [[0, 1], [2, 3]],
        [[6, 7], [8, 9]],
    ]


def test_drop_compares_with_the_batch_size_of_arrays(split):
    dataset = from_arrays(np.arange(10), batch_size=4)
    assert len(split(dataset, 2, remainder="drop")) == 2
    small = from_arrays(np.arange(3), batch_size=4)
    assert [b.arrays.shape for b in split(small, 2, remainder="drop")] == [(2, 1)]


def test_pad_keeps_one_shape_and_marks_the_copies(split):
    batches = split(sized(6, 6, 2), 4, remainder="pad")
    assert [b.arrays["x"].shape for b in batches] == [(4, 2)] * 3
    assert batches[0].arrays["x"].reshape(-1).tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert batches[0].arrays["mask"].reshape(-1).tolist() == [True] * 6 + [False] * 2
    assert batches[2].arrays["mask"].dtype == np.dtype(bool)
    assert batches[2].arrays["x"].reshape(-1).tolist() == [12, 13] + [13] * 6


def test_pad_gives_replicas_without_data_only_copies(split):
    first, last = split(sized(2, 2, 1), 2, remainder="pad", per_replica_batches=True)
    assert first.arrays["mask"].all()
    assert last.arrays["x"].tolist() == [[4, 4], [4, 4]]
    assert last.arrays["mask"].tolist() == [[True, False], [False, False]]


@pytest.mark.parametrize("kind", [tuple, list])
def test_pad_adds_the_mask_as_the_last_item(split, kind):
    source = [kind([np.arange(size), np.ones(size)]) for size in (4, 3)]
    _, last = split(source, 2, remainder="pad")
    assert type(last.arrays) is kind
    rows, ones, mask = last.arrays
    assert rows.tolist() == [[0, 1], [2, 2]]
    assert ones.shape == mask.shape
    assert mask.tolist() == [[True, True], [True, False]]


def test_pad_needs_a_place_for_the_mask(split):
    with pytest.raises(TypeError, match=r'type ndarray, .*"pad".*entry `mask` of a di'):
        split([np.arange(4)], 2, remainder="pad")
    with pytest.raises(ValueError, match=r"have a leaf `mask` already.*Rename it"):
        split([{"x": np.arange(2), "mask": np.ones(2)}], 2, remainder="pad")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"x": (8, 3)}),
        ({"per_replica_batches": True}, {"x": (16, 3)}),
        ({"remainder": "exact", "num_replicas": 3}, {"x": (8, 3)}),
        ({"remainder": "drop", "num_replicas": 3}, {"x": (6, 3)}),
        ({"remainder": "pad", "num_replicas": 3}, {"x": (9, 3), "mask": (9,)}),
    ],
)
def test_element_spec_is_that_of_a_global_batch(options, expected, make_layout):
    options = dict(options)
    dataset = DistributedDataset(
        [{"x": np.zeros((8, 3))}],
        make_layout(options.pop("num_replicas", 2)),
        options=InputOptions(remainder=options.pop("remainder", None)),
        **options,
    )
    spec = dataset.element_spec
    assert {name: leaf.shape for name, leaf in spec.items()} == expected
    assert isinstance(spec["x"], jax.ShapeDtypeStruct)
    assert spec["x"].dtype == np.float32
