"""One table format for mistakes: the exception, its message, and the call.

For example::

    @mistakes({ValueError: {"`size` is 0, but": lambda: make(size=0)}})
    def test_wrong_arguments_are_errors(call, error, message):
        with pytest.raises(error, match=message):
            call()
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

Calls = Mapping[str, Callable[..., Any]]


def mistakes(table: Mapping[type[BaseException], Calls]) -> pytest.MarkDecorator:
    """Runs a test for each row, as `call`, `error` and `message`, a pattern."""
    rows = [
        pytest.param(call, error, message, id=f"{error.__name__}: {message}")
        for error, calls in table.items()
        for message, call in calls.items()
    ]
    return pytest.mark.parametrize(("call", "error", "message"), rows)
