"""Tests of the size that `benchmarks.footprint` finds for a library."""

import sys
from importlib.metadata import distribution

import pytest

from benchmarks import footprint
from benchmarks.peers.footprint import count_bytes, find_closure, find_required


def test_dependencies_are_found_through_others_and_without_extras():
    found = find_closure("orbax-checkpoint")

    assert {"jax", "jaxlib", "tensorstore"} <= found.keys()
    assert "orbax-checkpoint" not in found
    # NumPy needs nothing, so it is at the end of each way.
    assert list(find_required(distribution("numpy"), frozenset())) == []
    assert find_closure("numpy") == {}
    assert count_bytes(distribution("numpy")) > 10e6


@pytest.mark.slow
def test_a_library_is_measured_where_it_is_installed():
    record = footprint.measure("armillary", sys.executable, num_imports=1)

    assert len(record["import_seconds"]) == 1
    assert 1e6 < record["own_bytes"] < 20e6 < record["all_bytes"]
    assert 10 < record["num_dependencies"] < 60
    row = footprint.make_row("armillary", record)
    assert row[0].startswith("armillary 0.") and row[3].endswith(" MB")


@pytest.mark.slow
def test_a_library_that_is_not_there_has_a_problem(monkeypatch):
    absent = footprint.Library("no-such-library", "no_such_library")
    monkeypatch.setitem(footprint.LIBRARIES, "absent", absent)

    record = footprint.measure("absent", sys.executable, num_imports=0)

    assert "No module named 'no_such_library'" in record["problem"]
