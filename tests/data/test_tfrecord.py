import base64
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import FixedLenFeature, from_tfrecords
from armillary.errors import TFRecordError
from tests.records import make_record, write_records

INT, FLOAT = FixedLenFeature((), np.int64), FixedLenFeature((), np.float32)

# Two records that TensorFlow 2.21 wrote.
WRITTEN_BY_TENSORFLOW = base64.b64decode(
    "QAAAAAAAAAAoF/SVCj4KHAoDaWRzEhUaEwoRAP///////////wGAgICAgCAKDwoEdGV4dBIHCgUKA2EA"
    "YgoNCgF4EggSBgoEAAAAPxCwzVNAAAAAAAAAACgX9JUKPgocCgNpZHMSFRoTChEB////////////AYCA"
    "gICAIAoPCgR0ZXh0EgcKBQoDYQBiCg0KAXgSCBIGCgQAAMA/dS44Vw=="
)


def write(folder, *examples, name="a.tfrecord"):
    return write_records(folder / name, map(make_record, examples))


def read_one(path, **features):
    return next(iter(from_tfrecords(path, features, batch_size=100)))


@pytest.fixture
def ten(tmp_path):
    """Returns the paths of three files, of 3, 6 and 1 records that are numbered."""
    parts = [range(3), range(3, 9), range(9, 10)]
    return [
        write(tmp_path, *({"x": x} for x in part), name=f"{place}.tfrecord")
        for place, part in enumerate(parts)
    ]


def read_all(source, count=None):
    batches = itertools.islice(source, count)
    return [batch["x"].tolist() for batch in batches]


def test_files_of_tensorflow_are_read(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(WRITTEN_BY_TENSORFLOW)
    features = {
        "ids": FixedLenFeature([3], np.int64),
        "x": FixedLenFeature([], np.float32),
        "text": FixedLenFeature([], bytes),
    }
    batch = read_one(path, **features)
    assert batch["ids"].tolist() == [[0, -1, 2**40], [1, -1, 2**40]]
    assert batch["x"].tolist() == [0.5, 1.5]
    assert batch["text"].tolist() == [b"a\0b", b"a\0b"]
    dtypes = {name: array.dtype for name, array in batch.items()}
    assert dtypes == {"ids": np.int64, "x": np.float32, "text": object}


@settings(deadline=None)
@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    floats=st.lists(st.floats(width=32), min_size=1, max_size=4),
    text=st.binary(max_size=5),
    repeats=st.sampled_from([1, 1, 65]),
)
def test_values_come_back_as_they_were_written(
    tmp_path_factory, values, floats, text, repeats
):
    values, floats = values * repeats, floats * repeats
    folder = tmp_path_factory.mktemp("records")
    path = write(folder, {"i": values, "f": floats, "b": text})
    batch = read_one(
        path,
        i=FixedLenFeature((len(values),), np.int64),
        f=FixedLenFeature((len(floats),), np.float32),
        b=FixedLenFeature((), bytes),
    )
    assert batch["i"].tolist() == [values]
    np.testing.assert_array_equal(batch["f"], [floats])
    assert [(type(value), value) for value in batch["b"]] == [(bytes, text)]


BYTES = np.arange(6).reshape(2, 3)
INTEGERS = [bool, np.int8, np.uint8, np.int32, np.uint64, "int16"]
FLOATS = [np.float16, np.float64, ml_dtypes.bfloat16]
TYPED = [
    *(([0, 1, 1, 0], [[0, 1], [1, 0]], dtype) for dtype in INTEGERS),
    *(([0.5, -2.0], [0.5, -2.0], dtype) for dtype in FLOATS),
    *(
        (BYTES.astype(dtype).tobytes(), BYTES.tolist(), dtype)
        for dtype in (np.uint8, np.uint64, np.float32, ml_dtypes.bfloat16)
    ),
]


@pytest.mark.parametrize(("written", "read", "dtype"), TYPED)
def test_values_take_the_dtype_that_is_asked_for(tmp_path, written, read, dtype):
    path = write(tmp_path, {"x": written})
    array = read_one(path, x=FixedLenFeature(np.shape(read), dtype))["x"]
    assert array.dtype == dtype
    assert array.tolist() == [read]


@pytest.mark.parametrize(
    ("shape", "default", "expected"),
    [((), 7, 7), ((2,), 7, [7, 7]), ((2,), [7, 8], [7, 8]), ((1, 2), [7, 8], [[7, 8]])],
)
def test_a_default_stands_in_where_a_feature_is_missing(
    tmp_path, shape, default, expected
):
    path = write(tmp_path, {"y": 0}, {"y": 0, "x": np.zeros(shape, int)})
    batch = read_one(path, x=FixedLenFeature(shape, np.int32, default))
    assert batch["x"].tolist() == [expected, np.zeros(shape, int).tolist()]


BAD_FEATURES = {
    "has no feature 'name'.*It has 'b', 'f', 'i'": {"name": INT},
    "holds the feature 'i' as `int64_list`, but `features` says float32.*np.int64": {
        "i": FLOAT
    },
    "holds the feature 'f' as `float_list`, but `features` says int64.*np.float32": {
        "f": INT
    },
    r"holds 3 values in the feature 'i', but its shape \(4,\) takes 4": {
        "i": FixedLenFeature((4,), np.int64)
    },
    "holds 300 in the feature 'i', which uint8 cannot hold": {
        "i": FixedLenFeature((3,), np.uint8)
    },
    "holds -1 in the feature 'i', which uint64 cannot hold": {
        "i": FixedLenFeature((3,), np.uint64)
    },
    r"holds byte strings of \[5\] bytes in the feature 'b', but float32 of shape \(2,\)"
    " is one of 8 bytes": {"b": FixedLenFeature((2,), np.float32)},
    "holds the feature 'i' as `int64_list`, but `features` says object.*np.int64": {
        "i": FixedLenFeature((3,), bytes)
    },
}


@pytest.mark.parametrize("message", BAD_FEATURES)
def test_features_that_do_not_fit_are_errors(tmp_path, message):
    path = write(tmp_path, {"i": [300, -1, 0], "f": 0.5, "b": b"bytes"})
    with pytest.raises(TFRecordError, match=rf"^Record 0 of `{path}` .*{message}"):
        read_one(path, **BAD_FEATURES[message])


def test_every_changed_byte_and_every_cut_is_an_error(tmp_path):
    path = write(tmp_path, {"x": 0}, {"x": 1})
    whole = path.read_bytes()
    half = len(whole) // 2
    for place in range(len(whole)):
        number, offset = divmod(place, half)
        begin = number * half + 12
        message = rf"^Record {number} of `{path}` \(offset {begin}\) is "
        changed = bytearray(whole)
        changed[place] ^= 1
        path.write_bytes(changed)
        with pytest.raises(TFRecordError, match=message + "damaged"):
            read_one(path, x=INT)
        path.write_bytes(whole[:place])
        if offset:
            with pytest.raises(TFRecordError, match=message + "cut off"):
                read_one(path, x=INT)


def test_a_file_that_is_cut_off_later_is_an_error(ten):
    source = from_tfrecords(ten, {"x": INT}, batch_size=9)
    ten[1].write_bytes(ten[1].read_bytes()[:-1])
    with pytest.raises(TFRecordError, match=rf"Record 5 of `{ten[1]}`.* is damaged"):
        next(iter(source))


def test_a_record_that_is_no_example_is_an_error(tmp_path):
    for record, message in ((b"\xff\xff", "is no `tf.train.Example`"), (b"", "none:")):
        path = write_records(tmp_path / "a", [record])
        with pytest.raises(TFRecordError, match=rf"Record 0 .*{message}"):
            read_one(path, x=INT)


@pytest.mark.parametrize("repeat", [False, True])
def test_files_are_one_sequence_in_the_order_of_arrays(ten, repeat):
    options = {"batch_size": 4, "shuffle_seed": 3, "repeat": repeat}
    arrays = armillary.data.from_arrays({"x": np.arange(10)}, **options)
    records = from_tfrecords(ten, {"x": INT}, **options)
    for _ in range(2):
        assert read_all(records, 7) == read_all(arrays, 7)
    back = from_tfrecords(reversed(ten), {"x": INT}, batch_size=10)
    assert read_all(back) == [[9, 3, 4, 5, 6, 7, 8, 0, 1, 2]]


def test_files_without_records_are_errors(tmp_path, ten):
    missing = str(tmp_path / "*.record")
    with pytest.raises(FileNotFoundError, match=r"record`, which is no.*sorted\(glob"):
        from_tfrecords([ten[0], missing], {"x": INT}, batch_size=1)
    with pytest.raises(ValueError, match="`paths` has 0 examples, but"):
        from_tfrecords(write(tmp_path), {"x": INT}, batch_size=1)
