"""Tests of how batches are divided into pieces for the replicas."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armillary.data import (
    DistributedDataset,
    InputContext,
    InputOptions,
    from_arrays,
)
from armillary.errors import BatchSizeError


@pytest.fixture
def split(make_layout, read_all):
    """Returns all pieces of `source` on `num_replicas` replicas."""

    def split(
        source, num_replicas, *, in_pieces=False, remainder=None, stacked=True, **kw
    ):
        dataset = DistributedDataset(
            source,
            make_layout(num_replicas, stacked),
            options=InputOptions(remainder=remainder),
            **kw,
        )
        return read_all(dataset, in_pieces)

    return split


def sized(*sizes):
    ends = np.cumsum(sizes)
    return [
        {"x": np.arange(end - size, end)} for size, end in zip(sizes, ends, strict=True)
    ]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), max_size=12)
    | st.tuples(st.integers(1, 50), st.integers(1, 16), st.none() | st.integers(0, 3)),
    num_replicas=st.integers(1, 4),
    per_replica_batches=st.booleans(),
    how=st.sampled_from([(None, True), ("pad", True), ("pad", False)]),
)
def test_exact_and_pad_use_every_example_once(
    sizes, num_replicas, per_replica_batches, how, make_layout, read_all, examples
):
    if isinstance(sizes, tuple):
        count, batch_size, seed = sizes
        arrays = {"x": np.arange(count)}
        source = from_arrays(arrays, batch_size=batch_size, shuffle_seed=seed)
    else:
        source, count = sized(*sizes), sum(sizes)
    remainder, in_pieces = how
    dataset = DistributedDataset(
        source,
        make_layout(num_replicas),
        per_replica_batches=per_replica_batches,
        options=InputOptions(remainder=remainder),
    )
    seen = []
    for piece in read_all(dataset, in_pieces):
        assert piece.arrays["x"].shape[0] == num_replicas
        assert 1 <= len(piece.active) <= num_replicas
        rows = examples(piece.arrays["x"], piece.active)
        if remainder == "pad":
            assert len(piece.active) == num_replicas
            mask = examples(piece.arrays["mask"], piece.active)
            rows = [row for row, kept in zip(rows, mask, strict=True) if kept]
        seen += rows
    assert sorted(seen) == list(range(count))


OF_REPLICAS = {"per_replica_batches": True}
EXACT, DROP = {"remainder": "exact"}, {"remainder": "drop"}
PIECES = {
    "batches of replicas in order": (
        (2, 2, 2, 2),
        2,
        OF_REPLICAS,
        [([[0, 1], [2, 3]], 2), ([[4, 5], [6, 7]], 2)],
    ),
    "two pieces in an evaluation": (
        (10,),
        4,
        {"in_pieces": True},
        [([[0, 1], [2, 3], [4, 5], [6, 7]], 4), ([[8], [9], [8], [8]], 2)],
    ),
    "replica batches by size in an evaluation": (
        (2, 2, 1),
        3,
        {"in_pieces": True} | OF_REPLICAS,
        [([[0, 1], [2, 3], [0, 1]], 2), ([[4], [4], [4]], 1)],
    ),
    "any size without a replica axis": (
        (3, 1),
        2,
        {"stacked": False},
        [([0, 1, 2], 2), ([3], 2)],
    ),
    "exact: as many replicas as can share it": (
        (8, 6, 5),
        4,
        EXACT,
        [
            ([[0, 1], [2, 3], [4, 5], [6, 7]], 4),
            ([[8, 9, 10], [11, 12, 13]], 2),
            ([[14, 15, 16, 17, 18]], 1),
        ],
    ),
    "exact: replica batches joined": (
        (2, 2, 2, 1, 3),
        2,
        EXACT | OF_REPLICAS,
        [([[0, 1], [2, 3]], 2), ([[4, 5, 6]], 1), ([[7, 8, 9]], 1)],
    ),
    "drop: short batches and excess rows": (
        (6, 7, 5, 6),
        4,
        DROP,
        [
            ([[0], [1], [2], [3]], 4),
            ([[6], [7], [8], [9]], 4),
            ([[18], [19], [20], [21]], 4),
        ],
    ),
    "drop: short replica batches and incomplete groups": (
        (2, 3, 1, 2, 2, 2),
        2,
        DROP | OF_REPLICAS,
        [([[0, 1], [2, 3]], 2), ([[6, 7], [8, 9]], 2)],
    ),
}


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_are_these(split, kind):
    sizes, num_replicas, options, expected = PIECES[kind]
    pieces = split(sized(*sizes), num_replicas, **options)
    assert [(p.arrays["x"].tolist(), len(p.active)) for p in pieces] == expected
    if options.get("remainder") == "exact" and not options.get("in_pieces"):
        assert all(p.num_replicas == len(p.active) and p.is_last for p in pieces)
    else:
        assert {p.num_replicas for p in pieces} == {num_replicas}


@pytest.mark.parametrize(
    ("sizes", "num_replicas", "options", "message"),
    [
        ([8, 6, 8], 4, {}, r'has 6 examples, which 4.*\(6 % 4 = 2\).*"exact".*"pad"'),
        ([4, 3], 2, OF_REPLICAS, r'have 4, 3 examples\. Batch.*"exact"'),
        ([4, 4], 3, OF_REPLICAS, "have 4, 4 examples and the data ends th"),
        ([3], 4, DROP, "A batch has 3 examples, fewer than the 4 rep"),
    ],
)
def test_batches_that_replicas_cannot_share_are_errors(
    split, sizes, num_replicas, options, message
):
    with pytest.raises(BatchSizeError, match=message):
        split(sized(*sizes), num_replicas, **options)


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
    ("remainder", "per_replica_batches", "rows"),
    [(None, True, 24), ("exact", False, 8), ("drop", False, 6), ("pad", False, 9)],
)
def test_element_spec_describes_a_global_batch(
    remainder, per_replica_batches, rows, make_layout
):
    spec = DistributedDataset(
        [{"x": np.zeros((8, 3))}],
        make_layout(3),
        per_replica_batches=per_replica_batches,
        options=InputOptions(remainder=remainder),
    ).element_spec
    assert (spec["x"].shape, spec["x"].dtype) == ((rows, 3), np.float32)
    assert (remainder == "pad") == ("mask" in spec)
    assert all(leaf.shape[0] == rows for leaf in spec.values())


def test_the_batch_size_of_a_replica_is_an_equal_share():
    assert InputContext(num_replicas_in_sync=4).get_per_replica_batch_size(64) == 16
    message = r"100, which 8 replicas .* \(100 % 8 = 4\).*multiple of 8"
    with pytest.raises(BatchSizeError, match=message):
        InputContext(num_replicas_in_sync=8).get_per_replica_batch_size(100)
