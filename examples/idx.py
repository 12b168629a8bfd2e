"""Reads image datasets in the IDX format, such as MNIST and Fashion-MNIST.

A file is a magic number (two zeros, the type of the values, the number of axes), the
length of each axis as a big-endian integer of four bytes, and then the values.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

UNSIGNED_BYTE = 8


def read_split(folder: Path, split: str) -> dict[str, np.ndarray]:
    """Returns images of shape `(n, rows, columns, 1)` in 0..1, and `n` labels."""
    images = read_idx(folder / f"{split}-images-idx3-ubyte.gz", num_axes=3)
    labels = read_idx(folder / f"{split}-labels-idx1-ubyte.gz", num_axes=1)
    if len(images) != len(labels):
        raise ValueError(
            f"{folder} holds {len(images)} images but {len(labels)} labels for "
            f"{split!r}. Take both files from the same dataset."
        )
    image = images[..., None].astype(np.float32) / 255.0
    return {"image": image, "label": labels.astype(np.int32)}


def read_idx(path: Path, num_axes: int) -> np.ndarray:
    """Reads a compressed IDX file of unsigned bytes, and checks that it is whole."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. The folder needs the four standard IDX files: images "
            "and labels, each for `train` and `t10k`."
        )
    try:
        content = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete gzip file: {error} Download it again."
        ) from error
    magic = bytes([0, 0, UNSIGNED_BYTE, num_axes])
    if content[:4] != magic:
        raise ValueError(
            f"{path} begins with the bytes {content[:4].hex()!r}, but an IDX file of "
            f"{num_axes} axes begins with {magic.hex()!r}. Is it another file?"
        )
    header_size = len(magic) + 4 * num_axes
    shape = np.frombuffer(content[4:header_size].ljust(4 * num_axes, b"\0"), ">u4")
    size = header_size + math.prod(shape.tolist())
    if len(content) != size:
        raise ValueError(
            f"{path} holds {len(content)} bytes, but its header announces {size}, for "
            f"shape {tuple(shape.tolist())}. Download it again."
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape(shape)
