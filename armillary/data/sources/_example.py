"""`tf.train.Example` without TensorFlow: records to batches of arrays."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._checks import is_positive_int
from armillary.errors import TFRecordError

# The lists of values, with what these are called, and dtypes that fit them.
_KINDS = {
    "bytes_list": ("bytes", "bytes"),
    "float_list": ("floats", "np.float32"),
    "int64_list": ("integers", "np.int64"),
}
# As many values are taken one by one in the time that an array of them costs at least.
_FEW = 64


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
        ValueError: If `shape` is no shape, or `default_value` does not fit it or
            `dtype`.
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
            dtype = None
        if dtype is None or self.dtype is None or _kind_of(dtype) is None:
            raise TypeError(
                f"`dtype` is {self.dtype!r}, but a feature holds numbers or bytes. Use "
                "a dtype such as `np.int64`, `np.float32` or `bytes`."
            )
        object.__setattr__(self, "shape", tuple(shape))
        object.__setattr__(self, "dtype", dtype if dtype.kind != "S" else np.dtype("O"))
        if self.default_value is not None:
            object.__setattr__(self, "default_value", self._make_default())

    def _make_default(self) -> np.ndarray:
        try:
            value = np.asarray(self.default_value, self.dtype)
            return np.broadcast_to(
                value.reshape(self.shape if value.size > 1 else ()), self.shape
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"`default_value` is {self.default_value!r:.80}, but the feature has "
                f"the dtype {self.dtype} and the shape {self.shape}. Pass one value of "
                "that dtype, or as many as the shape takes."
            ) from error


def parse_examples(
    features: Mapping[str, FixedLenFeature],
    records: Sequence[bytes],
    get_name: Callable[[int], str],
) -> dict[str, np.ndarray]:
    """Returns the features of serialized messages, each of shape `(records, *shape)`.

    `get_name` returns what messages call a record, given its place.
    """
    from google.protobuf.message import DecodeError

    batch = {
        name: np.empty((len(records), *feature.shape), feature.dtype)
        for name, feature in features.items()
    }
    message = example_class()
    for place, record in enumerate(records):
        try:
            stored = message.FromString(record).features.feature
            for name, feature in features.items():
                # With `...`, or an array of objects would hold an array.
                batch[name][place, ...] = _read_values(stored, name, feature)
        except DecodeError as error:
            raise TFRecordError(
                f"{get_name(place)} is no `tf.train.Example`: {error}. Write the file "
                "with `example.SerializeToString()`."
            ) from error
        except TFRecordError as error:
            raise TFRecordError(f"{get_name(place)} {error}") from None
    return batch


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
    if kind == "bytes_list" and dtype.kind != "O":
        return _read_raw(values, name, feature)
    if kind != _kind_of(dtype):
        called, fitting = _KINDS[kind]
        raise TFRecordError(
            f"holds {called} in the feature {name!r}, but `features` says {dtype}. Use "
            f"a dtype such as `{fitting}`."
        )
    if len(values) != math.prod(feature.shape):
        raise TFRecordError(
            f"holds {len(values)} values in the feature {name!r}, but its shape "
            f"{feature.shape} takes {math.prod(feature.shape)}. Use "
            f"`shape=({len(values)},)` if all records hold as many; otherwise pad the "
            "values where the file is written."
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
    if kind == "int64_list" and dtype != written.dtype:
        wrong = written[read != written]
        if wrong.size:
            raise TFRecordError(
                f"holds {wrong[0]} in the feature {name!r}, which {dtype} cannot hold. "
                "Use a wider dtype, such as `np.int64`."
            )
    return read.reshape(feature.shape)


def _read_raw(
    values: Sequence[bytes], name: str, feature: FixedLenFeature
) -> np.ndarray:
    # They were written as the bytes of an array.
    size = math.prod(feature.shape) * feature.dtype.itemsize
    if len(values) != 1 or len(values[0]) != size:
        raise TFRecordError(
            f"holds byte strings of {[len(value) for value in values[:3]]} bytes in "
            f"the feature {name!r}, but {feature.dtype} of shape {feature.shape} is "
            f"one of {size} bytes. Use the shape and dtype of the array that was "
            "written, or `dtype=bytes` to decode them in the program."
        )
    written = np.frombuffer(values[0], feature.dtype.newbyteorder("<"))
    return written.reshape(feature.shape)


def _kind_of(dtype: np.dtype) -> str | None:
    """Returns which list of values fits a dtype."""
    if dtype.kind in "biu":
        return "int64_list"
    if dtype.kind in "SO":
        return "bytes_list"
    # JAX knows bfloat16 and its relatives, which NumPy does not.
    return "float_list" if jax.dtypes.issubdtype(dtype, np.floating) else None


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
