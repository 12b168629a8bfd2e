"""TFRecord files of `tf.train.Example` as a source, without TensorFlow.

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
from armillary.data.sources._example import FixedLenFeature, parse_examples
from armillary.errors import TFRecordError
from armillary.typing import Batch

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_GZIP = b"\x1f\x8b\x08"
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
        A data set with the order, the passes and the positions of `from_arrays`.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If `features` is no dictionary of `FixedLenFeature`.
        ValueError: If there is no path, no feature or no record, or another argument
            is wrong.
        TFRecordError: If a file is damaged, or records do not hold the features.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    options = batch_size, shuffle_seed, repeat, drop_remainder
    return TFRecordDataset(paths, features, *options)


class TFRecordDataset(IndexedDataset):
    """Records of files in batches; made by `from_tfrecords`, which documents it.

    Files are opened for each batch, so that there may be any number of them, and read
    by position, so that several threads may do it.
    """

    name = "TFRecord files"

    def __init__(
        self, paths: Paths, features: Mapping[str, FixedLenFeature], *options: Any
    ) -> None:
        self._paths = _check_paths(paths)
        self._features = _check_features(features)
        places = [_find_records(path) for path in self._paths]
        # Where the data of each record are, and how many records the files before have.
        self._places = np.concatenate(places)
        self._starts = np.cumsum([0, *map(len, places)])
        super().__init__("paths", len(self._places), *options)
        # What is wrong with `features` shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the features of these records."""
        return parse_examples(
            self._features, self._read(rows), lambda place: self._name(rows[place])
        )

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
                if header.startswith(_GZIP):
                    raise TFRecordError(
                        f"`{path}` is compressed with GZIP, but records are read by "
                        f"position. Unpack it: `gunzip < {path} > {path}.plain`."
                    )
                raise TFRecordError(
                    f"{name} is damaged, or the file is no TFRecord file: the length "
                    "of the record does not have the checksum that was written with "
                    "it. Copy the file anew."
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


def _check_paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike) or not np.iterable(paths):
        paths = [paths]
    found = [check_path("paths", path) for path in paths]
    if not found:
        raise ValueError(
            f"`paths` is {paths!r}, but there must be at least one file. Look at the "
            "pattern that should have found them."
        )
    for path in found:
        if not os.path.isfile(path):
            raise FileNotFoundError(
                f"`paths` has `{path}`, which is no file. Pass files of this machine; "
                "patterns are not expanded: `sorted(glob.glob(pattern))`."
            )
    return found


def _check_features(features: Any) -> dict[str, FixedLenFeature]:
    if not isinstance(features, Mapping) or not all(
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
