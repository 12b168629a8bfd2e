"""TFRecord files of `tf.train.Example` as a source, without TensorFlow.

A record consists of the length of its data in 8 bytes, a checksum of these bytes, the
data, and a checksum of the data. One pass over a file finds the places of its records.
"""

import itertools
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from armillary._checks import check_path
from armillary.data.sources._arrays import IndexedDataset, fingerprint
from armillary.data.sources._features import FixedLenFeature, check_features
from armillary.data.sources._files import find_files, opened
from armillary.data.sources._message import example_class, read_values
from armillary.data.sources._message_batches import parse_examples
from armillary.errors import TFRecordError
from armillary.typing import Batch

_HEADER = struct.Struct("<QI")
_FOOTER = struct.Struct("<I")
_MAX_READ = 64
"""The number of records that a fingerprint reads."""

_AT_ONCE = 2**20
"""The number of bytes to read together; small batches share a read."""
_MAX_GAP = 2**12
"""Records up to this many bytes apart share a read, which is faster than two reads."""

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
    """Returns a dataset of the records of TFRecord files, in batches.

    The files are one sequence of records, in the order of the paths, and are shuffled
    together. Each file is scanned once to find its records. Later, records are read by
    their place, and their checksums are compared. A batch is a dictionary of NumPy
    arrays. `docs/data/tfrecord.md` has an example.

    Args:
        paths: One file or several, not compressed. A pattern such as
            `"train-*.tfrecord"` stands for the files that fit it, in sorted order. An
            address such as `"gs://bucket/train-*.tfrecord"` is read by `fsspec`, which
            needs the package for it (`gcsfs`).
        features: The features to read from each record, by name. Other features are
            skipped.
        batch_size: As in `from_arrays`, like all arguments below.
        shuffle_seed: Seed of the order.
        repeat: Whether the dataset never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A dataset with the order, the passes and the positions of `from_arrays`.

    Raises:
        FileNotFoundError: If there is no such file.
        ImportError: If an address needs a package that is not installed.
        TypeError: If `features` is not a dictionary of `FixedLenFeature`.
        ValueError: If there is no record, or another argument is wrong.
        TFRecordError: If a file is damaged, or records do not hold the features.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return TFRecordDataset(
        paths, features, batch_size, shuffle_seed, repeat, drop_remainder
    )


class TFRecordDataset(IndexedDataset):
    """Records of files in batches; made by `from_tfrecords`, which documents it."""

    name = "TFRecord files"

    def __init__(
        self, paths: Any, features: Mapping[str, FixedLenFeature], *options: Any
    ) -> None:
        if isinstance(paths, str | os.PathLike) or not np.iterable(paths):
            paths = [paths]
        patterns: list[str] = []
        for pattern in paths:
            patterns.append(check_path("paths", pattern, only_python_opens=True))
        self._paths = find_files(patterns)
        self._features = check_features(features)

        places = [_find_records(path) for path in self._paths]
        # The offset and the size of each record.
        self._places = np.concatenate([np.empty((0, 2), np.int64), *places])
        # The number of records in all files before each file.
        self._starts = np.cumsum([0, *map(len, places)])
        super().__init__("paths", len(self._places), *options)

        mean_size = int(self._places[:, 1].mean())
        count = _AT_ONCE // (1 + mean_size)
        self.rows_at_once = min(count, self.num_examples)
        # One read finds mistakes in `features` before the program runs.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the features of these records.

        Raises:
            TFRecordError: If a file is damaged, or a record does not hold the features.
        """
        from google.protobuf.message import DecodeError

        data, begins, ends = self._read(rows)
        batch, left = parse_examples(data, begins, ends, self._features)
        for place in left.tolist():
            message = data[begins[place] : ends[place]]
            try:
                stored = example_class().FromString(message).features.feature
                for name, feature in self._features.items():
                    # With `...`, so that an array of objects does not hold an array.
                    batch[name][place, ...] = read_values(stored, name, feature)
            except DecodeError as error:
                raise TFRecordError(
                    f"{self._name(rows[place])} is not a `tf.train.Example`: {error}. "
                    "Write the file with `example.SerializeToString()`."
                ) from error
            except TFRecordError as error:
                raise TFRecordError(f"{self._name(rows[place])} {error}") from None
        return batch

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of the sizes of all records, and of some contents."""
        data, begins, ends = self._read(self.spaced_rows(_MAX_READ))
        some = _cut(data, begins, ends)
        return {"records": fingerprint(self._places[:, 1], *some)}

    def _read(self, rows: np.ndarray) -> tuple[bytes, np.ndarray, np.ndarray]:
        """Returns bytes that hold these records, and the begin and end of each."""
        order = np.argsort(rows)
        in_order = rows[order]
        files = np.searchsorted(self._starts, in_order, "right") - 1
        offsets, sizes = self._places[in_order].T
        first, lengths = _join_reads(files, offsets, sizes)
        data = self._read_spans(files[first], offsets[first], lengths)

        # The places of the records in `data`, in the order of `rows`.
        begins, ends = np.empty((2, len(rows)), np.int64)
        starts = np.cumsum(lengths) - lengths  # of the reads in `data`
        moved = starts - offsets[first]
        records_per_read = np.diff(first, append=len(rows))
        begins[order] = offsets + np.repeat(moved, records_per_read)
        ends[order] = begins[order] + sizes
        self._check(rows, data, begins, ends)
        return data, begins, ends

    def _read_spans(
        self, files: np.ndarray, offsets: np.ndarray, lengths: np.ndarray
    ) -> bytes:
        """Returns the bytes of several reads, sorted by file, one after the other."""
        reads = np.stack([files, lengths, offsets], 1).tolist()
        pieces: list[bytes] = []
        for file, own in itertools.groupby(reads, lambda read: read[0]):
            # Opened for each read, because there may be many files and threads.
            with opened(self._paths[file]) as source:
                for _, length, offset in own:
                    part = source.read(length, offset)
                    # If the file was truncated in the meantime, zeros fill the part.
                    pieces.append(part.ljust(length, b"\0"))
        # With 8 more bytes, so that a word can be read at every place.
        return b"".join([*pieces, bytes(8)])

    def _check(
        self,
        rows: np.ndarray,
        data: bytes,
        begins: np.ndarray,
        ends: np.ndarray,
    ) -> None:
        """Raises if the checksum behind a record does not match its data."""
        # A word of 4 bytes at each byte of the data; nothing is copied.
        words = np.ndarray(len(data) - 3, "<u4", data, strides=(1,))
        checksums = _checksums(_cut(data, begins, ends))
        wrong = np.flatnonzero(words[ends] != checksums)
        if len(wrong):
            row = rows[wrong[0]]
            raise TFRecordError(
                f"{self._name(row)} is damaged: its data does not match the checksum "
                "that was written with it. Copy the file again."
            )

    def _name(self, row: Any) -> str:
        file = int(np.searchsorted(self._starts, row, "right")) - 1
        number = row - self._starts[file]
        return _name(self._paths[file], number, self._places[row, 0])


def _join_reads(
    files: np.ndarray, offsets: np.ndarray, sizes: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Joins the reads of records that are near each other.

    Args:
        files: The number of the file of each record, sorted.
        offsets: The offset of the record in its file, sorted for each file.
        sizes: The size of the record.

    Returns:
        The record with which each read begins, and the length of the read in bytes.
    """
    stops = offsets + sizes + _FOOTER.size
    gaps = offsets[1:] - stops[:-1]
    is_same_file = files[1:] == files[:-1]
    is_near = (gaps >= 0) & (gaps <= _MAX_GAP) & is_same_file
    begins_read = ~np.append(False, is_near)
    first = np.flatnonzero(begins_read)
    last = np.append(first[1:], len(files)) - 1
    lengths = stops[last] - offsets[first]
    return first, lengths


def _find_records(path: str) -> np.ndarray:
    """Returns offset and size of the data of each record of a file."""
    headers: list[bytes] = []
    offsets: list[int] = []
    with opened(path) as source:
        end = source.size
        offset = 0
        while offset + _HEADER.size <= end:
            header = source.read(_HEADER.size, offset)
            size, _ = _HEADER.unpack(header)
            headers.append(header)
            offset += _HEADER.size
            offsets.append(offset)
            offset += size + _FOOTER.size

    table = np.frombuffer(b"".join(headers), [("size", "<i8"), ("checksum", "<u4")])
    checksums = _checksums(header[:8] for header in headers)
    wrong = np.flatnonzero(table["checksum"] != checksums)
    if len(wrong):
        number = wrong[0]
        raise TFRecordError(
            f"{_name(path, number, offsets[number])} is damaged, or the file is "
            "compressed or not a TFRecord file: the length of the record does not "
            "match its checksum. Copy the file again, or unpack it."
        )
    if offset != end:
        if offset < end:  # Not even the header is there.
            offset += _HEADER.size
            offsets.append(offset)
        number = len(offsets) - 1
        raise TFRecordError(
            f"{_name(path, number, offsets[number])} is cut off: the file ends "
            f"{offset - end} bytes before the end of the record. Copy the file again."
        )
    return np.stack([np.array(offsets, np.int64), table["size"]], 1)


def _cut(data: bytes, begins: np.ndarray, ends: np.ndarray) -> Iterator[bytes]:
    spans = zip(begins.tolist(), ends.tolist(), strict=True)
    return (data[begin:end] for begin, end in spans)


def _name(path: str, number: int, offset: int) -> str:
    return f"Record {number} of `{path}` (offset {offset})"


def _checksums(parts: Iterable[bytes]) -> np.ndarray:
    """Returns the CRC-32C of each, rotated and shifted as TFRecord files have it."""
    import google_crc32c

    crc = np.fromiter(map(google_crc32c.value, parts), np.uint32)
    return (crc >> 15 | crc << 17) + np.uint32(0xA282EAD8)
