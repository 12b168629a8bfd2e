"""The differential suite computes in float64, as its references do."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Computes in float64, with the promotion of ranks that libraries rely on."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"):
        yield
