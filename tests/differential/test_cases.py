"""Every construct gives on N replicas what plain JAX gives on one device.

The default run takes a sample, on two replicas. `make differential` runs everything.
"""

import os

import pytest

from tests.differential.harness import Case, can_merge, check
from tests.differential.suite import CASES, GROUP, groups

IS_FULL = os.environ.get("ARMILLARY_DIFFERENTIAL") == "all"
SAMPLED_EVERY = 73
REPLICAS = (0, 1, 2, 4) if IS_FULL else (2,)
RUNNABLE = [case for case in CASES if case.is_here]
SAMPLE = [case for case in RUNNABLE if can_merge(case)][::SAMPLED_EVERY]
GROUPS = groups(RUNNABLE if IS_FULL else SAMPLE)


def _name(cases: list[Case]) -> str:
    return " to ".join(dict.fromkeys((cases[0].name, cases[-1].name)))


@pytest.mark.slow
@pytest.mark.parametrize("cases", GROUPS, ids=_name)
def test_constructs_equal_plain_jax(cases):
    check(cases, REPLICAS)


def test_a_group_is_not_too_large_to_read_its_failures():
    assert max(map(len, GROUPS)) <= GROUP


def test_names_are_unique():
    names = [case.name for case in CASES]
    assert sorted(set(names)) == sorted(names)
