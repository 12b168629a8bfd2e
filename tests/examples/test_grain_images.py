"""The Grain pipeline augments each image, and resumes at the same crops."""

import re

import numpy as np
import pytest
from PIL import Image

from tests.examples.loading import load_example
from tests.examples.running import read_accuracy, read_steps, run_well

pytest.importorskip("grain")
grain_images = load_example("grain_images")


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(1, 256, (80, 8, 8), np.uint8)


@pytest.fixture(scope="module")
def source(tmp_path_factory, images):
    """Returns 80 files of images, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("images")
    for number, image in enumerate(images):
        file = folder / f"{number:02}" / "image.png"
        file.parent.mkdir()
        Image.fromarray(image).save(file)
    files = sorted(folder.glob("*/*"))
    return grain_images.ImageFiles(files, [file.parent.name for file in files])


def find_crops(image):
    """Returns the nine crops of an image."""
    padded = np.pad(image, 1)
    return np.stack([padded[i : i + 8, j : j + 8] for i in range(3) for j in range(3)])


def find_square(is_erased):
    """Returns the corners of the smallest rectangle that has all of these pixels."""
    rows, columns = np.nonzero(is_erased)
    return (rows.min(), columns.min()), (rows.max(), columns.max())


def test_each_image_is_cropped_and_erased_with_its_label(source, images):
    batch = next(iter(grain_images.make_train_data(source)))
    assert batch["image"].shape == (64, 8, 8, 1)
    assert len(set(batch["label"])) == 64
    chosen, corners = set(), set()
    for image, label in zip(batch["image"][..., 0], batch["label"], strict=True):
        crops = find_crops(images[label]) / np.float32(255)
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


def test_a_position_gives_the_same_crops_again(source):
    iterator = iter(grain_images.make_train_data(source))
    next(iterator)
    position = iterator.get_state()
    expected = next(iterator)
    again = iter(grain_images.make_train_data(source))
    again.set_state(position)
    found = next(again)
    for name in ("image", "label"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_a_folder_without_images_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"`--data-dir` is .*no files in folders"):
        grain_images.load_data(tmp_path)


@pytest.mark.slow
def test_files_of_the_user_are_read_by_class(tmp_path):
    for label, pixels in (("cat", 50), ("dog", 200)):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(10):
            image = Image.new("RGB", (20, 30), (pixels + number, pixels, pixels))
            image.save(tmp_path / "photos" / label / f"{number}.jpg")
    output = run_well(
        "grain_images.py",
        *("--data-dir", tmp_path / "photos", "--run-dir", tmp_path / "run"),
        *("--steps", 100),
    )
    assert read_accuracy(output.stdout) == 100.0


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
