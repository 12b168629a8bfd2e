"""Tests that processes share filtered, packed and mixed text, and continue exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess import text
from tests.multiprocess.conftest import Outcome, run_program

pytestmark = pytest.mark.slow

NUM_BATCHES = 8


def run(folder: Path, scenario: str, processes: int, **options: Any) -> Outcome:
    program = Path(text.__file__)
    return run_program(program, folder, scenario, processes, 8 // processes, **options)


def count_documents(tokens: np.ndarray) -> int:
    """Returns the number of documents in rows of tokens; the tokens are bytes."""
    return sum(bytes(row).count(b".") for row in tokens.astype(np.uint8))


def test_each_process_reads_the_documents_of_its_own_rows(tmp_path):
    expected = text.reads(NUM_BATCHES)
    outcome = run(tmp_path, "reads", 4, num_batches=NUM_BATCHES)

    assert outcome.codes == [0] * 4, outcome.log
    for result in outcome.results:
        assert result["batches"] == expected["batches"]
        assert result["position"] == expected["position"]
        assert result["rows"] == NUM_BATCHES * text.BATCH_SIZE // 4
        # A quarter of the reads of one process, as far as rows hold as many documents.
        assert result["reads"] < expected["reads"] / 2
    assert expected["position"]["index"] == NUM_BATCHES * text.BATCH_SIZE
    assert expected["position"]["used"] == {"words": 84, "numbers": 44}


def test_any_number_of_processes_continues_bit_for_bit(tmp_path):
    expected = text.trains(str(tmp_path / "whole"), text.NUM_STEPS)
    run_dir = str(tmp_path / "run")
    start = 0
    for processes, steps in (4, 3), (2, 7):
        folder = tmp_path / f"job of {processes}"
        outcome = run(folder, "trains", processes, run_dir=run_dir, steps=steps)
        assert outcome.codes == [0] * processes, outcome.log
        for result in outcome.results:
            assert result["start"] == start
            assert result["seen"] == expected["seen"][:steps]
        start = steps

    last = text.trains(run_dir, text.NUM_STEPS)

    assert last.pop("start") == 7
    assert expected.pop("start") == 0
    assert last == expected
