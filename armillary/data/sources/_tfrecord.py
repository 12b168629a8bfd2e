"""TFRecord files of `tf.train.Example` as a source, without TensorFlow.

The records of TFRecord files, by number.

A record is the length of its data in 8 bytes, a checksum of these, the data, and a
checksum of the data. One pass over a file finds where its records are; then any of them
is one read.
"""

import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from armillary._checks import check_path
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._example import ExampleParser, FixedLenFeature
from armillary.errors import TFRecordError
from armillary.typing import Batch

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MOST_BYTES = 2**31 - 1
"""What a serialized message may have at most."""
_GZIP = b"\x1f\x8b\x08"
_FIX = "Copy the file anew, or write it anew."


class RecordFiles:
    """Records of several files, numbered through in the order of the files.

    Files are opened for each batch, so that there may be any number of them, and read
    by position, so that several threads may do it.

    Raises:
        TFRecordError: If a file is damaged, or no TFRecord file.
    """

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        # For each record: its file, its number in it, and where its data are.
        self._records = np.concatenate(
            [_find_records(path, file) for file, path in enumerate(paths)]
        )

    def __len__(self) -> int:
        return len(self._records)

    @property
    def sizes(self) -> np.ndarray:
        """The bytes of each record."""
        return self._records[:, 3]

    def name(self, row: int) -> str:
        """Returns what messages call a record."""
        file, number, offset, _ = self._records[row].tolist()
        return _name(self._paths[file], number, offset)

    def read(self, rows: np.ndarray) -> list[bytes]:
        """Returns the data of these records, in this order."""
        data = [b""] * len(rows)
        records = self._records[rows]
        for file in np.unique(records[:, 0]).tolist():
            path = self._paths[file]
            places = np.flatnonzero(records[:, 0] == file)
            with open(path, "rb", buffering=0) as opened:
                for place, (_, number, offset, size) in zip(
                    places.tolist(), records[places].tolist(), strict=True
                ):
                    name = _name(path, number, offset)
                    data[place] = _read_data(opened.fileno(), offset, size, name)
        return data


def _find_records(path: str, file: int) -> np.ndarray:
    # A row for each record: its file, its number, offset and size of the data.
    places: list[tuple[int, int, int, int]] = []
    with open(path, "rb", buffering=0) as opened:
        descriptor = opened.fileno()
        end, offset = os.fstat(descriptor).st_size, 0
        while offset < end:
            header = os.pread(descriptor, _HEADER.size, offset)
            name = _name(path, len(places), offset + _HEADER.size)
            if len(header) < _HEADER.size:
                raise TFRecordError(f"{name} is cut off: the file ends in it. {_FIX}")
            size, checksum = _HEADER.unpack(header)
            if checksum != _checksum(header[:8]):
                raise TFRecordError(_describe_header(path, name, header))
            if size > _MOST_BYTES:
                raise TFRecordError(
                    f"{name} is no `tf.train.Example`: it has {size} bytes, and a "
                    f"message has at most {_MOST_BYTES}. {_FIX}"
                )
            offset += _HEADER.size
            places.append((file, len(places), offset, size))
            offset += size + _FOOTER.size
            if offset > end:
                raise TFRecordError(
                    f"{name} is cut off: it has {size} bytes, and the file ends "
                    f"{offset - end} bytes before the end of the record. {_FIX}"
                )
    return np.array(places, np.int64).reshape(-1, 4)


def _read_data(descriptor: int, offset: int, size: int, name: str) -> bytes:
    record = os.pread(descriptor, size + _FOOTER.size, offset)
    data, footer = record[:size], record[size:]
    if len(footer) < _FOOTER.size or _FOOTER.unpack(footer)[0] != _checksum(data):
        raise TFRecordError(
            f"{name} is damaged: its {size} bytes do not have the checksum that was "
            f"written with them. {_FIX}"
        )
    return data


def _describe_header(path: str, name: str, header: bytes) -> str:
    if header.startswith(_GZIP):
        return (
            f"`{path}` is compressed with GZIP, but records are read by position, "
            f"which needs plain files. Unpack it: `gunzip < {path} > {path}.plain`."
        )
    return (
        f"{name} is damaged, or the file is no TFRecord file: the length of the record "
        f"does not have the checksum that was written with it. {_FIX}"
    )


def _name(path: str, number: int, offset: int) -> str:
    return f"Record {number} of `{path}` (offset {offset})"


def _checksum(data: bytes) -> int:
    """Returns the CRC-32C of `data`, rotated and shifted as TFRecord files have it."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_MOST_READ = 64
"""How many records a fingerprint reads."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


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
        A data set. Each pass over it is the next epoch. Positions count examples, so
        that one can be restored with another batch size.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If `features` is no dictionary of `FixedLenFeature`.
        ValueError: If there is no path, no feature or no record, or another argument
            is wrong.
        TFRecordError: If a file is damaged, or records do not hold the features.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return TFRecordDataset(
        _check_paths(paths),
        features,
        batch_size=batch_size,
        shuffle_seed=shuffle_seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


class TFRecordDataset(IndexedDataset):
    """Records of files in batches; made by `from_tfrecords`, which documents it."""

    name = "TFRecord files"

    def __init__(
        self,
        paths: list[str],
        features: Mapping[str, FixedLenFeature],
        **options: Any,
    ) -> None:
        self._parser = ExampleParser(_check_features(features))
        self._files = RecordFiles(paths)
        if not len(self._files):
            raise ValueError(
                f"`paths` is {_show(paths)}, which hold 0 records, but a data set "
                "needs at least one. Pass files with records."
            )
        super().__init__(len(self._files), **options)
        # What is wrong with `features` shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the features of these records.

        Raises:
            TFRecordError: If a record is damaged or does not hold the features.
        """
        records = self._files.read(rows)
        return self._parser.parse(records, lambda place: self._files.name(rows[place]))

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of the sizes of all records, and of what some hold."""
        some = self._files.read(self.spaced_rows(_MOST_READ))
        return {"records": fingerprint(self._files.sizes, *some)}


def _check_paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike) or not np.iterable(paths):
        paths = [paths]
    found = [check_path("paths", path) for path in paths]
    if not found:
        raise ValueError(
            f"`paths` is {paths!r}, but there must be at least one file. Look at the "
            "pattern that should have found them."
        )
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        raise FileNotFoundError(
            f"`paths` has {_show(missing)}, which is no file. Pass files of this "
            "machine; patterns are not expanded: `sorted(glob.glob(pattern))`."
        )
    return found


def _check_features(
    features: Mapping[str, FixedLenFeature],
) -> dict[str, FixedLenFeature]:
    is_mapping = isinstance(features, Mapping)
    if not is_mapping or not all(
        isinstance(feature, FixedLenFeature) for feature in features.values()
    ):
        raise TypeError(
            f"`features` is {features!r:.200}, but it must be a dictionary of "
            "`armillary.data.FixedLenFeature`. Use `features={'label': "
            "armillary.data.FixedLenFeature((), np.int64)}`."
        )
    if not features:
        raise ValueError(
            "`features` is {}, but a batch needs at least one array. Name the features "
            "to read."
        )
    return dict(features)


def _show(paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"`{paths[0]}`{more}"
