"""A clock that only tests move."""

import pytest


class FakeClock:
    """Gives `now`, which tests raise."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()
