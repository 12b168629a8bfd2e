"""Reads checkpoints of TensorFlow without TensorFlow.

A checkpoint `PREFIX` is a table, `PREFIX.index`, and shards, such as
`PREFIX.data-00000-of-00001`. The table has the format of LevelDB: blocks of sorted
keys, and one block with the offsets of the other blocks. A key is stored without the
beginning that it shares with the key before. It is the name of a tensor, and its value
is a protocol buffer with the tensor's type, its shape, and its offset in a shard.
TensorFlow does not compress the table.

The reader compares every block and every tensor with its checksum.
"""

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from google_crc32c import value as crc32c

MAGIC = struct.pack("<Q", 0xDB4775248B80FB57)
FOOTER_SIZE = 48
# A byte after each block that names the compression; a checksum of both follows it.
UNCOMPRESSED = b"\0"

# Numbers of TensorFlow's `DataType`. Other types, such as strings, are left out.
TYPES = {
    1: np.dtype("<f4"),
    2: np.dtype("<f8"),
    3: np.dtype("<i4"),
    4: np.dtype("u1"),
    5: np.dtype("<i2"),
    6: np.dtype("i1"),
    9: np.dtype("<i8"),
    10: np.dtype("?"),
    14: np.dtype(ml_dtypes.bfloat16),
    17: np.dtype("<u2"),
    19: np.dtype("<f2"),
    22: np.dtype("<u4"),
    23: np.dtype("<u8"),
}


def read_tensor_bundle(prefix: Path) -> dict[str, np.ndarray]:
    """Returns all arrays of a checkpoint by name.

    Args:
        prefix: The path of the files, without `.index` and `.data-00000-of-00001`.

    Raises:
        FileNotFoundError: If a shard is missing.
        ValueError: If a file is damaged, or of a kind that is not read.
    """
    index = Path(f"{prefix}.index")
    entries = dict(read_table(index))
    header = dict(read_message(entries.pop(b"", b"")))
    num_shards = header.get(1, 0)
    if header.get(2, 0) != 0 or not num_shards:
        raise ValueError(
            f"{index} is not the index of a checkpoint that TensorFlow wrote on a "
            f"little-endian machine: its header is {header}."
        )
    shards = [
        np.memmap(f"{prefix}.data-{number:05}-of-{num_shards:05}", np.uint8, mode="r")
        for number in range(num_shards)
    ]
    tensors = {}
    for key, value in entries.items():
        entry = dict(read_message(value))
        if entry.get(1) not in TYPES:
            continue
        name, dtype = key.decode(), TYPES[entry[1]]
        if 7 in entry:
            raise ValueError(
                f"The tensor {name!r} in {index} is saved in slices, which are not "
                "read here. Save it again with TensorFlow, as one variable."
            )
        shape = read_shape(entry.get(2, b""))
        offset, size = entry.get(4, 0), entry.get(5, 0)
        content = shards[entry.get(3, 0)][offset : offset + size]
        if not len(content) == size == math.prod(shape) * dtype.itemsize:
            raise ValueError(
                f"The tensor {name!r} of shape {shape} and type {dtype} has "
                f"{len(content)} bytes in the files of {prefix}, and {size} in its "
                "index. Are all files whole?"
            )
        if entry.get(6) != masked_checksum(content.tobytes()):
            raise ValueError(
                f"The tensor {name!r} of {prefix} is damaged: the checksum "
                "differs. Download them again."
            )
        tensors[name] = content.view(dtype).reshape(shape)
    return tensors


def read_table(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of a table of LevelDB in the order of the keys."""
    content = path.read_bytes()
    if len(content) < FOOTER_SIZE or not content.endswith(MAGIC):
        raise ValueError(
            f"{path} is not a whole table: it must end with the bytes {MAGIC.hex()}. "
            "Download it again."
        )
    footer = content[-FOOTER_SIZE:]
    # The footer has the places of two blocks; the second one lists all others.
    _, position = read_place(footer, 0)
    root, _ = read_place(footer, position)
    for _, value in read_block(path, content, *root):
        place, _ = read_place(value, 0)
        yield from read_block(path, content, *place)


def read_block(
    path: Path, content: bytes, offset: int, size: int
) -> Iterator[tuple[bytes, bytes]]:
    """Yields keys and values of one block."""
    block = content[offset : offset + size]
    end = offset + size + len(UNCOMPRESSED)
    checksum = content[end : end + 4]
    if checksum != masked_checksum(content[offset:end]):
        raise ValueError(
            f"{path} is damaged: the checksum of the block at byte {offset} differs. "
            "Download it again."
        )
    if not content[:end].endswith(UNCOMPRESSED):
        raise ValueError(
            f"{path} is compressed, and TensorFlow does not compress the index of a "
            "checkpoint. Is it another table?"
        )
    # At its end the block lists where keys are stored whole, for searches.
    (num_restarts,) = struct.unpack_from("<I", block, size - 4)
    end = size - 4 * (num_restarts + 1)
    key, position = b"", 0
    while position < end:
        num_shared, position = read_varint(block, position)
        num_own, position = read_varint(block, position)
        num_value, position = read_varint(block, position)
        key = key[:num_shared] + block[position : position + num_own]
        position += num_own
        yield key, block[position : position + num_value]
        position += num_value


def read_place(content: bytes, position: int) -> tuple[tuple[int, int], int]:
    """Returns the offset and size of a block, and the position behind them."""
    offset, position = read_varint(content, position)
    size, position = read_varint(content, position)
    return (offset, size), position


def read_shape(content: bytes) -> tuple[int, ...]:
    """Returns the shape in a `TensorShapeProto`: field 2 has one axis each."""
    axes = [value for field, value in read_message(content) if field == 2]
    return tuple(dict(read_message(axis)).get(1, 0) for axis in axes)


def read_message(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the number and value of each field: an integer, or bytes."""
    position = 0
    while position < len(content):
        tag, position = read_varint(content, position)
        match tag & 7:
            case 0:
                value, position = read_varint(content, position)
                yield tag >> 3, value
                continue
            case 2:
                size, position = read_varint(content, position)
            case wire_type:
                size = {1: 8, 5: 4}[wire_type]
        yield tag >> 3, content[position : position + size]
        position += size


def read_varint(content: bytes, position: int) -> tuple[int, int]:
    """Returns an integer stored seven bits a byte, and the position behind it."""
    value = shift = 0
    while True:
        byte = content[position]
        value |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return value, position


def masked_checksum(content: bytes) -> bytes:
    """Returns the CRC-32C, rotated and shifted as LevelDB stores it."""
    checksum = crc32c(content)
    rotated = checksum >> 15 | checksum << 17
    return struct.pack("<I", rotated + 0xA282EAD8 & 0xFFFFFFFF)
