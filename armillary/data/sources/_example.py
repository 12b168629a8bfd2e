"""`tf.train.Example` without TensorFlow: records to batches of arrays.

The messages are built when they are first used, from what their `.proto` file says.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from armillary._checks import is_positive_int
from armillary.errors import TFRecordError

# What the three lists of values are called in messages, and dtypes that fit them.
# In the order of their numbers in the message.
_KINDS = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "integers"}
_WRITTEN = {"float_list": np.float32, "int64_list": np.int64}
# As many values are taken one by one in the time that an array of them costs at least.
_FEW = 64
_DTYPES = {"bytes_list": "bytes", "float_list": "np.float32", "int64_list": "np.int64"}


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
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"`default_value` is {self.default_value!r:.80}, but the feature has "
                f"the dtype {self.dtype}. Pass values of that dtype, or another "
                "`dtype`."
            ) from error
        if value.size not in (1, math.prod(self.shape)):
            raise ValueError(
                f"`default_value` has {value.size} values, but the shape "
                f"{self.shape} takes {math.prod(self.shape)}. Pass one value, or as "
                "many as the shape takes."
            )
        return np.broadcast_to(
            value.reshape(self.shape) if value.size > 1 else value.reshape(()),
            self.shape,
        )


class ExampleParser:
    """Makes batches of records."""

    def __init__(self, features: Mapping[str, FixedLenFeature]) -> None:
        self._features = features
        self._message = example_class()

    def parse(
        self, records: Sequence[bytes], get_name: Callable[[int], str]
    ) -> dict[str, np.ndarray]:
        """Returns the features of records, each of shape `(records, *shape)`.

        Args:
            records: Serialized messages.
            get_name: Returns what messages call a record, given its place.

        Raises:
            TFRecordError: If a record is no `tf.train.Example`, or does not hold the
                features.
        """
        batch = {
            name: np.empty((len(records), *feature.shape), feature.dtype)
            for name, feature in self._features.items()
        }
        for place, record in enumerate(records):
            stored = self._decode(record, place, get_name)
            for name, feature in self._features.items():
                try:
                    # With `...`, or an array of objects would hold an array.
                    batch[name][place, ...] = _read_values(stored, name, feature)
                except TFRecordError as error:
                    raise TFRecordError(f"{get_name(place)} {error}") from None
        return batch

    def _decode(self, record: bytes, place: int, get_name: Callable[[int], str]) -> Any:
        from google.protobuf.message import DecodeError

        try:
            return self._message.FromString(record).features.feature
        except DecodeError as error:
            raise TFRecordError(
                f"{get_name(place)} is no `tf.train.Example`: {error}. Write the file "
                "with `example.SerializeToString()`."
            ) from error


def _read_values(
    stored: Mapping[str, Any], name: str, feature: FixedLenFeature
) -> np.ndarray:
    kind = stored[name].WhichOneof("kind") if name in stored else None
    if kind is None:
        if feature.default_value is None:
            raise TFRecordError(_describe_missing(stored, name))
        return feature.default_value
    values = getattr(stored[name], kind).value
    if kind == "bytes_list" and feature.dtype != object:
        return _read_raw(values, name, feature)
    if kind != _kind_of(feature.dtype):
        raise TFRecordError(
            f"holds {_KINDS[kind]} in the feature {name!r}, but `features` says "
            f"{feature.dtype}. Use a dtype such as `{_DTYPES[kind]}`."
        )
    if len(values) != math.prod(feature.shape):
        raise TFRecordError(
            f"holds {len(values)} values in the feature {name!r}, but its shape "
            f"{feature.shape} takes {math.prod(feature.shape)}. Use "
            f"`shape=({len(values)},)` if all records hold as many; otherwise pad the "
            "values where the file is written."
        )
    if feature.dtype == object:
        # Not `asarray`, which would look into the byte strings.
        return np.fromiter(values, object, len(values)).reshape(feature.shape)
    written = _as_array(values, kind)
    read = written.astype(feature.dtype)
    if kind == "int64_list" and feature.dtype != written.dtype:
        wrong = written[read != written]
        if wrong.size:
            raise TFRecordError(
                f"holds {wrong[0]} in the feature {name!r}, which {feature.dtype} "
                "cannot hold. Use a wider dtype, such as `np.int64`."
            )
    return read.reshape(feature.shape)


def _as_array(values: Sequence[Any], kind: str) -> np.ndarray:
    if len(values) > _FEW:
        return np.asarray(values)
    return np.fromiter(values, _WRITTEN[kind], len(values))


def _read_raw(
    values: Sequence[bytes], name: str, feature: FixedLenFeature
) -> np.ndarray:
    # They were written as the bytes of an array.
    size = math.prod(feature.shape) * feature.dtype.itemsize
    if len(values) != 1 or len(values[0]) != size:
        found = " + ".join(str(len(value)) for value in values[:3]) or "0"
        raise TFRecordError(
            f"holds {len(values)} byte strings in the feature {name!r} ({found} "
            f"bytes), but {feature.dtype} of shape {feature.shape} is one of {size} "
            "bytes. Use the shape and dtype of the array that was written, or "
            "`dtype=bytes` to decode them in the program."
        )
    written = np.frombuffer(values[0], feature.dtype.newbyteorder("<"))
    return written.reshape(feature.shape)


def _describe_missing(stored: Mapping[str, Any], name: str) -> str:
    held = ", ".join(
        f"{key!r} ({_KINDS.get(value.WhichOneof('kind'), 'empty')})"
        for key, value in sorted(stored.items())
    )
    return (
        f"has no feature {name!r}, and no `default_value` is given for it. It has "
        f"{held or 'none'}. Name one of these, or give a `default_value`."
    )


def _kind_of(dtype: np.dtype) -> str | None:
    """Returns which list of values fits a dtype."""
    if dtype.kind in "biu":
        return "int64_list"
    if dtype.kind in "SO":
        return "bytes_list"
    # JAX knows bfloat16 and its relatives, which NumPy does not.
    return "float_list" if jax.dtypes.issubdtype(dtype, np.floating) else None


@functools.cache
def example_class() -> Any:
    """Returns the class of messages, in a pool of its own beside TensorFlow's."""
    from google.protobuf import descriptor_pb2, descriptor_pool, json_format
    from google.protobuf import message_factory as factory

    lists = {
        "BytesList": [_field(1, "value", "TYPE_BYTES", is_list=True)],
        "FloatList": [_field(1, "value", "TYPE_FLOAT", is_list=True)],
        "Int64List": [_field(1, "value", "TYPE_INT64", is_list=True)],
    }
    kinds = [
        _field(number, name, message) | {"oneofIndex": 0}
        for number, (name, message) in enumerate(zip(_KINDS, lists, strict=True), 1)
    ]
    entry = {
        "name": "FeatureEntry",
        "field": [_field(1, "key", "TYPE_STRING"), _field(2, "value", "Feature")],
        "options": {"mapEntry": True},
    }
    messages = [{"name": name, "field": fields} for name, fields in lists.items()]
    messages += [
        {"name": "Feature", "field": kinds, "oneofDecl": [{"name": "kind"}]},
        {
            "name": "Features",
            "field": [_field(1, "feature", "Features.FeatureEntry", is_list=True)],
            "nestedType": [entry],
        },
        {"name": "Example", "field": [_field(1, "features", "Features")]},
    ]
    file = {
        "name": "armillary/example.proto",
        "package": "armillary",
        "syntax": "proto3",
        "messageType": messages,
    }
    pool = descriptor_pool.DescriptorPool()
    pool.Add(json_format.ParseDict(file, descriptor_pb2.FileDescriptorProto()))
    return factory.GetMessageClass(pool.FindMessageTypeByName("armillary.Example"))


def _field(
    number: int, name: str, kind: str, *, is_list: bool = False
) -> dict[str, Any]:
    """Returns the description of a field, of a plain type or of a message."""
    is_plain = kind.startswith("TYPE_")
    types = {"type": kind} if is_plain else {"typeName": f".armillary.{kind}"}
    label = "LABEL_REPEATED" if is_list else "LABEL_OPTIONAL"
    return {"name": name, "number": number, "label": label} | types
