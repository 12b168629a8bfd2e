"""Tests of the ratio between a contestant and the faster hand-written loop."""

import pytest

from benchmarks.ratios import Ratio, choose_burst, find_faster, pair_ratios


def test_ratio_is_the_median_of_the_rounds():
    ratio = pair_ratios([1.0, 2.0, 3.0], [1.0, 4.0, 2.0])
    assert ratio == Ratio(median=1.0, low=0.5, high=1.5)


def test_a_round_that_is_slow_for_all_does_not_change_the_ratio():
    assert pair_ratios([1.0, 10.0], [2.0, 20.0]) == Ratio(0.5, 0.5, 0.5)


def test_the_faster_reference_is_the_one_with_the_lower_median():
    seconds = {"step": [1.0, 9.0, 1.0], "scan": [2.0, 2.0, 2.0], "other": [0.1]}
    assert find_faster(seconds, ("step", "scan")) == "step"
    assert find_faster(seconds, ("scan",)) == "scan"


@pytest.mark.parametrize(
    ("per_step", "wanted", "loop", "steps"),
    [
        (0.001, 2.0, 100, 2000),
        (0.001, 2.0, 1, 2000),
        (1.0, 2.0, 100, 100),
        (1, 2, 3, 3),
    ],
)
def test_a_burst_is_whole_loops_of_about_the_wanted_time(per_step, wanted, loop, steps):
    assert choose_burst(per_step, wanted, loop) == steps
