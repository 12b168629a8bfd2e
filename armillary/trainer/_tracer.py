"""Traces a user's step once for each shape of batch, and knows when that is stale.

A traced step depends on three things: the places its state is in, the shapes of its
batches, and the plain Python values (flags, rates, names) that were read on the way.
New places or values are noticed between loops; batches may get smaller, and have other
shapes if the options say how many.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from armillary._logging import logger
from armillary.data._layout import Active, BatchLayout
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._step_iterator import (
    MoreBatches,
    StepIterator,
    check_taken,
)
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.errors import RetraceError
from armillary.state._lift import State
from armillary.trainer._batch_types import BatchShapes, key_of
from armillary.trainer._hooks import Hooks, find_reason, trace_hooks
from armillary.trainer._reads import recorded_reads
from armillary.trainer._step_method import StepMethod
from armillary.typing import PyTree

_MAX_BATCHES_PER_STEP = 64
_MANY_IN_VAIN = 5
_COMPILED_AGAIN = (
    "`%s` is compiled again, because it read plain values that have changed (%s). Hold "
    "a value that changes often in an array, so that it is an input of the compiled "
    "step."
)
_TRACED_IN_VAIN = (
    "`%s` was traced %d times to find that it is the same program, because plain "
    "values changed beside others that it reads (%s). That takes as long as the first "
    "trace: hold what changes in an attribute of its own, which the step does not look "
    "at."
)


class Trace(NamedTuple):
    """A traced step, and how many batches of each dataset it takes."""

    step: TracedStep
    batches_per_step: tuple[int, ...]


class _Entry(NamedTuple):
    """A trace, and the batches it was made for."""

    batches: list[PyTree]
    active: tuple[Active, ...]
    trace: Trace


class StepTracer:
    """Traces one step, which takes a nest of iterators of this structure.

    Attributes:
        flat: The state; `None` before `find_state`.
    """

    def __init__(
        self,
        method: StepMethod,
        structure: Any,
        layouts: Sequence[BatchLayout],
        max_shapes: int = 1,
    ) -> None:
        self._method, self._structure, self._layouts = method, structure, layouts
        self._traces: dict[Any, _Entry] = {}
        self._shapes = BatchShapes(method, max_shapes)
        # The attributes of the owner that steps looked at; shared with the state.
        self._reads: set[str] = set()
        self._num_in_vain = 0
        # Once they are known: `(None,)` if they stay in Python.
        self._hooks: tuple[Hooks | None] | None = None
        self._is_asked = False
        self.flat: FlatState | None = None

    def find_state(self) -> bool:
        """Finds the state as it is now; returns whether programs are out of date."""
        flat = self.flat
        if flat is None:
            self.flat = FlatState(self._search(), self._method.strategy)
            return True
        if flat.state.is_current() and flat.fits():
            return False
        old, new = flat.state, self._search()
        # That of `old` as it was: its places may have another structure by now.
        if new.signature() != flat.signature:
            self.flat = FlatState(new, self._method.strategy)
            self._traces.clear()
            self._hooks = None
            return True
        flat.rebind(new)
        changes = new.changes_since(old)
        return bool(changes) and self._trace_again(changes)

    def _search(self) -> State:
        roots = [(self._method.owner, "")]
        return State(roots, self._reads, has_constants=True)

    def _trace_again(self, changes: Collection[str]) -> bool:
        """Traces again where plain values changed; returns whether that made a change.

        A step may look at any of them while it is traced, such as at a flag of a
        module. Whether it does shows in the program.
        """
        old, self._traces = self._traces, {}
        shown = ", ".join(sorted(changes)[:5])
        if self._has_other_hooks():
            logger.warning(_COMPILED_AGAIN, self._method.name, shown)
            return True
        for entry in old.values():
            try:
                again = self.trace(entry.batches, entry.active)
            except BaseException:
                # The next loop must not run what was traced before.
                self.flat, self._traces = None, {}
                raise
            if (
                again.batches_per_step != entry.trace.batches_per_step
                or not again.step.is_same(entry.trace.step)
            ):
                logger.warning(_COMPILED_AGAIN, self._method.name, shown)
                return True
        self._traces = old
        self._num_in_vain += 1
        if self._num_in_vain == _MANY_IN_VAIN:
            logger.warning(_TRACED_IN_VAIN, self._method.name, _MANY_IN_VAIN, shown)
        return False

    @property
    def has_python_hooks(self) -> bool:
        """Whether the hooks of the trainer are known to stay in Python."""
        return self._hooks == (None,)

    def hooks(self, *, is_asked: bool) -> Hooks | None:
        """Returns the hooks of the trainer, or `None` if they stay in Python.

        The user may say (`is_asked`) that they do not need it.
        """
        if self._hooks is None:
            self._is_asked = is_asked
            self._hooks = (self._trace_hooks(),)
        return self._hooks[0]

    def _trace_hooks(self) -> Hooks | None:
        owner, flat = self._method.owner, self.flat
        reason = None if self._is_asked else find_reason(owner)
        if reason is not None:
            logger.debug("%s.", reason)
        elif flat is not None:
            with recorded_reads(owner, flat.state.note_read):
                hooks = trace_hooks(owner, flat, is_asked=self._is_asked)
            flat.state.watch()
            if hooks is not None:
                return hooks
        # What Python does where a loop begins may put state where there was none.
        self.flat = None
        return None

    def _has_other_hooks(self) -> bool:
        """Traces the hooks again, if there are any; returns if that made a change."""
        old = self._hooks[0] if self._hooks is not None else None
        if old is None:
            return False
        self._hooks = None
        new = self._trace_hooks()
        self._hooks = (new,)
        return new is None or not new.is_same(old)

    def trace(self, batches: list[PyTree], active: tuple[Active, ...]) -> Trace:
        """Returns the traced step for batches of some shape."""
        key = key_of(batches, active)
        if key not in self._traces:
            self._shapes.check(batches)
            trace = self._trace_new(batches, active)
            self._traces[key] = _Entry(batches, active, trace)
        return self._traces[key].trace

    def _trace_new(self, batches: list[PyTree], active: tuple[Active, ...]) -> Trace:
        name, counts = self._method.name, [1] * len(batches)
        while True:
            try:
                step, taken = self._trace_with(batches, counts, active)
            except MoreBatches as more:
                if counts[more.index] < _MAX_BATCHES_PER_STEP:
                    # Doubled, since each try is a trace of the whole step.
                    doubled = 2 * counts[more.index]
                    counts[more.index] = min(doubled, _MAX_BATCHES_PER_STEP)
                    continue
                raise RetraceError(
                    f"`{name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                    "step, so it seems to loop over the whole data set. Take a fixed "
                    "number with `next(iterator)`; the library calls the step until "
                    "the data ends."
                ) from None
            check_taken(name, taken)
            if taken == counts:
                return Trace(step, tuple(counts))
            counts = taken

    def _trace_with(
        self, batches: list[PyTree], counts: list[int], active: tuple[Active, ...]
    ) -> tuple[TracedStep, list[int]]:
        """Traces the step with so many batches to take; returns how many it took."""
        method, flat = self._method, self.flat
        assert flat is not None
        taken: list[int] = []

        def fn(*arguments: Any) -> PyTree:
            iterators = [
                StepIterator(
                    i, [self._layouts[i].wrap(batch, active[i]) for batch in offered]
                )
                for i, offered in enumerate(arguments)
            ]
            result = method(self._structure.unflatten(iterators))
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        offered = zip(batches, counts, strict=True)
        was_current = flat.state.is_current()
        with recorded_reads(method.owner, flat.state.note_read):
            step = trace_step(
                fn,
                flat,
                tuple([batch] * count for batch, count in offered),
                user_fn=method.fn,
                owner=method.owner_name,
            )
        flat.state.watch()
        if was_current and not flat.state.is_current():
            # The step set something to what it is after each of its runs.
            flat.rebind(self._search())
        return step, taken
