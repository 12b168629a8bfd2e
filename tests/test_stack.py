"""Tests that deep calls do not map memory again, by the system's page counts."""

import resource
from collections.abc import Callable

import pytest

from armillary._stack import with_room
from armillary.controller._loops import LoopRunner
from armillary.trainer import StandardEvaluator

_CALLS = 200
_DEPTHS = range(150)


def test_no_depth_makes_calls_slow() -> None:
    @with_room
    def count_with_room() -> list[int]:
        return _count_faults()

    assert max(_count_faults()) > _CALLS // 2, "Python needs no help any more"
    assert max(count_with_room()) < _CALLS // 2


def test_arguments_results_and_errors_pass_through() -> None:
    @with_room
    def divide(a: int, *, by: int) -> float:
        """Divides."""
        return a / by

    assert divide(3, by=2) == 1.5
    assert (divide.__name__, divide.__doc__) == ("divide", "Divides.")
    with pytest.raises(ZeroDivisionError):
        divide(1, by=0)


@pytest.mark.parametrize("method", [LoopRunner.train_until, StandardEvaluator.evaluate])
def test_loops_have_room(method: Callable[..., object]) -> None:
    functions = [method]
    while functions[-1] is not None:
        functions.append(getattr(functions[-1], "__wrapped__", None))
    assert max(each.__code__.co_stacksize for each in functions[:-1]) > 1000


def _count_faults() -> list[int]:
    """Returns how many pages some calls touch for the first time, from each depth."""
    return [_go_down(depth) for depth in _DEPTHS]


def _go_down(depth: int) -> int:
    if depth:
        return _go_down(depth - 1)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(_CALLS):
        _call()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


def _call() -> None:
    pass


# Its frame is larger than one of `_go_down`, so that one depth is right before an end.
_call.__code__ = _call.__code__.replace(co_stacksize=100)
