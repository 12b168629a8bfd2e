"""Tests of histograms, images and text, as they are made and written."""

import io
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from armillary.distribute import PerReplica
from armillary.summary import Histogram, Image, SummaryManager, Text
from tests.mistakes import mistakes

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="These tests need TensorBoard: pip install tensorboard.",
)


REPLICAS = PerReplica(jnp.ones((2, 3)), 2)


class Recorder:
    """A writer that keeps what it is told."""

    def __init__(self, directory: str = "") -> None:
        self.written: list[tuple[Any, ...]] = []

    def histogram(self, *arguments: Any) -> None:
        self.written.append(arguments)

    image = text = histogram


def read_events(directory: Path) -> Any:
    accumulator = event_accumulator.EventAccumulator(str(directory))
    accumulator.Reload()
    return accumulator


def write_and_read(directory: Path, **values: Any) -> Any:
    manager = SummaryManager(directory)
    manager.write_summaries(values, step=7)
    manager.close()
    return read_events(directory)


@pytest.mark.slow
@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    values=arrays.arrays(
        np.float32,
        (3, 4),  # Another shape is another program.
        elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
)
def test_every_finite_value_lies_in_its_bucket(values):
    writer = Recorder()
    Histogram(values).write(writer, "x", 3)

    ((tag, edges, counts, step),) = writer.written
    assert (tag, step, counts.sum()) == ("x", 3, values.size)
    assert counts[0] > 0
    assert counts[-1] > 0
    assert (np.diff(edges) > 0).all()
    below = [
        (values < edge) if edge > 0 else (values <= edge) if edge < 0 else np.signbit
        for edge in edges[1:-1]
    ]
    expected = [np.signbit(values) if part is np.signbit else part for part in below]
    assert np.cumsum(counts)[:-1].tolist() == [part.sum() for part in expected]


def test_tensorboard_reads_histograms(tmp_path: Path) -> None:
    kernel = nnx.Linear(30, 40, rngs=nnx.Rngs(0)).kernel
    events = write_and_read(tmp_path, kernel=Histogram(kernel))

    (event,) = events.Histograms("kernel")
    histogram = event.histogram_value
    values = np.asarray(kernel[...])
    assert (event.step, histogram.num) == (7, 1200)
    assert histogram.min <= values.min() < values.max() <= histogram.max
    assert sum(histogram.bucket) == 1200
    assert histogram.bucket_limit == sorted(histogram.bucket_limit)
    assert histogram.sum_squares == pytest.approx(np.square(values).sum(), rel=0.02)


def test_all_arrays_of_a_tree_are_counted_together():
    tree = {"a": jnp.ones((2, 3)), "b": [np.arange(4), jnp.array([True, False])]}
    assert Histogram(tree).counts.sum() == 12
    assert Histogram(nnx.Linear(3, 2, rngs=nnx.Rngs(0))).counts.sum() == 8


def test_what_is_not_finite_is_left_out_and_told(tmp_path, caplog):
    values = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 2.0])
    with caplog.at_level(logging.WARNING, "armillary"):
        events = write_and_read(
            tmp_path, some=Histogram(values), none=Histogram(values[1:2])
        )

    assert events.Tags()["histograms"] == ["some"]
    assert events.Histograms("some")[0].histogram_value.num == 2
    assert "some | step: 7 | 3 of 5 values are not finite" in caplog.text


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_tensorboard_reads_images_bit_for_bit(tmp_path: Path, num_channels: int):
    pillow = pytest.importorskip("PIL.Image")
    shape = (2, 5, 7, num_channels)
    pixels = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)

    events = write_and_read(tmp_path, several=Image(pixels), one=Image(pixels[0]))

    assert set(events.Tags()["images"]) == {"several/0", "several/1", "one"}
    for tag, expected in (("several/1", pixels[1]), ("one", pixels[0])):
        (image,) = events.Images(tag)
        decoded = pillow.open(io.BytesIO(image.encoded_image_string))
        assert (image.height, image.width, image.step) == (5, 7, 7)
        np.testing.assert_array_equal(
            np.asarray(decoded).reshape(expected.shape), expected
        )


def test_floats_are_pixels_from_0_to_1(caplog):
    writer = Recorder()
    with caplog.at_level(logging.WARNING, "armillary"):
        Image(jnp.array([[0, 0.5], [0.25, 1.0]], jnp.bfloat16)).write(writer, "x", 0)
        assert not caplog.text
        Image(np.array([[-1.0, 2.0], [np.nan, 0.0]])).write(writer, "y", 3)

    assert writer.written[0][1][..., 0].tolist() == [[0, 128], [64, 255]]
    assert writer.written[1][1][..., 0].tolist() == [[0, 255], [0, 0]]
    assert "y | step: 3 | Pixels are cut off" in caplog.text


def test_tensorboard_reads_text(tmp_path: Path) -> None:
    events = write_and_read(tmp_path, notes=Text("**Überschrift**\n\n| a | b |"))

    (event,) = events.Tensors("notes")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode() == "**Überschrift**\n\n| a | b |"
    assert events.SummaryMetadata("notes").plugin_data.plugin_name == "text"


@mistakes(
    {
        TypeError: {
            "`values` holds 'a' of type str.*`jnp.asarray": lambda: Histogram(["a"]),
            "`values` holds Array": lambda: Histogram(jax.random.key(0)),
            "array of real numbers": lambda: Histogram(np.array([1j])),
            r"strategy\.reduce": lambda: Histogram(REPLICAS),
            r"`pixels` holds \[\[0.0\]\] of type list": lambda: Image([[0.0]]),
            r"strategy\.gather": lambda: Image(REPLICAS),
            r"`text` is 3 of type int.*`Text\(str": lambda: Text(3),
        },
        ValueError: {
            "`values` has no elements": lambda: Histogram(np.zeros((0, 3))),
            r"dtype int32 and .*`pixels.astype": (
                lambda: Image(np.zeros((2, 2), np.int32))
            ),
            r"shape \(4,\), but images are": lambda: Image(np.zeros(4)),
            r"\(4, 28, 28\).*`pixels\[\.\.\., None\]`": (
                lambda: Image(np.zeros((4, 28, 28)))
            ),
            r"\(0, 2, 2, 1\), but images are": lambda: Image(np.zeros((0, 2, 2, 1))),
        },
    }
)
def test_values_of_another_form_are_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()
