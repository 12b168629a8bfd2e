"""Tests of the bytes that saves and restores report while they run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from armillary.checkpoint import (
    Checkpoint,
    CheckpointManager,
    _checksums,
    _commit,
    _reader,
)
from armillary.checkpoint.memory import _source, _tier
from armillary.lifeline._transfer import find_transfers
from tests.problems import Holder

SIZE = 1 << 20  # Elements of four bytes: 4.19 MB


class Watch:
    """Notes the transfers of a phase at the end of a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.seen: list[str] = []

    def look(self, phase: str) -> None:
        self.seen += map(str, find_transfers(phase))

    def at_end_of(self, module: Any, name: str, phase: str) -> None:
        function = getattr(module, name)

        def look_after(*args: Any, **options: Any) -> Any:
            result = function(*args, **options)
            self.look(phase)
            return result

        self._monkeypatch.setattr(module, name, look_after)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


def open_manager(folder: Path, spec: PartitionSpec, **options: Any) -> Any:
    """Returns the manager of an array on eight devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")
    values = np.random.default_rng(0).normal(size=SIZE).astype(np.float32)
    array = jax.device_put(values, NamedSharding(mesh, spec))
    checkpoint = Checkpoint(state=Holder(array=array, step=jnp.asarray(1)))
    return CheckpointManager(checkpoint, folder, **options)


SPECS = [PartitionSpec(), PartitionSpec("x")]


@pytest.mark.parametrize("spec", SPECS, ids=["copies", "parts"])
def test_a_save_reports_the_bytes_that_it_has_written(
    tmp_path, monkeypatch, watch, spec
):
    copy_arrays = _commit.copy_arrays

    def copy_and_look(*args: Any) -> Callable[[], None]:
        wait = copy_arrays(*args)

        def wait_and_look() -> None:
            wait()
            watch.look("saving")

        return wait_and_look

    monkeypatch.setattr(_commit, "copy_arrays", copy_and_look)
    manager = open_manager(tmp_path, spec)

    manager.save()
    manager.sync()

    # TensorStore has also written an index, of less than a percent.
    assert watch.seen in (["4.2 MB of 4.19 MB written"], ["4.19 MB of 4.19 MB written"])
    assert find_transfers("saving") == []


@pytest.mark.parametrize("spec", SPECS, ids=["copies", "parts"])
def test_a_restore_reports_the_bytes_that_it_has_verified_and_read(
    tmp_path, watch, spec
):
    manager = open_manager(tmp_path, spec)
    path = manager.save()
    manager.sync()
    watch.at_end_of(_checksums, "measure", "restoring")
    watch.at_end_of(_reader, "read_arrays", "restoring")

    manager.restore(path)

    # The state of Python objects has no arrays, and is read first.
    *verified, nothing, read = watch.seen
    assert nothing == "0 B read"
    assert read in ("4.2 MB of 4.19 MB read", "4.19 MB of 4.19 MB read")
    done, _, rest = verified[-1].partition(" of ")
    assert rest == f"{done} verified"
    assert find_transfers("restoring") == []


@pytest.mark.parametrize("spec", SPECS, ids=["copies", "parts"])
def test_a_snapshot_in_memory_reports_its_bytes(tmp_path, watch, spec):
    (tmp_path / "memory").mkdir()
    options = {
        "memory_interval_seconds": 60,
        "memory_directory": tmp_path / "memory",
    }
    manager = open_manager(tmp_path / "run", spec, **options)
    watch.at_end_of(_tier, "write_parts", "saving")
    watch.at_end_of(_source.SnapshotSource, "_read_array", "restoring")

    manager.save_to_memory()
    manager.close()
    manager.restore_or_initialize()

    assert watch.seen[0] == "4.19 MB of 4.19 MB copied to memory"
    assert watch.seen[-1] == "4.19 MB of 4.19 MB read from memory"
