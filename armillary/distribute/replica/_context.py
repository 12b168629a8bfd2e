"""The strategy in effect, and the replica in which the code runs, if there is one.

*Replica context* is the code inside `Strategy.run`, *cross-replica context* the code
around it that knows a strategy. Without any strategy, code runs in the replica context
of the default strategy, so a library function may always ask for its context.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0

from armillary._checks import check_callable, check_methods
from armillary._jax_compat import get_trace_state
from armillary.data._layout import Active
from armillary.distribute.replica._sameness import reduce_by
from armillary.distribute.replica._values import (
    PerReplica,
    ReduceOp,
    count_active,
    is_argument,
    is_per_replica,
    join,
)
from armillary.errors import ReplicaContextError
from armillary.state._holders import is_claimed
from armillary.state._keras import follow_keras
from armillary.state._lift import State
from armillary.state._nnx import is_variable
from armillary.typing import PyTree

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy


class ReplicaContext:
    """The replica in which the code runs (`tf.distribute.ReplicaContext`).

    Attributes:
        strategy: The strategy whose `run` made this replica.
        axis_name: The name of the axis of replicas in `jax.lax`; `None` if there is
            only one replica.
        active: The replicas that hold data in this step: an integer `n` for the first
            `n` replicas, or the numbers of the replicas.
        was_asked: Whether the step has used the number of replicas in any way.
        share_size: Examples of each replica's share of the batch; `None` if `run` got
            no batch, or arrays of different lengths.
    """

    def __init__(
        self,
        strategy: "Strategy",
        axis_name: str | None,
        active: Active,
        num_replicas: int | None = None,
        share_size: int | None = None,
    ) -> None:
        self.strategy = strategy
        self.axis_name = axis_name
        self.active = active
        self.was_asked = False
        self.share_size = share_size
        self._num_replicas = num_replicas or strategy.num_replicas_in_sync

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas that run this step together.

        It is less than the strategy's number only for an uneven batch of a dataset
        with `InputOptions(remainder="exact")`.
        """
        self.was_asked = True
        return self._num_replicas

    @property
    def num_active(self) -> int:
        """Replicas that hold data; fewer only at the end of a complete evaluation."""
        self.was_asked = True
        return count_active(self.active)

    @property
    def replica_id_in_sync_group(self) -> Any:
        """The number of this replica, from 0; traced if there are several replicas."""
        return 0 if self.axis_name is None else jax.lax.axis_index(self.axis_name)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, *, dtype: Any = None
    ) -> PyTree:
        """Combines a value over replicas; every replica gets the result.

        See `armillary.all_reduce`, which is the same.

        Raises:
            ReplicaContextError: If `value` is a `PerReplica`, as `run` returns it.
            ValueError: If `dtype` is not a dtype of floats.
        """
        op = ReduceOp.of(reduce_op)
        wire_dtype = check_wire_dtype(dtype)
        if any(map(is_per_replica, jax.tree.leaves(value, is_leaf=is_per_replica))):
            raise ReplicaContextError(
                "`all_reduce` was given a `PerReplica`, as `strategy.run` returns it. "
                "Call it in the function given to `run`, or use `strategy.reduce(op, "
                "value)` outside."
            )
        if self.axis_name is None or self._num_replicas == 1:
            return jax.tree.map(functools.partial(_alone, op), value)
        self._check_is_not_hidden("all_reduce", self.axis_name)
        leaves, treedef = jax.tree.flatten(value)
        # Leaves of dtype `float0` are gradients of integers, and hold no numbers.
        places = [i for i, x in enumerate(leaves) if jnp.result_type(x) != float0]
        given = [jnp.asarray(leaves[i]) for i in places]
        wide = [self._counted(op, _widened(op, array)) for array in given]
        results = self._reduce(op, [_to_wire(array, wire_dtype) for array in wide])
        for i, old, whole, result in zip(places, given, wide, results, strict=True):
            result = result.astype(whole.dtype)
            if op is ReduceOp.MEAN:
                result /= count_active(self.active)
            is_kept = op in _REDUCE or old.dtype == jnp.float16
            leaves[i] = result.astype(old.dtype) if is_kept else result
        return treedef.unflatten(leaves)

    def _reduce(self, op: ReduceOp, values: list[jax.Array]) -> list[Any]:
        """Returns arrays combined over replicas, in the way of the strategy."""
        ops = self.strategy.cross_device_ops
        if ops is not None and values:
            axis = self.strategy.axis_name
            return reduce_by(ops, op, values, axis, self._num_replicas)
        return _REDUCE.get(op, jax.lax.psum)(values, self.axis_name)

    def _check_is_not_hidden(self, function: str, axis_name: str) -> None:
        """Raises if another axis of the same name hides the axis of replicas."""
        size = jax.lax.axis_size(axis_name)
        if size == self._num_replicas:
            return
        raise ReplicaContextError(
            f"`{function}` was called where {axis_name!r} is an axis of size {size}, "
            f'as inside `jax.vmap(fn, axis_name="{axis_name}")`, and not the axis of '
            f"{self._num_replicas} replicas. Call it outside of `fn`, or give the axis "
            "of replicas another name (`axis_name=...` of the strategy)."
        )

    def _counted(self, op: ReduceOp, value: jax.Array) -> jax.Array:
        """Returns a value, replaced by a neutral value where a replica has no data."""
        if count_active(self.active) == self._num_replicas:
            return value
        other = 0
        if op in _REDUCE:
            least = -jnp.inf
            most = jnp.inf
            if not jnp.issubdtype(value.dtype, jnp.inexact):
                least = jnp.iinfo(value.dtype).min
                most = jnp.iinfo(value.dtype).max
            other = least if op is ReduceOp.MAX else most
        return jnp.where(self.is_active(), value, jnp.full_like(value, other))

    def all_gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis, on every replica.

        Args:
            value: A pytree of arrays of equal shape on all replicas.
            axis: The axis to join, such as 0 for examples.

        Returns:
            The same pytree, with `axis` longer by the number of replicas with data.

        Raises:
            ValueError: If a value has no such axis.
        """
        if self.axis_name is None:
            return value
        self._check_is_not_hidden("all_gather", self.axis_name)

        def gather(leaf: Any) -> jax.Array:
            rows = jax.lax.all_gather(leaf, self.axis_name)
            return join(PerReplica(rows, self.active), axis)

        return jax.tree.map(gather, value)

    def merge_call(
        self,
        merge_fn: Callable[..., PyTree],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> PyTree:
        """Calls `merge_fn(strategy, *args, **kwargs)` in cross-replica context.

        As in `tf.distribute`: a step leaves its replica for a function that sees the
        values of all replicas, and continues with the result::

            def apply(strategy, gradients):
                gradients = strategy.reduce("mean", gradients)
                optimizer.update(model, gradients)

            armillary.get_replica_context().merge_call(apply, args=(gradients,))

        In `merge_fn`, arrays of the arguments are `PerReplica` values, for
        `strategy.reduce`, `gather`, `local_results` and `run`. Modules, variables and
        everything else are passed unchanged. With one replica, arrays stay arrays.

        Args:
            merge_fn: The function. It gets the strategy first.
            args: Positional arguments, pytrees.
            kwargs: Keyword arguments, pytrees.

        Returns:
            The result of `merge_fn`. Each replica gets its part of a `PerReplica`.

        Raises:
            TypeError: If `merge_fn` cannot be called.
        """
        check_callable("merge_fn", merge_fn)
        given, named = self._share((tuple(args), kwargs or {}))
        with Scope(self.strategy):
            result = merge_fn(self.strategy, *given, **named)
        return self._take_own(result)

    def run_merged(
        self, fn: Callable[..., PyTree], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> PyTree:
        """Calls `fn` in this replica again: `strategy.run` within `merge_call`."""
        args, kwargs = self._take_own((args, kwargs))
        with Scope(self.strategy, self):
            return self._share(fn(*args, **kwargs))

    def reduce_merged(
        self, op: ReduceOp, value: PerReplica, axis: int | None
    ) -> jax.Array:
        """Reduces a value over replicas: `strategy.reduce` within `merge_call`."""
        own = value.own if axis is None else _ALONG_AXIS[op](value.own, axis)
        return self.all_reduce(op, own)

    def _share(self, tree: PyTree) -> PyTree:
        """Returns a pytree with a `PerReplica` for each array."""
        if self.axis_name is None:
            return tree
        state = lifted_state()
        lifted = set() if state is None else {slot.key for slot in state.slots}

        def is_object(part: Any) -> bool:
            # Objects are not copied, because writes to a copy would be lost. Variables
            # that are not lifted are values, such as gradients in an `nnx.State`.
            return is_claimed(part) and (id(part) in lifted or not is_variable(part))

        def share(leaf: Any) -> Any:
            if not isinstance(leaf, jax.Array):
                return leaf
            rows = jax.lax.all_gather(leaf, self.axis_name)
            shared = PerReplica(rows, self.active)
            shared.own = leaf
            return shared

        return jax.tree.map(share, tree, is_leaf=is_object)

    def _take_own(self, tree: PyTree) -> PyTree:
        """Returns a pytree with this replica's part of each `PerReplica`."""

        def take(leaf: Any) -> Any:
            if not is_per_replica(leaf):
                return leaf
            if leaf.own is not None:
                return leaf.own
            if leaf.is_shared:
                return leaf.array
            return leaf.array[self.replica_id_in_sync_group]

        return jax.tree.map(take, tree, is_leaf=is_argument)

    def is_active(self) -> jax.Array:
        """Returns whether this replica holds data; traced if there are several."""
        replica = self.replica_id_in_sync_group
        if isinstance(self.active, int):
            return replica < self.active
        return jnp.any(replica == np.array(self.active))

    def is_first(self) -> jax.Array:
        """Returns whether this is the first replica that holds data."""
        first = 0 if isinstance(self.active, int) else self.active[0]
        return self.replica_id_in_sync_group == first


_REDUCE = {ReduceOp.MAX: jax.lax.pmax, ReduceOp.MIN: jax.lax.pmin}
_ALONG_AXIS = {
    ReduceOp.SUM: jnp.sum,
    ReduceOp.MEAN: jnp.mean,
    ReduceOp.MAX: jnp.max,
    ReduceOp.MIN: jnp.min,
}


def check_wire_dtype(dtype: Any) -> Any:
    """Returns the dtype in which floats travel; `None` for their own dtype."""
    if dtype is None:
        return None
    with contextlib.suppress(TypeError):
        if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            return jnp.dtype(dtype)
    raise ValueError(
        f"`dtype` is {dtype!r}, but values travel between replicas in a dtype of "
        "floats. Use `dtype=jnp.bfloat16`, or leave it out for the dtype of each value."
    )


def _to_wire(value: jax.Array, dtype: Any) -> jax.Array:
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    return value if dtype is None or not is_float else value.astype(dtype)


def _widened(op: ReduceOp, value: jax.Array) -> jax.Array:
    """Returns a value in a wider dtype, if its sum could soon overflow."""
    is_small = value.dtype == bool or (
        op is ReduceOp.MEAN
        and jnp.issubdtype(value.dtype, jnp.integer)
        and value.dtype.itemsize < 4
    )
    if op is ReduceOp.MEAN and value.dtype == jnp.float16:
        return value.astype(jnp.float32)
    return value.astype(int) if is_small else value


def _alone(op: ReduceOp, value: Any) -> Any:
    """Returns the reduction of a single value, in the dtype that several would have."""
    value = jnp.asarray(value) if isinstance(value, bool) else value
    dtype = getattr(value, "dtype", float0)
    if op in _REDUCE or dtype == float0 or jnp.issubdtype(dtype, jnp.inexact):
        return value
    if op is ReduceOp.MEAN:
        return value / 1
    return value.astype(int) if jnp.issubdtype(dtype, jnp.bool_) else value


class _Frame(NamedTuple):
    strategy: "Strategy"
    replica_context: ReplicaContext | None


class _Step(NamedTuple):
    state: State
    trace_state: Any
    strategy: "Strategy"


class _Ambient(threading.local):
    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.chosen: Strategy | None = None
        # The context in which arrays of the chosen strategy are made.
        self.place: AbstractContextManager[Any] | None = None
        self.steps: list[_Step] = []


_ambient = _Ambient()
_default_frame: list[_Frame] = []


def set_default(strategy: "Strategy") -> None:
    context = ReplicaContext(strategy, None, active=1)
    _default_frame[:] = [_Frame(strategy, context)]


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


def get_replica_context() -> ReplicaContext | None:
    """Returns the replica context, or `None` in cross-replica context."""
    return _frame().replica_context


def get_running_context(strategy: "Strategy") -> ReplicaContext | None:
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
    follow_keras()
    if _ambient.frames:
        raise ReplicaContextError(
            "`set_strategy` was called inside `strategy.scope()` or `strategy.run`, "
            "which already decide the strategy. Call it at the top of the program."
        )
    _ambient.chosen = None if strategy is _default_frame[0].strategy else strategy

    if _ambient.place is not None:
        _ambient.place.__exit__(None, None, None)
        _ambient.place = None
    device = getattr(strategy, "default_device", None)
    if device is not None:
        _ambient.place = jax.default_device(device)
        _ambient.place.__enter__()


class Scope:
    """Puts a strategy, and perhaps one of its replicas, in effect. It is reentrant.

    Args:
        strategy: The strategy.
        replica_context: The replica whose code runs.
        device: The default device for new arrays; `None` keeps the default of JAX.
    """

    def __init__(
        self,
        strategy: "Strategy",
        replica_context: ReplicaContext | None = None,
        device: Any = None,
    ) -> None:
        self._frame = _Frame(strategy, replica_context)
        self._device = device
        self._places: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> "Strategy":
        _ambient.frames.append(self._frame)
        if self._device is not None:
            place = jax.default_device(self._device)
            place.__enter__()
            self._places.append(place)
        return self._frame.strategy

    def __exit__(self, *_: object) -> None:
        if self._device is not None:
            self._places.pop().__exit__(None, None, None)
        _ambient.frames.pop()


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
def lifted(state: State, strategy: "Strategy") -> Iterator[None]:
    """Marks `state`, of a step under `strategy`, as the state that `run` lifts."""
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
    """Returns whether the code is inside a JAX transformation in the running step."""
    steps = _ambient.steps
    return bool(steps) and steps[-1].trace_state != get_trace_state()


def require_replica_context(function: str, instead: str) -> ReplicaContext:
    """Returns the replica context for `function`; raises an error if there is none."""
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
