"""How much of a grace period may be used for training."""

import pytest

from armillary.actions._save_if_preempted import GracePeriod


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def call_after(grace: GracePeriod, clock: Clock, *pauses: float) -> None:
    for pause in pauses:
        clock.now += pause
        grace.note_call()


def test_a_loop_two_saves_and_a_tenth_are_kept_back():
    clock = Clock()
    grace = GracePeriod(100.0, clock)
    call_after(grace, clock, 30.0, 2.0, 5.0, 4.0)
    grace.begin()
    # The notice may have come 4 seconds ago; the first pause held compilation.
    assert grace.spare_seconds() == pytest.approx(100 - 4 - 5 - 10)
    with grace.saving():
        clock.now += 7.0
    assert grace.spare_seconds() == pytest.approx(100 - 4 - 7 - 5 - 14 - 10)
    clock.now += 3.0
    grace.note_call()
    # The save was no part of the pause.
    assert grace.spare_seconds() == pytest.approx(100 - 4 - 7 - 3 - 5 - 14 - 10)


def test_the_first_pause_counts_until_there_is_another():
    clock = Clock()
    grace = GracePeriod(100.0, clock)
    call_after(grace, clock, 30.0)
    grace.begin()
    assert grace.spare_seconds() == pytest.approx(100 - 30 - 30 - 10)
    call_after(grace, clock, 2.0)
    assert grace.spare_seconds() == pytest.approx(100 - 30 - 2 - 2 - 10)


def test_nothing_is_to_spare_at_the_end():
    clock = Clock()
    grace = GracePeriod(10.0, clock)
    call_after(grace, clock, 1.0, 1.0)
    grace.begin()
    loops = 0
    while grace.spare_seconds() > 0:
        call_after(grace, clock, 1.0)
        loops += 1
    # 1 s before it was heard of, 1 s in reserve for a loop, 1 s of margin.
    assert loops == 7
