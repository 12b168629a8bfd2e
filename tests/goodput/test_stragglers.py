"""Tests of finding the process that others wait for, with simulated times."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from armillary.controller import _stragglers
from armillary.goodput._stopwatch import Times, find_straggler

LOOPS, DEVICES = 10, 0.5
PHASES = ("data", "step", "save", "evaluation")


def simulate(random, count, jitter, slow=None, phase="data", extra=0.0):
    """Returns the times of processes that wait for the last one, in 2 x 10 loops."""
    return [simulate_half(random, count, jitter, slow, phase, extra) for _ in range(2)]


def simulate_half(random, count, jitter, slow, phase, extra):
    sums = np.zeros((count, 5))
    for _ in range(LOOPS):
        own = np.array([0.2, 0.1, 0.15, 0.05]) * np.ones((count, 4))
        if slow is not None:
            own[slow, PHASES.index(phase)] += extra
        own *= random.uniform(1 - jitter, 1 + jitter, own.shape)
        device = DEVICES * random.uniform(1 - jitter, 1 + jitter, count).max()
        last = own.sum(1).max()
        sums += np.column_stack([own, last - own.sum(1) + device])
    return [Times(*row) for row in sums]


@pytest.mark.slow
def test_no_process_is_accused_in_1000_runs_with_jitter():
    random = np.random.default_rng(0)
    for run in range(1000):
        times = simulate(random, [2, 4, 16, 64][run % 4], jitter=0.3)
        assert find_straggler(times) is None


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("phase", PHASES)
def test_a_process_that_takes_longer_is_named_once_with_its_phase(count, phase):
    random = np.random.default_rng(1)
    for slow in (0, count - 1):
        times = simulate(random, count, 0.3, slow, phase, extra=0.8)
        found = find_straggler(times)
        assert found is not None
        assert (found.process, found.phase) == (slow, phase)
        assert 1.5 <= found.seconds / found.others < 2.2
        assert find_straggler(times, {slow}) is None


def test_times_too_short_to_matter_accuse_nobody():
    times = [Times(0.001, 0.002, 0.0, 0.0, 0.1), Times(0.05, 0.05, 0.0, 0.0, 0.0)]
    assert find_straggler([times] * 2) is None
    assert find_straggler([times[:1]] * 2) is None


def test_one_long_save_makes_no_straggler():
    times = [Times(0.1, 1.0, 0.0, 0.0, 0.1), Times(0.1, 1.0, 0.0, 0.0, 0.1)]
    saving = [times[0]._replace(save=9.0), times[1]._replace(waiting=9.1)]
    assert find_straggler([saving, times]) is None
    assert find_straggler([saving, saving]) is not None


@pytest.mark.parametrize(
    ("phase", "shown"),
    [("save", "mostly for save (6 MB, compared with 2 MB): "), ("data", "for data: ")],
)
def test_a_slow_save_is_named_with_its_bytes(monkeypatch, phase, shown):
    quick = Times(0.1, 1.0, 0.1, 0.0, 9.0)
    slow = Times(0.1, 1.0, 0.1, 0.0, 0.1)._replace(**{phase: 9.0})
    answers = [[list(quick), 1_000_000], [list(slow), 3_000_000]]
    warnings: list[str] = []

    def mark(event: str, step: int, note: str) -> None:
        assert (event, step) == ("straggler", 40)
        warnings.append(note)

    peers = SimpleNamespace(
        is_alone=False,
        index=1,
        count=2,
        boundary=SimpleNamespace(take=lambda _: answers),
    )
    monkeypatch.setattr(_stragglers, "get_peers", lambda: peers)
    run: Any = SimpleNamespace(goodput=SimpleNamespace(times=quick, mark=mark))

    stragglers = _stragglers.Stragglers(run)
    stragglers.check(20)
    stragglers.check(40)

    (text,) = warnings
    assert "Process 1 of 2 takes" in text
    assert shown in text
