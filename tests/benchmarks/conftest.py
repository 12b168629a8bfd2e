"""Fixtures for the tests of the benchmarks."""

import logging

import pytest


@pytest.fixture(autouse=True)
def own_log(optimized):
    """Gives the logger back as it was: a contestant captures it for its process."""
    logger = logging.getLogger("armillary")
    before = (logger.handlers[:], logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
