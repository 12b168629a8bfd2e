"""Tests of the IDX reader of the Fashion-MNIST example."""

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


def test_split_is_read_as_scaled_images_and_integer_labels(tmp_path):
    write_folder(tmp_path, gzip.compress(encode(IMAGES)), gzip.compress(encode(LABELS)))
    split = idx.read_split(tmp_path, "train")
    assert split["image"].shape == (2, 3, 4, 1)
    assert split["image"].dtype == np.float32
    np.testing.assert_allclose(split["image"][..., 0], IMAGES / 255.0, rtol=1e-6)
    np.testing.assert_array_equal(split["label"], LABELS)


IMAGE_FILE, LABEL_FILE = gzip.compress(encode(IMAGES)), gzip.compress(encode(LABELS))


@pytest.mark.parametrize(
    ("images", "labels", "parts"),
    [
        (IMAGE_FILE[:12], LABEL_FILE, ["is not a complete gzip file", "Download it"]),
        (b"<html>", LABEL_FILE, ["is not a complete gzip file", "Not a gzipped file"]),
        (
            LABEL_FILE,
            LABEL_FILE,
            ["begins with the bytes '00000801'", "3 axes begins with '00000803'"],
        ),
        (
            gzip.compress(encode(IMAGES)[:20]),
            LABEL_FILE,
            ["holds 20 bytes", "announces 40, for shape ("],
        ),
        (
            IMAGE_FILE,
            gzip.compress(encode(LABELS[:1])),
            ["holds 2 images but 1 labels for 'train'"],
        ),
    ],
    ids=["cut off", "no gzip", "other magic", "too short", "other number"],
)
def test_files_that_are_wrong_are_named(tmp_path, images, labels, parts):
    write_folder(tmp_path, images, labels)
    with pytest.raises(ValueError, match=".*".join(map(re.escape, parts))):
        idx.read_split(tmp_path, "train")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz is miss"):
        idx.read_split(tmp_path, "train")
