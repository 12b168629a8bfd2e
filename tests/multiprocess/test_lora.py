"""Tests of adapters in several processes: killed, resumed, and with a wrong base."""

import signal
from pathlib import Path

import pytest

from tests.multiprocess import lora
from tests.multiprocess.conftest import Outcome, run_program

pytestmark = pytest.mark.slow


def run(
    folder: Path, scenario: str, processes: int, devices: int, **options
) -> Outcome:
    program = Path(lora.__file__)
    return run_program(program, folder, scenario, processes, devices, **options)


def test_killed_processes_resume_bit_for_bit_without_the_base_on_the_disk(tmp_path):
    run_dir = str(tmp_path / "run")
    whole = run(tmp_path / "whole", "train", 2, 2, run_dir=None, steps=6)
    assert whole.codes == [0, 0], whole.log

    options = {"run_dir": run_dir, "steps": 6}
    killed = run(tmp_path / "killed", "train", 2, 2, **options, kill_after=5)
    assert killed.codes == [-signal.SIGKILL] * 2, killed.log
    resumed = run(tmp_path / "resumed", "train", 2, 2, **options)
    assert resumed.codes == [0, 0], resumed.log
    assert resumed.results == whole.results
    assert resumed.results[0]["step"] == 6

    # Another number of processes finds the same digests, and the same values.
    alone = run(tmp_path / "alone", "train", 1, 4, **options)
    assert alone.codes == [0], alone.log
    assert alone.results == whole.results[:1]

    refused = run(tmp_path / "refused", "refuse", 2, 2, run_dir=run_dir)
    assert refused.codes == [0, 0], refused.log
    for message in refused.results:
        assert message.startswith("CheckpointMismatchError")
        assert "trainer/model/layers/kernel" in message
        assert "trainer/model/layers/lora_a" not in message


def test_a_base_that_is_wrong_in_one_process_is_refused_by_both(tmp_path):
    outcome = run(tmp_path, "refuse_one", 2, 1, run_dir=str(tmp_path / "run"))
    assert outcome.codes == [0, 0], outcome.log
    (other, head), (own, own_head) = outcome.results
    assert own.startswith("CheckpointMismatchError")
    assert "base/value" in own
    assert "process 1" in other
    assert head == own_head == 1
