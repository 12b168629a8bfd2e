"""A step that is lifted by hand and run as a program, for the tests of state."""

from collections.abc import Callable
from typing import Any

import pytest

from armillary.distribute import DefaultStrategy
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.state._lift import State

RunLifted = Callable[..., State]


@pytest.fixture
def run_lifted() -> RunLifted:
    """Returns a function that runs a step compiled, on the state of some roots."""

    def run(step: Callable[[], Any], root: Any, path: str = "") -> State:
        state = State([(root, path)])
        before = state.read()
        flat = FlatState(state, DefaultStrategy())
        traced = trace_step(step, flat, (), user_fn=step, owner="the test")
        after = list(before)
        for i, value in zip(traced.changed, traced.call(before, ())[0], strict=True):
            after[i] = value
        state.write(after)
        return state

    return run
