"""Tests of some faults, with each kind among them; `make soak` injects 1,000."""

from itertools import islice

import pytest

from tests.recovery.faults import FAULTS
from tests.recovery.soak import make_faults, soak

# Most with one process, which starts again in half the time.
SOME = list(islice(make_faults(54, (*"1111", "2")), 20))
# Each process writes a part of a checkpoint.
IN_SAVES = [
    fault
    for fault in islice(make_faults(3, ["2 sharded"]), 60)
    if fault["phase"] in ("save", "grace")
]
SHARDED = IN_SAVES[:6]
# A divided state with snapshots in memory; a process that is hit loses its memory.
IN_MEMORY = [
    fault
    for fault in islice(make_faults(5, ["2 memory"]), 60)
    if fault["phase"] in ("step", "save")
][:6]


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["1", "2"])
def test_a_job_with_faults_ends_like_a_job_without_faults(topology, tmp_path):
    assert {fault["kind"] for fault in SOME} == set(FAULTS)
    faults = [fault for fault in SOME if fault["topology"] == topology]
    table, problems = soak(faults, tmp_path, print)
    assert not problems, "\n".join(problems)
    assert f"| all | {len(faults)} |" in table


@pytest.mark.slow
def test_faults_in_saves_of_a_divided_state_change_nothing(tmp_path):
    _, problems = soak(SHARDED, tmp_path, print)
    assert not problems, "\n".join(problems)


@pytest.mark.slow
def test_faults_with_snapshots_in_memory_change_nothing(tmp_path):
    _, problems = soak(IN_MEMORY, tmp_path, print)
    assert not problems, "\n".join(problems)
    lines = [path.read_text() for path in tmp_path.glob("job_*/restored")]
    assert "memory" in "".join(lines)
