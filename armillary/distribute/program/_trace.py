"""Traces a user's step, once, into a pure program that the library can compile.

The program takes the arrays of every slot and the step's arguments; it returns the
slots that the step changed, and the step's results. Whatever JAX can only prove while
tracing is checked here: state that was captured as a constant, slots that changed
shape. What replicas must not do is found where they run (`replica/_run.py`).

The iterators that a step gets while it is traced.

Keeps values of a trace from getting where they outlive it, or are not expected.

An array of a trace that is left in a list or dictionary fails later, far from the line
that put it there. State that is written under a `jax.jit` of the user would hold such
arrays when that is done.
"""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.core import Tracer
from jax.extend import core

from armillary._jaxpr import call_program, is_in_trace
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._host_values import (
    guarded_host_values,
    taken_message,
)
from armillary.distribute.program._notes import (
    VALUE_ERRORS,
    add_step_notes,
    add_value_note,
)
from armillary.distribute.replica._context import lifted
from armillary.errors import (
    ArmillaryError,
    CapturedStateError,
    ReplicaContextError,
    RetraceError,
    StateStructureError,
)
from armillary.state._captured import (
    Fingerprint,
    check_captured,
    keras_write_error,
    write_error,
)
from armillary.state._keras import guarded_writes
from armillary.state._lift import State
from armillary.state._place import PlaceSlot
from armillary.state._step_changes import unsettled_message
from armillary.typing import PyTree


class MoreBatches(BaseException):
    """A step called `next` more often than batches were offered.

    Not an `Exception`, so that the user's own handlers let it pass.
    """

    def __init__(self, index: int) -> None:
        self.index = index


class StepIterator:
    """Hands out the batches of one step, and counts how many it takes."""

    def __init__(self, index: int, batches: Sequence[PyTree]) -> None:
        self.index = index
        self.num_taken = 0
        self._batches = batches

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Returns the next batch of the step."""
        if self.num_taken == len(self._batches):
            raise MoreBatches(self.index)
        self.num_taken += 1
        return self._batches[self.num_taken - 1]

    get_next = __next__

    def __getitem__(self, key: Any) -> Any:
        """Says what to write instead."""
        raise TypeError(
            f"A step gets an iterator, not a batch, so it has no item {key!r}. Take "
            "the batch first: `batch = next(iterator)`."
        )


def check_taken(step_name: str, taken: Sequence[int]) -> None:
    """Raises if a step took no batch from one of its datasets."""
    if not all(taken):
        raise RetraceError(
            f"`{step_name}` took no batch from dataset {list(taken).index(0)} of "
            f"{len(taken)}, so its data would never end. Call `next(iterator)` "
            "on each iterator, or leave the dataset out."
        )


_INSTEAD = (
    "Decorate the function that calls `strategy.run` with `@armillary.function` in "
    "place of `jax.jit`; inside the function that `strategy.run` gets, `nnx.jit` and "
    "the others work."
)


def check_no_trace(fn: Callable[..., Any], state: State) -> None:
    """Raises if a function with state is called under a transformation of JAX."""
    if not (is_in_trace() and state.slots):
        return
    name = getattr(fn, "__name__", "the function")
    paths = ", ".join(state.paths[:3])
    more = f" and {len(state.paths) - 3} more" if len(state.paths) > 3 else ""
    raise ReplicaContextError(
        f"`{name}` reads or writes variables ({paths}{more}), and was called inside "
        "`jax.jit`, `nnx.jit` or another transformation of JAX, which would leave its "
        f"own values in them. {_INSTEAD}"
    )


def add_trace_note(error: Exception) -> None:
    """Adds a note to Flax's error for variables from outside of a transformation."""
    if is_in_trace() and "different trace level" in str(error):
        error.add_note(_INSTEAD)


def check_nothing_left(fn: Callable[..., Any], owner: str) -> None:
    """Raises if a step, which was just traced, left an array where it stays."""
    # The step may call other methods, and those may use globals of their own.
    kinds = type(getattr(fn, "__self__", None)).__mro__
    methods = [value for kind in kinds for value in vars(kind).values()]
    python = [value for value in methods if isinstance(value, types.FunctionType)]
    # Not the object of a method, which is the state that was traced.
    functions = [getattr(fn, "__func__", fn), *python]
    left = [
        slot
        for slot in State([(function, "") for function in functions]).slots
        if isinstance(slot, PlaceSlot)
        if any(isinstance(leaf, Tracer) for leaf in slot.read())
    ]
    if not left:
        return
    for slot in left:
        slot.put(None)
    name = getattr(fn, "__name__", "the step")
    paths = sorted({slot.path.rpartition("/")[0] or slot.path for slot in left})
    shown = ", ".join(f"`{path}`" for path in paths)
    raise CapturedStateError(
        f"`{name}` put an array into {shown}, which {owner} does not carry from step "
        "to step: it would hold a value of the trace, once. Hold it in an array or a "
        f"metric of {owner}, and read that between loops; to print values, use "
        "`jax.debug.print`."
    )


class TracedStep(NamedTuple):
    """A step as a pure program.

    Attributes:
        program: From `(*slot arrays, *argument arrays)` to `(*changed slot arrays,
            *result arrays)`.
        changed: Indices of the slot arrays that the step changes.
        result_tree: Structure of the results; not arrays, see `results`.
        static_results: Results that are not arrays, and `ARRAY` for those that are.
        fingerprint: Tells the program from others.
    """

    program: core.ClosedJaxpr
    changed: tuple[int, ...]
    result_tree: Any
    static_results: tuple[Any, ...]
    fingerprint: Fingerprint

    def call(
        self, slots: Sequence[Any], arguments: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Runs or traces the program; returns changed slots and result arrays."""
        outputs = call_program(self.program, [*slots, *arguments])
        return outputs[: len(self.changed)], outputs[len(self.changed) :]

    @property
    def result_types(self) -> list[Any]:
        """Shape and dtype of the result arrays."""
        return self.program.out_avals[len(self.changed) :]

    def is_same(self, other: "TracedStep") -> bool:
        """Returns whether two traces are the same program."""
        return (
            self.changed == other.changed
            and self.result_tree == other.result_tree
            and self.static_results == other.static_results
            and self.fingerprint.is_same(other.fingerprint)
        )

    def results(self, arrays: Sequence[Any]) -> PyTree:
        """Returns the step's results as the user's function returned them."""
        rest = iter(arrays)
        return self.result_tree.unflatten(
            next(rest) if value is ARRAY else value for value in self.static_results
        )


# What `nnx.grad` says of a module that belongs to another trace.
_FLAX_MESSAGE = "from different trace level"

ARRAY = object()
"""Stands for an array among results that are not."""


def trace_step(
    fn: Callable[..., PyTree],
    flat: FlatState,
    arguments: tuple[PyTree, ...],
    *,
    user_fn: Callable[..., Any],
    owner: str,
    refusal: Callable[[str, dict[str, str]], str] | None = None,
) -> TracedStep:
    """Traces `fn(*arguments)` with the state lifted."""
    tracing = _Tracing(fn, flat, arguments, user_fn, owner)
    with flat.state.kept() as changes:
        step, places = tracing.trace()
        first = changes()
        if places and not tracing.repeats(step):
            raise CapturedStateError(taken_message(tracing.name, places[0]))
        if first and refusal is not None:
            raise StateStructureError(refusal(tracing.name, first))
        if first:
            # A flag that is set in each step, or a value that is cached, does no harm.
            with flat.state.kept() as more_changes:
                if not tracing.repeats(step) or more_changes():
                    raise StateStructureError(unsettled_message(tracing.name, first))
    return step


class _Tracing(NamedTuple):
    """What `trace_step` was called with."""

    fn: Callable[..., PyTree]
    flat: FlatState
    arguments: tuple[PyTree, ...]
    user_fn: Callable[..., Any]
    owner: str

    @property
    def name(self) -> str:
        return getattr(self.user_fn, "__name__", "the step")

    def repeats(self, step: TracedStep) -> bool:
        """Returns whether to trace again gives the same program."""
        try:
            return self.trace()[0].is_same(step)
        except StopIteration:  # from an iterator that the first trace has used up
            return False

    def trace(self) -> tuple[TracedStep, list[str]]:
        """Traces the step once; returns where it called `next` as well."""
        state, arguments = self.flat.state, self.arguments
        user_fn, owner = self.user_fn, self.owner
        changed: list[int] = []
        results: list[Any] = []

        def pure(slots: list[Any], arguments: tuple[Any, ...]) -> tuple[Any, Any]:
            with (
                state.swapped(slots, is_kept=True),
                lifted(state, self.flat.strategy),
            ):
                result = self.fn(*arguments)
                after = state.collect(slots, self.name)
            pairs = zip(slots, after, strict=True)
            changed[:] = [i for i, (old, new) in enumerate(pairs) if old is not new]
            values, tree = jax.tree.flatten(result)
            static = [ARRAY if isinstance(v, jax.Array) else v for v in values]
            results[:] = [tree, tuple(static)]
            arrays = [value for value in values if isinstance(value, jax.Array)]
            return [after[i] for i in changed], arrays

        with (
            explained(user_fn, state, owner, arguments),
            guarded_host_values(user_fn, owner) as places,
            guarded_writes(
                {slot.key for slot in state.slots},
                functools.partial(keras_write_error, user_fn, state, owner),
            ),
        ):
            traced = jax.jit(pure).trace(self.flat.types, arguments)
        if not is_in_trace():
            check_nothing_left(user_fn, owner)
        check_captured(traced.jaxpr, state, user_fn, owner)
        tree, static = results
        fingerprint = Fingerprint(traced.jaxpr)
        step = TracedStep(traced.jaxpr, tuple(changed), tree, static, fingerprint)
        return step, places


@contextlib.contextmanager
def explained(
    user_fn: Callable[..., Any],
    state: State,
    owner: str,
    arguments: tuple[PyTree, ...] = (),
) -> Iterator[None]:
    """Turns Flax's error for writing to an unlifted variable into ours.

    Errors of JAX for the value of a traced array get a note that names the step, other
    ones a note on the batches that a step was traced with.
    """
    try:
        yield
    except Exception as error:
        name = getattr(user_fn, "__name__", "the step")
        add_value_note(error, name, owner)
        if not isinstance(error, (ArmillaryError, *VALUE_ERRORS)):
            add_step_notes(error, name, owner, arguments)
        # Not above: to import Flax takes a fifth of the time of this library's import.
        from flax.errors import TraceContextError

        is_flax = isinstance(error, TraceContextError) or (
            isinstance(error, ValueError) and _FLAX_MESSAGE in str(error)
        )
        explanation = write_error(user_fn, state, owner) if is_flax else None
        if explanation is None:
            raise
        raise explanation from error
