"""Traces a user's step once for each shape of batch, and knows when that is stale.

A traced step depends on three things: the places its state is in, the shapes of its
batches, and the plain Python values (flags, rates, names) that were read on the way.
New places or values are noticed between loops; batches may only get smaller.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from armillary._logging import logger
from armillary._typing import PyTree
from armillary.distribute import Placement, Strategy, TracedStep, trace_step
from armillary.errors import RetraceError
from armillary.loops._step_iterator import MoreBatches, StepIterator
from armillary.state import State, describe

_MAX_BATCHES_PER_STEP = 1000


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
    active: tuple[int, ...]
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
        self._found: State | None = None
        self._constants: dict[str, Any] = {}
        self._unread: set[str] = set()
        self.state: State | None = None
        self.placement: Placement | None = None

    def find_state(self) -> bool:
        """Finds the state as it is now; returns whether steps must be traced again."""
        if self._found is not None and self._found.is_current():
            return False
        self._found = found = State([(self._owner, "")])
        # As sets: the order may change, as NNX sorts an optimizer's state at an update.
        if self.state is None or found.places != self.state.places:
            self.state = found
            self.placement = Placement(found, self._strategy)
            self._constants = found.constants
            self._traces.clear()
            return True
        return self._find_constants(found.constants)

    def _find_constants(self, now: dict[str, Any]) -> bool:
        """Traces again where plain values changed; returns whether that made a change.

        Most changes are of values that no step reads, such as a count of epochs: those
        give the same program, and are not looked at again.
        """
        changed = {
            path
            for path, value in now.items()
            if path not in self._unread and self._constants.get(path) != value
        }
        if not changed:
            return False
        before, self._constants = self._constants, now
        old, self._traces = self._traces, {}
        for entry in old.values():
            again = self.trace(entry.batches, entry.active, entry.layouts)
            if not _is_same(entry.trace, again):
                self._warn(changed, before, now)
                return True
        self._traces = old
        self._unread |= changed
        return False

    def _warn(
        self, changed: set[str], before: dict[str, Any], now: dict[str, Any]
    ) -> None:
        values = ", ".join(
            f"{path}: {before.get(path)!r} became {now[path]!r}"
            for path in sorted(changed)
        )
        logger.warning(
            "`%s` is compiled again, because plain values that it reads have changed "
            "(%s). Hold a value that changes often in an array, so that it is an input "
            "of the compiled step.",
            self._name,
            values,
        )

    def trace(
        self, batches: list[PyTree], active: tuple[int, ...], layouts: Sequence[Any]
    ) -> Trace:
        """Returns the traced step for batches of some shape.

        Args:
            batches: Shape and dtype of one batch of each dataset, in the layout's form.
            active: How many replicas hold data, for each dataset.
            layouts: The layout of each dataset.

        Raises:
            RetraceError: If batches have changed in more than their size, or the step
                takes no batch of a dataset, or nearly all of them.
        """
        key = batch_key(batches, active)
        if key not in self._traces:
            self._check_batches(batches)
            trace = self._trace_new(batches, active, layouts)
            self._traces[key] = _Entry(batches, active, list(layouts), trace)
        return self._traces[key].trace

    def _trace_new(
        self, batches: list[PyTree], active: tuple[int, ...], layouts: Sequence[Any]
    ) -> Trace:
        counts = [1] * len(batches)
        while True:
            try:
                step, taken = self._trace_with(batches, counts, active, layouts)
            except MoreBatches as more:
                counts[more.index] += 1
                if counts[more.index] <= _MAX_BATCHES_PER_STEP:
                    continue
                raise RetraceError(
                    f"`{self._name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                    "step, so it seems to loop over the whole data set. Take a fixed "
                    "number with `next(iterator)`; the library calls the step until "
                    "the data ends."
                ) from None
            if not all(taken):
                raise RetraceError(
                    f"`{self._name}` took no batch from dataset {taken.index(0)} of "
                    f"{len(taken)}, so its data would never end. Call `next(iterator)` "
                    "on each iterator, or leave the dataset out."
                )
            return Trace(step, tuple(counts))

    def _trace_with(
        self,
        batches: list[PyTree],
        counts: list[int],
        active: tuple[int, ...],
        layouts: Sequence[Any],
    ) -> tuple[TracedStep, list[int]]:
        """Traces the step with so many batches to take; returns how many it took."""
        assert self.state is not None and self.placement is not None
        iterators: list[StepIterator] = []

        def fn(*arguments: Any) -> PyTree:
            iterators[:] = [
                StepIterator(
                    i, [layouts[i].wrap(batch, active[i]) for batch in offered]
                )
                for i, offered in enumerate(arguments)
            ]
            return self._step_fn(self._nest.unflatten(iterators))

        step = trace_step(
            fn,
            self.state,
            self.placement.types(),
            tuple(
                [batch] * count for batch, count in zip(batches, counts, strict=True)
            ),
            user_fn=self._step_fn,
            owner=owner_of(self._name),
        )
        return step, [iterator.num_taken for iterator in iterators]

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


def batch_key(batches: Sequence[PyTree], active: tuple[int, ...]) -> Any:
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
    return (*leaf.shape[:axis], *leaf.shape[axis + 1 :], str(leaf.dtype))


def _is_same(old: Trace, new: Trace) -> bool:
    """Returns whether two traces are the same program."""
    a, b = old.step.program, new.step.program
    return (
        old.batches_per_step == new.batches_per_step
        and old.step.changed == new.step.changed
        and _print(a) == _print(b)
        and len(a.consts) == len(b.consts)
        and all(map(_is_equal, a.consts, b.consts))
    )


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or bool(np.array_equal(np.asarray(a), np.asarray(b)))


def _print(program: core.ClosedJaxpr) -> str:
    # Functions inside a program print with their address, which is new in each trace.
    return re.sub(r"0x[0-9a-f]+", "", str(program))
