"""Writes TFRecord files for tests with a different library than the tested one."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX.record_writer import RecordWriter

from armillary.data.sources._message import example_class


def make_record(features: Mapping[str, Any]) -> bytes:
    """Returns a serialized `tf.train.Example`; the values decide the kinds."""
    example = example_class()()
    for name, value in features.items():
        values = [value] if isinstance(value, bytes) else np.ravel(value).tolist()
        kind = {bytes: "bytes", int: "int64", float: "float"}[type(values[0])]
        into = getattr(example.features.feature[name], f"{kind}_list").value
        into.extend(values)
    return example.SerializeToString()


def write_records(path: Path, records: Iterable[bytes]) -> Path:
    """Writes a TFRecord file, and returns its path."""
    writer = RecordWriter(str(path))
    for record in records:
        writer.write(record)
    writer.close()
    return path
