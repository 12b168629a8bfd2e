"""Traces a step for each shape of batch, and compiles a program for each kind of chunk.

`Programs` detects new slots and new plain values between loops. It drops outdated
programs, and marks others as doubtful until the next trace.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from armillary._jaxpr import read_settings
from armillary._logging import logger
from armillary.data._layout import Active
from armillary.data.feed._chunks import Chunk
from armillary.data.feed._gather import Gather
from armillary.distribute.program._batch_sums import warn_of_sums
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._programs import Programs
from armillary.distribute.program._step_iterator import (
    MoreBatches,
    StepIterator,
    check_taken,
)
from armillary.distribute.program._step_warnings import MetricWarnings, warn_of_draws
from armillary.distribute.program._trace import trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.errors import RetraceError
from armillary.goodput._stopwatch import compiling
from armillary.state._lift import State
from armillary.trainer._batch_shapes import Leaves, check_shapes
from armillary.trainer._hook_code import need_python
from armillary.trainer._hooks import Hooks, trace_hooks
from armillary.trainer._noticed_prints import noticing_prints
from armillary.trainer._program import Program
from armillary.trainer._recorded_reads import recorded_reads
from armillary.trainer._step_checks import (
    check_evaluation,
    check_precision,
    check_training,
    warn_of_rates,
)
from armillary.trainer._step_method import StepMethod
from armillary.trainer._work import Work, measure_work
from armillary.typing import PyTree
from armillary.xla._compile import has_slow_loop
from armillary.xla._precision import compute_in

_MAX_BATCHES_PER_STEP = 64


class _Trace(NamedTuple):
    """A traced step, and the number of batches that it takes from each dataset."""

    step: TracedStep
    taken: tuple[int, ...]


class StepPrograms(Programs[Program]):
    """The programs of one step, which takes a nest of iterators of this structure."""

    def __init__(
        self, method: StepMethod, gathers: Sequence[Gather], structure: Any
    ) -> None:
        super().__init__(method.strategy)
        self._method = method
        self._gathers = gathers
        self._structure = structure
        # By the shapes of batches.
        self._traces: dict[Any, _Trace] = {}
        self._settings = read_settings()
        # The first batches of each shape.
        self._shapes: list[Leaves] = []
        # The attributes of the owner that steps have read; shared with the state.
        self._reads: set[str] = set()
        # The step, and the hooks in its program; shared with the state.
        self._functions: list[Callable[..., Any]] = [method.fn]
        replicas = method.strategy.num_replicas_in_sync
        self._warnings = MetricWarnings(
            method.name, replicas, is_evaluation=method.is_evaluation
        )
        self._has_traced_hooks = False
        self._has_warned_of_results = False
        self._has_sought_sums = False
        self.hooks: Hooks | None = None  # of the trainer, if they are in the programs
        self.batches_per_step: tuple[int, ...] = ()
        self.loops_per_chunk = 1

    def find_state(self) -> FlatState:
        """Finds the current state, and drops outdated traces and programs."""
        settings = read_settings()
        if settings != self._settings:
            self.doubt("settings of JAX, such as a precision, have changed")
            self._settings = settings
        if self.hooks is not None and self._functions[1:] != self._find_hook_methods():
            self.doubt("a hook was replaced")
        flat = self.find_current()
        if flat is not None:
            return flat
        state = State([(self._method.owner, "")], self._reads, self._functions)
        return self.adopt(state)

    def adopt(self, state: State) -> FlatState:
        before = self.flat
        flat = super().adopt(state)
        if flat is not before:
            self._traces.clear()
            if before is not None:
                self._has_traced_hooks = False
                self.hooks = None
        return flat

    def doubt(self, reason: str) -> None:
        super().doubt(reason)
        self._traces.clear()
        # Hooks in the program are traced again, and hooks in Python stay there.
        if self.hooks is not None:
            self._has_traced_hooks = False

    def find_hooks(self) -> Hooks | None:
        """Finds the state, and the hooks of the trainer unless they stay in Python."""
        if self._method.options.hooks_in_program is False:
            return None
        if self._has_traced_hooks and self.hooks is None:
            return None
        self.find_state()
        if not self._has_traced_hooks:
            self.hooks = self._trace_hooks()
            self._has_traced_hooks = True
        return self.hooks

    def _find_hook_methods(self) -> list[Callable[..., Any]]:
        owner = self._method.owner
        return [owner.train_loop_begin, owner.train_loop_end]

    @compiling()
    def _trace_hooks(self) -> Hooks | None:
        """Traces the hooks for the programs; `None` if they stay in Python."""
        owner = self._method.owner
        flat = self.flat
        assert flat is not None
        is_asked = self._method.options.hooks_in_program is True
        hooks = None
        if is_asked or not need_python(owner):
            with recorded_reads(owner, flat.state.note_read):
                hooks = trace_hooks(owner, flat, is_asked=is_asked)

        if hooks is not None:
            self._functions[1:] = self._find_hook_methods()
        flat.state.watch()
        if hooks is None:
            # In Python, the hooks may create new state, so search for the state again.
            self.flat = None
        return hooks

    def count_batches(
        self, types: list[PyTree], active: tuple[Active, ...]
    ) -> tuple[int, ...]:
        """Traces the step for its first batches.

        Returns:
            The number of batches that a step takes from each dataset.
        """
        self.batches_per_step = self._find_trace(types, active).taken
        return self.batches_per_step

    def trace(self, types: list[PyTree], active: tuple[Active, ...]) -> None:
        """Traces the step for batches that come later; the trace is kept."""
        self._find_trace(types, active)

    def _find_trace(self, batches: list[PyTree], active: tuple[Active, ...]) -> _Trace:
        """Returns the trace for batches of these types, made once."""
        leaves, structure = jax.tree.flatten(batches)
        key = (structure, *leaves, active)
        if key not in self._traces:
            check_shapes(self._method, self._shapes, batches)
            self._traces[key] = self._trace(batches, active)
        return self._traces[key]

    @compiling()
    def _trace(self, batches: list[PyTree], active: tuple[Active, ...]) -> _Trace:
        """Traces the step for batches of these types, and checks the traced step."""
        method = self._method
        taken = [0] * len(batches)
        returned: list[Any] = []

        def fn(*arguments: Any) -> PyTree:
            """Calls the step with iterators over the batches that it may take."""
            iterators: list[StepIterator] = []
            datasets = zip(self._gathers, arguments, active, strict=True)
            for index, (gather, offered, replicas) in enumerate(datasets):
                # Each batch when it is taken, because most of them never are.
                wrapped = map(gather.layout.wrap, offered, itertools.repeat(replicas))
                iterators.append(StepIterator(index, wrapped))

            result = method(self._structure.unflatten(iterators))
            returned[:] = jax.tree.leaves(result)
            taken[:] = [iterator.num_taken for iterator in iterators]
            return result

        most_batches = tuple([batch] * _MAX_BATCHES_PER_STEP for batch in batches)
        try:
            with (
                self.tracing() as flat,
                recorded_reads(method.owner, flat.state.note_read),
                noticing_prints(method.name),
            ):
                step = trace_step(
                    fn,
                    flat,
                    most_batches,
                    user_fn=method.fn,
                    owner=method.owner_name,
                    taken=taken,
                )
        except MoreBatches:
            raise RetraceError(
                f"`{method.name}` took over {_MAX_BATCHES_PER_STEP} batches in one "
                "step, so it seems to loop over the whole dataset. Take a fixed "
                "number with `next(iterator)`, such as `x, y = next(iterator)`: the "
                "library calls the step again until the data ends."
            ) from None

        if method.options.compute_dtype is not None:
            step = self._with_precision(step, flat)
        warn_of_rates(flat.state)
        drops_results = bool(returned) and not method.keep_results
        if drops_results:
            self._warn_of_results()
        check_taken(method.name, taken)
        return _Trace(step, tuple(taken))

    def _with_precision(self, step: TracedStep, flat: FlatState) -> TracedStep:
        """Returns a step whose products compute in the dtype of the options."""
        name = self._method.name
        options = self._method.options
        assert options.compute_dtype is not None
        check_precision(name, flat.state, options)
        edited = compute_in(step.program, options.compute_dtype, flat.platform)
        if edited.num_products == 0:
            raise ValueError(
                f"`precision` is {options.precision!r}, but `{name}` has no product of "
                "float32 matrices, so it would change nothing. Leave `precision` out, "
                "or the `dtype` and the `precision` of the layers."
            )
        return step.with_program(edited.program)

    def _warn_of_results(self) -> None:
        """Warns that nothing receives the result of a step, once for all traces."""
        if self._has_warned_of_results:
            return
        self._has_warned_of_results = True
        end = "`train_loop_end`"
        if self._method.is_evaluation:
            end = "`eval_end`; or write `eval_reduce(self, state, step_outputs)`"
        logger.warning(
            "The result of `%s` is dropped. Update a metric in this method, and return "
            "the result of the metric from %s.",
            self._method.name,
            end,
        )

    def get(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk; the first chunk of a kind compiles it."""
        key = (chunk.signature, chunk.capacity)
        if key not in self.current:
            self.current[key] = self._make(chunk, self.doubted.pop(key, None))
        return self.current[key]

    @compiling()
    def _make(self, chunk: Chunk, old: Program | None) -> Program:
        """Returns the program for a chunk; the old program if it is still correct."""
        method = self._method
        flat = self.flat
        assert flat is not None
        step, taken = self._find_trace(chunk.types, chunk.active)

        if taken != self.batches_per_step:
            raise RetraceError(
                f"`{method.name}` took {list(self.batches_per_step)} batches of its "
                f"datasets in one step, and now takes {list(taken)}. Batches that were "
                "read ahead cannot be divided again: take the same number in every "
                "step, or make a new trainer."
            )
        if old is not None:
            if old.is_of(step, self.hooks):
                return old
            # The change reached this program, so the others are not compared with it.
            self.doubted.clear()
            logger.warning(
                "`%s` is compiled again, because %s.", method.name, self.reason
            )

        peers = method.strategy.peers
        if not peers.is_alone:
            check_same_program(peers, method.name, step.program, method.fn)
        is_slow = has_slow_loop(
            step.program, flat.platform, is_partitioned=flat.split is not None
        )
        if not self.current:
            self._check_first(step, flat, is_slow=is_slow)
        self._warn_of_sums(step, flat)
        self._warnings.check(flat.state, step, chunk.active)

        return Program(
            step,
            self.batches_per_step,
            self._gathers,
            chunk.capacity,
            flat,
            method,
            None if is_slow else self.hooks,
            num_loops=self.loops_per_chunk,
            is_nested=not is_slow,
            work=self._measure_work(step, chunk),
        )

    def _warn_of_sums(self, step: TracedStep, flat: FlatState) -> None:
        """Warns of sums over a batch, in the first program only."""
        if self._has_sought_sums:
            return
        self._has_sought_sums = True
        axis = 1 if self._method.strategy.layout.stacked else 0
        num_slots = len(flat.state.paths)
        warn_of_sums(self._method.name, step.program, num_slots, axis)

    def _measure_work(self, step: TracedStep, chunk: Chunk) -> Work | None:
        method = self._method
        if method.is_evaluation:
            return None
        return measure_work(step.program, chunk, self.batches_per_step, method.strategy)

    def _check_first(self, step: TracedStep, flat: FlatState, *, is_slow: bool) -> None:
        """Checks the first program: the later ones do the same to the same state."""
        name = self._method.name
        if self._method.is_evaluation:
            check_evaluation(name, flat.state, step.changed)
        else:
            check_training(name, flat.state, step.changed)
            warn_of_draws(name, step)
        if is_slow and self._method.options.compile_loop:
            logger.info(
                "`%s` has convolutions that XLA's CPU compiler would run slowly "
                "inside a loop on the device, so its steps run one by one.",
                name,
            )
