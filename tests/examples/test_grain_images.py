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
    """Returns everything that a crop and a flip can make of an image."""
    padded = np.pad(image, 1)
    crops = [padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)]
    return np.stack([*crops, *(crop[:, ::-1] for crop in crops)])


def test_each_image_is_cropped_and_flipped_with_its_label():
    source = make_source()
    batch = next(iter(grain_images.make_train_data(source)))
    assert batch["image"].shape == (64, 8, 8, 1)
    assert len(set(batch["label"])) == 64
    chosen = []
    for image, label in zip(batch["image"], batch["label"], strict=True):
        crops = find_crops(source.images[label]) / np.float32(16)
        [places] = np.nonzero((crops == image[..., 0]).all(axis=(1, 2)))
        chosen.append(places[0])
    assert len(set(chosen)) > 9


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
