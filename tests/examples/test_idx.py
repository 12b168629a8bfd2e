"""The IDX reader of the Fashion-MNIST example: what it reads and what it refuses."""

import gzip
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from tests.examples.loading import load_example

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
LABELS = np.array([7, 1], dtype=np.uint8)


idx = load_example("idx")


def encode(array: np.ndarray) -> bytes:
    header = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_folder(folder: Path, images: bytes, labels: bytes) -> Path:
    (folder / "train-images-idx3-ubyte.gz").write_bytes(images)
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(labels)
    return folder


def refuses(folder: Path, error: type[Exception], *parts: str) -> None:
    pattern = ".*".join(re.escape(part) for part in parts)
    with pytest.raises(error, match=pattern):
        idx.read_split(folder, "train")


def test_split_is_read_as_scaled_images_and_integer_labels(tmp_path):
    write_folder(tmp_path, gzip.compress(encode(IMAGES)), gzip.compress(encode(LABELS)))
    split = idx.read_split(tmp_path, "train")
    assert split["image"].shape == (2, 3, 4, 1)
    assert split["image"].dtype == np.float32
    np.testing.assert_allclose(split["image"][..., 0], IMAGES / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(split["label"], LABELS)


def test_missing_file_is_named(tmp_path):
    refuses(
        tmp_path,
        FileNotFoundError,
        "train-images-idx3-ubyte.gz is missing",
        "needs the four standard IDX files",
    )


@pytest.mark.parametrize("keep", [1, 12, -9])
def test_truncated_gzip_file_is_named(tmp_path, keep):
    images = gzip.compress(encode(IMAGES))[:keep]
    write_folder(tmp_path, images, gzip.compress(encode(LABELS)))
    refuses(
        tmp_path,
        ValueError,
        "train-images-idx3-ubyte.gz is not a complete gzip file",
        "Download it again.",
    )


def test_file_that_is_not_gzip_is_named(tmp_path):
    write_folder(tmp_path, b"<html>not found</html>", gzip.compress(encode(LABELS)))
    refuses(
        tmp_path,
        ValueError,
        "train-images-idx3-ubyte.gz is not a complete gzip file",
        "Not a gzipped file",
    )


def test_wrong_magic_number_shows_both(tmp_path):
    labels = gzip.compress(encode(LABELS))
    write_folder(tmp_path, labels, labels)
    refuses(
        tmp_path,
        ValueError,
        "train-images-idx3-ubyte.gz begins with the bytes '00000801'",
        "3 axes begins with '00000803'",
    )


@pytest.mark.parametrize(
    ("keep", "announced"), [(6, 16), (20, 40)], ids=["header", "values"]
)
def test_shortened_content_shows_both_sizes(tmp_path, keep, announced):
    images = gzip.compress(encode(IMAGES)[:keep])
    write_folder(tmp_path, images, gzip.compress(encode(LABELS)))
    refuses(
        tmp_path,
        ValueError,
        f"train-images-idx3-ubyte.gz holds {keep} bytes",
        f"announces {announced}, for shape (",
    )


def test_images_and_labels_of_different_sets_are_refused(tmp_path):
    write_folder(
        tmp_path, gzip.compress(encode(IMAGES)), gzip.compress(encode(LABELS[:1]))
    )
    refuses(tmp_path, ValueError, "holds 2 images but 1 labels for 'train'")
