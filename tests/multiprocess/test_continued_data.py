"""Tests that any number of processes continues the one order of the data."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.multiprocess import rows, text
from tests.multiprocess.conftest import run_on_eight_devices

pytestmark = pytest.mark.slow


class Case(NamedTuple):
    """A program, and its training in this process alone, at the start and the end."""

    program: Any
    begin: Callable[[str, int], dict[str, Any]]
    end: Callable[[str, int], dict[str, Any]]


def train_by_number(run_dir: str, steps: int) -> dict[str, Any]:
    """Trains with examples that are read by number, in place of arrays."""
    return rows.train(run_dir, steps, rows=rows.Rows())


CASES = {
    "examples": Case(rows, rows.train, train_by_number),
    "text": Case(text, text.trains, text.trains),
}


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_continues_bit_for_bit(tmp_path, name):
    program, begin, end = CASES[name]
    num_steps = program.NUM_STEPS
    expected = begin(str(tmp_path / "whole"), num_steps)
    run_dir = str(tmp_path / "run")
    start = 0
    for processes, steps in (4, 3), (2, 7):
        folder = tmp_path / f"job of {processes}"
        outcome = run_on_eight_devices(
            program, folder, "trains", processes, run_dir=run_dir, steps=steps
        )
        assert outcome.codes == [0] * processes, outcome.log
        for result in outcome.results:
            assert result["start"] == start
            assert result["seen"] == expected["seen"][:steps]
        start = steps

    last = end(run_dir, num_steps)

    assert last.pop("start") == 7
    assert expected.pop("start") == 0
    assert last == expected
