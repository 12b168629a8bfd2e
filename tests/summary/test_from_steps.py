"""Tests of summaries of values in a step, on any number of replicas."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from armillary.report._run_files import SPEEDS
from armillary.summary import Histogram, Image, Text
from tests.problems import CNN, Classifier, make_strategy

event_accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator",
    reason="These tests need TensorBoard: pip install tensorboard.",
)


class Trainer(Classifier):
    """Looks at the images of all replicas, and at the images of the first one."""

    def __init__(self, strategy: Any, **options: Any) -> None:
        super().__init__(strategy, CNN(nnx.Rngs(0)), optax.sgd(0.1), **options)
        self.pixels = armillary.metrics.Distribution()
        self.first = nnx.Variable(
            jnp.zeros((2, 8, 8, 1)),
            aggregation=armillary.distribute.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def train_loop_begin(self) -> None:
        self.pixels.reset()

    def train_step(self, iterator: Any) -> None:
        batch = next(iterator)

        def look(batch: Any) -> Any:
            self.pixels.update(values=batch["image"])
            self.first[...] = batch["image"][:2]

        self.strategy.run(look, args=(batch,))
        super().train_step(iter([batch]))

    def train_loop_end(self) -> dict[str, Any]:
        return {
            "accuracy": self.accuracy.compute(),
            "pixels": self.pixels.compute(),
            "kernel": Histogram(self.model.dense.kernel),
            "deep": {"first": Image(self.first[...])},
            "note": Text(f"Up to step {int(self.optimizer.step[...])}."),
        }


def train(run_dir: Path, num_replicas: int, steps: int, **options: Any) -> None:
    strategy = make_strategy(num_replicas)
    trainer = Trainer(strategy, **options)
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        strategy=strategy,
        steps_per_loop=2,
        summary_interval=4,
        summary_dir=run_dir / "summaries",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer, data=trainer.train_dataset),
            run_dir / "checkpoints",
        ),
    )
    controller.train(steps)
    controller.summary_manager.close()


def read(run_dir: Path) -> dict[str, list[Any]]:
    """Returns the written values with their steps, without times."""
    found: dict[str, list[Any]] = {}
    for folder in ("summaries", "summaries/deep"):
        every = dict.fromkeys(event_accumulator.DEFAULT_SIZE_GUIDANCE, 0)
        events = event_accumulator.EventAccumulator(str(run_dir / folder), every)
        events.Reload()
        for kind, read_tag, content in (
            ("scalars", events.Scalars, "value"),
            ("histograms", events.Histograms, "histogram_value"),
            ("images", events.Images, "encoded_image_string"),
            ("tensors", events.Tensors, "tensor_proto"),
        ):
            for tag in events.Tags()[kind]:
                found[tag] = [(e.step, getattr(e, content)) for e in read_tag(tag)]
    return {tag: points for tag, points in found.items() if tag not in SPEEDS}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    run_dir = tmp_path_factory.mktemp("run")
    train(run_dir, 1, 8)
    return read(run_dir)


@pytest.mark.slow
def test_all_steps_of_a_loop_are_in_a_distribution(expected):
    first = {"first/0", "first/1"}
    assert expected.keys() == {"accuracy", "pixels", "kernel", "note", *first}
    for points in expected.values():
        assert [step for step, _ in points] == [4, 8]
    # Loops have two steps, of 16 images.
    assert [values.num for _, values in expected["pixels"]] == [2 * 16 * 64] * 2


@pytest.mark.slow
def test_replicas_write_the_same(tmp_path, expected):
    train(tmp_path, 4, 8, compile_loop=False)

    actual = read(tmp_path)
    for tag in ("pixels", "first/0", "first/1", "note"):
        assert actual[tag] == expected[tag]
    np.testing.assert_allclose(actual["accuracy"], expected["accuracy"], rtol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_writes_what_one_run_does(tmp_path, expected):
    train(tmp_path, 1, 4)
    train(tmp_path, 1, 8)

    assert read(tmp_path) == expected
