"""Fixtures of a folder in memory, and of managers that are closed after a test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from armillary.checkpoint import Checkpoint, CheckpointManager


@pytest.fixture
def make_manager(tmp_path: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """Returns a function that makes managers, and closes them after the test."""
    managers: list[CheckpointManager] = []

    def make(checkpoint: Checkpoint, directory: Any = None, **kwargs: Any) -> Any:
        directory = directory or tmp_path / "run"
        managers.append(CheckpointManager(checkpoint, directory, **kwargs))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


@pytest.fixture
def memory(tmp_path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder
