"""Traces a user's step, once, into a pure program that the library can compile.

The checks that need a trace are here: state that was captured as a constant, slots that
changed their shape, and arrays of the trace that remain in places that nothing carries.
"""

import contextlib
import functools
import itertools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from armillary._checks import list_lines
from armillary._dataflow import find_unchanged
from armillary._jaxpr import is_in_trace, take_inputs
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._notes import add_notes
from armillary.distribute.program._traced_step import ARRAY, TracedStep
from armillary.distribute.replica._context import lifted
from armillary.errors import (
    CapturedStateError,
    ReplicaContextError,
    StateStructureError,
)
from armillary.state._adapters import guarded_writes
from armillary.state._captured import (
    Fingerprint,
    check_captured,
    guarded_write_error,
    methods_of,
    write_error,
)
from armillary.state._lift import State, take_tracers
from armillary.state._walk import Walk
from armillary.typing import PyTree

_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)


def trace_step(
    fn: Callable[..., PyTree],
    flat: FlatState,
    arguments: tuple[PyTree, ...],
    *,
    user_fn: Callable[..., Any],
    owner: str,
    refusal: Callable[[str, dict[str, str]], str] | None = None,
    taken: Sequence[int] | None = None,
    before: Walk | None = None,
    is_live: bool = False,
) -> TracedStep:
    """Traces `fn(*arguments)` with the state lifted.

    A step that changed plain values is traced twice, to see whether it changes them
    again. `before` is a recent `State.look`, if no code has run since then. If the
    results hold objects with state, they are copies from the end of the step, or the
    objects themselves with `is_live`.
    """
    tracing = _Tracing(fn, flat, arguments, user_fn, owner, taken, is_live)
    step, changes, drawn = tracing.trace(before)
    if changes and refusal is not None:
        raise StateStructureError(refusal(tracing.name, changes))
    if not (changes or drawn):
        return step

    # A second trace without changes, and with the same program, shows that the changes
    # of the first trace do no harm.
    again, more_changes, _ = tracing.trace()
    is_same = again.is_same(step)
    is_constant = is_same and not more_changes
    if drawn and not is_same:
        raise _explain_drawn(tracing.name, owner, drawn[0])
    if changes and not is_constant:
        raise _explain_changes(tracing.name, changes)
    return step


def _explain_drawn(name: str, owner: str, generator: str) -> CapturedStateError:
    """Returns the error for random numbers that would be constants."""
    return CapturedStateError(
        f"`{name}` draws from `{generator}` while it is traced, so the same numbers "
        "would be a constant of the compiled program in every step. Draw from a key of "
        f"JAX that {owner} carries from step to step, such as `nnx.Rngs` "
        "(`jax.random.normal(rngs(), shape)`), or put random numbers into the batches."
    )


def _explain_changes(name: str, changes: dict[str, str]) -> StateStructureError:
    """Returns the error for plain values that a step has changed."""
    lines: list[str] = []
    for path, change in sorted(changes.items()):
        lines.append(f"{path}: {change}, once, while the step was traced")
    return StateStructureError(
        f"`{name}` changed plain values, so the next step would be a different "
        "program, but a compiled loop runs Python only once:\n"
        f"{list_lines(lines, most=10)}\n"
        "Hold counters and conditions in arrays (`jnp.zeros(...)`, `jnp.where`). Set "
        "values that are set only once in `__init__` or `train_loop_begin`."
    )


class _Tracing(NamedTuple):
    """The arguments of `trace_step`, for one trace or two."""

    fn: Callable[..., PyTree]
    flat: FlatState
    arguments: tuple[PyTree, ...]
    user_fn: Callable[..., Any]
    owner: str
    taken: Sequence[int] | None
    is_live: bool

    @property
    def name(self) -> str:
        return getattr(self.user_fn, "__name__", "the step")

    def trace(
        self, before: Walk | None = None
    ) -> tuple[TracedStep, dict[str, str], list[str]]:
        """Traces the step.

        Returns:
            The step, the plain values that it changed, and the random generators that
            it drew from.
        """
        state = self.flat.state
        before = before or state.look()
        functions = Walk(self._functions)
        # Programs of functions that the step calls would hold the old values of slots.
        functions.forget_programs()
        generators = _find_generators(before, functions)
        states = {name: get_state() for name, get_state in generators.items()}

        try:
            step, changes = self._trace(before)
        except BaseException:
            if not is_in_trace():
                take_tracers(state.roots)
            raise
        finally:
            functions.forget_programs()

        drawn: list[str] = []
        for name, get_state in generators.items():
            if get_state() != states[name]:
                drawn.append(name)
        return step, changes, drawn

    @property
    def _functions(self) -> list[tuple[Any, str]]:
        """The step and the methods that it may call, without their object."""
        function = getattr(self.user_fn, "__func__", self.user_fn)
        methods = [(method, "") for method in methods_of(self.user_fn)]
        return [(function, ""), *methods]

    def _trace(self, before: Walk) -> tuple[TracedStep, dict[str, str]]:
        """Traces the step; returns it, and the plain values that it changed."""
        state = self.flat.state
        changed: list[int] = []
        changes: dict[str, str] = {}
        tree: Any = None
        static: tuple[Any, ...] = ()

        def pure(slots: list[Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
            nonlocal changed, changes, tree, static
            with (
                self.flat.strategy.jax_settings(),
                state.swapped(slots),
                lifted(state, self.flat.strategy, self.flat.homes.in_step),
            ):
                result = self.fn(*arguments)
                is_leaf = state.holds if self.is_live else None
                values, tree = jax.tree.flatten(result, is_leaf=is_leaf)
                walk = state.look()
                new = state.find_new_places(walk)
                after = state.collect(slots, self.name, new)

            changed = []
            new_arrays: list[Any] = []
            for i, (old, now) in enumerate(zip(slots, after, strict=True)):
                if now is not old:
                    changed.append(i)
                    new_arrays.append(now)
            # Here, because a walk that outlives the trace would hold its tracers.
            changes = state.changes_between(before, walk)
            arrays, static = _split_results(values)
            return new_arrays, arrays

        keys = {slot.key for slot in state.slots}
        explain_write = functools.partial(guarded_write_error, self.user_fn, self.owner)
        with (
            self.flat.strategy.jax_settings(),
            explained(self.user_fn, state, self.owner, self.arguments),
            guarded_writes(keys, explain_write),
        ):
            traced = jax.jit(pure).trace(self.flat.types, self.arguments)

        if not is_in_trace():
            self._check_nothing_left()
        check_captured(traced.jaxpr, state, self.user_fn, self.owner)

        program, written = _without_unchanged(traced.jaxpr, changed)
        program = self._without_unused(program)
        step = TracedStep(program, tuple(written), tree, static, Fingerprint(program))
        return step, changes

    def _check_nothing_left(self) -> None:
        """Raises if a step left an array of the trace in a place that nobody carries.

        Otherwise, an error would come later, far from the line that is wrong.
        """
        left = take_tracers(self._functions)
        if not left:
            return
        paths: set[str] = set()
        for slot in left:
            parent, _, _ = slot.path.rpartition("/")
            paths.add(parent or slot.path)
        shown = ", ".join(f"`{path}`" for path in sorted(paths))
        raise CapturedStateError(
            f"`{self.name}` put an array into {shown}, which {self.owner} does not "
            "carry from step to step, so it would hold one value of the trace. Hold "
            f"the value in an array or a metric of {self.owner}, and read that between "
            "loops. To print values, use `jax.debug.print`."
        )

    def _without_unused(self, program: core.ClosedJaxpr) -> core.ClosedJaxpr:
        """Returns a program that takes only the batches that the step took."""
        if self.taken is None:
            return program
        is_used = [True] * len(self.flat.types)
        for batches, count in zip(self.arguments, self.taken, strict=True):
            for index, batch in enumerate(batches):
                is_used += [index < count] * len(jax.tree.leaves(batch))
        return take_inputs(program, is_used)


def _split_results(values: list[Any]) -> tuple[list[jax.Array], tuple[Any, ...]]:
    """Returns the arrays among the results of a step, and the results without them.

    Arrays are results of the program. Other values stay in Python.
    """
    arrays: list[jax.Array] = []
    static: list[Any] = []
    for value in values:
        if isinstance(value, jax.Array):
            arrays.append(value)
            static.append(ARRAY)
        else:
            static.append(value)
    return arrays, tuple(static)


def _without_unchanged(
    program: core.ClosedJaxpr, changed: list[int]
) -> tuple[core.ClosedJaxpr, list[int]]:
    """Leaves out the slots that the program returns unchanged.

    For example, `nnx.remat` writes all variables of its function, changed or not.
    """
    is_written = [not is_same for is_same in find_unchanged(program, changed)]
    if all(is_written):
        return program, changed

    # The new values of slots come first, and then the results of the step.
    outvars = program.jaxpr.outvars
    new_values = list(itertools.compress(outvars, is_written))
    results = outvars[len(changed) :]
    jaxpr = program.jaxpr.replace(outvars=[*new_values, *results])
    written = list(itertools.compress(changed, is_written))
    return core.ClosedJaxpr(jaxpr, program.consts), written


@contextlib.contextmanager
def explained(
    user_fn: Callable[..., Any],
    state: State,
    owner: str,
    arguments: tuple[PyTree, ...] = (),
) -> Iterator[None]:
    """Explains Flax's error for a write to an unlifted variable; notes all errors."""
    try:
        yield
    except Exception as error:
        add_notes(error, getattr(user_fn, "__name__", "the step"), owner, arguments)
        is_of_flax = _is_write_to_other_trace(error)
        explanation = write_error(user_fn, state, owner) if is_of_flax else None
        if explanation is None:
            raise
        raise explanation from error


def _is_write_to_other_trace(error: Exception) -> bool:
    """Returns whether Flax refuses a variable that belongs to another trace."""
    # Not above, because importing Flax would make this library's import slower.
    from flax.errors import TraceContextError

    if isinstance(error, TraceContextError):
        return True
    # `nnx.grad` raises this error for a module of another trace.
    return isinstance(error, ValueError) and "from different trace level" in str(error)


def check_no_trace(fn: Callable[..., Any], state: State) -> None:
    """Raises if a function with state is called under a transformation of JAX."""
    if not (is_in_trace() and state.slots):
        return
    raise ReplicaContextError(
        f"`{getattr(fn, '__name__', 'the function')}` reads or writes variables "
        f"({', '.join(state.paths[:3])}), and was called inside `jax.jit`, `nnx.jit` "
        "or another transformation of JAX, which would leave its own values in them. "
        "Decorate the function that calls `strategy.run` with `@armillary.function` "
        "instead of `jax.jit`. Inside the function that `strategy.run` gets, you can "
        "use `nnx.jit` and all other transformations."
    )


def _find_generators(*walks: Walk) -> dict[str, Callable[[], Any]]:
    """Returns functions that read the random generators a step may draw from.

    Each function returns the state of one generator. The keys are their paths.
    """
    found: dict[str, Callable[[], Any]] = {
        "np.random": _read_numpy_state,
        "random": random.getstate,
    }
    nodes = itertools.chain(*(walk.nodes.values() for walk in walks))
    for node in nodes:
        for part in node.parts:
            for name, value in part.pairs:
                if issubclass(type(value), _GENERATORS):
                    path = part.way.join(node.path, name)
                    found[path] = functools.partial(pickle.dumps, value)
    return found


def _read_numpy_state() -> bytes:
    # As bytes, because the state has an array, which cannot be compared by `!=`.
    return pickle.dumps(np.random.get_state())
