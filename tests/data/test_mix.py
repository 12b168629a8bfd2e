"""Tests of `mix`: shares that are exact, epochs of each source, and one position."""

import json
from fractions import Fraction

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import (
    InputOptions,
    from_arrays,
    mix,
    pack,
    select,
)
from armillary.data.sources import _proportions
from armillary.data.sources._arrays import ArrayDataset
from armillary.data.sources._proportions import Proportions
from armillary.errors import DatasetStateError
from tests.mistakes import mistakes
from tests.problems import make_strategy

weight_lists = st.lists(
    st.one_of(st.just(0.0), st.floats(1e-6, 1e3)), min_size=1, max_size=9
).filter(any)


def make_rows(source, count):
    """Returns rows that name their source and their number there."""
    numbers = np.arange(count, dtype=np.int32)
    return {"source": np.full(count, source, np.int32), "number": numbers}


def make_mix(sizes, weights, **options):
    sources = {f"s{n}": make_rows(n, size) for n, size in enumerate(sizes)}
    return mix(sources, weights, **({"batch_size": 4, "shuffle_seed": 0} | options))


def read(dataset, num_batches, state=None, epoch=0):
    """Returns the source and the number of each row of some batches, and a state."""
    iterator = dataset.make_iterator(epoch)
    if state is not None:
        iterator.set_state(state)
    batches = [next(iterator) for _ in range(num_batches)]
    pairs = [
        pair
        for batch in batches
        for pair in zip(batch["source"].tolist(), batch["number"].tolist(), strict=True)
    ]
    return pairs, iterator.get_state()


# Shares


@settings(deadline=None, max_examples=60)
@given(weights=weight_lists, start=st.integers(0, 10**12), count=st.integers(1, 300))
def test_shares_are_exact_after_any_number_of_rows(weights, start, count):
    proportions = Proportions(weights)
    choices, before = proportions.choose(start, start + count)
    counts = proportions.count(start)
    assert sum(counts) == start
    total = sum(map(Fraction, weights))
    shares = [Fraction(weight) / total for weight in weights]
    # With up to three sources, rounding is all that differs.
    most = 1 if len(weights) <= 3 else 1.7
    for row, (choice, earlier) in enumerate(zip(choices, before, strict=True)):
        assert earlier == counts[choice]
        assert weights[choice] > 0
        counts[choice] += 1
        for own, share in zip(counts, shares, strict=True):
            # Weights are rounded to 40 bits, which is 1 row of 10**12.
            assert abs(own - share * (start + row + 1)) <= most + 1
    assert proportions.count(start + count) == counts


@settings(deadline=None, max_examples=60)
@given(weights=weight_lists)
def test_shares_of_the_first_rows_are_rounded_at_most(weights):
    choices, _ = Proportions(weights).choose(0, 400)
    shares = np.asarray(weights) / sum(weights)
    counts = np.cumsum(choices[:, None] == np.arange(len(weights)), axis=0)
    expected = np.arange(1, 401)[:, None] * shares
    most = {1: 0, 2: 0.5, 3: 1}.get(len(weights), 1.7)
    assert np.max(np.abs(counts - expected)) <= most + 1e-6


def test_many_rows_are_chosen_in_parts(monkeypatch):
    expected = Proportions([5, 3, 2]).choose(7, 107)
    monkeypatch.setattr(_proportions, "_MAX_ROWS", 16)
    found = Proportions([5, 3, 2]).choose(7, 107)
    np.testing.assert_array_equal(found, expected)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), num_sources=st.integers(1, 4), batch_size=st.integers(1, 7))
def test_weights_change_at_their_step(data, num_sources, batch_size):
    steps = [0, *sorted(data.draw(st.sets(st.integers(1, 30), max_size=3)))]
    one = st.lists(st.integers(0, 9), min_size=num_sources, max_size=num_sources)
    weights = {step: data.draw(one.filter(any)) for step in steps}
    dataset = make_mix([7] * num_sources, weights, batch_size=batch_size)

    pairs, _ = read(dataset, 40)
    sources = np.array([source for source, _ in pairs])
    shares = np.empty((len(sources), num_sources))
    for step, end in zip(steps, [*steps[1:], 40], strict=True):
        own = sources[step * batch_size : end * batch_size]
        assert not np.isin(own, np.flatnonzero(np.array(weights[step]) == 0)).any()
        shares[step * batch_size : end * batch_size] = weights[step]
        counts = np.bincount(own, minlength=num_sources)
        before = dataset.count_rows(step)
        after = dataset.count_rows(end)
        assert [after[name] - before[name] for name in after] == counts.tolist()
    shares /= shares.sum(1, keepdims=True)
    found = np.cumsum(sources[:, None] == np.arange(num_sources), axis=0)
    assert np.max(np.abs(found - np.cumsum(shares, axis=0))) < 2


@settings(deadline=None, max_examples=40)
@given(
    data=st.data(),
    num_choices=st.integers(1, 9),
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=20),
)
def test_shares_are_exact_if_weights_change_at_each_step(data, num_choices, lengths):
    one = st.lists(
        st.just(0.0) | st.floats(1e-3, 1e3), min_size=num_choices, max_size=num_choices
    )
    counts = [0] * num_choices
    expected = [Fraction(0)] * num_choices
    owed = None
    for length in lengths:
        weights = data.draw(one.filter(any))
        proportions = Proportions(weights, owed)
        total = sum(map(Fraction, weights))
        choices, before = proportions.choose(0, length)
        earlier = list(counts)
        for choice, count in zip(choices.tolist(), before.tolist(), strict=True):
            assert weights[choice] > 0
            assert counts[choice] - earlier[choice] == count
            counts[choice] += 1
            for each, weight in enumerate(weights):
                expected[each] += Fraction(weight) / total
                assert abs(counts[each] - expected[each]) < 2
        owed = proportions.find_owed(length)
        for each in range(num_choices):
            exact = expected[each] - counts[each]
            assert abs(Fraction(owed[each], 2**40) - exact) < 1e-6


def test_a_small_share_is_read_if_weights_change_at_each_step():
    # Each step alone would be rounded to no row of the second source.
    weights = {step: [95 - step / 1000, 5 + step / 1000] for step in range(1000)}
    dataset = make_mix([100, 100], weights, batch_size=8)
    share = sum(8 * second / 100 for _, second in weights.values())
    assert dataset.count_rows(1000)["s1"] == round(share) == 440


def test_weights_are_numbers_of_examples_by_default():
    assert make_mix([30, 10], None).count_rows(10) == {"s0": 30, "s1": 10}


def test_weights_have_names_or_an_order():
    expected, _ = read(make_mix([9, 9], {0: [3, 1], 5: [1, 3]}), 10)
    by_name = {0: {"s1": 1, "s0": 3}, 5: {"s1": 3, "s0": 1}}
    assert read(make_mix([9, 9], by_name), 10)[0] == expected
    constant, _ = read(make_mix([9, 9], {"s1": 1, "s0": 3}), 5)
    assert constant == expected[: len(constant)]
    assert read(make_mix([9, 9], np.array([3, 1])), 5)[0] == constant


# Epochs


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    seed=st.none() | st.integers(0, 5),
)
def test_a_row_is_repeated_only_after_all_rows_of_its_source(sizes, batch_size, seed):
    weights = list(range(1, len(sizes) + 1))
    dataset = make_mix(sizes, weights, batch_size=batch_size, shuffle_seed=seed)
    pairs, _ = read(dataset, 20)
    for source, size in enumerate(sizes):
        own = [number for name, number in pairs if name == source]
        for start in range(0, len(own), size):
            epoch = own[start : start + size]
            if len(epoch) == size:
                assert sorted(epoch) == list(range(size))
            assert len(set(epoch)) == len(epoch)
            if seed is None:
                assert epoch == list(range(len(epoch)))


def test_epochs_and_sources_have_different_orders():
    pairs, _ = read(make_mix([50, 50], [1, 1]), 50)
    first, second = ([n for s, n in pairs if s == source] for source in (0, 1))
    orders = [first[:50], first[50:], second[:50], second[50:]]
    assert len({tuple(order) for order in orders}) == 4
    other_seed, _ = read(make_mix([50, 50], [1, 1], shuffle_seed=1), 50)
    assert other_seed != pairs
    next_pass, _ = read(make_mix([50, 50], [1, 1]), 50, epoch=1)
    assert next_pass != pairs


def test_one_source_has_the_order_of_arrays():
    rows = make_rows(0, 10)
    expected = from_arrays(rows, batch_size=4, shuffle_seed=3, repeat=True)
    mixed = mix({"only": rows}, batch_size=4, shuffle_seed=3)
    assert read(mixed, 9)[0] == read(expected, 9)[0]


# Positions


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    stop=st.integers(0, 15),
)
def test_a_position_continues_at_the_next_row(sizes, batch_size, stop):
    weights = {0: [1] * len(sizes), 6: list(range(1, len(sizes) + 1))}
    expected, _ = read(make_mix(sizes, weights, batch_size=batch_size), 20)
    begun, state = read(make_mix(sizes, weights, batch_size=batch_size), stop)
    state = json.loads(json.dumps(state))
    again = make_mix(sizes, weights, batch_size=batch_size)
    rest, _ = read(again, 20 - stop, state)
    assert begun + rest == expected
    assert state["index"] == stop * batch_size


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    num_processes=st.sampled_from([1, 2, 3, 4]),
    rows_each=st.integers(1, 3),
)
def test_processes_read_together_the_rows_of_one(sizes, num_processes, rows_each):
    batch_size = num_processes * rows_each
    dataset = make_mix(sizes, None, batch_size=batch_size)
    numbers = dataset.iterate(0, lambda rows: rows)
    batches = dataset.make_iterator(0)
    for _ in range(6):
        rows = next(numbers)
        parts = [
            dataset.take_examples(own, np.zeros_like(own))
            for own in np.split(rows, num_processes)
        ]
        joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
        jax.tree.map(np.testing.assert_array_equal, joined, next(batches))


def test_weights_of_later_steps_may_change():
    _, state = read(make_mix([5, 9], {0: [1, 2], 20: [1, 1]}), 10)
    later = make_mix([5, 9], {0: [1, 2], 12: [5, 1]})
    assert (
        read(later, 3, state)[0]
        == read(make_mix([5, 9], [1, 2]), 13)[0][40:48] + (read(later, 13)[0][48:])
    )
    with pytest.raises(DatasetStateError, match=r"after 40 rows.*\n  s0: 13 in the st"):
        read(make_mix([5, 9], {0: [1, 2], 5: [1, 1]}), 1, state)
    # Without an earlier change of weights, the batch size may change.
    wider = make_mix([5, 9], [1, 2], batch_size=8)
    expected, _ = read(make_mix([5, 9], [1, 2]), 14)
    assert read(wider, 2, state)[0] == expected[40:]


def test_a_position_of_other_sources_is_refused():
    strategy = armillary.distribute.DefaultStrategy()
    dataset = strategy.distribute_dataset(make_mix([5, 9], None))
    next(iter(dataset))
    state = json.loads(json.dumps(dataset.get_state()))
    for other, text in (
        (make_mix([5, 10], [5, 9]), "s1: examples: 9 in the state, 10"),
        (make_mix([5, 9], None, shuffle_seed=1), "shuffle_seed: 0 in the state, 1"),
        (mix({"other": make_rows(0, 14)}, batch_size=4), r"sources: \['s0', 's1'\]"),
    ):
        with pytest.raises(DatasetStateError, match=text):
            strategy.distribute_dataset(other).set_state(state)


def test_replicas_share_the_batches_of_a_mixture():
    expected, _ = read(make_mix([5, 9], [1, 2], batch_size=8), 5)
    strategy = make_strategy(4)
    dataset = strategy.distribute_dataset(
        make_mix([5, 9], [1, 2], batch_size=8), InputOptions(prefetch=0)
    )
    found = []
    iterator = iter(dataset)
    for _ in range(5):
        batch = strategy.gather(next(iterator), axis=0)
        found += zip(batch["source"].tolist(), batch["number"].tolist(), strict=True)
    assert found == expected
    state = dataset.get_state()["source"]
    assert state["index"] == 40
    assert state["used"] == {"s0": 13, "s1": 27}


# Sources


class Numbers:
    def __init__(self, count, dtype=np.int32):
        self.count = count
        self.dtype = dtype

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        return {"x": self.dtype(number)}


def test_sources_of_all_kinds_are_mixed():
    x = np.arange(6, dtype=np.int32)
    dataset = mix(
        {
            "arrays": {"x": x},
            "dataset": from_arrays({"x": x + 10}, batch_size=3),
            "examples": Numbers(6),
            "some": select(Numbers(9), [7, 8]),
        },
        batch_size=20,
        num_threads=2,
    )
    batch = next(dataset.make_iterator(0))
    assert sorted(batch["x"].tolist()) == sorted(
        [*range(6), *range(10, 16), *range(6), 7, 8]
    )


class OneShort(ArrayDataset):
    """Rows of three numbers, of which a read of row 2 alone gives one number."""

    def __init__(self):
        super().__init__({"x": np.arange(15.0).reshape(5, 3)}, 1, None, False, False)

    def read_rows(self, rows):
        read = super().read_rows(rows)
        return {"x": read["x"][:, :1]} if rows.tolist() == [2] else read


def test_rows_are_never_repeated_to_fit():
    sources = {"short": OneShort(), "other": {"x": np.zeros((5, 3))}}
    dataset = mix(sources, [1, 1], batch_size=2)
    batches = dataset.make_iterator(0)
    next(batches)
    next(batches)
    text = (
        r"(?s)^Example 2 of `sources\['short'\]` has.*x: float64 \(1,\), but .*\(3,\)"
    )
    with pytest.raises(TypeError, match=text):
        next(batches)


def make_two(weights, **options):
    sources = {"web": Numbers(4), "code": Numbers(4)}
    return mix(sources, weights, batch_size=2, **options)


@mistakes(
    {
        TypeError: {
            "`sources` is .* of type list, but it must be a dictionary": (
                lambda: mix([Numbers(3)], batch_size=2)
            ),
            "`sources` is {} of type dict": lambda: mix({}, batch_size=2),
            r"`sources\['a'\]` is 5 of type int, which has no `__len__`": (
                lambda: mix({"a": 5}, batch_size=2)
            ),
            r"Example 0 of `sources\['a'\]` is None.*`armillary.data.select\(source": (
                lambda: mix({"a": grain.MapDataset.range(3).filter(bool)}, batch_size=2)
            ),
            r"(?s)different types.*a: x: int32 \(\)\n  b: x: float32 .*`np.asarray": (
                lambda: mix(
                    {"a": Numbers(3), "b": Numbers(3, np.float32)}, batch_size=2
                )
            ),
            r"`weights\[0\]` is 1 of type int, but it must be a list .* \(web, c": (
                lambda: make_two({0: 1})
            ),
            "`weights` is 'ab' of type str, but it": lambda: make_two("ab"),
        },
        ValueError: {
            "`sources` has 0 examples|`sources.*has 0 examples": (
                lambda: mix({"a": Numbers(0)}, batch_size=2)
            ),
            r"`sources\['a'\]` is a dataset with `shuffle_seed=3`.*Leave out": (
                lambda: mix(
                    {"a": from_arrays(np.ones(3), batch_size=1, shuffle_seed=3)},
                    batch_size=2,
                )
            ),
            r"with `repeat=True`": (
                lambda: mix(
                    {"a": from_arrays(np.ones(3), batch_size=1, repeat=True)},
                    batch_size=2,
                )
            ),
            r"`sources\['a'\]` is a mixture, but .*products of their weights": (
                lambda: mix({"a": make_mix([3], None)}, batch_size=2)
            ),
            "`source` is a mixture, but .*select and pack its sources first": (
                lambda: select(make_mix([3], None), [0])
            ),
            "`documents` is a mixture, but only": (
                lambda: pack(make_mix([3], None), row_length=4)
            ),
            "repeats forever.* and `mix` repeat": (
                lambda: mix({"a": grain.MapDataset.range(3).repeat()}, batch_size=2)
            ),
            "`num_steps` is -1, but": lambda: make_two([1, 1]).count_rows(-1),
            "`weights` has 1000.*, but weights must": lambda: make_two([10**400, 1]),
            "the steps \\[5\\], but the first step must be 0": (
                lambda: make_two({5: [1, 1]})
            ),
            r"the steps \[0, 9, 4\], but": (
                lambda: make_two({0: [1, 1], 9: [1, 1], 4: [1, 1]})
            ),
            r"the steps \[\], but": lambda: make_two({}),
            "has the key 0.5, but its keys must be the sources .web, code., or the": (
                lambda: make_two({0.5: [1, 1]})
            ),
            "`weights` has 3 weights, but there are 2 sources": (
                lambda: make_two([1, 1, 1])
            ),
            "`weights` has the sources web, but `sources` has web, code": (
                lambda: make_two({"web": 1})
            ),
            r"`weights\[0\]` has -1, but weights must be numbers": (
                lambda: make_two({0: [1, -1]})
            ),
            "`weights` has nan, but": lambda: make_two([1, float("nan")]),
            "`weights` has no weight above 0": lambda: make_two([0, 0]),
            "`batch_size` is 0": lambda: mix({"a": Numbers(3)}, batch_size=0),
            "`num_threads` is 0": lambda: make_two([1, 1], num_threads=0),
            "`shuffle_seed` is -1": lambda: make_two([1, 1], shuffle_seed=-1),
        },
    }
)
def test_wrong_arguments_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_weights_are_compared_between_processes():
    one = make_mix([5, 9], {0: [1, 2], 10: [1, 1]})
    other = make_mix([5, 9], {0: [1, 2], 11: [1, 1]})
    assert one.order_of_examples == other.order_of_examples
    assert one.shared_options != other.shared_options


def test_weights_may_change_at_many_steps():
    weights = {step: [1 + step, 2000 - step] for step in range(2000)}
    one = make_mix([5, 9], weights)
    other = make_mix([5, 9], {**weights, 1999: [1, 1]})
    assert len(one.shared_options["weights"]) < 300
    assert one.shared_options != other.shared_options
    for step in (1, 700, 1999):
        share = sum(4 * (1 + earlier) / 2001 for earlier in range(step))
        assert abs(one.count_rows(step)["s0"] - share) <= 0.5
    pairs, _ = read(one, 2000)
    counts = np.bincount([source for source, _ in pairs])
    assert counts.tolist() == list(one.count_rows(2000).values())


def test_packed_rows_of_several_sources_are_mixed():
    documents = [np.arange(size, dtype=np.int32) for size in (3, 5, 8, 2)]
    packed = pack(documents, row_length=8)
    dataset = mix({"a": packed, "b": packed}, [3, 1], batch_size=4)
    batch = next(dataset.make_iterator(0))
    assert batch["tokens"].shape == (4, 8)
    assert set(batch) == {"tokens", "segment_ids", "positions"}
