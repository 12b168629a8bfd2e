import base64
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import armillary
from armillary.data import FixedLenFeature, from_tfrecords
from armillary.errors import BatchSizeError, TFRecordError
from tests.mistakes import mistakes
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


@pytest.mark.parametrize("batch_size", [1, 4, 10, 11])
def test_files_are_one_sequence_in_the_order_of_the_paths(ten, batch_size):
    batches = read_all(from_tfrecords(ten, {"x": INT}, batch_size=batch_size))
    assert list(itertools.chain(*batches)) == list(range(10))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}
    back = from_tfrecords(reversed(ten), {"x": INT}, batch_size=10)
    assert read_all(back) == [[9, 3, 4, 5, 6, 7, 8, 0, 1, 2]]


@pytest.mark.parametrize("repeat", [False, True])
def test_the_order_is_that_of_arrays(ten, repeat):
    options = {"batch_size": 4, "shuffle_seed": 3, "repeat": repeat}
    arrays = armillary.data.from_arrays({"x": np.arange(10)}, **options)
    records = from_tfrecords(ten, {"x": INT}, **options)
    for _ in range(2):
        assert read_all(records, 7) == read_all(arrays, 7)


@given(
    values=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=4),
    floats=st.lists(st.floats(width=32), min_size=1, max_size=4),
    text=st.binary(max_size=5),
)
def test_values_come_back_as_they_were_written(tmp_path_factory, values, floats, text):
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


@pytest.mark.parametrize("count", [64, 65, 1000])
def test_long_lists_come_back_as_they_were_written(tmp_path, count):
    integers, floats = np.arange(count) - 2**40, np.arange(count) / 4
    path = write(tmp_path, {"i": integers, "f": floats})
    batch = read_one(
        path,
        i=FixedLenFeature((count,), np.int64),
        f=FixedLenFeature((count,), np.float32),
    )
    np.testing.assert_array_equal(batch["i"], [integers])
    np.testing.assert_array_equal(batch["f"], [floats])


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


def test_records_without_the_features_are_errors(tmp_path):
    paths = [
        write(tmp_path, {"x": 0}, name="good"),
        write(tmp_path, {"x": 0}, {"x": [1, 2], "z": 0.5}, name="bad"),
    ]
    place = rf"^Record 1 of `{paths[1]}` \(offset \d\d\) "
    source = iter(from_tfrecords(paths, {"x": INT}, batch_size=2))
    next(source)
    with pytest.raises(
        TFRecordError, match=place + r"holds 2 values .*'x'.*\(\) takes 1"
    ):
        next(source)


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


def test_a_record_that_is_no_example_is_an_error(tmp_path):
    path = write_records(tmp_path / "a", [b"\xff\xff"])
    with pytest.raises(TFRecordError, match=r"Record 0 .* is no `tf.train.Example`"):
        read_one(path, x=INT)
    path = write_records(tmp_path / "a", [b""])
    with pytest.raises(TFRecordError, match=r"Record 0 .* 'x'.*It has none:"):
        read_one(path, x=INT)


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


def make(paths, features=None, **options):
    features = {"x": INT} if features is None else features
    return from_tfrecords(paths, features, **({"batch_size": 1} | options))


def test_wrong_paths_are_errors(tmp_path, ten):
    missing = str(tmp_path / "*.record")
    with pytest.raises(
        FileNotFoundError, match=r"record`, which is no file.*sorted\(glob"
    ):
        make([ten[0], missing])
    for empty in ([], write(tmp_path)):
        with pytest.raises(ValueError, match="`paths` has 0 examples, but"):
            make(empty)


def test_wrong_options_are_errors(ten):
    for features in ({"x": np.int64}, ["x"], {}):
        with pytest.raises(TypeError, match="must be a dictionary of at least one"):
            make(ten, features)
    with pytest.raises(ValueError, match="`batch_size` is 0"):
        make(ten, batch_size=0)
    with pytest.raises(BatchSizeError, match="`batch_size` is 11, but there are 10"):
        make(ten, batch_size=11, drop_remainder=True)


@mistakes(
    {
        ValueError: {
            r"`shape` is 3, but it must be a tuple": lambda: FixedLenFeature(3, int),
            r"`shape` is \(0,\), but": lambda: FixedLenFeature((0,), int),
            r"`default_value` is 'x', but the feature has the dtype int64": (
                lambda: FixedLenFeature((), int, "x")
            ),
            r"`default_value` is \[1, 2, 3\], but .* shape \(2,\)": (
                lambda: FixedLenFeature((2,), int, [1, 2, 3])
            ),
        },
        TypeError: {
            "`dtype` is <class 'str'>, but a feature": (
                lambda: FixedLenFeature((), str)
            ),
            "`dtype` is 'x', but a feature holds": lambda: FixedLenFeature((), "x"),
            "`dtype` is <class 'complex'>, but": lambda: FixedLenFeature((), complex),
        },
    }
)
def test_wrong_features_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_byte_strings_reach_no_device(tmp_path):
    source = from_tfrecords(
        write(tmp_path, {"x": b"a"}), {"x": FixedLenFeature((), bytes)}, batch_size=1
    )
    strategy = armillary.OneDeviceStrategy("cpu:0")
    with pytest.raises(TypeError, match="x: ndarray of dtype object"):
        next(iter(strategy.distribute_dataset(source)))
