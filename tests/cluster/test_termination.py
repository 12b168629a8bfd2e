"""`TerminationConfig` checks what it is told."""

import math

import pytest

from armillary.cluster import TerminationConfig


def test_says_nothing_by_default():
    config = TerminationConfig()
    assert (config.grace_period, config.exit_fn, config.watcher) == (None, None, None)


@pytest.mark.parametrize("seconds", [-1, math.nan, math.inf])
def test_a_grace_period_that_is_no_time_is_an_error(seconds):
    with pytest.raises(ValueError, match=f"`grace_period` is {seconds}, but it must"):
        TerminationConfig(grace_period=seconds)


@pytest.mark.parametrize("name", ["exit_fn", "watcher"])
def test_what_is_to_be_called_must_be_callable(name):
    with pytest.raises(TypeError, match=f"`{name}` is 77 of type int, but it must be"):
        TerminationConfig(**{name: 77})
