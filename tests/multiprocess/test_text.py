"""Tests that processes share filtered, packed and mixed text, and continue exactly."""

import numpy as np
import pytest

from tests.multiprocess import text
from tests.multiprocess.conftest import run_on_eight_devices

pytestmark = pytest.mark.slow

NUM_BATCHES = 8


def count_documents(tokens: np.ndarray) -> int:
    """Returns the number of documents in rows of tokens; the tokens are bytes."""
    return sum(bytes(row).count(b".") for row in tokens.astype(np.uint8))


def test_each_process_reads_the_documents_of_its_own_rows(tmp_path):
    expected = text.reads(NUM_BATCHES)
    outcome = run_on_eight_devices(text, tmp_path, "reads", 4, num_batches=NUM_BATCHES)

    assert outcome.codes == [0] * 4, outcome.log
    for result in outcome.results:
        assert result["batches"] == expected["batches"]
        assert result["position"] == expected["position"]
        assert result["rows"] == NUM_BATCHES * text.BATCH_SIZE // 4
        # A quarter of the reads of one process, as far as rows hold as many documents.
        assert result["reads"] < expected["reads"] / 2
    assert expected["position"]["index"] == NUM_BATCHES * text.BATCH_SIZE
    assert expected["position"]["used"] == {"words": 84, "numbers": 44}
