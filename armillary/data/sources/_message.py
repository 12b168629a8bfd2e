"""Reads one `tf.train.Example` message with the parser of protobuf."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from armillary.data.sources._features import (
    DTYPES_BY_LIST,
    FixedLenFeature,
    convert,
    list_for,
)
from armillary.errors import TFRecordError


def read_values(
    stored: Mapping[str, Any], name: str, feature: FixedLenFeature
) -> np.ndarray:
    """Returns the values of one feature of an example, checked against its description.

    Errors begin with a verb, because the caller puts the name of the record before it.
    """
    kind = stored[name].WhichOneof("kind") if name in stored else None
    if kind is None:
        if feature.default_value is None:
            held = ", ".join(map(repr, sorted(stored)))
            raise TFRecordError(
                f"has no feature {name!r}. It has {held or 'none'}: name one of these, "
                "or give a `default_value`."
            )
        return feature.default_value

    values = getattr(stored[name], kind).value
    dtype = feature.dtype
    count = math.prod(feature.shape)
    if kind == "bytes_list" and dtype.kind != "O":
        return _read_array(values, name, feature)

    if kind != list_for(dtype):
        raise TFRecordError(
            f"holds the feature {name!r} as `{kind}`, but `features` says {dtype}. Use "
            f"a dtype such as `{DTYPES_BY_LIST[kind]}`."
        )
    if len(values) != count:
        raise TFRecordError(
            f"holds {len(values)} values in the feature {name!r}, but its shape "
            f"{feature.shape} takes {count}. If all records hold {len(values)} values, "
            f"use `shape=({len(values)},)`. Otherwise, pad the values when the file is "
            "written."
        )
    if dtype.kind == "O":
        # Not `asarray`, which would look into the byte strings.
        return np.fromiter(values, object, len(values)).reshape(feature.shape)

    written = np.asarray(values)
    read, fits = convert(written, dtype)
    wrong = written[~fits]
    if wrong.size:
        raise TFRecordError(
            f"holds {wrong[0]} in the feature {name!r}, which {dtype} cannot hold. Use "
            f"a wider dtype, such as `{DTYPES_BY_LIST[kind]}`."
        )
    return read.reshape(feature.shape)


def _read_array(
    values: Sequence[bytes], name: str, feature: FixedLenFeature
) -> np.ndarray:
    """Returns an array that was written as its bytes."""
    dtype = feature.dtype
    size = math.prod(feature.shape) * dtype.itemsize
    sizes = [len(value) for value in values]
    if sizes != [size]:
        raise TFRecordError(
            f"holds byte strings of {sizes[:3]} bytes in the feature {name!r}, but "
            f"{dtype} of shape {feature.shape} is one of {size} bytes. Use the shape "
            "and dtype of the array that was written, or `dtype=bytes` to decode them "
            "in the program."
        )
    [data] = values
    written = np.frombuffer(data, dtype.newbyteorder("<"))
    return written.reshape(feature.shape)


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


@functools.cache
def example_class() -> Any:
    """Returns the class of messages, in a pool separate from TensorFlow's."""
    from google.protobuf import descriptor_pb2, descriptor_pool, text_format
    from google.protobuf import message_factory as factory

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return factory.GetMessageClass(pool.FindMessageTypeByName("armillary.Example"))
