"""Tests of nested outputs as a hierarchy of summary directories."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.summary import (
    Histogram,
    NoopSummaryManager,
    SummaryManager,
    SummaryWriter,
)


class RecordingWriter:
    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.values: list[tuple[str, float, int]] = []
        self.num_flushes = 0
        self.is_closed = False

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.values.append((tag, value, step))

    def flush(self) -> None:
        self.num_flushes += 1

    def close(self) -> None:
        self.is_closed = True


class Recorder:
    def __init__(self) -> None:
        self.writers: list[RecordingWriter] = []

    def __call__(self, directory: str) -> SummaryWriter:
        self.writers.append(RecordingWriter(directory))
        return self.writers[-1]


def test_nested_dictionaries_are_subdirectories(tmp_path: Path) -> None:
    recorder = Recorder()
    manager = SummaryManager(tmp_path, writer_fn=recorder)

    manager.write_summaries(
        {"train": {"loss": 2.0}, "validation": {"set_a": {"loss": 1.0}}, "rate": 3.0},
        step=7,
    )

    assert {writer.directory: writer.values for writer in recorder.writers} == {
        str(tmp_path): [("rate", 3.0, 7)],
        str(tmp_path / "train"): [("loss", 2.0, 7)],
        str(tmp_path / "validation" / "set_a"): [("loss", 1.0, 7)],
    }


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        np.float64(3),
        np.asarray(3, np.int16),
        jnp.asarray(3.0),
        jnp.asarray(3, jnp.bfloat16),
    ],
)
def test_every_kind_of_number_is_a_scalar(tmp_path: Path, value: object) -> None:
    recorder = Recorder()

    SummaryManager(tmp_path, writer_fn=recorder).write_summaries(
        {"x": value}, step=jnp.asarray(4)
    )

    assert recorder.writers[0].values == [("x", 3.0, 4)]


def test_booleans_and_numbers_that_are_not_finite_are_written(tmp_path: Path) -> None:
    recorder = Recorder()

    SummaryManager(tmp_path, writer_fn=recorder).write_summaries(
        {"nan": float("nan"), "inf": jnp.asarray(-jnp.inf), "flag": True}, step=0
    )

    (_, nan, _), (_, inf, _), (_, flag, _) = recorder.writers[0].values
    assert np.isnan(nan)
    assert inf == -np.inf
    assert flag == 1.0


def test_nothing_is_made_before_the_first_value(tmp_path: Path) -> None:
    recorder = Recorder()
    manager = SummaryManager(tmp_path / "run", writer_fn=recorder)

    manager.write_summaries({}, step=0)
    manager.write_summaries(None, step=0)
    manager.write_summaries({"empty": {}}, step=0)
    manager.flush()
    manager.close()

    assert recorder.writers == []
    assert manager.summary_dir == str(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_flush_and_close_reach_every_writer(tmp_path: Path) -> None:
    recorder = Recorder()
    manager = SummaryManager(tmp_path, writer_fn=recorder)
    manager.write_summaries({"a": 1, "b": {"a": 2}}, step=0)

    manager.flush()
    manager.close()

    assert [writer.num_flushes for writer in recorder.writers] == [1, 1]
    assert all(writer.is_closed for writer in recorder.writers)


def test_write_after_close_starts_a_new_writer(tmp_path: Path) -> None:
    recorder = Recorder()
    manager = SummaryManager(tmp_path, writer_fn=recorder)
    manager.write_summaries({"a": 1}, step=0)
    manager.close()

    manager.write_summaries({"a": 2}, step=1)

    assert [writer.values for writer in recorder.writers] == [
        [("a", 1.0, 0)],
        [("a", 2.0, 1)],
    ]


def test_empty_arrays_are_an_error_with_path_and_shape_and_write_nothing(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    manager = SummaryManager(tmp_path, writer_fn=recorder)

    with pytest.raises(TypeError, match=r"(?s)^2 values cannot be.*not empty") as info:
        manager.write_summaries(
            {"ok": 1, "train": {"loss": jnp.zeros((0, 3))}, "no": np.zeros(0)}, step=0
        )

    assert "  train/loss: float32 (0, 3)\n  no: float64 (0,)\n" in str(info.value)
    assert recorder.writers == []


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_arrays_are_written_as_histograms(tmp_path: Path, as_array: Any) -> None:
    writer = Mock()
    values = as_array([[1.0, 4.0], [-1.0, 4.0]])

    manager = SummaryManager(tmp_path, writer_fn=lambda _: writer)
    manager.write_summaries({"x": 2.0, "per_class": values}, step=3)

    assert [call[0] for call in writer.method_calls] == ["scalar", "histogram"]
    tag, edges, counts, step = writer.histogram.call_args.args
    assert (tag, step) == ("per_class", 3)
    found = {edge: count for edge, count in zip(edges, counts, strict=False) if count}
    assert {edge: found[edge] for edge in (1.0, 4.0)} == {1.0: 1, 4.0: 2}
    assert sum(found.values()) == 4


@pytest.mark.parametrize(
    ("value", "described"),
    [
        ("text", "'text' of type str"),
        (None, "None of type NoneType"),
        ([1, [2]], r"\[1, \[2\]\] of type list"),
        (1j, "1j of type complex"),
        (np.asarray(1j), r"complex128 \(\)"),
        (np.asarray("text"), r"<U4 \(\)"),
        (jax.random.key(0), r"key<fry> \(\)"),
    ],
)
def test_values_that_are_not_numeric_are_an_error(
    tmp_path: Path, value: object, described: str
) -> None:
    manager = SummaryManager(tmp_path, writer_fn=Recorder())

    with pytest.raises(TypeError, match=rf"1 values.*\n  train/x: {described}\n"):
        manager.write_summaries({"train": {"x": value}}, step=0)


def test_keys_that_are_not_strings_are_an_error(tmp_path: Path) -> None:
    manager = SummaryManager(tmp_path, writer_fn=Recorder())

    with pytest.raises(TypeError, match="train/3: the key 3 is no name"):
        manager.write_summaries({"train": {3: 1.0}}, step=0)


@pytest.mark.parametrize("name", ["../other", "/elsewhere", "a/../../b", ""])
def test_nested_names_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    manager = SummaryManager(tmp_path, writer_fn=Recorder())

    with pytest.raises(TypeError, match=r"cannot name a subdirectory|is no name"):
        manager.write_summaries({name: {"loss": 1.0}}, step=0)


def test_a_file_as_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(ValueError, match=r"`summary_dir` is .*file', which is a file"):
        SummaryManager(tmp_path / "file")


def test_event_files_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=r"is 'gs://bucket/a', but .* `writer_fn`"):
        SummaryManager("gs://bucket/a")

    # A writer of one's own may know what to do with it.
    manager = SummaryManager("gs://bucket/a", writer_fn=Mock())
    manager.write_summaries({"b": {"c": 1.0}}, step=1)
    assert list(manager._writers) == ["gs://bucket/a/b"]
    assert not list(tmp_path.iterdir())


def test_writer_fn_must_be_callable(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="`writer_fn` is 3 of type int"):
        SummaryManager(tmp_path, writer_fn=3)


def test_noop_manager_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = NoopSummaryManager()

    manager.write_summaries({"loss": jnp.zeros(3)}, step=0)
    manager.flush()
    manager.close()

    assert manager.summary_dir is None
    assert list(tmp_path.iterdir()) == []


def test_processes_that_are_not_the_chief_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = Mock(is_chief=False)
    monkeypatch.setattr(
        "armillary.summary._summary_manager.get_process", lambda: process
    )
    manager = SummaryManager(tmp_path, writer_fn=Recorder())

    manager.write_summaries({"x": 1.0, "h": Histogram(np.ones(2))}, step=0)
    with pytest.raises(TypeError, match="x: float64"):
        manager.write_summaries({"x": np.ones(0)}, step=0)

    assert not manager._writers
