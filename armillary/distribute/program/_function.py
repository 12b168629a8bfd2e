"""Compiles a step of a user's own loop, with the state that it reaches."""

import collections
import functools
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ParamSpec, TypeVar, overload

import jax
from jax.core import Tracer

from armillary._checks import check_instance
from armillary._jaxpr import read_settings
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.distribute._global_arrays import with_auto_axes
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._function_program import (
    FunctionProgram,
    UserFunction,
    check_same_function,
    trace_function,
)
from armillary.distribute.program._keys import (
    argument_key,
    code_of,
    identity_of,
    objects_of,
)
from armillary.distribute.program._programs import Programs
from armillary.distribute.program._step_warnings import MetricWarnings
from armillary.distribute.replica._context import (
    get_strategy,
    is_in_run,
    lifted_state,
)
from armillary.state._holders import captured, is_claimed
from armillary.state._lift import State
from armillary.typing import PyTree

_P = ParamSpec("_P")
_R = TypeVar("_R")
_MAX_PROGRAMS = 64
_MANY_PROGRAMS = 16
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
    compiled = CompiledFunction(fn, strategy, compiler_options=compiler_options)

    @hides_frames
    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return compiled(*args, **kwargs)

    # `ClusterCoordinator.schedule` uses it to compile the function on workers.
    vars(call)["armillary_function"] = fn
    return call


class CompiledFunction:
    """A function with a program for each kind of arguments.

    Args:
        fn: The user's function.
        strategy: The strategy of its state; `None` for the strategy that it reaches.
        body: A function that calls `fn`; by default `fn` itself.
        compiler_options: As in `StandardTrainerOptions`.
        check: Takes the state and the changed indices of each new program.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        strategy: Strategy | None,
        body: Callable[..., Any] | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        check: Callable[[State, Sequence[int]], None] | None = None,
    ) -> None:
        self._function = UserFunction(fn, body or fn, compiler_options)
        self._strategy = strategy
        self._check = check
        # One keeper for each kind of arguments, because some arguments are objects with
        # state.
        self._programs: dict[Any, Programs[FunctionProgram]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if lifted_state() is not None or is_in_run():
            return self._function.body(*args, **kwargs)
        strategy = self._strategy or _strategy_of(self._function.fn)
        with strategy.leave_program_mesh(), strategy.jax_settings():
            return self._call(strategy, args, kwargs)

    def _call(
        self, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the program for arguments like these, and makes it first if needed.

        Programs are kept by the structure and the types of the arguments, and by the
        settings of JAX that change a trace.
        """
        fn, body, _ = self._function
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_claimed)
        if strategy.mesh is not None:
            given = leaves
            leaves = list(map(with_auto_axes, given))
            has_new_leaves = any(map(operator.is_not, leaves, given))
            if has_new_leaves:
                args, kwargs = treedef.unflatten(leaves)

        argument_keys = tuple(map(argument_key, leaves))
        key = (strategy, treedef, argument_keys, read_settings())
        programs = self._programs.get(key)
        if programs is None:
            programs = Programs(strategy)

        if programs.find_current() is None:
            objects = [(leaf, "") for leaf in objects_of(leaves)]
            state = State([(fn, ""), *objects], functions=(fn,))
            is_lifted = any(isinstance(leaf, Tracer) for leaf in state.read())
            if is_lifted and body is fn:
                # A transformation of NNX has already lifted the arguments' variables.
                return body(*args, **kwargs)
            _adopt(programs, state)

        if None not in programs.current:
            old = programs.doubted.pop(None, None)
            programs.current[None] = self._make(programs, old, leaves, treedef)
        _keep(self._programs, key, programs)
        return programs.current[None]((args, kwargs), leaves)

    def _make(
        self,
        programs: Programs[FunctionProgram],
        old: FunctionProgram | None,
        leaves: list[Any],
        treedef: Any,
    ) -> FunctionProgram:
        """Returns a program for arguments; the old program if it is still correct."""
        function = self._function
        with programs.tracing() as flat:
            step = trace_function(function, flat, leaves, treedef)
        warn_if_compiled_often(function.fn, function.name)

        strategy = flat.strategy
        peers = strategy.peers
        if not peers.is_alone:
            arguments = treedef.unflatten(leaves)
            check_same_function(peers, function, step, arguments)
        if old is not None and old.step.is_same(step):
            return old

        warnings = MetricWarnings(function.name, strategy.num_replicas_in_sync)
        warnings.check(flat.state, step)
        if self._check is not None:
            self._check(flat.state, step.changed)
        return FunctionProgram(function, step, flat, leaves)


def _adopt(programs: Programs[FunctionProgram], state: State) -> None:
    """Continues with a newly found state."""
    returns_objects = any(
        program.returns_objects for program in programs.current.values()
    )
    programs.adopt(state)
    if returns_objects:
        programs.doubt("it returns objects of its state, which are new objects now")


def warn_if_compiled_often(fn: Callable[..., Any], name: str) -> None:
    """Warns once about a function that seems to be compiled again by each call."""
    code = code_of(fn)
    _num_compiled[code] += 1
    if _num_compiled[code] == _MANY_PROGRAMS:
        names: list[str] = []
        for captured_name, value in captured(fn):
            if not isinstance(value, ModuleType):
                names.append(captured_name)
        found = ", ".join(dict.fromkeys(names)) or "nothing"
        logger.warning(
            f"`{name}` was compiled {_MANY_PROGRAMS} times. Each new shape or dtype of "
            "an array compiles it again. So does each new value or object among its "
            f"other arguments and its captured variables ({found}). Pass values that "
            "change as arrays of a few shapes."
        )


class FunctionCache:
    """Functions that `run` compiled outside any step, by code and captured values."""

    def __init__(self) -> None:
        self._functions: dict[Any, tuple[Any, CompiledFunction]] = {}

    def get(self, fn: Callable[..., Any], strategy: Strategy) -> CompiledFunction:
        """Returns the compiled call of `strategy.run` with a function."""
        values = tuple(captured(fn))
        identities: list[tuple[str, Any]] = []
        for name, value in values:
            identities.append((name, identity_of(value)))
        key = (code_of(fn), tuple(identities))
        found = self._functions.get(key)
        if found is None:

            def body(*args: Any, **kwargs: Any) -> PyTree:
                return strategy.run(fn, args, kwargs)

            # The values are kept alive, so that Python does not reuse their identities.
            found = values, CompiledFunction(fn, strategy, body)
        _keep(self._functions, key, found)
        _, compiled = found
        return compiled


def _keep(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """Keeps a value, and drops the least recently used value if there are too many."""
    # A dictionary keeps the order of insertion, so the first key was used least
    # recently.
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > _MAX_PROGRAMS:
        oldest = next(iter(kept))
        del kept[oldest]


def _strategy_of(fn: Callable[..., Any]) -> Strategy:
    """Returns the first strategy that a function reaches, or the one in effect."""
    for _, value in captured(fn):
        # `isinstance` would ask the object for its class, which may run user code.
        if issubclass(type(value), Strategy):
            return value
    return get_strategy()
