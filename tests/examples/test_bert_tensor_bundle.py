"""Tests of the reader of TensorFlow's checkpoints, with independent files."""

import re
import tempfile
from pathlib import Path

import hypothesis.extra.numpy as arrays_of
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.bundle_writer import field, make_block, seal, write_bundle
from tests.examples.loading import load_example

tensor_bundle = load_example("bert.tensor_bundle")

DTYPES = ["<f4", "<f8", "<i4", "u1", "<i8", "?", ml_dtypes.bfloat16, "<f2"]
some_arrays = st.dictionaries(
    st.text(min_size=1, max_size=30),
    arrays_of.arrays(
        st.sampled_from(DTYPES),
        arrays_of.array_shapes(min_dims=0, max_dims=3, max_side=4),
        elements=st.sampled_from([0, 1]),
    ),
    min_size=1,
    max_size=12,
)
SMALL = {"a/kernel": np.arange(6.0, dtype="float32").reshape(2, 3)}


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(some_arrays, st.integers(1, 3), st.integers(1, 8), st.integers(1, 4))
def test_arrays_are_read_as_they_were_written(arrays, num_shards, per_block, interval):
    num_shards = min(num_shards, len(arrays))
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_bundle(
            Path(folder) / "model.ckpt",
            arrays,
            num_shards=num_shards,
            keys_per_block=per_block,
            restart_interval=interval,
        )
        found = tensor_bundle.read_tensor_bundle(prefix)
        assert list(found) == sorted(arrays, key=str.encode)
        for name, array in arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)


def test_names_that_share_their_beginning_are_read_over_many_blocks(tmp_path):
    arrays = {
        f"bert/encoder/layer_{number}/{part}": np.float32(number)
        for number in range(100)
        for part in ("kernel", "kernel/adam_m", "bias")
    }
    write_bundle(tmp_path / "model", arrays, keys_per_block=16, restart_interval=16)
    assert tensor_bundle.read_tensor_bundle(tmp_path / "model") == arrays


def test_types_that_are_no_numbers_are_left_out(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL, extra=field(1, 7))  # DT_STRING
    assert tensor_bundle.read_tensor_bundle(prefix) == {}


def refuses(prefix: Path, *parts: str) -> None:
    pattern = ".*".join(map(re.escape, parts))
    with pytest.raises(ValueError, match=pattern):
        tensor_bundle.read_tensor_bundle(prefix)


def test_truncated_index_is_named(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    index = tmp_path / "model.index"
    content = index.read_bytes()
    for keep in (0, 20, len(content) - 1):
        index.write_bytes(content[:keep])
        refuses(prefix, "model.index is not a whole table", "must end with the bytes")


def test_every_changed_byte_of_a_block_is_noticed(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    index = tmp_path / "model.index"
    content = index.read_bytes()
    block = len(seal(make_block({}, 1)))  # The one that lists nothing is not read.
    entries = content.index(seal(make_block({}, 1)))
    for place in (0, entries // 2, entries - 1, entries + block):
        changed = bytearray(content)
        changed[place] ^= 1
        index.write_bytes(changed)
        refuses(prefix, "model.index is damaged", "Download it again")


def test_compressed_index_is_refused(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    index = tmp_path / "model.index"
    content = index.read_bytes()
    end = content.index(seal(make_block({}, 1))) - 5
    index.write_bytes(seal(content[:end], b"\1") + content[end + 5 :])
    refuses(prefix, "model.index is compressed", "Is it another table?")


def test_truncated_shard_shows_both_sizes(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    shard = tmp_path / "model.data-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[:-4])
    refuses(prefix, "'a/kernel' of shape (2, 3)", "has 20 bytes", "24 in its index")


def test_changed_shard_names_the_tensor(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    shard = tmp_path / "model.data-00000-of-00001"
    shard.write_bytes(shard.read_bytes()[::-1])
    refuses(prefix, "'a/kernel' of", "is damaged: the checksum differs")


def test_missing_shard_is_named(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL)
    (tmp_path / "model.data-00000-of-00001").unlink()
    with pytest.raises(FileNotFoundError, match=r"model\.data-00000-of-00001"):
        tensor_bundle.read_tensor_bundle(prefix)


def test_variables_in_slices_are_refused(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL, extra=field(7, b""))
    refuses(prefix, "'a/kernel' in", "is saved in slices", "as one variable")


def test_other_byte_order_is_refused(tmp_path):
    prefix = write_bundle(tmp_path / "model", SMALL, header=field(2, 1))
    refuses(prefix, "little-endian machine: its header is {1: 1, 2: 1}")
