"""Tests of `from_tfrecords`: values, order, addresses and damaged files."""

import base64
import itertools
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.data import FixedLenFeature, from_tfrecords
from armillary.data.sources import _tfrecord
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


@pytest.mark.parametrize("count", [1, 20])  # Twenty records are read together.
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_a_float_that_does_not_fit_is_an_error(tmp_path, dtype, count):
    large = 1e6 if dtype == np.float16 else 3.4e38
    fine = [{"f": x} for x in [0.1, np.inf, np.nan, *np.zeros(count - 1)]]
    feature = {"f": FixedLenFeature((), dtype)}
    read_one(write(tmp_path, *fine), **feature)

    path = write(tmp_path, *fine, {"f": large})
    message = rf"^Record {len(fine)} .* in the feature 'f', which {np.dtype(dtype)} "
    with pytest.raises(TFRecordError, match=message + "cannot hold.*`np.float32`"):
        read_one(path, **feature)


@pytest.mark.parametrize(
    ("default", "dtype"),
    [(0.5, np.int32), ([1, 300], np.uint8), (np.nan, np.int64), (1e6, np.float16)],
)
def test_a_default_that_does_not_fit_is_an_error(default, dtype):
    message = rf"`default_value` is .*: {np.dtype(dtype)} cannot hold (0.5|300|nan|1.*)"
    with pytest.raises(ValueError, match=message):
        FixedLenFeature(np.shape(default), dtype, default)


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
    for record, message in (
        (b"\xff\xff", "is not a `tf.train.Example`"),
        (b"", "none:"),
    ):
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
    message = r"\*\.record`, which is not a file, and no file fits it as a pattern"
    with pytest.raises(FileNotFoundError, match=message):
        from_tfrecords([ten[0], missing], {"x": INT}, batch_size=1)
    with pytest.raises(ValueError, match="`paths` has 0 examples, but"):
        from_tfrecords(write(tmp_path), {"x": INT}, batch_size=1)


def test_a_pattern_is_the_files_that_fit_in_sorted_order(tmp_path, ten):
    pattern = str(tmp_path / "*.tfrecord")
    found = from_tfrecords(pattern, {"x": INT}, batch_size=10)
    assert read_all(found) == [list(range(10))]
    found = from_tfrecords([ten[2], tmp_path / "[01].tf*"], {"x": INT}, batch_size=10)
    assert read_all(found) == [[9, *range(9)]]

    # A file is itself, whatever its name would be as a pattern.
    odd = write(tmp_path, {"x": 77}, name="[ab].tfrecord")
    assert read_all(from_tfrecords(odd, {"x": INT}, batch_size=1)) == [[77]]


@pytest.fixture
def remote(ten):
    """Returns the address of a folder that holds the three files."""
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    folder = "/test_tfrecord"
    for number, path in enumerate(ten):
        with open(path, "rb") as file:
            system.pipe_file(f"{folder}/{number}.tfrecord", file.read())
    yield f"memory:/{folder}"
    system.rm(folder, recursive=True)


def test_addresses_and_patterns_of_them_are_read_as_local_files_are(ten, remote):
    options = {"batch_size": 4, "shuffle_seed": 3}
    expected = from_tfrecords(ten, {"x": INT}, **options)
    order = read_all(expected)
    paths = [f"{remote}/{number}.tfrecord" for number in range(3)]
    for addresses in (paths, f"{remote}/*.tfrecord"):
        found = from_tfrecords(addresses, {"x": INT}, **options)
        assert read_all(found) == order
        assert found.fingerprints() == expected.fingerprints()

    with pytest.raises(FileNotFoundError, match=r"memory://.*which is not a file"):
        from_tfrecords(f"{remote}/*.record", {"x": INT}, batch_size=1)


def test_an_address_that_needs_a_missing_package_is_an_error_with_the_fix():
    message = "`paths` has `unknown://a/b`.*Install the package.*copy the files"
    with pytest.raises(ImportError, match=message):
        from_tfrecords("unknown://a/b", {"x": INT}, batch_size=1)


def encode_varint(value):
    """Returns a number as protocol buffers store it."""
    value, octets = value % 2**64, []
    while value >= 0x80:
        octets.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*octets, value])


def encode(number, *parts):
    """Returns a field that holds these bytes."""
    data = b"".join(parts)
    return bytes([number << 3 | 2]) + encode_varint(len(data)) + data


def encode_feature(name, kind, *lists):
    return encode(1, encode(1, name), encode(2, encode(kind, *lists)))


INTEGER = st.one_of(st.integers(0, 127), st.integers(-(2**63), 2**63 - 1))
SCHEMA = {
    "i": st.builds(
        FixedLenFeature,
        st.sampled_from([(), (2,)]),
        st.sampled_from([np.int64, np.int32, np.uint8, bool]),
        st.sampled_from([None, 1]),
    ),
    "f": st.builds(
        FixedLenFeature,
        st.sampled_from([(), (1, 2)]),
        st.sampled_from([np.float32, np.float64]),
    ),
    "b": st.builds(
        FixedLenFeature,
        st.sampled_from([(), (2,)]),
        st.sampled_from([bytes, np.uint8, np.int16]),
    ),
}


@st.composite
def make_messages(draw, features, *, is_odd):
    """Returns a message that fits the features, in one of the ways to write it."""

    def choose(usual, *others):
        usuals = [usual] * 4 * len(others)
        return draw(st.sampled_from([*usuals, *others])) if is_odd else usual

    def pack(values):
        """Packs the values, or some of them, or leaves them one by one."""
        packed = choose(len(values), 0, 1)
        tag = bytes([1 << 3 | (5 if isinstance(values[0], float) else 0)])
        return [
            *([encode(1, *map(store, values[:packed]))] if packed else []),
            *(tag + store(value) for value in values[packed:]),
        ]

    def store(value):
        if isinstance(value, float):
            return np.float32(value).tobytes()
        *octets, last = encode_varint(value)
        more = choose(0, 1, 9, 10)
        longer = [last | 0x80, *[0x80] * (more - 1), 0] if more else [last]
        return bytes(octets + longer)

    parts = []
    for name, feature in features.items():
        count, key = int(np.prod(feature.shape)), name.encode()
        if name == "i":
            most = INTEGER if feature.dtype == np.int64 else st.integers(0, 1)
            values = draw(st.lists(most, min_size=count, max_size=count))
            parts.append(encode_feature(key, 3, *pack(values)))
        elif name == "f":
            values = draw(st.lists(st.floats(width=32), min_size=count, max_size=count))
            parts.append(encode_feature(key, 2, *pack(values)))
        elif feature.dtype.kind == "O":
            texts = draw(
                st.lists(st.binary(max_size=3), min_size=count, max_size=count)
            )
            parts.append(encode_feature(key, 1, *(encode(1, text) for text in texts)))
        else:
            size = count * feature.dtype.itemsize
            text = draw(st.binary(min_size=size, max_size=size))
            parts.append(encode_feature(key, 1, encode(1, text)))
    # It is as well a list of other values; of features that are not read, it is none.
    other = choose(b"other", b"i", b"name", b"", b"\xff")
    parts.append(encode_feature(other, 1, encode(1, bytes([1] * 8))))
    parts += choose([], [parts[0]])
    return encode(1, *draw(st.permutations(parts)))


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_many_records_are_read_as_each_of_them(tmp_path_factory, data):
    features = data.draw(st.fixed_dictionaries(SCHEMA))
    first = data.draw(make_messages(features, is_odd=False))
    odd = st.lists(make_messages(features, is_odd=True), min_size=1, max_size=4)
    others = data.draw(odd)
    bit = st.integers(0, 7) | st.just(7)
    for _ in range(
        data.draw(st.integers(0, 8))
    ):  # A bit is another, or a byte is gone.
        message = bytearray(data.draw(st.sampled_from(others)))
        place = data.draw(st.integers(0, len(message) - 1))
        changed = bytes([message[place] ^ 1 << data.draw(bit)])
        message[place : place + 1] = data.draw(st.sampled_from([changed, changed, b""]))
        others.append(bytes(message))
    path = write_records(tmp_path_factory.mktemp("records") / "a", [first, *others])
    source = from_tfrecords(path, features, batch_size=1)
    good, usual = {}, np.zeros(16, np.int64)
    for row in range(1 + len(others)):
        try:
            good[row] = source.read_rows(np.array([row]))
        except TFRecordError as error:
            with pytest.raises(TFRecordError) as raised:
                source.read_rows(np.append(usual, row))
            assert str(raised.value) == str(error)
    read = source.read_rows(np.array([*usual, *good]))
    for name, array in read.items():
        expected = np.concatenate([batch[name] for batch in good.values()])
        assert array.dtype == expected.dtype
        with np.errstate(invalid="ignore"):  # Some are signaling NaNs.
            np.testing.assert_array_equal(array[len(usual) :], expected)


@pytest.mark.parametrize(
    ("kind", "held"),
    [
        (3, encode(1, b"\1")),
        (3, encode(1, b"\1\2\3")),
        (3, encode(1, b"\1\x80")),
        (3, encode(1, b"\1" + b"\x80" * 9 + b"\2")),
        (3, encode(1, b"\1" + b"\x80" * 10 + b"\0")),
        (1, b"\x0a\x82\x80\x80"),
    ],
)
def test_an_unusual_list_among_many_is_read_as_it_is_alone(tmp_path, kind, held):
    held = [encode(1, b"\1\2")] * 16 + [held]
    x = (encode(1, encode(1, b"x"), encode(2, encode(kind, each))) for each in held)
    path = write_records(tmp_path / "a", (encode(1, each) for each in x))
    feature = FixedLenFeature((2,), np.int64 if kind == 3 else np.uint8)
    source = from_tfrecords(path, {"x": feature}, batch_size=1)
    try:
        alone = source.read_rows(np.array([16]))["x"].tolist()
    except TFRecordError as error:
        with pytest.raises(TFRecordError, match=re.escape(str(error))):
            source.read_rows(np.arange(17))
    else:
        assert source.read_rows(np.arange(17))["x"].tolist()[16:] == alone


def test_a_damaged_record_stops_at_its_own_batch_if_many_are_read_together(ten):
    source = from_tfrecords(ten, {"x": INT}, batch_size=2)
    assert source.rows_at_once == 10
    data = bytearray(ten[1].read_bytes())
    data[-5] ^= 1  # In the data of record 8.
    ten[1].write_bytes(data)
    iterator = source.make_iterator(0)
    for index in (2, 4, 6, 8):
        assert next(iterator)["x"].tolist() == [index - 2, index - 1]
        assert iterator.get_state()["index"] == index
    with pytest.raises(TFRecordError, match=rf"Record 5 of `{ten[1]}`.* is damaged"):
        next(iterator)
    assert iterator.get_state()["index"] == 8


@pytest.mark.parametrize("num_rows", [40, 5])
def test_plain_records_need_no_parser(tmp_path, monkeypatch, num_rows):
    values = [[row, -row, row << 40] for row in range(num_rows)]
    path = write(tmp_path, *({"x": row, "y": 0.5} for row in values))
    source = from_tfrecords(path, {"x": FixedLenFeature((3,), np.int64)}, batch_size=9)
    calls = []
    monkeypatch.setattr(_tfrecord, "read_values", lambda *_: calls.append(1) or 0)
    read = source.read_rows(np.arange(num_rows))["x"].tolist()
    assert (read == values, len(calls)) == ((True, 0) if num_rows > 16 else (False, 5))
