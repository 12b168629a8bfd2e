"""The records of TFRecord files, by number.

A record is the length of its data in 8 bytes, a checksum of these, the data, and a
checksum of the data. One pass over a file finds where its records are; then any of them
is one read.
"""

import os
import struct

import numpy as np

from armillary.errors import TFRecordError

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
