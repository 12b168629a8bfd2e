"""Tests that every construct gives on N replicas what plain JAX gives on one device.

This takes about an hour, so pytest does not collect this file by its name.
`make differential` names it.
"""

import pytest

from tests.differential.harness import check
from tests.differential.suite import CASES, groups, name_group

REPLICAS = (0, 1, 2, 4)  # 0: without a strategy.
# Older releases lack some constructs.
HERE = [case for case in CASES if case.is_here]


@pytest.mark.parametrize("cases", groups(HERE), ids=name_group)
def test_constructs_equal_plain_jax(cases):
    check(cases, REPLICAS)
