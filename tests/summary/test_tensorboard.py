"""Tests of event files, with TensorBoard's own reader."""

import io
import logging
import math
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

import armillary
from armillary.distribute import PerReplica
from armillary.summary import (
    Histogram,
    Image,
    SummaryManager,
    SummaryWriter,
    TensorBoardWriter,
    Text,
)
from tests.mistakes import mistakes

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="These tests need TensorBoard: pip install tensorboard.",
)


REPLICAS = PerReplica(jnp.ones((2, 3)), (0, 1))


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
    ((tag, edges, counts),) = Histogram(values).read("x", 3)
    assert (tag, counts.sum()) == ("x", values.size)
    assert counts[0] > 0
    assert counts[-1] > 0
    assert (np.diff(edges) > 0).all()
    below = [
        (values < edge) if edge > 0 else (values <= edge) if edge < 0 else np.signbit
        for edge in edges[1:-1]
    ]
    expected = [np.signbit(values) if part is np.signbit else part for part in below]
    assert np.cumsum(counts)[:-1].tolist() == [part.sum() for part in expected]


def test_tensorboard_reads_histograms(tmp_path):
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


def test_values_that_are_not_finite_are_left_out_and_reported(tmp_path, caplog):
    values = jnp.array([1.0, jnp.nan, jnp.inf, -jnp.inf, 2.0])
    with caplog.at_level(logging.WARNING, "armillary"):
        events = write_and_read(
            tmp_path, some=Histogram(values), none=Histogram(values[1:2])
        )

    assert events.Tags()["histograms"] == ["some"]
    assert events.Histograms("some")[0].histogram_value.num == 2
    assert "some | step: 7 | 3 of 5 values are not finite" in caplog.text


@pytest.mark.parametrize("num_channels", [1, 3, 4])
def test_tensorboard_reads_images_bit_for_bit(tmp_path, num_channels):
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
    image = Image(jnp.array([[0, 0.5], [0.25, 1.0]], jnp.bfloat16))
    ((_, pixels),) = image.read("x", 0)
    assert pixels[..., 0].tolist() == [[0, 128], [64, 255]]
    assert not caplog.text
    ((_, pixels),) = Image(np.array([[-1.0, 2.0], [np.nan, 0.0]])).read("y", 3)
    assert pixels[..., 0].tolist() == [[0, 255], [0, 0]]
    assert "y | step: 3 | Pixels are cut off" in caplog.text


def test_tensorboard_reads_text(tmp_path):
    events = write_and_read(tmp_path, notes=Text("**Überschrift**\n\n| a | b |"))

    (event,) = events.Tensors("notes")
    assert event.step == 7
    assert event.tensor_proto.string_val[0].decode() == "**Überschrift**\n\n| a | b |"
    assert events.SummaryMetadata("notes").plugin_data.plugin_name == "text"


@mistakes(
    {
        TypeError: {
            "`values` holds Array": lambda: Histogram(jax.random.key(0)),
            "array of real numbers": lambda: Histogram(np.array([1j])),
            r"strategy\.reduce": lambda: Histogram(REPLICAS),
            r"strategy\.gather": lambda: Image(REPLICAS),
        },
        ValueError: {
            "`values` has no elements": lambda: Histogram(np.zeros((0, 3))),
            "dtype int32 and": lambda: Image(np.zeros((2, 2), np.int32)),
            r"\(4, 28, 28\).*`pixels\[\.\.\., None\]`": (
                lambda: Image(np.zeros((4, 28, 28)))
            ),
        },
    }
)
def test_values_of_another_form_are_an_error(call, error, message):
    with pytest.raises(error, match=message):
        call()


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    events = read_events(directory)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_separate_runs_with_the_same_tag(tmp_path):
    manager = SummaryManager(tmp_path)
    for step in (100, 200):
        output = {"train": {"loss": step / 4}, "eval": {"loss": 1.0}, "rate": step}
        manager.write_summaries(output, step=step)
    manager.flush()

    assert read_scalars(tmp_path / "train") == {"loss": [(100, 25.0), (200, 50.0)]}
    assert read_scalars(tmp_path / "eval") == {"loss": [(100, 1.0), (200, 1.0)]}
    assert read_scalars(tmp_path) == {"rate": [(100, 100.0), (200, 200.0)]}
    manager.close()


def test_tensorboard_reads_large_steps_and_values_that_are_not_finite(tmp_path):
    writer = TensorBoardWriter(tmp_path / "new" / "folder")
    writer.scalar("nan", math.nan, 2**40)
    writer.scalar("inf", math.inf, 1)
    writer.close()

    assert isinstance(writer, SummaryWriter)
    scalars = read_scalars(tmp_path / "new" / "folder")
    [(step, nan)] = scalars["nan"]
    assert step == 2**40
    assert math.isnan(nan)
    assert scalars["inf"] == [(1, math.inf)]


def test_resuming_appends_files_and_keeps_the_old_ones(tmp_path):
    for step in range(4):  # within one second, the resolution of the file names
        manager = SummaryManager(tmp_path)
        manager.write_summaries({"loss": step}, step=step)
        manager.close()

    files = list(tmp_path.iterdir())
    assert len(files) == 4
    points = [point for file in files for point in read_scalars(file)["loss"]]
    assert sorted(points) == [(step, float(step)) for step in range(4)]


def test_tensorboard_shows_hyperparameters_with_the_metrics(tmp_path):
    from tensorboard.backend.event_processing import (
        data_provider,
        plugin_event_multiplexer,
    )
    from tensorboard.context import RequestContext
    from tensorboard.plugins.base_plugin import TBContext
    from tensorboard.plugins.hparams import (
        api_pb2,
        backend_context,
        list_session_groups,
    )

    for attempt in range(2):  # A run that is resumed writes them again.
        manager = SummaryManager(tmp_path / "train")
        optimizer = {"name": "adam", "nesterov": True}
        manager.write_hyperparameters({"layers": 3, "optimizer": optimizer})
        manager.write_summaries({"loss": 0.5}, step=attempt)
        manager.close()

    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(tmp_path))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0,
        slice_size=10,
        allowed_statuses=[api_pb2.STATUS_UNKNOWN],
        col_params=[],
    )
    handler = list_session_groups.Handler(RequestContext(), context, "", request)
    (group,) = handler.run().session_groups

    shown = {
        name: getattr(value, value.WhichOneof("kind"))
        for name, value in group.hparams.items()
    }
    expected = {"layers": 3, "optimizer/name": "adam", "optimizer/nesterov": True}
    assert shown == expected
    assert [metric.name.tag for metric in group.metric_values] == ["loss"]


class CrashError(Exception):
    pass


@pytest.mark.parametrize(
    ("steps_per_loop", "eval_interval", "crashes"),
    [(1, 2, (7, 7, 11)), (4, 4, (8, 12))],  # The second evaluates each saved step.
)
def test_steps_that_a_resumed_run_does_again_show_once(
    tmp_path, steps_per_loop, eval_interval, crashes
):
    def train_until(crash_at):
        dataset = armillary.data.from_arrays(
            {"x": np.ones((8, 1), np.float32)}, batch_size=4, repeat=True
        )
        trainer = Counting(dataset)

        def crash(_):
            if int(trainer.step[...]) == crash_at:
                raise CrashError

        manager = armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), tmp_path / "c", checkpoint_interval=4
        )
        controller = armillary.Controller(
            trainer=trainer,
            evaluator=trainer,
            global_step=trainer.step,
            steps_per_loop=steps_per_loop,
            checkpoint_manager=manager,
            summary_dir=tmp_path / "train",
            eval_summary_dir=tmp_path / "eval",
            train_actions=[crash],
        )
        try:
            controller.train_and_evaluate(12, eval_steps=1, eval_interval=eval_interval)
        except CrashError:
            controller.summary_manager.flush()

    for crash_at in (*crashes, None):
        train_until(crash_at)

    steps = {
        name: [step for step, _ in read_scalars(tmp_path / name)["count"]]
        for name in ("train", "eval")
    }
    assert steps == {
        "train": [*range(steps_per_loop, 13, steps_per_loop)],
        "eval": [*range(eval_interval, 13, eval_interval)],
    }


class Counting(armillary.StandardTrainer, armillary.StandardEvaluator):
    def __init__(self, dataset):
        armillary.StandardTrainer.__init__(self, dataset)
        armillary.StandardEvaluator.__init__(self, dataset)
        self.step = armillary.create_global_step()

    def train_step(self, iterator):
        next(iterator)
        self.step[...] += 1

    def train_loop_end(self):
        return {"count": self.step[...]}

    def eval_step(self, iterator):
        next(iterator)

    def eval_end(self, *state):
        return {"count": self.step[...]}


def test_a_restore_that_is_only_evaluated_leaves_later_steps(tmp_path):
    manager = SummaryManager(tmp_path)
    for step in (1, 2, 3):
        manager.write_summaries({"loss": float(step)}, step=step)

    manager.resume_at(1)
    manager.write_summaries({"best": 1.0}, step=1)
    manager.flush()

    assert [step for step, _ in read_scalars(tmp_path)["loss"]] == [1, 2, 3]

    manager.write_summaries({"loss": 9.0}, step=2)
    manager.close()

    assert read_scalars(tmp_path)["loss"] == [(1, 1.0), (2, 9.0)]


def test_a_manager_that_is_closed_and_used_again_keeps_its_values(tmp_path):
    manager = SummaryManager(tmp_path)
    for step in (1, 2, 3):
        manager.write_summaries({"loss": float(step)}, step=step)
    manager.resume_at(1)
    manager.write_summaries({"loss": 8.0}, step=2)
    manager.close()
    manager.write_summaries({"loss": 9.0}, step=3)
    manager.close()

    assert read_scalars(tmp_path)["loss"] == [(1, 1.0), (2, 8.0), (3, 9.0)]
