"""Exports and parts of checkpoints in a job of several processes."""

import numpy as np
import pytest

from tests.multiprocess.conftest import run_job

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def test_one_process_exports_and_all_restore_a_part(tmp_path):
    run_dir = tmp_path / "runs"
    parts = {"train": {"num_steps": 6}, "exports": {"run_dir": str(run_dir)}}
    outcome = run_job(tmp_path, "several", processes=2, devices=1, parts=parts)
    assert outcome.codes == [0, 0], outcome.errors
    first, second = (result["exports"] for result in outcome.results)
    assert first.pop("written")[:4] == ["export-2", "export-4", "export-6", "other-0"]
    assert second.pop("written") == []
    # What one process cannot write, the others hear of at their next exchange.
    assert first.pop("error").startswith(("NotADirectoryError", "FileExistsError"))
    assert second.pop("error").startswith("PeerError")
    assert first == second
    assert first["names"] == ["export-4", "export-6"]
    np.testing.assert_array_equal(first["restored"], first["trained"])
    restored, kept = first["report"]
    assert {"run/model/first/kernel", "run/model/norm/mean"} <= set(restored)
    assert all(path.startswith("run/model/") for path in restored)
    assert "run/optimizer/step" in kept

    # Exporting has not disturbed training.
    plain = outcome.results[0]["train"]
    np.testing.assert_array_equal(first["losses"], plain["losses"])
