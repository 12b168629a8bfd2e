"""Compiles a step of a user's own loop, with the state that it reaches."""

import array
import collections
import functools
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType, ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from armillary._checks import check_instance
from armillary._jaxpr import read_settings
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.distribute._global_arrays import is_array
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._notes import MetricWarnings
from armillary.distribute.program._trace import check_no_trace, trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._context import (
    get_strategy,
    is_in_run,
    lifted_state,
)
from armillary.distribute.replica._values import (
    array_of,
    is_argument,
    is_per_replica,
    other_count,
)
from armillary.errors import CapturedStateError
from armillary.state._holders import captured, is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree
from armillary.xla._compile import compile_step

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_PROGRAMS = 64
_MANY_PROGRAMS = 16
_ITERATORS = GeneratorType, type(iter([])), map, zip, enumerate
_DRAWN_FROM = np.random.Generator, np.random.RandomState, random.Random, *_ITERATORS
_num_compiled = collections.Counter[Any]()  # by code


@overload
def function(fn: Callable[_P, _R]) -> Callable[_P, _R]: ...
@overload
def function(
    fn: None = None,
    *,
    strategy: Strategy | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]: ...
def function(
    fn: Callable[..., Any] | None = None,
    *,
    strategy: Strategy | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Any:
    """Compiles a function that reads and writes variables.

    Use it for the step of a loop without a trainer::

        @armillary.function
        def train_step(batch):
            return strategy.run(step_fn, args=(batch,))

        for batch in dataset:
            losses = train_step(batch)

    It is traced once for each structure, shape and dtype of its array arguments, and
    for each value of its other arguments. It may use variables that it reaches through
    its arguments, its closure, its globals or `self`. They remain the same objects. The
    memory of their old values is reused, so copy an array that you take out of a
    variable between calls (`variable[...].copy()`). A plain global or local name that
    is rebound to a new array is not a variable: hold the array as an attribute.

    Args:
        fn: The function. Inside a compiled step, or with a module inside `nnx.grad`, it
            becomes part of the outer program.
        strategy: The strategy of its state. By default, it is the first strategy that
            the function reaches, or else the strategy in effect.
        compiler_options: As in `StandardTrainerOptions`.

    Returns:
        A function with the same signature; a decorator if `fn` is left out.

    Raises:
        TypeError: If `fn` is a generator or a coroutine, or an argument is of the wrong
            type.
    """
    fix = "Write `@armillary.function` above a function."
    check_instance("fn", fn, Callable | None, fix)
    fix = "Use a strategy such as `armillary.MirroredStrategy()`."
    check_instance("strategy", strategy, Strategy | None, fix)
    fix = 'Use a dictionary, such as `{"xla_cpu_enable_fast_math": True}`.'
    check_instance("compiler_options", compiler_options, Mapping | None, fix)
    if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn):
        raise TypeError(
            f"`{getattr(fn, '__name__', 'fn')}` is a generator or a coroutine, which "
            "would run only after its trace has ended. Return its values instead, such "
            "as a tuple of arrays."
        )
    if fn is None:
        return functools.partial(
            function, strategy=strategy, compiler_options=compiler_options
        )
    compiled = Function(fn, strategy, compiler_options=compiler_options)

    @hides_frames
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    # `ClusterCoordinator.schedule` uses it to compile the function on workers.
    vars(call)["armillary_function"] = fn
    return call


class Function:
    """A function with a program for each kind of arguments.

    `check` takes the state and the changed indices of each new program.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        strategy: Strategy | None,
        body: Callable[..., Any] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        check: Callable[[State, Sequence[int]], None] | None = None,
    ) -> None:
        self.fn = fn
        self.body = body or fn
        self.compiler_options = compiler_options
        self.name = getattr(fn, "__name__", "the function")
        self._strategy = strategy
        self._check = check
        self._programs: dict[Any, _Program] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if lifted_state() is not None or is_in_run():
            return self.body(*args, **kwargs)
        strategy = self._strategy or _strategy_of(self.fn)
        with strategy.leave_program_mesh():
            return self._call(strategy, args, kwargs)

    def _call(
        self, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_claimed)
        kinds = tuple(kind_of(leaf) for leaf in leaves)
        key = (strategy, treedef, kinds, read_settings())
        program = self._programs.get(key)
        if program is None or not program.is_current():
            roots = [(self.fn, ""), *((leaf, "") for leaf in objects_of(leaves))]
            state = State(roots, functions=(self.fn,))
            is_lifted = any(isinstance(leaf, Tracer) for leaf in state.read())
            if is_lifted and self.body is self.fn:
                # A transformation of NNX has already lifted the arguments' variables.
                return self.body(*args, **kwargs)
            if program is None or not program.rebind(state):
                last = program
                program = _Program(self, state, strategy, leaves, treedef)
                warnings = MetricWarnings(self.name, strategy.num_replicas_in_sync)
                warnings.look(state, program.step)
                if self._check is not None:
                    self._check(state, program.step.changed)
                if last is not None:
                    program.reuse(last)
                warn_if_compiled_often(self.fn, self.name)
        _keep(self._programs, key, program)
        return program((args, kwargs), leaves)


def warn_if_compiled_often(fn: Callable[..., Any], name: str) -> None:
    """Warns once about a function that seems to be compiled again by each call."""
    code = code_of(fn)
    _num_compiled[code] += 1
    if _num_compiled[code] == _MANY_PROGRAMS:
        held = (n for n, value in captured(fn) if not isinstance(value, ModuleType))
        found = ", ".join(dict.fromkeys(held)) or "nothing"
        logger.warning(
            f"`{name}` was compiled {_MANY_PROGRAMS} times. Each new shape or dtype of "
            "an array compiles it again. So does each new value or object among its "
            f"other arguments and its captured variables ({found}). Pass values that "
            "change as arrays of a few shapes."
        )


class Functions:
    """Functions that `run` compiled outside any step, by code and captured values."""

    def __init__(self) -> None:
        self._functions: dict[Any, tuple[Any, Function]] = {}

    def get(self, fn: Callable[..., Any], strategy: Strategy) -> Function:
        values = tuple(captured(fn))
        held = tuple((name, identity_of(value)) for name, value in values)
        key = code_of(fn), held
        found = self._functions.get(key)
        if found is None:

            def body(*args: Any, **kwargs: Any) -> PyTree:
                return strategy.run(fn, args, kwargs)

            # The values are kept alive, so that Python does not reuse their identities.
            found = values, Function(fn, strategy, body)
        _keep(self._functions, key, found)
        return found[1]


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value, and drops the least recently used value if there are too many."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _MAX_PROGRAMS:
        del kept[next(iter(kept))]


class _Program:
    """One compiled program, and the state it works on."""

    def __init__(
        self,
        function: Function,
        state: State,
        strategy: Strategy,
        leaves: list[Any],
        treedef: Any,
    ) -> None:
        _check_arguments(function.name, leaves)
        self._fn = function.fn
        self._strategy = strategy
        self._flat = flat = FlatState(state, strategy)
        static = [None if is_array(leaf) else leaf for leaf in leaves]
        positions = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

        def call_body(*arrays: Any) -> PyTree:
            values = list(static)
            for position, value in zip(positions, arrays, strict=True):
                values[position] = value
            args, kwargs = treedef.unflatten(values)
            return function.body(*args, **kwargs)

        arrays = tuple(leaves[i] for i in positions)
        self.step: TracedStep = trace_step(
            call_body,
            flat,
            arrays,
            user_fn=function.fn,
            owner="the function",
            is_live=True,
        )
        state.watch()
        if not state.is_current():
            # The function sets a plain value to the same value in every call.
            flat.rebind(state.search_again())
        if strategy.peers is not None:
            arguments = _arguments_for_all(treedef.unflatten(leaves))
            program = self.step.program
            check_same_program(
                strategy.peers, function.name, program, function.fn, arguments
            )

        def pure(
            donated: Sequence[Any], others: Sequence[Any], arrays: list[Any]
        ) -> Any:
            slots = flat.join(self.step.changed, donated, others)
            new, results = self.step.call(slots, arrays)
            return new, results, jnp.zeros(())

        self._compiled = compile_step(
            pure,
            self.step.program,
            flat.platform,
            function.compiler_options,
            split=flat.split,
            donate_argnums=0,
            out_shardings=(flat.shardings(self.step.changed), None, None),
        )

    def is_current(self) -> bool:
        return self._flat.state.is_current() and self._flat.fits()

    def rebind(self, state: State) -> bool:
        """Switches to a newly found state, and returns whether the program fits it."""
        flat = self._flat
        if flat.signature != state.signature() or state.changes_since(flat.state):
            return False
        if any(map(flat.state.holds, self.step.static_results)):
            return False  # The new objects must be returned, and not the old objects.
        flat.rebind(state)
        return True

    def reuse(self, last: "_Program") -> None:
        """Reuses the compiled program of `last`, if it is the same program."""
        is_same = self._flat.signature == last._flat.signature
        if is_same and self.step.is_same(last.step):
            self._compiled = last._compiled

    def __call__(self, arguments: Any, leaves: list[Any]) -> PyTree:
        flat = self._flat
        check_no_trace(self._fn, flat.state)
        arrays = [leaf for leaf in leaves if is_array(leaf)]
        with flat.lent(self.step.changed) as (donated, others):
            try:
                values, results, token = self._compiled(donated, others, arrays)
            except ValueError:
                # Only after an error, because a look at the device of each argument
                # would take longer than a call.
                moved = _bring(arguments, self._strategy)
                if moved is None:
                    raise
                values, results, token = self._compiled(donated, others, moved)
            flat.give(values, token)
            flat.write_back()
        return self.step.results(results)


def _bring(arguments: PyTree, strategy: Strategy) -> list[Any] | None:
    """Returns the arrays of arguments, moved to a strategy; `None` if none moved."""
    if strategy.peers is not None:
        return None
    layout = strategy.layout
    is_moved = False
    devices = set(layout.devices)

    def move(leaf: Any) -> Any:
        nonlocal is_moved
        array = array_of(leaf)
        is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
        if not is_concrete or array.sharding.device_set == devices:
            return array
        is_moved = True
        if not is_per_replica(leaf) or leaf.is_shared:
            return layout.replicate(array)
        if len(array) != strategy.num_replicas_in_sync:
            raise other_count(leaf, strategy)
        return layout.place(array)

    leaves = jax.tree.leaves(arguments, is_leaf=is_argument)
    arrays = [array for array in map(move, leaves) if is_array(array)]
    return arrays if is_moved else None


def _check_arguments(name: str, leaves: list[Any]) -> None:
    for leaf in leaves:
        if isinstance(leaf, _DRAWN_FROM):
            raise CapturedStateError(
                f"An argument of `{name}` is of type {type(leaf).__name__}. A value "
                "that the function draws from it while it is traced would be a "
                "constant of each call. Pass a value instead: `next(iterator)`, or "
                "numbers."
            )


def code_of(fn: Callable[..., Any]) -> Any:
    """Returns a key that is equal for functions with the same code."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__code__", None) or id(fn)


def _strategy_of(fn: Callable[..., Any]) -> Strategy:
    found = (value for _, value in captured(fn) if issubclass(type(value), Strategy))
    return next(found, None) or get_strategy()


def _arguments_for_all(arguments: PyTree) -> dict[str, Any]:
    """Returns the arrays in `(args, kwargs)` that all replicas share, by path."""
    flat = jax.tree_util.tree_leaves_with_path(arguments, is_leaf=is_per_replica)
    return {
        f"{('args', 'kwargs')[path[0].idx]}{jax.tree_util.keystr(path[1:])}": leaf
        for path, leaf in flat
        if is_array(leaf) and getattr(leaf, "is_fully_addressable", True)
    }


def objects_of(leaves: list[Any]) -> list[Any]:
    return [leaf for leaf in leaves if is_claimed(leaf)]


def kind_of(leaf: Any) -> Any:
    """Returns a key that is equal for arguments with the same program."""
    return jax.typeof(leaf) if is_array(leaf) else identity_of(leaf)


def identity_of(value: Any) -> Any:
    """Returns a key that is equal only for values that may share a program."""
    if isinstance(value, str | bytes | int | float | complex | bool | type(None)):
        # By `repr`, because 0.0 equals -0.0, and NaN does not equal itself.
        return type(value), repr(value)
    if isinstance(value, set):
        return set, frozenset(map(identity_of, value))
    if isinstance(value, bytearray | array.array):
        return type(value), getattr(value, "typecode", ""), bytes(value)
    return id(value)
