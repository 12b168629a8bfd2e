"""TFRecord files of `tf.train.Example` as a source, without TensorFlow.

A record is the length of its data in 8 bytes, a checksum of these, the data, and a
checksum of the data. One pass over a file finds where its records are; then any of them
is one read.
"""

import functools
import math
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._checks import check_path, is_positive_int
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.errors import TFRecordError
from armillary.typing import Batch

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MOST_READ = 64
"""How many records a fingerprint reads."""
_DTYPES = {"bytes_list": "bytes", "float_list": "np.float32", "int64_list": "np.int64"}
"""The lists that values are stored in, and a dtype that fits each."""
# As many values are taken one by one in the time that an array of them costs at least.
_FEW = 64

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, eq=False)
class FixedLenFeature:
    """A feature that has the same number of values in every record.

    Args:
        shape: Shape of one example; `()` for one value.
        dtype: What the batch has. Integers and floats may be narrower than in the file
            (`np.int32`), and a value that does not fit is an error. A feature that was
            written as bytes, with `array.tobytes()`, is read with the dtype of the
            array. `bytes` keeps byte strings, in arrays of objects.
        default_value: For records without the feature: one value, or one for each
            element. None makes them an error.

    Raises:
        ValueError: If `shape` is no shape, or `default_value` does not fit.
        TypeError: If `dtype` is of neither numbers nor bytes.
    """

    shape: Sequence[int]
    dtype: Any
    default_value: Any = None

    def __post_init__(self) -> None:
        shape = self.shape
        if not isinstance(shape, list | tuple) or not all(map(is_positive_int, shape)):
            raise ValueError(
                f"`shape` is {shape!r}, but it must be a tuple of positive integers. "
                "Use `shape=()` for one value in each example."
            )
        try:
            dtype = np.dtype(self.dtype)
        except (TypeError, ValueError, SyntaxError):
            dtype = np.dtype("V")  # Neither numbers nor bytes.
        if self.dtype is None or _list_for(dtype) is None:
            raise TypeError(
                f"`dtype` is {self.dtype!r}, but a feature holds numbers or bytes. Use "
                "a dtype such as `np.int64`, `np.float32` or `bytes`."
            )
        dtype = dtype if dtype.kind != "S" else np.dtype("O")
        default = self.default_value
        if default is not None:
            try:
                default = np.asarray(default, dtype)
                default = default.reshape(shape if default.size > 1 else ())
                default = np.broadcast_to(default, shape)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(
                    f"`default_value` is {self.default_value!r:.80}, but the feature "
                    f"has the dtype {dtype} and the shape {shape}: {error}."
                ) from error
        vars(self).update(shape=tuple(shape), dtype=dtype, default_value=default)


def _list_for(dtype: np.dtype) -> str | None:
    """Returns which list of values fits a dtype."""
    if dtype.kind in "biu":
        return "int64_list"
    if dtype.kind in "SO":
        return "bytes_list"
    # JAX knows bfloat16 and its relatives, which NumPy does not.
    return "float_list" if jax.dtypes.issubdtype(dtype, np.floating) else None


def from_tfrecords(
    paths: Paths,
    features: Mapping[str, FixedLenFeature],
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "TFRecordDataset":
    """Returns a data set of the records of TFRecord files, in batches.

    The files are one sequence of records, in the order of the paths, and are shuffled
    as one. Each file is gone through once to find its records, which are then read one
    by one, with their checksums compared. A batch is a dictionary of NumPy arrays::

        data = armillary.data.from_tfrecords(
            sorted(glob.glob("data/train-*.tfrecord")),
            {
                "image": armillary.data.FixedLenFeature((28, 28), np.uint8),
                "label": armillary.data.FixedLenFeature((), np.int32),
            },
            batch_size=64,
            shuffle_seed=0,
        )

    Args:
        paths: One file or several, not compressed, on a file system of this machine.
        features: What to read of each record, by name; the rest is left out.
        batch_size: As in `from_arrays`, like all that follow.
        shuffle_seed: Seed of the order.
        repeat: Whether the data set never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A data set with the order, the passes and the positions of `from_arrays`.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If `features` is no dictionary of `FixedLenFeature`.
        ValueError: If there is no record, or another argument is wrong.
        TFRecordError: If a file is damaged, or records do not hold the features.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return TFRecordDataset(
        paths, features, batch_size, shuffle_seed, repeat, drop_remainder
    )


class TFRecordDataset(IndexedDataset):
    """Records of files in batches; made by `from_tfrecords`, which documents it.

    Files are opened for each batch, so that there may be any number of them, and read
    by position, so that several threads may do it.
    """

    name = "TFRecord files"

    def __init__(
        self, paths: Any, features: Mapping[str, FixedLenFeature], *options: Any
    ) -> None:
        if isinstance(paths, str | os.PathLike) or not np.iterable(paths):
            paths = [paths]
        self._paths = [check_path("paths", path) for path in paths]
        if missing := [path for path in self._paths if not os.path.isfile(path)]:
            raise FileNotFoundError(
                f"`paths` has `{missing[0]}`, which is no file. Patterns are not "
                "expanded: use `sorted(glob.glob(pattern))`."
            )
        self._features = _check_features(features)
        places = [_find_records(path) for path in self._paths]
        # Where the data of each record are, and how many records the files before have.
        self._places = np.concatenate([np.empty((0, 2), np.int64), *places])
        self._starts = np.cumsum([0, *map(len, places)])
        super().__init__("paths", len(self._places), *options)
        # What is wrong with `features` shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the features of these records.

        Raises:
            TFRecordError: If a file is damaged, or a record does not hold the features.
        """
        from google.protobuf.message import DecodeError

        message = example_class()
        batch = {
            name: np.empty((len(rows), *feature.shape), feature.dtype)
            for name, feature in self._features.items()
        }
        for place, record in enumerate(self._read(rows)):
            try:
                stored = message.FromString(record).features.feature
                for name, feature in self._features.items():
                    # With `...`, or an array of objects would hold an array.
                    batch[name][place, ...] = _read_values(stored, name, feature)
            except DecodeError as error:
                raise TFRecordError(
                    f"{self._name(rows[place])} is no `tf.train.Example`: {error}. "
                    "Write the file with `example.SerializeToString()`."
                ) from error
            except TFRecordError as error:
                raise TFRecordError(f"{self._name(rows[place])} {error}") from None
        return batch

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of the sizes of all records, and of what some hold."""
        some = self._read(self.spaced_rows(_MOST_READ))
        return {"records": fingerprint(self._places[:, 1], *some)}

    def _read(self, rows: np.ndarray) -> list[bytes]:
        """Returns the data of these records, in this order."""
        data = [b""] * len(rows)
        files = np.searchsorted(self._starts, rows, "right") - 1
        places = self._places[rows].tolist()
        for file in np.unique(files).tolist():
            with open(self._paths[file], "rb", buffering=0) as opened:
                for index in np.flatnonzero(files == file).tolist():
                    offset, size = places[index]
                    record = os.pread(opened.fileno(), size + _FOOTER.size, offset)
                    data[index], footer = record[:size], record[size:]
                    if footer != _FOOTER.pack(_checksum(data[index])):
                        raise TFRecordError(
                            f"{self._name(rows[index])} is damaged: its data do not "
                            "have the checksum that was written with them. Copy the "
                            "file anew."
                        )
        return data

    def _name(self, row: int) -> str:
        file = int(np.searchsorted(self._starts, row, "right")) - 1
        number = row - self._starts[file]
        return _name(self._paths[file], number, self._places[row, 0])


def _check_features(features: Any) -> dict[str, FixedLenFeature]:
    is_named = isinstance(features, Mapping) and len(features)
    if not is_named or not all(
        isinstance(feature, FixedLenFeature) for feature in features.values()
    ):
        raise TypeError(
            f"`features` is {features!r:.200}, but it must be a dictionary of at least "
            "one `armillary.data.FixedLenFeature`. Use `features={'label': "
            "armillary.data.FixedLenFeature((), np.int64)}`."
        )
    return dict(features)


def _find_records(path: str) -> np.ndarray:
    """Returns offset and size of the data of each record of a file."""
    places: list[tuple[int, int]] = []
    with open(path, "rb", buffering=0) as opened:
        end, offset = os.fstat(opened.fileno()).st_size, 0
        while offset < end:
            header = os.pread(opened.fileno(), _HEADER.size, offset)
            offset += _HEADER.size
            name, is_whole = _name(path, len(places), offset), offset <= end
            if is_whole and _HEADER.unpack(header)[1] != _checksum(header[:8]):
                raise TFRecordError(
                    f"{name} is damaged, or the file is compressed or no TFRecord "
                    "file: the length of the record does not have the checksum that "
                    "was written with it. Copy the file anew, or unpack it."
                )
            size = _HEADER.unpack(header)[0] if is_whole else 0
            places.append((offset, size))
            offset += size + _FOOTER.size
            if offset > end:
                raise TFRecordError(
                    f"{name} is cut off: the file ends {offset - end} bytes before the "
                    "end of the record. Copy the file anew."
                )
    return np.array(places, np.int64).reshape(-1, 2)


def _name(path: str, number: int, offset: int) -> str:
    return f"Record {number} of `{path}` (offset {offset})"


def _checksum(data: bytes) -> int:
    """Returns the CRC-32C of `data`, rotated and shifted as TFRecord files have it."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _read_values(
    stored: Mapping[str, Any], name: str, feature: FixedLenFeature
) -> np.ndarray:
    kind = stored[name].WhichOneof("kind") if name in stored else None
    if kind is None:
        if feature.default_value is None:
            held = ", ".join(map(repr, sorted(stored)))
            raise TFRecordError(
                f"has no feature {name!r}. It has {held or 'none'}: name one of these, "
                "or give a `default_value`."
            )
        return feature.default_value
    values, dtype = getattr(stored[name], kind).value, feature.dtype
    count = math.prod(feature.shape)
    if kind == "bytes_list" and dtype.kind != "O":
        # It was written as the bytes of an array.
        size = count * dtype.itemsize
        if len(values) != 1 or len(values[0]) != size:
            raise TFRecordError(
                f"holds byte strings of {[len(value) for value in values[:3]]} bytes "
                f"in the feature {name!r}, but {dtype} of shape {feature.shape} is one "
                f"of {size} bytes. Use the shape and dtype of the array that was "
                "written, or `dtype=bytes` to decode them in the program."
            )
        written = np.frombuffer(values[0], dtype.newbyteorder("<"))
        return written.reshape(feature.shape)
    if kind != _list_for(dtype):
        raise TFRecordError(
            f"holds the feature {name!r} as `{kind}`, but `features` says {dtype}. Use "
            f"a dtype such as `{_DTYPES[kind]}`."
        )
    if len(values) != count:
        raise TFRecordError(
            f"holds {len(values)} values in the feature {name!r}, but its shape "
            f"{feature.shape} takes {count}. Use `shape=({len(values)},)` if all "
            "records hold as many; otherwise pad the values where the file is written."
        )
    if dtype.kind == "O":
        # Not `asarray`, which would look into the byte strings.
        return np.fromiter(values, object, len(values)).reshape(feature.shape)
    if len(values) > _FEW:
        written = np.asarray(values)
    else:
        wide = np.float32 if kind == "float_list" else np.int64
        written = np.fromiter(values, wide, len(values))
    read = written.astype(dtype)
    if kind == "int64_list" and (wrong := written[read != written]).size:
        raise TFRecordError(
            f"holds {wrong[0]} in the feature {name!r}, which {dtype} cannot hold. "
            "Use a wider dtype, such as `np.int64`."
        )
    return read.reshape(feature.shape)


_PROTO = """
name: "armillary/example.proto" package: "armillary" syntax: "proto3"
message_type { name: "BytesList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_BYTES } }
message_type { name: "FloatList"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_FLOAT } }
message_type { name: "Int64List"
  field { name: "value" number: 1 label: LABEL_REPEATED type: TYPE_INT64 } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type_name: "BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type_name: "FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type_name: "Int64List" oneof_index: 0 } }
message_type { name: "Features"
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
    field { name: "value" number: 2 label: LABEL_OPTIONAL type_name: "Feature" } }
  field { name: "feature" number: 1 label: LABEL_REPEATED type_name: "FeatureEntry" } }
message_type { name: "Example"
  field { name: "features" number: 1 type_name: "Features" } }
"""
"""The messages of `tensorflow/core/example/example.proto`."""


@functools.cache
def example_class() -> Any:
    """Returns the class of messages, in a pool of its own beside TensorFlow's."""
    from google.protobuf import descriptor_pb2, descriptor_pool, text_format
    from google.protobuf import message_factory as factory

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return factory.GetMessageClass(pool.FindMessageTypeByName("armillary.Example"))
