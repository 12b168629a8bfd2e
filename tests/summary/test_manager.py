"""Tests of nested outputs as summary directories, for one writer or several."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from armillary.distribute import PerReplica
from armillary.summary import SummaryManager, Text

SCALARS = ["scalar", "flush", "close"]


class Recorder:
    """Makes writers, and keeps them by directory."""

    def __init__(self):
        self.writers = {}

    def __call__(self, directory):
        self.writers.setdefault(directory, []).append(Mock(spec=SCALARS))
        return self.writers[directory][-1]

    def values(self, directory):
        writers = self.writers[str(directory)]
        return [call.args for each in writers for call in each.scalar.call_args_list]


@pytest.fixture
def recorder():
    return Recorder()


def test_nested_dictionaries_are_subdirectories(tmp_path, recorder):
    output = {"train": {"loss": 2.0}, "validation": {"a": {"loss": 1.0}}, "rate": 3.0}
    manager = SummaryManager(tmp_path, writer_fn=recorder)
    manager.write_summaries(output, step=7)

    assert len(recorder.writers) == 3
    assert recorder.values(tmp_path) == [("rate", 3.0, 7)]
    assert recorder.values(tmp_path / "train") == [("loss", 2.0, 7)]
    assert recorder.values(tmp_path / "validation" / "a") == [("loss", 1.0, 7)]

    manager.flush()
    manager.close()
    for writers in recorder.writers.values():
        writers[0].flush.assert_called_once_with()
        writers[0].close.assert_called_once_with()
    manager.write_summaries({"rate": 4.0}, step=8)
    assert len(recorder.writers[str(tmp_path)]) == 2


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (3, 3.0),
        (np.float64(3), 3.0),
        (np.asarray(3, np.int16), 3.0),
        (jnp.asarray(3.0), 3.0),
        (jnp.asarray(3, jnp.bfloat16), 3.0),
        (True, 1.0),
        (float("nan"), float("nan")),
        (jnp.asarray(-jnp.inf), -float("inf")),
    ],
)
def test_every_kind_of_number_is_a_scalar(tmp_path, recorder, value, written):
    manager = SummaryManager(tmp_path, writer_fn=recorder)
    manager.write_summaries({"x": value}, step=jnp.asarray(4))

    [(tag, number, step)] = recorder.values(tmp_path)
    assert (tag, step) == ("x", 4)
    np.testing.assert_equal(number, written)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray])
def test_arrays_are_written_as_histograms(tmp_path, as_array):
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
    ("error", "key", "value"),
    [
        (TypeError, "x", "text"),
        (TypeError, "x", None),
        (TypeError, "x", [1, [2]]),
        (TypeError, "x", 1j),
        (TypeError, "x", jax.random.key(0)),
        (ValueError, "x", jnp.zeros((0, 3))),
        (TypeError, "x", PerReplica(jnp.ones((2, 3)), (0, 1))),
        (TypeError, "../other", {"a": 1.0}),
        (TypeError, "", {"a": 1.0}),
        (TypeError, 3, 1.0),
    ],
)
def test_values_that_cannot_be_written_are_named_and_nothing_is_written(
    tmp_path, recorder, error, key, value
):
    manager = SummaryManager(tmp_path, writer_fn=recorder)
    with pytest.raises(error) as info:
        manager.write_summaries({"ok": 1, "train": {key: value}}, step=0)
    named = f"`train/{key}`" if key == "x" else f"the key {key!r} at ('train',"
    assert named in str(info.value) or "strategy.reduce" in str(info.value)
    assert not recorder.writers


def test_event_files_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"is 'gs://bucket/a', but .* `writer_fn`"):
        SummaryManager("gs://bucket/a")

    # A writer of one's own may know what to do with it.
    manager = SummaryManager("gs://bucket/a", writer_fn=Mock())
    manager.write_summaries({"b": {"c": 1.0}}, step=1)
    assert list(manager._writers) == ["gs://bucket/a/b"]
    assert not list(tmp_path.iterdir())


def test_without_a_directory_or_a_value_nothing_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for directory, values in ((None, {"loss": 1.0}), ("run", {"empty": {}})):
        manager = SummaryManager(directory)
        manager.write_summaries(values, step=0)
        manager.write_hyperparameters({})
        manager.flush()
        manager.close()
        assert manager.summary_dir == (directory and str(tmp_path / directory))
    assert list(tmp_path.iterdir()) == []


def test_every_writer_gets_what_it_has_a_method_for(tmp_path):
    plain, rich = Mock(spec=SCALARS), Mock(spec=[*SCALARS, "text", "hyperparameters"])
    manager = SummaryManager(tmp_path, writer_fn=(lambda _: plain, lambda _: rich))

    with pytest.raises(AttributeError, match=r"none .* has a method 'histogram'"):
        manager.write_summaries({"x": np.ones(2)}, step=1)
    manager.write_summaries({"loss": 1.0, "note": Text("hello")}, step=2)
    manager.write_hyperparameters({"rate": 0.1})
    manager.flush()
    manager.close()

    shared = [("scalar", ("loss", 1.0, 2)), ("flush", ()), ("close", ())]
    assert [call[:2] for call in plain.method_calls] == shared
    assert [call[:2] for call in rich.method_calls] == [
        shared[0],
        ("text", ("note", "hello", 2)),
        ("hyperparameters", ({"rate": 0.1},)),
        *shared[1:],
    ]
