"""Tests that processes with different data or state get an error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.cluster._peers import Peers
from armillary.data import FixedLenFeature, from_arrays, from_tfrecords
from armillary.distribute.program._compare import check_same, check_same_data
from armillary.errors import PeerError
from tests.peers import run_together
from tests.records import make_record, write_records

ROWS = np.arange(1000, dtype=np.float32)


def compare(make) -> list:
    def talk(peers: Peers) -> str:
        check_same_data(peers, make(peers.index))
        return peers.gather("what follows", "")[0]

    return run_together(talk)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda index: from_arrays({"x": ROWS[index::2]}, batch_size=8),
            r"array x: process 0 has float32 \(500,\) #.*, process 1 has float32",
        ),
        (
            lambda index: from_arrays({"x": ROWS[: 1000 - index]}, batch_size=8),
            r"examples: process 0 has 1000, process 1 has 999",
        ),
        (
            lambda index: from_arrays({"x": ROWS}, batch_size=8, shuffle_seed=index),
            r"shuffle_seed: process 0 has 0, process 1 has 1\nGive all processes",
        ),
        (
            lambda index: from_arrays({"xy"[index]: ROWS}, batch_size=8),
            r"array x: .*, process 1 has no such array",
        ),
        (
            lambda index: from_arrays({"x": ROWS}, batch_size=8 + index),
            r"batch_size: process 0 has 8, process 1 has 9",
        ),
    ],
)
def test_other_rows_or_options_are_an_error_in_all(make, message):
    for outcome in compare(make):
        with pytest.raises(PeerError, match=message):
            raise outcome


def test_rows_of_files_are_compared_like_arrays(tmp_path):
    paths = [
        write_records(tmp_path / name, [make_record({"x": x}) for x in values])
        for name, values in {"a": [1, 2], "b": [1, 3]}.items()
    ]

    def make(index):
        features = {"x": FixedLenFeature((), np.int64)}
        return from_tfrecords(paths[index], features, batch_size=1)

    assert compare(lambda index: make(0)) == ["", ""]
    for outcome in compare(make):
        with pytest.raises(PeerError, match=r"records: process 0 has #.*, process 1"):
            raise outcome


def test_equal_state_passes_and_different_state_is_named():
    def compare(peers):
        same = jnp.arange(3.0)
        check_same(peers, "state", {"a": same})
        key = jax.random.key(peers.index)
        check_same(peers, "state", {"a": same, "b/c": same + peers.index, "key": key})

    for outcome in run_together(compare):
        with pytest.raises(PeerError, match="Arrays of the state differ") as e:
            raise outcome
        assert "  b/c: process 0 has float32 (3,) #" in str(e.value)
        assert "  key: process 0 has uint32 (2,) #" in str(e.value)


def test_missing_state_and_long_lists_are_reported():
    def compare(peers):
        count, value = 30 - 5 * peers.index, np.float32(peers.index)
        check_same(peers, "state", {f"x{i}": value for i in range(count)})

    for outcome in run_together(compare):
        with pytest.raises(PeerError, match="and 10 more"):
            raise outcome
