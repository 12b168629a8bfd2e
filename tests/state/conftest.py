"""What the tests of state share: a step lifted by hand, with nothing but JAX."""

from collections.abc import Callable
from typing import Any

import jax
import pytest

from armillary.state import State

RunLifted = Callable[..., State]


@pytest.fixture
def run_lifted() -> RunLifted:
    """Returns a function that runs a step compiled, on the state of some roots."""

    def run(step: Callable[[], Any], root: Any, path: str = "") -> State:
        state = State([(root, path)])

        def pure(leaves: list[Any]) -> list[Any]:
            with state.swapped(leaves):
                step()
                return state.collect(leaves, "step")

        state.write(jax.jit(pure)(state.read()))
        return state

    return run
