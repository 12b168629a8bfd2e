"""Runs a user's step many times, over chunks of batches.

`Loop` is the engine of `StandardTrainer` and `StandardEvaluator`. It finds the state
the owner reaches, traces the step once per shape of batch, keeps one compiled program
for each, and moves through the data: read a chunk, run the steps of it that the loop
asks for, mark them as used.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from armillary._checks import check_instance, check_positive_int
from armillary._logging import logger
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import BatchLayout
from armillary.data.feed._chunk_builder import Chunk, ChunkBuilder
from armillary.data.feed._feed import Feed
from armillary.data.feed._position import Position
from armillary.data.feed._split import HostBatch
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._placement import Placement
from armillary.distribute.program._same_program import check_same_program
from armillary.distribute.program._signals import uninterrupted
from armillary.errors import RetraceError
from armillary.state._lift import State
from armillary.trainer._data_wait import waiting_for_data
from armillary.trainer._eager import run_eagerly
from armillary.trainer._globals import Globals
from armillary.trainer._guard import LoopCheck, LoopGuard
from armillary.trainer._hooks import BEGIN, END, Hooks, LoopOutputs
from armillary.trainer._origin import find_origin
from armillary.trainer._program import Loops, Program
from armillary.trainer._step_writes import check_writes
from armillary.trainer._tracer import StepTracer, owner_of
from armillary.typing import PyTree
from armillary.xla._steps import has_slow_loop

# Programs shorter than this cost more to start than to run, where steps are small.
_FEW_STEPS = 20
# More steps than this gain nothing.
_MANY_STEPS = 100


@dataclass(frozen=True, kw_only=True)
class LoopOptions:
    """What trainers and evaluators have in common: see `StandardTrainerOptions`.

    Raises:
        ValueError: If a number is below 1.
    """

    compile_loop: bool = True
    compile_step: bool = True
    steps_per_chunk: int | None = None
    max_chunk_bytes: int = 256 * 2**20
    compiler_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.steps_per_chunk is not None:
            check_positive_int("steps_per_chunk", self.steps_per_chunk)
        check_positive_int("max_chunk_bytes", self.max_chunk_bytes)
        if self.compiler_options is not None:
            check_instance(
                "compiler_options",
                self.compiler_options,
                Mapping,
                'Use a dictionary, such as `{"xla_cpu_enable_fast_math": True}`.',
            )


class Loop:
    """Runs one method of one owner over one nest of datasets.

    Args:
        owner: The trainer or evaluator, from which state is reached.
        step_fn: Its step, a function of a nest of iterators.
        name: How messages call the step.
        datasets: A nest (list, dict, ...) of datasets, or one.
        strategy: The strategy in effect while the step runs.
        options: How the loop runs.
        exact: Whether every example is used, in smaller steps where needed.
        keep_results: Whether what steps return is needed.
        on_non_finite: As in `StandardTrainerOptions`.
        check_replicas_every: As in `StandardTrainerOptions`.
        compile_hooks: As in `StandardTrainerOptions`.

    Attributes:
        is_cut_off: Whether the last `iterate` ended before it was done.
        num_iterated: How many steps it ran.
    """

    def __init__(
        self,
        owner: Any,
        step_fn: Callable[[Any], PyTree],
        name: str,
        datasets: PyTree,
        strategy: Strategy,
        options: LoopOptions,
        *,
        exact: bool,
        keep_results: bool,
        on_non_finite: str | None = None,
        check_replicas_every: int | None = None,
        compile_hooks: bool | None = False,
    ) -> None:
        self._owner, self._step_fn, self._name = owner, step_fn, name
        self._strategy, self._options = strategy, options
        self._exact, self._keep_results = exact, keep_results
        self._datasets = datasets
        datasets, self._nest = _flatten(datasets)
        self._sources = [_distribute(dataset, strategy) for dataset in datasets]
        self._feed = self._open_feed()
        self._tracer = StepTracer(owner, step_fn, name, self._nest, strategy)
        # What looks at each step may end a loop at any of them.
        is_watched = on_non_finite is not None or check_replicas_every is not None
        is_compiled = options.compile_loop and options.compile_step
        self._may_compile_hooks = (
            compile_hooks is not False and is_compiled and not is_watched
        )
        self._has_pure_hooks = compile_hooks is True
        self._globals = Globals(step_fn)
        self._hooks: Hooks | None = None
        self._programs: dict[Any, Program] = {}
        self._batches_per_step: tuple[int, ...] = ()
        self.is_cut_off, self.num_iterated = False, 0
        self._steps_per_chunk = options.steps_per_chunk
        self._guard = LoopGuard(name, strategy, on_non_finite, check_replicas_every)

    @property
    def datasets(self) -> list[DistributedDataset]:
        """The datasets, without the structure of their nest."""
        return list(self._sources)

    def serves(
        self,
        datasets: PyTree,
        strategy: Strategy,
        options: LoopOptions,
        keep_results: bool,
    ) -> bool:
        """Returns whether this loop was made for these arguments."""
        return (
            not self._feed.is_closed
            and datasets is self._datasets
            and strategy is self._strategy
            and options is self._options
            and keep_results == self._keep_results
        )

    def has_data(self) -> bool:
        """Returns whether another step can run; waits for the data if it must."""
        if not self._feed.is_started:
            return None not in self._peek()
        return self._next_chunk() is not None

    def reopen(self) -> None:
        """Begins a new pass over the datasets, with the same compiled programs."""
        self.close()
        self._feed = self._open_feed()

    def _open_feed(self) -> Feed[Chunk]:
        exact = self._exact
        return Feed(self._sources, exact=exact, begins_anew=exact, name=self._name)

    def close(self) -> None:
        """Lets go of the data."""
        self._feed.close()

    def prepare(self, num_steps: int) -> None:
        """Decides, once, how many steps a chunk has: other sizes are other programs.

        As many as a loop that nothing shortens, or as several such loops.
        """
        if self._steps_per_chunk is None:
            several = max(_FEW_STEPS // num_steps, 1) * num_steps
            self._steps_per_chunk = min(several, _MANY_STEPS)

    def finds_hooks(self) -> bool:
        """Finds the state, and returns whether `run_loops` can run the owner's hooks.

        It cannot if that is what the options say, or the code of the hooks, or if each
        step is a program of its own.
        """
        if not self._may_compile_hooks:
            return False
        if self._hooks is not None:
            self._refresh()
        hooks = self._tracer.hooks(is_asked=self._has_pure_hooks)
        if hooks is not self._hooks:
            self._hooks = hooks
            self._programs.clear()
            if hooks is not None:
                own = [getattr(self._owner, name) for name in (BEGIN, END)]
                self._globals.watch(*own)
        if hooks is None:
            return False
        chunk = self._next_chunk()
        return chunk is not None and self._program(chunk).hooks is not None

    def run_loops(self, num_steps: int, num_loops: int) -> tuple[int, LoopOutputs]:
        """Runs loops with the hooks of the owner, after `finds_hooks` was true.

        Those that fit into what is left of a chunk are one program. One that does not
        runs alone.

        Args:
            num_steps: Steps of each loop.
            num_loops: Most loops to run.

        Returns:
            For how many steps there was data, and what the loops put out.
        """
        hooks, placement = self._hooks, self._tracer.placement
        assert hooks is not None and placement is not None
        outputs = LoopOutputs(hooks)
        count = num_done = 0
        last: Chunk | None = None
        with self._released(placement):
            while not outputs.num_loops:
                chunk = self._next_chunk()
                if chunk is None:
                    assert last is not None  # The data ends within the loop.
                    loops = Loops(num_steps, num_done, is_end=True)
                    outputs.add(self._start(placement, last, 0, loops), 1)
                    break
                last = chunk
                most = min(num_loops, self._program(chunk).most_loops)
                size = chunk.num_steps - self._feed.offset
                if num_done + size >= num_steps:
                    size -= (num_done + size) % num_steps
                size = min(size, most * num_steps - num_done)
                loops = Loops(num_steps, num_done, is_end=False)
                arrays = self._start(placement, chunk, size, loops)
                outputs.add(arrays, (num_done + size) // num_steps)
                count, num_done = count + size, (num_done + size) % num_steps
        return count, outputs

    def run(self, num_steps: int) -> int:
        """Runs up to `num_steps` steps; returns how many there was data for."""
        self.prepare(num_steps)
        count = 0
        try:
            # Not `sum`: an interrupted generator expression would live on in the
            # traceback, and keep `_run` from giving the state back.
            for num_done, _ in self._run(num_steps):
                count += num_done
        except BaseException as error:
            self.fail(error)
            raise
        self._guard.finish(count, self._read_state)
        return count

    def fail(self, error: BaseException) -> None:
        """Ends a loop with an error, before or after its `check`."""
        self._guard.fail(error, self._rewind)

    def check(self) -> LoopCheck | None:
        """Returns what is to be resolved of the last `run`, if it was guarded."""
        return self._guard.check(self._rewind, self._find_origin)

    def iterate(self, num_steps: int) -> Iterator[PyTree]:
        """Yields what each step returned; -1 runs until the data ends.

        The first pieces of a batch that runs as several smaller steps do not count.
        """
        self.prepare(_FEW_STEPS if num_steps == -1 else num_steps)
        self.is_cut_off, self.num_iterated = True, 0
        for num_done, results in self._run(num_steps):
            self.num_iterated += num_done
            yield from results
        self.is_cut_off = False

    def _run(self, num_steps: int) -> Iterator[tuple[int, list[PyTree]]]:
        """Yields how many steps ran, and what they returned, until enough did."""
        if not self._options.compile_step:
            yield from self._run_eagerly(num_steps)
            return
        placement, state = self._find_state()
        self._guard.begin(state.paths, self._feed.positions, num_steps)
        with self._released(placement):
            yield from self._run_chunks(num_steps, placement)

    def _find_state(self) -> tuple[Placement, State]:
        """Finds the state as it is now."""
        self._refresh()
        placement, state = self._tracer.placement, self._tracer.state
        assert placement is not None and state is not None
        return placement, state

    def _refresh(self) -> None:
        """Drops traces and programs that are out of date."""
        self._forget_if_changed()
        if self._tracer.find_state():
            self._programs.clear()

    @contextlib.contextmanager
    def _released(self, placement: Placement) -> Iterator[None]:
        """Leaves the slots with their arrays, whatever happens."""
        try:
            yield
        finally:
            if placement.is_held:
                with uninterrupted():
                    placement.release()

    def _forget_if_changed(self) -> None:
        """Traces anew if global values of the step's code have changed."""
        changes = self._globals.changes()
        if not changes:
            return
        logger.warning(
            "`%s` is compiled again, because global values that its code names have "
            "changed (%s). Hold a value that changes often in an array of %s.",
            self._name,
            "; ".join(changes),
            owner_of(self._name),
        )
        self._tracer = StepTracer(
            self._owner, self._step_fn, self._name, self._nest, self._strategy
        )

    def _run_chunks(
        self, num_steps: int, placement: Placement
    ) -> Iterator[tuple[int, list[PyTree]]]:
        remaining = num_steps
        while remaining and (chunk := self._next_chunk()) is not None:
            program = self._program(chunk)
            most = program.most_steps if self._options.compile_loop else 1
            start = self._feed.offset
            count, full = _count(chunk.ends[start:], most, remaining)
            first = start if program.is_nested else 0
            arrays = self._start(placement, chunk, count, is_last=full == remaining)
            remaining -= full if remaining > 0 else 0
            if not self._keep_results:
                yield full, []
                continue
            # Whoever gets the results may look at the state as well.
            placement.release()
            indices = range(first, first + count)
            yield full, [program.results(arrays, index) for index in indices]

    def _start(
        self,
        placement: Placement,
        chunk: Chunk,
        count: int,
        loops: Loops | None = None,
        *,
        is_last: bool = True,
    ) -> list[jax.Array]:
        """Starts a program that runs steps of a chunk; returns the arrays it puts out.

        `is_last` says that the slots are to hold what it makes of them.
        """
        program, start = self._program(chunk), self._feed.offset
        donated, others = placement.place(program.changed)
        self._strategy.dispatch.wait()
        with uninterrupted():
            new, arrays, token, self._guard.health = program(
                donated,
                others,
                chunk.inputs,
                start,
                count,
                self._guard.health,
                loops,
            )
            # The outputs of a loop on the device are arrays of their own.
            placement.hold(new, may_share=not program.is_nested)
            if count:
                self._guard.add(chunk.positions[start : start + count])
                self._feed.commit(count)
            self._strategy.dispatch.started(token)
            self._feed.read_on()  # when the device has something to do
            if is_last:
                placement.release()  # here, since Ctrl-C is kept away
        return arrays

    def detach(self, output: PyTree) -> PyTree:
        """Returns `output` with copies of arrays that the next loop takes over."""
        if isinstance(output, dict):  # `jax.tree` would sort the user's names
            return {name: self.detach(value) for name, value in output.items()}
        placement = self._tracer.placement
        if placement is None:
            return output
        return jax.tree.map(
            lambda leaf: leaf.copy() if placement.owns(leaf) else leaf, output
        )

    def _run_eagerly(self, num_steps: int) -> Iterator[tuple[int, list[PyTree]]]:
        paths = State([(self._owner, "")]).paths
        self._guard.begin(paths, self._feed.positions, num_steps)
        steps = run_eagerly(
            self._owner,
            self._step_fn,
            self._nest,
            self._feed,
            self._strategy,
            owner_of(self._name),
            self._guard,
        )
        with self._feed.reading():
            while num_steps and (outcome := next(steps, None)) is not None:
                result, is_end = outcome
                num_steps -= is_end if num_steps > 0 else 0
                yield int(is_end), [result]

    def _read_state(self) -> list[jax.Array]:
        """Returns the arrays of the state, on their devices."""
        placement = self._tracer.placement
        if placement is not None:
            return placement.arrays()
        placement = Placement(State([(self._owner, "")]), self._strategy)
        placement.place(())
        return placement.arrays()

    def _rewind(self, positions: Sequence[Position]) -> None:
        """Goes back to positions that were read since the data was last moved."""
        if self._feed.is_repositionable:
            self._feed.seek(positions)

    def _find_origin(self, bad: Sequence[int]) -> str | None:
        """Returns where the next step gets its bad values from, if that can be told."""
        if not self._feed.is_repositionable or not self._options.compile_step:
            return None
        if self._strategy.peers:
            return None
        try:
            return self._repeat_step(bad)
        except Exception as error:
            # It helps with an error that must not be lost to another one.
            logger.warning("The bad step could not be repeated: %r", error)
            return None

    def _repeat_step(self, bad: Sequence[int]) -> str | None:
        chunk, placement = self._next_chunk(), self._tracer.placement
        if chunk is None or placement is None:
            return None
        program = self._program(chunk)
        step = program.step
        slots = placement.join(step.changed, *placement.place(step.changed))
        batches = program.batches(chunk.inputs, self._feed.offset)
        paths = [
            jax.tree_util.keystr(path[1:], simple=True, separator="/") or "values"
            for count, types in zip(self._batches_per_step, chunk.types, strict=True)
            for path, _ in jax.tree_util.tree_leaves_with_path([types] * count)
        ]
        self._strategy.dispatch.wait()
        return find_origin(step, slots, batches, paths, bad)

    def _next_chunk(self) -> Chunk | None:
        """Returns the chunk that holds the next step, or `None` at the end."""
        feed = self._feed
        if feed.chunk is not None:
            return feed.chunk
        if not feed.is_started and not self._start_feed():
            return None
        with waiting_for_data(feed, self._strategy):
            chunk = feed.next_chunk()
        if self._strategy.dispatch.in_flight():
            feed.read_on()
        return chunk

    def _start_feed(self) -> bool:
        """Traces the step for the first batches; returns whether there are any."""
        first = self._peek()
        if None in first:
            return False
        pairs = zip(self._feed.readers, first, strict=True)
        types = [reader.gather.types(batch) for reader, batch in pairs if batch]
        active = tuple(batch.num_active for batch in first if batch)
        trace = self._tracer.trace(types, active, self._layouts)
        self._batches_per_step = trace.batches_per_step
        assert self._steps_per_chunk is not None
        builder = ChunkBuilder(
            trace.batches_per_step,
            steps_per_chunk=self._steps_per_chunk,
            max_chunk_bytes=self._options.max_chunk_bytes,
        )
        prefetch = min(1, *(source.prefetch for source in self._sources))
        self._feed.start(builder.build, prefetch)
        return True

    def _peek(self) -> list[HostBatch | None]:
        with waiting_for_data(self._feed, self._strategy):
            return self._feed.peek()

    def _program(self, chunk: Chunk) -> Program:
        """Returns the program for a chunk, compiled at the first one of its kind."""
        key = (chunk.signature, chunk.capacity)
        if key not in self._programs:
            self._programs[key] = self._make_program(chunk)
        return self._programs[key]

    def _make_program(self, chunk: Chunk) -> Program:
        trace = self._tracer.trace(chunk.types, chunk.num_active, self._layouts)
        if trace.batches_per_step != self._batches_per_step:
            raise RetraceError(
                f"`{self._name}` took {list(self._batches_per_step)} batches of its "
                f"datasets in one step, and now takes {list(trace.batches_per_step)}. "
                "Batches that were read ahead cannot be shared out anew: take the same "
                "number in every step, or make a new trainer."
            )
        if self._strategy.peers is not None:
            check_same_program(self._strategy.peers, self._name, trace.step.program)
        placement, state = self._tracer.placement, self._tracer.state
        assert placement is not None and state is not None
        if not self._programs:
            check_writes(self._name, state, trace.step.changed)
        is_slow = has_slow_loop(trace.step.program, placement.platform)
        if is_slow and self._options.compile_loop and not self._programs:
            logger.info(
                "`%s` has convolutions that XLA's CPU compiler runs slowly inside a "
                "loop on the device: its steps run one by one.",
                self._name,
            )
        return Program(
            trace.step,
            trace.batches_per_step,
            [source.gather.on_device for source in self._sources],
            chunk.capacity,
            placement,
            keep_results=self._keep_results,
            is_nested=not is_slow,
            guard=self._guard.for_step(
                state, trace.step.program.in_avals, trace.step.changed
            ),
            hooks=None if is_slow else self._hooks,
            compiler_options=self._options.compiler_options,
        )

    @property
    def _layouts(self) -> list[BatchLayout]:
        return [source.layout for source in self._sources]


def _count(ends: Sequence[bool], most: int, remaining: int) -> tuple[int, int]:
    """Returns how many steps to run, and how many of them end a batch."""
    count = full = 0
    for is_end in ends:
        if count == most or full == remaining:
            break
        count += 1
        full += is_end
    return count, full


def _flatten(datasets: PyTree) -> tuple[list[Any], Any]:
    """Flattens a nest of datasets; a list that holds arrays is one, of its batches."""
    leaves, nest = jax.tree.flatten(datasets, is_leaf=_is_dataset)
    if not leaves or any(hasattr(leaf, "dtype") for leaf in leaves):
        return [datasets], jax.tree.structure(0)
    return leaves, nest


def _is_dataset(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # JAX warns of iterators that it is not told to be leaves.
        return isinstance(value, Iterator)
    leaves = jax.tree.leaves(value, is_leaf=lambda part: isinstance(part, Iterator))
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def _distribute(dataset: Any, strategy: Strategy) -> DistributedDataset:
    if not isinstance(dataset, DistributedDataset):
        return strategy.distribute_dataset(dataset)
    if dataset.layout != strategy.layout:
        raise ValueError(
            f"The dataset was distributed over {dataset.layout.num_replicas} replicas "
            f"by another strategy than {strategy!r}, under which the step runs. Train "
            "under its strategy (`with strategy.scope():`, or `strategy=strategy` of "
            "the `Controller`), or make it with "
            "`armillary.make_distributed_dataset(strategy, ...)` of the other."
        )
    return dataset
