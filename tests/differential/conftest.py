"""The differential suite computes in float64, as its references do."""

import warnings
from collections.abc import Iterator

import jax
import pytest

from tests.releases import FLAX

# The cases are the public names of the newest releases: older ones lack some.
collect_ignore_glob = ["test_*.py"] if FLAX < (0, 12, 8) else []


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Computes in float64, with the promotion of ranks that libraries rely on.

    Deprecated names of a library have cases for as long as they exist.
    """
    x64, ranks = jax.enable_x64(True), jax.numpy_rank_promotion("allow")
    with x64, ranks, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield
