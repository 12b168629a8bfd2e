"""The Grain pipeline augments each image, and resumes at the same crops."""

import re

import numpy as np
import pytest

from tests.examples.loading import load_example
from tests.examples.running import read_accuracy, read_steps, run_well

pytest.importorskip("grain")
grain_images = load_example("grain_images")


def make_source(num_images=80):
    images = np.random.default_rng(0).integers(1, 17, (num_images, 8, 8), np.uint8)
    return grain_images.Digits(images, np.arange(num_images, dtype=np.int32))


def find_crops(image):
    """Returns the nine crops of an image."""
    padded = np.pad(image, 1)
    return np.stack([padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)])


def find_square(is_erased):
    """Returns the corners of the smallest rectangle that has all of these pixels."""
    rows, columns = np.nonzero(is_erased)
    return (rows.min(), columns.min()), (rows.max(), columns.max())


def test_each_image_is_cropped_and_erased_with_its_label():
    source = make_source()
    batch = next(iter(grain_images.make_train_data(source)))
    assert batch["image"].shape == (64, 8, 8, 1)
    assert len(set(batch["label"])) == 64
    chosen, corners = set(), set()
    for image, label in zip(batch["image"][..., 0], batch["label"], strict=True):
        crops = find_crops(source.images[label]) / np.float32(16)
        is_kept = (crops == image) | (image == 0)
        [places] = np.nonzero(is_kept.all(axis=(1, 2)))
        assert len(places) == 1
        chosen.add(places[0])
        is_erased = crops[places[0]] != image
        assert is_erased.sum() <= 4
        if is_erased.sum() == 4:  # not on the edge that a crop adds
            first, last = find_square(is_erased)
            assert (last[0] - first[0], last[1] - first[1]) == (1, 1)
            corners.add(first)
    assert len(chosen) == 9
    assert len(corners) > 20


def test_a_position_gives_the_same_crops_again():
    iterator = iter(grain_images.make_train_data(make_source()))
    next(iterator)
    position = iterator.get_state()
    expected = next(iterator)
    again = iter(grain_images.make_train_data(make_source()))
    again.set_state(position)
    found = next(again)
    for name in ("image", "label"):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.slow
def test_a_stopped_run_continues_and_equals_one_that_was_not_stopped(tmp_path):
    def run(name, steps):
        arguments = ("--run-dir", tmp_path / name, "--steps-per-loop", 50)
        return run_well("grain_images.py", *arguments, "--steps", steps)

    run("stopped", 50)
    resumed = run("stopped", 150)
    straight = run("straight", 150)
    assert read_steps(resumed.stderr) == [100, 150]
    pattern = r"train \| step: +1[05]0 .* output: (.*)"
    assert re.findall(pattern, resumed.stderr) == re.findall(pattern, straight.stderr)
    assert read_accuracy(resumed.stdout) == read_accuracy(straight.stdout) > 50.0
