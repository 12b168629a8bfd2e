"""The strategy in effect, and the replica in which the code runs, if there is one.

*Replica context* is the code inside `Strategy.run`, *cross-replica context* the code
around it that knows a strategy. Without any strategy, code runs in the replica context
of the default strategy, so a library function may always ask for its context.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from armillary._checks import check_methods
from armillary._jax_compat import get_trace_state
from armillary._traceback import add_note
from armillary.advice._partial_arrays import explain_partial_array
from armillary.distribute.replica._program_mesh import keeping_program_mesh
from armillary.errors import ReplicaContextError
from armillary.state._adapters import follow_strategies
from armillary.state._lift import State

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy
    from armillary.distribute.replica._replica import ReplicaContext


class _Frame(NamedTuple):
    """A block of code under a strategy, in one of its replicas or around them."""

    strategy: "Strategy"
    replica_context: "ReplicaContext | None"


class _Step(NamedTuple):
    """A step that is running, and the state that `run` lifts in it."""

    state: State
    trace_state: Any
    strategy: "Strategy"
    shardings: Sequence[Any] | None


class _Ambient(threading.local):
    """The blocks and steps around the code of this thread, the innermost one last."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        # The strategy of `set_strategy`, with its settings of JAX.
        self.chosen: Strategy | None = None
        self.settings: AbstractContextManager[Any] | None = None
        self.steps: list[_Step] = []


_ambient = _Ambient()
_default_frame: list[_Frame] = []


def set_default(context: "ReplicaContext") -> None:
    """Makes the strategy of a replica the default strategy."""
    _default_frame[:] = [_Frame(context.strategy, context)]


def _frame() -> _Frame:
    """Returns the block that the code of this thread is in."""
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


def get_running_context(strategy: object) -> "ReplicaContext | None":
    """Returns the replica context if the caller is inside `run` of this strategy."""
    for frame in reversed(_ambient.frames):
        if frame.strategy is not strategy:
            return None
        if frame.replica_context is not None:
            return frame.replica_context
    return None


def is_in_run() -> bool:
    """Returns whether the code runs in the function of some strategy's `run`."""
    frames = _ambient.frames
    return bool(frames) and frames[-1].replica_context is not None


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
        TypeError: If `strategy` is not a strategy.
    """
    if strategy is not None:
        fix = "Use a strategy such as `armillary.MirroredStrategy()`."
        check_methods("strategy", strategy, ["scope", "run"], fix)
    follow_strategies()
    if _ambient.frames:
        raise ReplicaContextError(
            "`set_strategy` was called inside `strategy.scope()` or `strategy.run`, "
            "which already decide the strategy. Call it at the top of the program."
        )
    own_mesh = None if _ambient.chosen is None else _ambient.chosen.mesh
    is_default = strategy is _default_frame[0].strategy
    _ambient.chosen = None if is_default else strategy

    if _ambient.settings is not None:
        with keeping_program_mesh(own_mesh):
            _ambient.settings.__exit__(None, None, None)
        _ambient.settings = None
    if strategy is not None:
        _ambient.settings = strategy.jax_settings()
        _ambient.settings.__enter__()


class Scope:
    """Puts a strategy, and perhaps one of its replicas, in effect. It is reentrant.

    Args:
        strategy: The strategy.
        replica_context: The replica whose code runs.
        settings: Returns a context with the settings of JAX for the code inside.
    """

    def __init__(
        self,
        strategy: "Strategy",
        replica_context: "ReplicaContext | None" = None,
        settings: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self._frame = _Frame(strategy, replica_context)
        self._settings = settings
        # A list, because the same scope may be entered again inside itself.
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> "Strategy":
        _ambient.frames.append(self._frame)
        settings = self._settings()
        settings.__enter__()
        self._entered.append(settings)
        return self._frame.strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            add_note(error, explain_partial_array(error))
        _ambient.frames.pop()
        # They may add a note to the error.
        self._entered.pop().__exit__(kind, error, traceback)


@contextlib.contextmanager
def without_strategy() -> Iterator[None]:
    """Puts the default strategy in effect for a while, outside of any scope."""
    frames = _ambient.frames
    chosen = _ambient.chosen
    _ambient.frames = []
    _ambient.chosen = None
    try:
        yield
    finally:
        _ambient.frames = frames
        _ambient.chosen = chosen


@contextlib.contextmanager
def lifted(
    state: State, strategy: "Strategy", shardings: Sequence[Any] | None = None
) -> Iterator[None]:
    """Marks a state as the state that `run` lifts.

    Args:
        state: The state.
        strategy: The strategy of the step.
        shardings: The shardings of its arrays in programs.
    """
    _ambient.steps.append(_Step(state, get_trace_state(), strategy, shardings))
    try:
        yield
    finally:
        _ambient.steps.pop()


def lifted_state() -> State | None:
    """Returns the state of the step that is running, if one is."""
    return _ambient.steps[-1].state if _ambient.steps else None


def lifted_shardings() -> Sequence[Any] | None:
    """Returns the shardings of the state of the step that is running."""
    return _ambient.steps[-1].shardings if _ambient.steps else None


def is_in_default_step() -> bool:
    """Returns whether the running step is one of the `DefaultStrategy`."""
    default = _default_frame[0].strategy
    steps = _ambient.steps
    return bool(steps) and steps[-1].strategy is default


def is_in_inner_trace() -> bool:
    """Returns whether the code is inside a JAX transformation in the running step."""
    steps = _ambient.steps
    return bool(steps) and steps[-1].trace_state != get_trace_state()


def require_replica_context(function: str, instead: str) -> "ReplicaContext":
    """Returns the replica context for `function`; raises an error if there is none."""
    context = get_replica_context()
    if context is None:
        raise ReplicaContextError(
            f"`{function}` was called outside `Strategy.run`. It needs a replica "
            "context: move the call into the function given to `strategy.run`, or "
            f"{instead}."
        )
    refuse_part_of_replica(function, context.strategy)
    return context


def refuse_part_of_replica(function: str, strategy: "Strategy") -> None:
    """Raises if a call is in a `shard_map` of the user, over the mesh of one replica.

    There, each device has a part of the only replica, and there is nothing to combine
    over replicas, although the user may expect it.
    """
    placement = strategy.placement
    if placement.mesh is None or placement.replica_mesh is not None:
        return
    manual = jax.sharding.get_abstract_mesh().manual_axes
    axes = [axis for axis in placement.mesh.axis_names if axis in manual]
    if axes:
        raise ReplicaContextError(
            f"`{function}` was called inside `jax.shard_map` over {axes}, where each "
            "device has a part of the only replica, so it would combine nothing. Call "
            "it outside of `shard_map`, or combine the parts: `jax.lax.pmean(value, "
            f'"{axes[0]}")` or `jax.lax.psum(value, "{axes[0]}")`.'
        )


def require_cross_replica_context(
    function: str, instead: str, strategy: object
) -> None:
    """Raises if `function` was called in `run`, or in another strategy's scope."""
    if is_in_run():
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
