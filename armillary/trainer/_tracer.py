"""Traces a step for each shape of batch, and compiles a program for each kind of chunk.

A traced step depends on three things: the places its state is in, the shapes of its
batches, and the plain Python values (flags, rates, names) that were read on the way.
New places or values are noticed between loops, and what is out of date is dropped.

`run_eagerly` runs the same steps without a compiler, for finding a mistake: on one
device line by line, where a debugger stops and `print` shows values.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from armillary._logging import logger
from armillary.data._layout import Active
from armillary.data.feed._chunks import Chunk
from armillary.data.feed._feed import Feed
from armillary.data.feed._gather import Gather
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._notes import MetricWarnings, warn_of_draws
from armillary.distribute.program._trace import (
    MoreBatches,
    StepIterator,
    TracedStep,
    check_taken,
    explained,
    trace_step,
)
from armillary.distribute.replica._context import lifted
from armillary.errors import RetraceError
from armillary.state._lift import State, as_array
from armillary.trainer._guard import LoopGuard
from armillary.trainer._hooks import Hooks, need_python, trace_hooks
from armillary.trainer._program import Program
from armillary.trainer._runner import StepMethod, recorded_reads
from armillary.trainer._step_checks import (
    check_evaluation,
    check_shapes,
    check_training,
)
from armillary.typing import PyTree
from armillary.xla._compile import has_slow_loop

_MAX_BATCHES_PER_STEP = 64


class Trace(NamedTuple):
    """A traced step, the batches it is for, and how many of each dataset it takes."""

    batches: list[PyTree]
    active: tuple[Active, ...]
    step: TracedStep
    batches_per_step: tuple[int, ...]

    def is_same(self, other: "Trace") -> bool:
        """Returns whether two traces are the same program."""
        is_same_count = self.batches_per_step == other.batches_per_step
        return is_same_count and self.step.is_same(other.step)


class StepPrograms:
    """The programs of one step, which takes a nest of iterators of this structure.

    `gathers` are what makes the batches of each.

    Attributes:
        flat: The state on its devices; `None` before `find_state`.
        hooks: What of the trainer is part of the programs, after `find_hooks`.
        batches_per_step: How many batches of each dataset the first step took.
    """

    def __init__(
        self,
        method: StepMethod,
        gathers: Sequence[Gather],
        structure: Any,
        guard: LoopGuard,
    ) -> None:
        self._method, self._gathers, self._structure = method, gathers, structure
        self._guard = guard
        self._traces: dict[Any, Trace] = {}
        self._programs: dict[Any, Program] = {}
        # The first batches of each shape.
        self._shapes: list[Sequence[PyTree]] = []
        # The attributes of the owner that steps looked at; shared with the state.
        self._reads: set[str] = set()
        replicas = method.strategy.num_replicas_in_sync
        self._warnings = MetricWarnings(method.name, replicas)
        self._has_traced_hooks = False
        self.hooks: Hooks | None = None
        self.flat: FlatState | None = None
        self.batches_per_step: tuple[int, ...] = ()

    def find_state(self) -> FlatState:
        """Finds the state as it is now, and drops what is out of date."""
        flat = self.flat
        if flat is not None and flat.state.is_current() and flat.fits():
            return flat
        state = self._search()
        # That of `flat` as it was: its places may have another structure by now.
        if flat is not None and state.signature() == flat.signature:
            changes = state.changes_since(flat.state)
            flat.rebind(state)
            if changes:
                self._trace_again(changes)
        else:
            self._traces.clear()
            self._programs.clear()
            if flat is not None:
                self._has_traced_hooks, self.hooks = False, None
            self.flat = FlatState(state, self._method.strategy)
        return self.flat or self.find_state()

    def _search(self) -> State:
        roots = [(self._method.owner, "")]
        return State(roots, self._reads)

    def _trace_again(self, changes: Collection[str]) -> None:
        """Traces again where plain values changed, and drops programs if it must.

        A step may look at any of them while it is traced, such as at a flag of a
        module. Whether it does shows in the program.
        """
        shown = ", ".join(sorted(changes)[:5])
        old, self._traces = self._traces, {}
        try:
            is_same = self._has_same_hooks() and all(
                self.trace(each.batches, each.active).is_same(each)
                for each in old.values()
            )
        except BaseException:
            # The next loop must not run what was traced before.
            self.flat, self._traces, self._has_traced_hooks = None, {}, False
            raise
        if is_same:
            self._traces = old
            logger.debug("%s changed, but no program.", shown)
            return
        self._programs.clear()
        logger.warning(
            "`%s` is compiled again, because it read plain values that have changed "
            "(%s). Hold a value that changes often in an array, so that it is an input "
            "of the compiled step.",
            self._method.name,
            shown,
        )

    def _has_same_hooks(self) -> bool:
        old, self.hooks = self.hooks, None
        if old is not None:
            self.hooks = self._trace_hooks()
        return old is None or (self.hooks is not None and self.hooks.is_same(old))

    def find_hooks(self) -> Hooks | None:
        """Finds the state, and the hooks of the trainer unless they stay in Python."""
        is_known = self._has_traced_hooks and self.hooks is None
        if self._method.options.hooks_in_program is False or is_known:
            return None
        self.find_state()
        if not self._has_traced_hooks:
            self._has_traced_hooks, self.hooks = True, self._trace_hooks()
            self._programs.clear()
        return self.hooks

    def _trace_hooks(self) -> Hooks | None:
        owner, flat = self._method.owner, self.flat
        assert flat is not None
        is_asked = self._method.options.hooks_in_program is True
        hooks = None
        if is_asked or not need_python(owner):
            with recorded_reads(owner, flat.state.note_read):
                hooks = trace_hooks(owner, flat, is_asked=is_asked)
        flat.state.watch()
        if hooks is None:
            # What Python does where a loop begins may put state where there was none.
            self.flat = None
        return hooks

    def count_batches(
        self, types: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[int, ...]:
        """Traces the step for its first batches; returns how many of each it takes."""
        self.batches_per_step = self.trace(types, active).batches_per_step
        return self.batches_per_step

    def trace(self, batches: list[PyTree], active: tuple[Active, ...]) -> Trace:
        """Returns the traced step for batches of some shape."""
        leaves, structure = jax.tree.flatten(batches)
        key = (structure, *leaves, active)
        if key not in self._traces:
            check_shapes(self._method, self._shapes, batches)
            self._traces[key] = self._trace(batches, active)
        return self._traces[key]

    def _trace(self, batches: list[PyTree], active: tuple[Active, ...]) -> Trace:
        method, flat = self._method, self.flat
        assert flat is not None
        taken = [0] * len(batches)

        def fn(*arguments: Any) -> PyTree:
            triples = zip(self._gathers, arguments, active, strict=True)
            iterators = [
                StepIterator(
                    i, map(gather.layout.wrap, offered, [count] * len(offered))
                )
                for i, (gather, offered, count) in enumerate(triples)
            ]
            result = method(self._structure.unflatten(iterators))
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        was_current = flat.state.is_current()
        try:
            with recorded_reads(method.owner, flat.state.note_read):
                step = trace_step(
                    fn,
                    flat,
                    tuple([batch] * _MAX_BATCHES_PER_STEP for batch in batches),
                    user_fn=method.fn,
                    owner=method.owner_name,
                    taken=taken,
                )
        except MoreBatches:
            raise RetraceError(
                f"`{method.name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                "step, so it seems to loop over the whole data set. Take a fixed "
                "number with `next(iterator)`; the library calls the step until the "
                "data ends."
            ) from None
        flat.state.watch()
        if was_current and not flat.state.is_current():
            # The step set something to what it is after each of its runs.
            flat.rebind(self._search())
        check_taken(method.name, taken)
        return Trace(batches, active, step, tuple(taken))

    def get(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk, compiled at the first one of its kind."""
        key = (chunk.signature, chunk.capacity)
        if key not in self._programs:
            self._programs[key] = self._make(chunk)
        return self._programs[key]

    def _make(self, chunk: Chunk) -> Program:
        method, flat = self._method, self.flat
        assert flat is not None
        step, taken = self.trace(chunk.types, chunk.num_active)[2:]
        if taken != self.batches_per_step:
            raise RetraceError(
                f"`{method.name}` took {list(self.batches_per_step)} batches of its "
                f"datasets in one step, and now takes {list(taken)}. Batches that were "
                "read ahead cannot be shared out anew: take the same number in every "
                "step, or make a new trainer."
            )
        if (peers := method.strategy.peers) is not None:
            check_same_program(peers, method.name, step.program, method.fn)
        is_slow = has_slow_loop(
            step.program, flat.platform, is_partitioned=flat.split is not None
        )
        if not self._programs:
            self._look_at_first(step, flat, is_slow)
        replicas = method.strategy.num_replicas_in_sync
        is_uneven = any(active != replicas for active in chunk.num_active)
        is_uneven &= method.is_evaluation
        self._warnings.look(flat.state, step, is_uneven=is_uneven)
        return Program(
            step,
            self.batches_per_step,
            self._gathers,
            chunk.capacity,
            flat,
            method,
            self._guard.for_step(flat.state, step.program.in_avals, step.changed),
            None if is_slow else self.hooks,
            is_nested=not is_slow,
        )

    def _look_at_first(self, step: TracedStep, flat: FlatState, is_slow: bool) -> None:
        """Says what is to be said of a step once."""
        method = self._method
        if method.is_evaluation:
            check_evaluation(method.name, flat.state, step.changed)
        else:
            check_training(method.name, flat.state, step.changed)
            warn_of_draws(method.name, step)
        if is_slow and method.options.compile_loop:
            logger.info(
                "`%s` has convolutions that XLA's CPU compiler runs slowly inside a "
                "loop on the device: its steps run one by one.",
                method.name,
            )


def run_eagerly(
    method: StepMethod, feed: Feed[Any], structure: Any, guard: LoopGuard
) -> Iterator[tuple[PyTree, bool]]:
    """Yields what each step returned, and whether it ended its batch, until data ends.

    What `run` of several replicas is given is traced and proved as in a compiled step.
    It also ends when `guard` finds a step that ends training. A step for which the data
    ends in the middle is not counted, but what it did before stays done.
    """
    while all(reader.peek() is not None for reader in feed.readers):
        if guard.health is not None and guard.health.is_halted:
            return
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        before = flat.join(every, *flat.take(every))
        state.write(before)
        taken: list[list[Any]] = [[] for _ in feed.readers]
        pairs = zip(feed.readers, taken, strict=True)
        iterators = [StepIterator(i, _place(*pair)) for i, pair in enumerate(pairs)]
        try:
            with (
                lifted(state, method.strategy),
                explained(method.fn, state, method.owner_name),
            ):
                result = method(jax.tree.unflatten(structure, iterators))
        except MoreBatches:
            return
        check_taken(method.name, list(map(len, taken)))
        _undo_if_bad(guard, state, before)
        FlatState(state, method.strategy).settle(())
        feed.commit_taken()
        guard.add([feed.positions])
        yield result, all(batches[-1].is_last for batches in taken)


def _place(reader: Any, taken: list[Any]) -> Iterator[PyTree]:
    """Yields the batches of a reader on their devices, and notes which were taken."""
    for batch in reader:
        taken.append(batch)
        gather = reader.gather
        yield gather.layout.wrap(gather.place(batch), batch.num_active)


def _undo_if_bad(guard: LoopGuard, state: State, before: list[jax.Array]) -> None:
    after = [as_array(leaf) for leaf in state.read()]
    changed = [i for i, old in enumerate(before) if after[i] is not old]
    step_guard = guard.for_step(state, after, changed)
    if step_guard is None or guard.health is None:
        return
    old, new = [before[i] for i in changed], [after[i] for i in changed]
    kept, guard.health = step_guard.look_closely(old, new, guard.health)
    for i, array in zip(changed, kept, strict=True):
        after[i] = array
    state.write(after, set(changed))
