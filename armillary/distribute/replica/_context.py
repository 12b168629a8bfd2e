"""Which strategy is in effect, and on which side of `run` the code is.

*Replica context* is the code inside `Strategy.run`, *cross-replica context* the code
around it that knows a strategy. Without any strategy, code runs in the replica context
of the default strategy, so a library function may always ask for its context.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from armillary._checks import check_methods
from armillary._jax_compat import get_trace_state
from armillary.errors import ReplicaContextError
from armillary.state._lift import State

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.distribute.replica._collectives import ReplicaContext


class _Frame(NamedTuple):
    strategy: "Strategy"
    replica_context: "ReplicaContext | None"


class _Step(NamedTuple):
    state: State
    trace_state: Any
    strategy: "Strategy"


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.chosen: Strategy | None = None
        self.steps: list[_Step] = []


_ambient = _Ambient()
_default_frame: list[_Frame] = []


def set_default(strategy: "Strategy", replica_context: "ReplicaContext") -> None:
    _default_frame[:] = [_Frame(strategy, replica_context)]


def _frame() -> _Frame:
    if _ambient.frames:
        return _ambient.frames[-1]
    chosen = _ambient.chosen
    return _default_frame[0] if chosen is None else _Frame(chosen, None)


def get_strategy() -> "Strategy":
    """Returns the strategy in effect; the `DefaultStrategy` if there is no other."""
    return _frame().strategy


def has_strategy() -> bool:
    """Returns whether a strategy other than the `DefaultStrategy` is in effect."""
    return _frame().strategy is not _default_frame[0].strategy


def get_replica_context() -> "ReplicaContext | None":
    """Returns the replica context, or `None` in cross-replica context."""
    return _frame().replica_context


def get_running_context(strategy: "Strategy") -> "ReplicaContext | None":
    """Returns the context of the `run` of a strategy that the code is called from."""
    for frame in reversed(_ambient.frames):
        if frame.strategy is strategy and frame.replica_context is not None:
            return frame.replica_context
    return None


def in_cross_replica_context() -> bool:
    """Returns whether the caller is in cross-replica context."""
    return _frame().replica_context is None


def set_strategy(strategy: "Strategy | None") -> None:
    """Puts a strategy in effect for the rest of this thread's program.

    It is `with strategy.scope():` without the indentation, as for notebooks.

    Args:
        strategy: The strategy, or `None` to return to the default one.

    Raises:
        ReplicaContextError: If called inside a `scope` or inside `run`.
        TypeError: If it is no strategy.
    """
    if strategy is not None:
        fix = "Use a strategy such as `armillary.MirroredStrategy()`."
        check_methods("strategy", strategy, ["scope", "run"], fix)
    if _ambient.frames:
        raise ReplicaContextError(
            "`set_strategy` was called inside `strategy.scope()` or `strategy.run`, "
            "which already decide the strategy. Call it at the top of the program."
        )
    _ambient.chosen = None if strategy is _default_frame[0].strategy else strategy


class Scope:
    """A strategy, and a replica of it or none, in effect; it may be entered again."""

    def __init__(
        self, strategy: "Strategy", replica_context: "ReplicaContext | None" = None
    ) -> None:
        self._frame = _Frame(strategy, replica_context)

    def __enter__(self) -> "Strategy":
        _ambient.frames.append(self._frame)
        return self._frame.strategy

    def __exit__(self, *_: object) -> None:
        _ambient.frames.pop()


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Puts the default strategy in effect for a while, as if no other ever was."""
    before = _ambient.frames, _ambient.chosen
    _ambient.frames, _ambient.chosen = [], None
    try:
        yield
    finally:
        _ambient.frames, _ambient.chosen = before


@contextlib.contextmanager
def lifted(state: State, strategy: "Strategy") -> Iterator[None]:
    """Marks `state`, of a step under `strategy`, as what `Strategy.run` lifts."""
    _ambient.steps.append(_Step(state, get_trace_state(), strategy))
    try:
        yield
    finally:
        _ambient.steps.pop()


def lifted_state() -> State | None:
    """Returns the state of the step that is running, if one is."""
    return _ambient.steps[-1].state if _ambient.steps else None


def is_in_default_step() -> bool:
    default = _default_frame[0].strategy
    return bool(_ambient.steps) and _ambient.steps[-1].strategy is default


def is_in_inner_trace() -> bool:
    """Returns whether a transformation within the running step is traced."""
    steps = _ambient.steps
    return bool(steps) and steps[-1].trace_state != get_trace_state()


def require_replica_context(function: str, instead: str) -> Any:
    """Returns the replica context for `function`, or raises what to do instead."""
    context = get_replica_context()
    if context is None:
        raise ReplicaContextError(
            f"`{function}` was called outside `Strategy.run`. It needs a replica "
            "context: move the call into the function given to `strategy.run`, or "
            f"{instead}."
        )
    return context


def require_cross_replica_context(
    function: str, instead: str, strategy: "Strategy"
) -> None:
    """Raises if `function` was called in `run`, or in another strategy's scope."""
    if _ambient.frames and _ambient.frames[-1].replica_context is not None:
        raise ReplicaContextError(
            f"`{function}` was called inside `Strategy.run`, where each replica sees "
            f"only its own values. Move the call out of the function given to "
            f"`strategy.run`, or {instead}."
        )
    if has_strategy() and get_strategy() is not strategy:
        raise ReplicaContextError(
            f"`{function}` of {strategy!r} was called inside the scope of "
            f"{get_strategy()!r}. Leave the other scope first, or use its strategy "
            "(`armillary.get_strategy()`)."
        )


def require_scope(strategy: "Strategy") -> None:
    instead = "enter the scope around `run`"
    require_cross_replica_context("strategy.scope", instead, strategy)
