"""Counts the bytes that are read from files."""

import pytest

from armillary.pretrained import _files


@pytest.fixture
def read_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list to which each read of a part of a tensor adds its bytes."""
    counts: list[int] = []
    read_slice = _files.read_slice

    def read_and_count(*arguments):
        part = read_slice(*arguments)
        counts.append(part.nbytes)
        return part

    monkeypatch.setattr(_files, "read_slice", read_and_count)
    return counts
