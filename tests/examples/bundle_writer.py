"""Writes checkpoints of TensorFlow: a table of LevelDB, and shards."""

import struct
from pathlib import Path

import numpy as np
from tensorboardX.record_writer import masked_crc32c

TYPES = {
    "float32": 1,
    "float64": 2,
    "int32": 3,
    "uint8": 4,
    "int64": 9,
    "bool": 10,
    "bfloat16": 14,
    "float16": 19,
}
MAGIC = bytes.fromhex("57fb808b247547db")


def write_bundle(
    prefix: Path,
    arrays: dict[str, np.ndarray],
    *,
    num_shards: int = 1,
    keys_per_block: int = 5,
    restart_interval: int = 3,
    extra: bytes = b"",
    header: bytes = b"",
) -> Path:
    """Writes arrays, and returns the prefix.

    Args:
        prefix: The path of the files, without their ends.
        arrays: The arrays by name.
        num_shards: Files that share the arrays.
        keys_per_block: Keys in each block of the table.
        restart_interval: The number of keys from one that is stored whole to the next.
        extra: Fields at the end of every entry.
        header: Fields at the end of the header.
    """
    shards = [b""] * num_shards
    # The first entry has no name.
    table = {b"": field(1, num_shards) + header}
    for number, name in enumerate(sorted(arrays, key=str.encode)):
        array, shard = np.asarray(arrays[name]), number % num_shards
        content = array.tobytes()
        axes = b"".join(field(2, field(1, size)) for size in array.shape)
        table[name.encode()] = (
            field(1, TYPES[array.dtype.name])
            + field(2, axes)
            + (field(3, shard) if shard else b"")
            + (field(4, len(shards[shard])) if shards[shard] else b"")
            + field(5, len(content))
            + bytes([6 << 3 | 5])
            + struct.pack("<I", masked_crc32c(content))
            + extra
        )
        shards[shard] += content
    for number, shard in enumerate(shards):
        Path(f"{prefix}.data-{number:05}-of-{num_shards:05}").write_bytes(shard)
    index = make_table(table, keys_per_block, restart_interval)
    Path(f"{prefix}.index").write_bytes(index)
    return prefix


def make_table(
    entries: dict[bytes, bytes], keys_per_block: int, restart_interval: int
) -> bytes:
    """Returns a table whose keys are in order already."""
    keys, content, places = list(entries), b"", {}
    for start in range(0, len(keys), keys_per_block):
        chosen = keys[start : start + keys_per_block]
        block = make_block({key: entries[key] for key in chosen}, restart_interval)
        places[chosen[-1]] = varint(len(content)) + varint(len(block))
        content += seal(block)
    footer = b""
    for block in (make_block({}, 1), make_block(places, 1)):
        footer += varint(len(content)) + varint(len(block))
        content += seal(block)
    return content + footer.ljust(40, b"\0") + MAGIC


def make_block(entries: dict[bytes, bytes], restart_interval: int) -> bytes:
    """Returns entries with shortened keys, and the offsets of the whole keys."""
    content, restarts, last = b"", [0], b""
    for number, (key, value) in enumerate(entries.items()):
        shared = 0
        if number % restart_interval:
            while shared < min(len(key), len(last)) and key[shared] == last[shared]:
                shared += 1
        elif number:
            restarts.append(len(content))
        sizes = (shared, len(key) - shared, len(value))
        content += b"".join(map(varint, sizes)) + key[shared:] + value
        last = key
    return content + struct.pack(f"<{len(restarts) + 1}I", *restarts, len(restarts))


def seal(block: bytes, compression: bytes = b"\0") -> bytes:
    """Returns a block with its compression and its checksum."""
    return block + compression + struct.pack("<I", masked_crc32c(block + compression))


def field(number: int, value: int | bytes) -> bytes:
    """Returns a field of a protocol buffer."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    """Returns an integer, seven bits in a byte."""
    groups = []
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])
