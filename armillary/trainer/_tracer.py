"""Traces a user's step once for each shape of batch, and knows when that is stale.

A traced step depends on three things: the places its state is in, the shapes of its
batches, and the plain Python values (flags, rates, names) that were read on the way.
New places or values are noticed between loops; batches may only get smaller.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from armillary._logging import logger
from armillary.data._layout import Active
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._placement import Placement
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.errors import RetraceError
from armillary.state._lift import State
from armillary.state._slots import describe
from armillary.trainer._hooks import Hooks, find_reason, trace_hooks
from armillary.trainer._reads import recorded_reads
from armillary.trainer._step_iterator import MoreBatches, StepIterator, check_taken
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
    """A traced step.

    Attributes:
        step: The step.
        batches_per_step: How many batches of each dataset it takes.
    """

    step: TracedStep
    batches_per_step: tuple[int, ...]


class _Entry(NamedTuple):
    """A trace, and the batches it was made for."""

    batches: list[PyTree]
    active: tuple[Active, ...]
    layouts: list[Any]
    trace: Trace


class StepTracer:
    """Traces one method of one owner.

    Args:
        owner: The trainer or evaluator, from which state is reached.
        step_fn: Its step, a function of a nest of iterators.
        name: How messages call the step.
        nest: The structure of the nest.
        strategy: The strategy in effect while the step runs.
    """

    def __init__(
        self,
        owner: Any,
        step_fn: Callable[[Any], PyTree],
        name: str,
        nest: Any,
        strategy: Strategy,
    ) -> None:
        self._owner, self._step_fn, self._name = owner, step_fn, name
        self._nest, self._strategy = nest, strategy
        self._traces: dict[Any, _Entry] = {}
        self._first_batches: list[PyTree] | None = None
        # The attributes of the owner that steps looked at; shared with the state.
        self._reads: set[str] = set()
        self._num_in_vain = 0
        self._types: list[jax.ShapeDtypeStruct] = []
        self._signature: Any = None
        # Once they are known: `(None,)` if they stay in Python.
        self._hooks: tuple[Hooks | None] | None = None
        self._is_asked = False
        self.state: State | None = None
        self.placement: Placement | None = None

    def find_state(self) -> bool:
        """Finds the state as it is now; returns whether programs are out of date."""
        old = self.state
        if old is None or self.placement is None:
            self._adopt(State([(self._owner, "")], self._reads))
            return True
        if old.is_current() and self.placement.has_types(self._types):
            return False
        found = State([(self._owner, "")], self._reads)
        # That of `old` as it was: its places may have another structure by now.
        if found.signature() != self._signature:
            self._adopt(found)
            self._traces.clear()
            self._hooks = None
            return True
        self._go_on_with(found)
        changes = found.changes_since(old)
        return bool(changes) and self._trace_again(changes)

    def _adopt(self, state: State) -> None:
        self.state = state
        self.placement = Placement(state, self._strategy)
        self._types = self.placement.types()
        self._signature = state.signature()

    def _go_on_with(self, state: State) -> None:
        """Takes what a new search has found: the same slots, or others like them."""
        assert self.placement is not None
        self.state = state
        self.placement.rebind(state)

    def _trace_again(self, changes: Collection[str]) -> bool:
        """Traces again where plain values changed; returns whether that made a change.

        A step may look at any of them while it is traced, such as at a flag of a
        module. Whether it does shows in the program.
        """
        old, self._traces = self._traces, {}
        shown = ", ".join(sorted(changes)[:5])
        if self._has_other_hooks():
            logger.warning(_COMPILED_AGAIN, self._name, shown)
            return True
        for entry in old.values():
            try:
                again = self.trace(entry.batches, entry.active, entry.layouts)
            except BaseException:
                # The next loop must not run what was traced before.
                self.state, self._traces = None, {}
                raise
            if (
                again.batches_per_step != entry.trace.batches_per_step
                or not again.step.is_same(entry.trace.step)
            ):
                logger.warning(_COMPILED_AGAIN, self._name, shown)
                return True
        self._traces = old
        self._num_in_vain += 1
        if self._num_in_vain == _MANY_IN_VAIN:
            logger.warning(_TRACED_IN_VAIN, self._name, _MANY_IN_VAIN, shown)
        return False

    def hooks(self, *, is_asked: bool) -> Hooks | None:
        """Returns the hooks of the trainer, or `None` if they stay in Python.

        Args:
            is_asked: Whether the user says that they need no Python.

        Raises:
            StateStructureError: If they do after all.
        """
        if self._hooks is None:
            self._is_asked = is_asked
            if self.state is not None:
                self.find_state()
            self._hooks = (self._trace_hooks(),)
        return self._hooks[0]

    def _trace_hooks(self) -> Hooks | None:
        reason = None if self._is_asked else find_reason(self._owner)
        if reason is None:
            if self.state is None:
                self.find_state()
            assert self.state is not None
            with recorded_reads(self._owner, self.state.note_read):
                hooks = trace_hooks(
                    self._owner, self.state, self._types, is_asked=self._is_asked
                )
            self.state.watch()
            if hooks is not None:
                return hooks
        else:
            logger.debug("%s.", reason)
        # What Python does where a loop begins may change the state.
        self.state = None
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

    def trace(
        self, batches: list[PyTree], active: tuple[Active, ...], layouts: Sequence[Any]
    ) -> Trace:
        """Returns the traced step for batches of some shape.

        Args:
            batches: Shape and dtype of one batch of each dataset, in the layout's form.
            active: Which replicas hold data, for each dataset.
            layouts: The layout of each dataset.

        Raises:
            RetraceError: If batches have changed in more than their size, or the step
                takes no batch of a dataset, or nearly all of them.
        """
        key = _batch_key(batches, active)
        if key not in self._traces:
            self._check_batches(batches)
            trace = self._trace_new(batches, active, layouts)
            self._traces[key] = _Entry(batches, active, list(layouts), trace)
        return self._traces[key].trace

    def _trace_new(
        self, batches: list[PyTree], active: tuple[Active, ...], layouts: Sequence[Any]
    ) -> Trace:
        counts = [1] * len(batches)
        while True:
            try:
                step, taken = self._trace_with(batches, counts, active, layouts)
            except MoreBatches as more:
                if counts[more.index] < _MAX_BATCHES_PER_STEP:
                    # Doubled, since each try is a trace of the whole step.
                    doubled = 2 * counts[more.index]
                    counts[more.index] = min(doubled, _MAX_BATCHES_PER_STEP)
                    continue
                raise RetraceError(
                    f"`{self._name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                    "step, so it seems to loop over the whole data set. Take a fixed "
                    "number with `next(iterator)`; the library calls the step until "
                    "the data ends."
                ) from None
            check_taken(self._name, taken)
            if taken == counts:
                return Trace(step, tuple(counts))
            counts = taken

    def _trace_with(
        self,
        batches: list[PyTree],
        counts: list[int],
        active: tuple[Active, ...],
        layouts: Sequence[Any],
    ) -> tuple[TracedStep, list[int]]:
        """Traces the step with so many batches to take; returns how many it took."""
        assert self.state is not None and self.placement is not None
        taken: list[int] = []

        def fn(*arguments: Any) -> PyTree:
            iterators = [
                StepIterator(
                    i, [layouts[i].wrap(batch, active[i]) for batch in offered]
                )
                for i, offered in enumerate(arguments)
            ]
            result = self._step_fn(self._nest.unflatten(iterators))
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        was_current = self.state.is_current()
        with recorded_reads(self._owner, self.state.note_read):
            step = trace_step(
                fn,
                self.state,
                self._types,
                tuple(
                    [batch] * count
                    for batch, count in zip(batches, counts, strict=True)
                ),
                user_fn=self._step_fn,
                owner=owner_of(self._name),
            )
        self.state.watch()
        if was_current and not self.state.is_current():
            # The step set something to what it is after each of its runs.
            self._go_on_with(State(self.state.roots, self._reads))
        return step, taken

    def _check_batches(self, batches: list[PyTree]) -> None:
        """Checks that batches differ from the first ones in their size only.

        Raises:
            RetraceError: If anything else differs.
        """
        if self._first_batches is None:
            self._first_batches = batches
        axis = 1 if self._strategy.layout.stacked else 0
        changes = [
            change
            for first, batch in zip(self._first_batches, batches, strict=True)
            for change in _compare(first, batch, axis)
        ]
        if changes:
            shown = "\n".join(changes)
            raise RetraceError(
                f"Batches changed after `{self._name}` was compiled, and it would be "
                f"compiled again for each new shape:\n{shown}\n"
                "Only the number of examples may be smaller at the end of the data. "
                "Give all batches one shape and dtype, for example by padding "
                "sequences to a fixed length."
            )


def _batch_key(batches: Sequence[PyTree], active: tuple[Active, ...]) -> Any:
    """Returns a key that is equal for batches which one trace serves."""
    leaves, treedef = jax.tree.flatten(list(batches))
    return treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves), active


def owner_of(step_name: str) -> str:
    """Returns what messages call the object that has the step."""
    return "the evaluator" if step_name.startswith("eval") else "the trainer"


def _compare(first: PyTree, batch: PyTree, axis: int) -> list[str]:
    old, new = jax.tree.structure(first), jax.tree.structure(batch)
    if old != new:
        return [f"  structure {old} became {new}"]
    changes = []
    pairs = zip(
        jax.tree_util.tree_leaves_with_path(first), jax.tree.leaves(batch), strict=True
    )
    for (path, old_leaf), leaf in pairs:
        if _without(old_leaf, axis) != _without(leaf, axis):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            was, became = describe(old_leaf), describe(leaf)
            changes.append(f"  {name or 'the batch'}: {was} became {became}")
    return changes


def _without(leaf: Any, axis: int) -> tuple[Any, ...]:
    return (*leaf.shape[axis + 1 :], str(leaf.dtype))
