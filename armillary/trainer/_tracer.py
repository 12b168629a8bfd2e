"""Traces a user's step once for each shape of batch, and knows when that is stale.

A traced step depends on three things: the places its state is in, the shapes of its
batches, and the plain Python values (flags, rates, names) that were read on the way.
New places or values are noticed between loops; batches may get smaller, and have other
shapes if the options say how many.

The compiled programs of one step, for as long as they are good.

There is one for each kind of chunk. When the state has other places, plain values that
the step read have changed, or the hooks of the trainer are other ones, all are dropped.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from armillary._logging import logger
from armillary.data._layout import Active, BatchLayout
from armillary.data.feed._chunks import Chunk
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._hardly_meant import (
    MetricWarnings,
    tell_of_training,
)
from armillary.distribute.program._trace import (
    MoreBatches,
    StepIterator,
    TracedStep,
    check_taken,
    trace_step,
)
from armillary.errors import RetraceError
from armillary.state._lift import State
from armillary.trainer._guard import LoopGuard
from armillary.trainer._hooks import Hooks, find_reason, trace_hooks
from armillary.trainer._loop_data import LoopData
from armillary.trainer._options import LoopOptions
from armillary.trainer._program import Program
from armillary.trainer._step_checks import (
    BatchShapes,
    StepMethod,
    check_writes,
    key_of,
    recorded_reads,
)
from armillary.typing import PyTree
from armillary.xla._compile import has_slow_loop

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
        name = self._method.name
        try:
            step, taken = self._trace_with(batches, active)
        except MoreBatches:
            raise RetraceError(
                f"`{name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                "step, so it seems to loop over the whole data set. Take a fixed "
                "number with `next(iterator)`; the library calls the step until "
                "the data ends."
            ) from None
        check_taken(name, taken)
        return Trace(step, tuple(taken))

    def _trace_with(
        self, batches: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[TracedStep, list[int]]:
        """Traces the step with many batches to take; returns how many it took."""
        method, flat = self._method, self.flat
        assert flat is not None
        taken = [0] * len(batches)

        def fn(*arguments: Any) -> PyTree:
            iterators = [
                StepIterator(
                    i, (self._layouts[i].wrap(batch, active[i]) for batch in offered)
                )
                for i, offered in enumerate(arguments)
            ]
            result = method(self._structure.unflatten(iterators))
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        was_current = flat.state.is_current()
        with recorded_reads(method.owner, flat.state.note_read):
            step = trace_step(
                fn,
                flat,
                tuple([batch] * _MAX_BATCHES_PER_STEP for batch in batches),
                user_fn=method.fn,
                owner=method.owner_name,
                taken=taken,
            )
        flat.state.watch()
        if was_current and not flat.state.is_current():
            # The step set something to what it is after each of its runs.
            flat.rebind(self._search())
        return step, taken


class Programs:
    """Traces and compiles one step, which takes batches from `data`.

    Attributes:
        flat: The state on its devices; `None` before `find_state`.
        hooks: What of the trainer is part of the programs; see `find_hooks`.
    """

    def __init__(
        self,
        method: StepMethod,
        data: LoopData,
        options: LoopOptions,
        guard: LoopGuard,
        *,
        keep_results: bool,
    ) -> None:
        self._method, self._data = method, data
        self._options, self._guard = options, guard
        self._keep_results = keep_results
        layouts = [dataset.layout for dataset in data.datasets]
        self._tracer = StepTracer(method, data.structure, layouts, options.max_shapes)
        self._programs: dict[Any, Program] = {}
        self._warnings = MetricWarnings(
            method.name, method.strategy.num_replicas_in_sync
        )
        self.hooks: Hooks | None = None

    @property
    def flat(self) -> FlatState | None:
        return self._tracer.flat

    def find_state(self) -> FlatState:
        """Finds the state as it is now, and drops what is out of date."""
        self._refresh()
        flat = self._tracer.flat
        assert flat is not None
        return flat

    def _refresh(self) -> None:
        if self._tracer.find_state():
            self._programs.clear()

    def find_hooks(self) -> Hooks | None:
        """Finds the state, and the hooks of the trainer unless they stay in Python.

        They do if that is what the options say, or the code of the hooks, or if each
        step is a program of its own.
        """
        in_program = self._options.hooks_in_program
        if in_program is False:
            return None
        if not self._tracer.has_python_hooks:
            self._refresh()
        hooks = self._tracer.hooks(is_asked=in_program is True)
        if hooks is not self.hooks:
            self.hooks = hooks
            self._programs.clear()
        return hooks

    def count_batches(
        self, types: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[int, ...]:
        """Traces the step for its first batches; returns how many of each it takes."""
        return self._tracer.trace(types, active).batches_per_step

    def get(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk, compiled at the first one of its kind."""
        key = (chunk.signature, chunk.capacity)
        if key not in self._programs:
            self._programs[key] = self._make(chunk)
        return self._programs[key]

    def _make(self, chunk: Chunk) -> Program:
        name, peers = self._method.name, self._method.strategy.peers
        is_evaluation = name.startswith("eval")
        trace = self._tracer.trace(chunk.types, chunk.num_active)
        step, per_step = trace.step, self._data.batches_per_step
        if trace.batches_per_step != per_step:
            raise RetraceError(
                f"`{name}` took {list(per_step)} batches of its "
                f"datasets in one step, and now takes {list(trace.batches_per_step)}. "
                "Batches that were read ahead cannot be shared out anew: take the same "
                "number in every step, or make a new trainer."
            )
        if peers is not None:
            check_same_program(peers, name, step.program, self._method.fn)
        flat = self._tracer.flat
        assert flat is not None
        if not self._programs:
            check_writes(name, flat.state, step.changed)
            if not is_evaluation:
                tell_of_training(self._method.fn, name, step)
        replicas = self._method.strategy.num_replicas_in_sync
        is_uneven = any(active != replicas for active in chunk.num_active)
        self._warnings.look(flat.state, step, is_uneven=is_uneven and is_evaluation)
        is_slow = has_slow_loop(
            step.program, flat.platform, is_partitioned=flat.split is not None
        )
        if is_slow and self._options.compile_loop and not self._programs:
            logger.info(
                "`%s` has convolutions that XLA's CPU compiler runs slowly inside a "
                "loop on the device: its steps run one by one.",
                name,
            )
        return Program(
            step,
            per_step,
            [dataset.gather.on_device for dataset in self._data.datasets],
            chunk.capacity,
            flat,
            keep_results=self._keep_results,
            is_nested=not is_slow,
            guard=self._guard.for_step(flat.state, step.program.in_avals, step.changed),
            hooks=None if is_slow else self.hooks,
            compiler_options=self._options.compiler_options,
        )
