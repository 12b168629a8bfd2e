"""Tests of records in files: times that never fall, and text in UTF-8."""

import types

import pytest

from armillary import _rising_clock
from armillary._json_values import flatten
from armillary._rising_clock import RisingClock


class Clocks:
    """The time of day, which anyone sets, and a clock that only goes forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.day = 1000.0
        self.passed = 0.0
        clocks = types.SimpleNamespace(
            time=lambda: self.day, monotonic=lambda: self.passed
        )
        monkeypatch.setattr(_rising_clock, "time", clocks)

    def move(self, seconds: float) -> None:
        self.day += seconds
        self.passed += seconds


def test_a_clock_that_is_set_back_continues_from_its_last_value(monkeypatch) -> None:
    clocks = Clocks(monkeypatch)
    clock = RisingClock()
    assert clock.now() == 1000
    clocks.move(5)
    clocks.day -= 600
    assert clock.now() == 1005
    clocks.move(7)
    assert clock.now() == 1012


def test_a_clock_that_is_set_forward_is_right_immediately(monkeypatch) -> None:
    clocks = Clocks(monkeypatch)
    clock = RisingClock()
    assert clock.now() == 1000
    clocks.move(5)
    clocks.day += 600
    assert clock.now() == 1605
    clocks.move(5)
    clocks.day -= 600
    assert clock.now() == 1610


def test_values_rise_where_no_time_passes(monkeypatch) -> None:
    Clocks(monkeypatch)
    clock = RisingClock()
    values = [clock.now() for _ in range(5)]
    assert values == sorted(set(values))


def test_a_clock_continues_after_the_one_of_an_earlier_process(monkeypatch) -> None:
    clocks = Clocks(monkeypatch)
    clock = RisingClock()
    clock.start_after(5000.0)
    clocks.move(10)
    assert clock.now() == 5010
    clock.start_after(2000.0)
    clocks.move(1)
    assert clock.now() == 5011


@pytest.mark.parametrize("where", ["name", "value"])
def test_hyperparameters_that_no_file_can_hold_are_an_error(where) -> None:
    text = "précision".encode().decode("ascii", "surrogateescape")
    values = {text: 1} if where == "name" else {"task": text}
    with pytest.raises(ValueError, match=r"`hyperparameters`.*pr\\ud.*LC_ALL=C.UTF-8"):
        flatten({"run": values})
