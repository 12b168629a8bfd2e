"""Fixtures of the tests of strategies: replicas on some of the virtual devices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from armillary import MirroredStrategy
from armillary.distribute import PerReplica, Strategy
from tests.problems import Notes

MakeStrategy = Callable[[int], Strategy]
PutRows = Callable[..., PerReplica]


@pytest.fixture
def make_mirrored() -> MakeStrategy:
    """Returns a function that makes a strategy with so many replicas."""

    def make(num_replicas: int) -> Strategy:
        return MirroredStrategy(jax.devices()[:num_replicas])

    return make


@pytest.fixture
def strategy(make_mirrored: MakeStrategy) -> Strategy:
    """Returns four replicas, where a module has no other strategy."""
    return make_mirrored(4)


@pytest.fixture
def float64() -> Iterator[None]:
    """Computes in float64 whatever says nothing else, as NumPy does."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def put_rows() -> PutRows:
    """Returns a function that gives each replica one of some rows."""

    def put(
        strategy: Strategy, rows: Sequence[Any] | np.ndarray, num_active: int = 0
    ) -> Any:
        stacked = np.asarray(rows, getattr(rows, "dtype", np.float32))
        layout = strategy.layout
        return layout.wrap(
            layout.place(stacked), tuple(range(num_active or len(stacked)))
        )

    return put


@pytest.fixture
def traces() -> Notes:
    """Notes how often Python runs the code of a function."""
    return Notes()
