"""ARCHITECTURE.md names the layers and the files that there are."""

import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from types import FrameType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import armillary
from tests.meta.test_docs import REPOSITORY

TEXT = (REPOSITORY / "ARCHITECTURE.md").read_text()


def test_the_three_commands_find_what_the_page_says():
    section = TEXT.partition("\n## Find a place in three commands\n")[2]
    commands = section.partition("```sh\n")[2].partition("```")[0].splitlines()
    message, subjects, definition = (
        subprocess.run(
            ["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True
        ).stdout.splitlines()
        for command in commands
    )
    assert "armillary/checkpoint/" in message[0]
    assert any(line.startswith("tests/") for line in message)
    assert all(re.match(r'armillary/checkpoint/\w+\.py:"""[A-Z`]', s) for s in subjects)
    assert len(subjects) > 10
    (line,) = definition
    assert line.startswith("armillary/checkpoint/_manager.py:")


def read_layers() -> list[set[str]]:
    """Returns the layers of the whole package, as `pyproject.toml` has them."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    [layers] = [
        contract["layers"]
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["containers"] == ["armillary"]
    ]
    return [set(layer.split(" | ")) for layer in layers]


def test_the_table_of_layers_is_the_one_that_is_checked():
    section = TEXT.partition("\n## Layers\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \|", section, re.M)
    assert [set(re.findall(r"`(\w+)`", row)) for row in rows] == read_layers()


def test_each_file_that_is_named_exists():
    files = {path.name for path in (REPOSITORY / "armillary").rglob("*.py")}
    named = re.findall(r"`(?:[\w/]+/)?(_\w+\.py)`", TEXT)
    assert len(named) > 30
    assert set(named) <= files


def test_each_path_that_is_named_exists():
    roots = ("", "armillary", "armillary/data", "armillary/distribute")
    paths = re.findall(r"`((?:\w+/)+(?:_?\w+\.py)?)`", TEXT)
    assert len(paths) > 20
    for path in paths:
        assert any((REPOSITORY / root / path).exists() for root in roots), path


def test_the_table_of_questions_names_definitions_of_its_files():
    section = TEXT.partition("\n## Where is it decided?\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| [^|]+\? \| ([^|]+) \| ([^|]+) \|$", section, re.M)
    assert len(rows) > 15
    for first, second in rows:
        files = re.findall(r"`([\w/]+\.py)`", first)
        text = "\n".join((REPOSITORY / "armillary" / x).read_text() for x in files)
        for name in re.findall(r"`(\w+)`", second):
            definition = rf"^\s*(?:(?:def|class) {name}\b|{name}\b.* = )"
            assert re.search(definition, text, re.M), name


def test_the_table_of_analyses_has_each_file_with_an_analysis():
    section = TEXT.partition("\n## How a step becomes a program\n")[2]
    listed = re.findall(r"^\| `(\w+/_\w+\.py)` \|", section, re.M)
    folder = REPOSITORY / "armillary" / "distribute"
    analysis = r"^class (?!ReplicaDataflow)\w+\((Replica)?Dataflow\b"
    files = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(analysis, path.read_text(), re.M)
    }
    assert len(files) > 5
    assert files <= set(listed)


def test_the_table_of_threads_has_each_thread_of_the_library():
    section = TEXT.partition("\n## Threads\n")[2].partition("\n## ")[0]
    rows = dict(
        re.findall(r"^\| `(armillary-\w+)` \(`([\w/]+\.py)`\) \|", section, re.M)
    )
    sources = [path.read_text() for path in (REPOSITORY / "armillary").rglob("*.py")]
    named = {
        name for each in sources for name in re.findall(r'"(armillary-\w+)"', each)
    }
    assert rows.keys() == named
    for name, file in rows.items():
        source = (REPOSITORY / "armillary" / file).read_text()
        assert re.search(r"Thread(PoolExecutor)?\(", source), name


class Trainer(armillary.StandardTrainer):
    """A user's trainer, whose loss a loop reports."""

    def __init__(self, strategy):
        with strategy.scope():
            self.model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.optimizer = nnx.Optimizer(self.model, optax.sgd(0.1), wrt=nnx.Param)
        data = armillary.data.from_arrays(
            {"x": np.ones((16, 3), np.float32)}, batch_size=8, repeat=True
        )
        super().__init__(strategy.distribute_dataset(data))
        self.strategy = strategy
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self):
        self.loss.reset()

    def train_step(self, iterator):
        def step_fn(batch):
            def loss_fn(model):
                return jnp.mean(model(batch["x"]) ** 2)

            loss, gradients = nnx.value_and_grad(loss_fn)(self.model)
            gradients = armillary.all_reduce("mean", gradients)
            self.optimizer.update(self.model, gradients)
            self.loss.update(loss=loss)

        self.strategy.run(step_fn, args=(next(iterator),))

    def train_loop_end(self):
        return {"loss": self.loss.compute()}


def watch_calls(function: Callable[[], object]) -> set[tuple[str, str]]:
    """Returns file and name of each Python function that runs, in every new thread."""
    calls: set[tuple[str, str]] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        calls.add((frame.f_code.co_filename, frame.f_code.co_name))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return calls


@pytest.mark.slow
def test_one_call_runs_the_files_and_functions_that_the_page_names(tmp_path):
    trainer = Trainer(armillary.MirroredStrategy(jax.devices()[:2]))
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.optimizer.step,
        steps_per_loop=100,
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer), tmp_path
        ),
        summary_dir=tmp_path,
    )
    calls = watch_calls(lambda: controller.train(200))

    section = TEXT.partition("\n## One call, file by file\n")[2].partition("\n## ")[0]
    code = set(re.findall(r"`([^`]+)`", section))
    files = {each for each in code if each.endswith(".py")}
    functions = {each for each in code if re.fullmatch(r"_?[a-z]+(_[a-z]+)*", each)}
    assert len(files) > 20
    assert functions >= {"train", "train_until", "step_fn"}
    for file in files:
        assert any(path.endswith(f"/{file}") for path, _ in calls), file
    assert functions <= {name for _, name in calls}
