"""When a job counts as stuck, and what is said then."""

from typing import Any

from armillary.lifeline import _ending
from armillary.lifeline._ending import Report, Sighting

NOW = 1000.0


def see(quiet: float = 50.0, silent: float = 0.0, **fields: Any) -> Sighting:
    """Returns a process that has not gone on, and was last heard of."""
    fields = {
        "phase": "step",
        "line": "train.py:1 in main",
        "limit_seconds": 30.0,
    } | fields
    return Sighting(Report(quiet_seconds=quiet - silent, **fields), NOW - silent)


def find_hang(*sightings: Sighting) -> str | None:
    return _ending.find_hang(dict(enumerate(sightings)), len(sightings), NOW)


def test_a_job_is_stuck_when_no_process_goes_on():
    text = find_hang(see(), see(31, phase="data", line="train.py:7 in read"))
    assert text == (
        "No process has gone on for 30 seconds (`hang_timeout_seconds`):\n"
        "  process 0 of 2: step for 50 s, at train.py:1 in main\n"
        "  process 1 of 2: data for 31 s, at train.py:7 in read\n"
        "Look at the one that does not wait for another one, or allow more time: "
        "`hang_timeout_seconds` must exceed the longest loop, evaluation, save and "
        "action."
    )


def test_a_process_that_goes_on_is_waited_for():
    assert find_hang(see(), see(quiet=3)) is None


def test_a_process_that_compiles_is_waited_for_while_it_is_heard_of():
    assert find_hang(see(), see(is_compiling=True)) is None
    text = find_hang(see(), see(is_compiling=True, silent=40)) or ""
    assert "process 1 of 2: compiling for 50 s" in text


def test_a_process_that_is_in_no_loop_is_waited_for():
    assert find_hang(see(), see(limit_seconds=None)) is None


def test_a_process_that_was_stopped_before_its_loop_is_not_waited_for():
    stopped = see(quiet=40, silent=40, limit_seconds=None, phase="outside of loops")
    text = find_hang(see(), stopped) or ""
    assert "process 1 of 2: outside of loops for 40 s" in text


def test_a_process_that_was_stopped_counts_by_its_silence():
    assert find_hang(see(), see(quiet=31, silent=31)) is not None
    assert find_hang(see(), see(quiet=29, silent=29)) is None
    text = find_hang(see(), see(quiet=33, silent=32)) or ""
    assert "it has not answered for 32 s (stopped?)" in text


def test_a_process_that_ended_is_named_and_not_waited_for():
    text = find_hang(see(), see(quiet=0, has_ended=True, limit_seconds=None))
    assert text is not None
    assert "process 1 of 2: has reached the end of its program" in text
    assert find_hang(see(has_ended=True)) is None


def test_a_stopped_process_is_called_so_when_the_timeout_is_short():
    short = {"limit_seconds": 4.0}
    text = find_hang(see(quiet=4, **short), see(quiet=4.2, silent=3.5, **short)) or ""
    assert "process 1 of 2: step for 4 s, at train.py:1 in main; it has not ans" in text
    assert text.count("it has not answered") == 1
