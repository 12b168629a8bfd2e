"""Runs a user's step many times, with a compiled program for each kind of chunk.

At first, the loop only looks at the next batches. The trace of the step shows how many
batches a step takes, and only then chunks can be built.
"""

import contextlib
import functools
import gc
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from armillary._logging import logger
from armillary.data._dataset import open_feed
from armillary.data.feed._chunks import Chunk, ChunkBuilder
from armillary.data.feed._feed import Feed
from armillary.data.feed._piece import Piece
from armillary.data.feed._position import Position
from armillary.distribute._global_arrays import as_whole
from armillary.distribute.program._flat_state import FlatState
from armillary.state._slots import is_equal
from armillary.trainer._data_wait import waiting_for_data
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._eager import run_eagerly
from armillary.trainer._hooks import map_output
from armillary.trainer._last_batch import check_last_batch
from armillary.trainer._loop_guard import LoopCheck, LoopGuard
from armillary.trainer._origin import find_origin
from armillary.trainer._repeated_work import warn_of_repeated_work
from armillary.trainer._setup import Setup
from armillary.trainer._step_method import StepMethod, check_step_signature
from armillary.trainer._tracer import StepPrograms
from armillary.trainer._work import Footprint, Work, WorkCount
from armillary.typing import PyTree

# If steps are small, programs with fewer steps cost more to start than to run.
FEW_STEPS = 20
# Programs with more steps are not faster.
_MANY_STEPS = 100


def choose_chunk_size(num_steps: int) -> int:
    """Returns the number of steps in a chunk, for loops of `num_steps` steps."""
    several = max(FEW_STEPS // num_steps, 1) * num_steps
    return min(several, _MANY_STEPS)


@contextlib.contextmanager
def _collection_paused() -> Iterator[None]:
    """Pauses garbage collection during a trace, which makes many objects that stay."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


class Loop:
    """Runs the user's step over one nest of datasets."""

    def __init__(self, method: StepMethod, setup: Setup) -> None:
        check_step_signature(method.fn, type(method.owner).__name__)
        self._method = method
        self._strategy = method.strategy
        self.datasets = setup.distribute(method.strategy)
        _, self._structure = flatten_datasets(setup.datasets)

        reads_ahead = method.options.read_ahead
        self._steps_per_chunk = method.options.steps_per_chunk if reads_ahead else 1
        # Without data, there is nothing to read ahead.
        self._prefetch = 0
        if self.datasets and reads_ahead:
            wanted = [dataset.prefetch for dataset in self.datasets]
            # At most one chunk, because a chunk already holds many batches.
            self._prefetch = min(1, *wanted)

        self.feed = self._open_feed(begins_anew=method.is_evaluation)
        self._guard = LoopGuard(method)
        gathers = [data.input.gather for data in self.datasets]
        self._programs = StepPrograms(method, gathers, self._structure)
        self._work = WorkCount()
        self.footprint: Footprint | None = None  # of the last program

    def take_work(self) -> Work:
        """Returns the mean work of the steps since the last call of this method."""
        return self._work.take()

    def serves(self, method: StepMethod, setup: Setup) -> bool:
        """Returns whether this loop can run this step with these data and options."""
        own = self._method
        datasets = setup.distribute(method.strategy)
        # An evaluation opens a closed feed again.
        is_open = method.is_evaluation or not self.feed.is_closed
        return (
            is_open
            and is_equal(method.source, own.source)
            and datasets is self.datasets
            and method.strategy is own.strategy
            and method.options is own.options
            and method.keep_results == own.keep_results
        )

    def _open_feed(self, *, begins_anew: bool) -> Feed[Chunk]:
        method = self._method
        return open_feed(
            self.datasets,
            in_pieces=method.is_evaluation,
            begins_anew=begins_anew,
            name=method.name,
            owner=method.owner,
            reads_ahead=method.options.read_ahead,
        )

    @property
    def _reads_ahead(self) -> bool:
        """True if a batch may be read before the previous step has run."""
        has_data = len(self.datasets) > 0
        return not has_data or self._prefetch > 0 or self._steps_per_chunk != 1

    def reopen(self) -> None:
        self.feed.close()
        self.feed = self._open_feed(begins_anew=True)

    def begin_epoch(self, epochs: int) -> int:
        """Begins the next pass, if the last one has ended; see `AbstractTrainer`."""
        num_datasets = len(self.datasets)
        if num_datasets != 1 or self.datasets[0].is_endless:
            reason = f"has {num_datasets} datasets, which end at different steps"
            if num_datasets == 0:
                reason = "is None, and steps that make their own data have no epochs"
            elif num_datasets == 1:
                reason = "repeats its data forever"
            raise ValueError(
                f"`epochs` is {epochs}, but `train_dataset` {reason}. Train up to a "
                "step, or make one dataset without `repeat=True`."
            )
        (position,) = self.feed.positions
        num_done = position.epoch + position.is_exhausted
        if num_done >= epochs:
            return 0
        if position.is_exhausted:
            self.reopen()
        return num_done + 1

    def find_left(self) -> list[int]:
        """Returns the indices of datasets with unused batches, after the last step."""
        left: list[int] = []
        for index, reader in enumerate(self.feed.readers):
            if reader.data.is_endless or reader.data.is_agreed:
                continue
            if index in self.feed.with_leftovers or reader.peek() is not None:
                left.append(index)
        return left

    def set_chunk_size(self, num_steps: int) -> None:
        """Sets the number of steps in a chunk once, because each size is a program."""
        if self._steps_per_chunk is None:
            self._steps_per_chunk = choose_chunk_size(num_steps)
        if not self.feed.is_started:
            self._programs.loops_per_chunk = self._steps_per_chunk // num_steps

    def has_data(self) -> bool:
        """Returns whether another step can run; may wait for the data."""
        if self.feed.is_started:
            return self._next_chunk() is not None
        with waiting_for_data(self.feed.queue, self._strategy):
            return None not in self.feed.peek()

    def _next_chunk(self) -> Chunk | None:
        """Returns the chunk that holds the next step, or `None` at the end."""
        feed = self.feed
        if not feed.is_started:
            if not self.has_data():
                return None
            self._start_feed()
        if feed.chunk is not None:
            return feed.chunk
        with waiting_for_data(feed.queue, self._strategy):
            chunk = feed.next_chunk()
        if self._strategy.dispatch.in_flight():
            feed.read_on()
        return chunk

    @_collection_paused()
    def _start_feed(self) -> None:
        """Traces the step for the first batches, and starts to build chunks."""
        assert self._steps_per_chunk is not None
        first = [batch for batch in self.feed.peek() if batch]
        pairs = zip(self.feed.readers, first, strict=True)
        types = [reader.data.gather.types(batch) for reader, batch in pairs]
        active = tuple(batch.active for batch in first)
        batches_per_step = self._programs.count_batches(types, active)
        warn_of_repeated_work(self._strategy.layout, types)

        if batches_per_step == (1,) and not self._method.is_evaluation:
            # A batch that is cut into parts may have a size that the step refuses.
            is_in_parts = self._method.options.accumulate_steps > 1
            trace = self._trace_for if is_in_parts else None
            check_last_batch(self.feed.readers[0], trace)

        builder = ChunkBuilder(
            batches_per_step,
            steps_per_chunk=self._steps_per_chunk,
            max_chunk_bytes=self._method.options.max_chunk_bytes,
            # A process must not raise an error alone: the other processes must receive
            # it, too.
            gives_errors_at_once=not self._strategy.layout.peers.is_alone,
            # An evaluation changes no state, so its data may always be read ahead.
            reads_ahead=self._reads_ahead and not self._method.is_evaluation,
        )
        self.feed.start(builder.build, self._prefetch)

    def _trace_for(self, piece: Piece) -> None:
        """Traces the step for a batch of the only dataset."""
        gather = self.feed.readers[0].data.gather
        self._programs.trace([gather.types(piece)], (piece.active,))

    @_collection_paused()
    def count_loops(self, num_steps: int, num_loops: int) -> int:
        """Finds the state; returns the number of loops that `run_loops` can run.

        It returns 0 if the hooks run in Python, or the data has ended.
        """
        if self._programs.find_hooks() is None:
            return 0
        chunk = self._next_chunk()
        if chunk is None:
            return 0
        program = self._programs.get(chunk)
        steps_left = chunk.num_steps - self.feed.offset
        loops_left = steps_left // num_steps
        return min(num_loops, loops_left, program.most_loops)

    def run_loops(self, num_steps: int, num_loops: int) -> tuple[list[Any], Any]:
        """Runs loops as one program.

        Returns:
            Arrays on the device, and a function from these arrays to the outputs.
        """
        hooks = self._programs.hooks
        flat = self._programs.flat
        chunk = self.feed.chunk
        assert hooks is not None and flat is not None and chunk is not None
        with flat.writing_back():
            arrays = self._start(flat, chunk, num_steps * num_loops, num_loops)
        return arrays, functools.partial(hooks.outputs, num_loops)

    def run(self, num_steps: int) -> int:
        """Runs up to `num_steps` steps; returns the number of steps that had data."""
        self.set_chunk_size(num_steps)
        count = 0
        try:
            # Not `sum`: after an interrupt, the traceback would hold its generator
            # expression, so `_run` would not write the state back.
            for num_done, _ in self._run(num_steps):
                count += num_done
        except BaseException as error:
            self.end_after_error(error)
            raise
        if (flat := self._programs.flat) is not None:
            self._guard.finish(count, flat.arrays)
        return count

    def end_after_error(self, error: BaseException) -> None:
        """Ends a loop after an error; adds a note if there was a bad step before."""
        check = self.check()
        self._guard.health = None
        try:
            if check is not None:
                check.resolve()
        except Exception as earlier:
            error.add_note(f"Before that, {earlier}")

    def check(self) -> LoopCheck | None:
        """Returns the check of the last `run`, or `None` if it was not guarded."""
        return self._guard.check(self._halt)

    def iterate(self, num_steps: int) -> Iterator[PyTree]:
        """Yields the result of each step; -1 runs until the data ends."""
        self.set_chunk_size(FEW_STEPS if num_steps == -1 else num_steps)
        for _, results in self._run(num_steps):
            yield from results

    def _run(self, num_steps: int) -> Iterator[tuple[int, list[PyTree]]]:
        """Yields numbers of steps that ran, and their results, up to `num_steps`."""
        if not self._method.options.compile_step:
            yield from self._run_eagerly(num_steps)
            return
        flat = self._programs.find_state()
        self._guard.begin(flat.state.paths, self.feed.positions, num_steps)
        with flat.writing_back():
            yield from self._run_chunks(num_steps, flat)

    def _run_eagerly(self, num_steps: int) -> Iterator[tuple[int, list[PyTree]]]:
        """Runs steps without a compiler; yields as `_run` does."""
        steps = run_eagerly(self._method, self.feed, self._structure)
        remaining = num_steps
        with self.feed.reading():
            while remaining and (outcome := next(steps, None)) is not None:
                result, is_end = outcome
                if remaining > 0:
                    remaining -= is_end
                yield int(is_end), [result]

    def _run_chunks(
        self, num_steps: int, flat: FlatState
    ) -> Iterator[tuple[int, list[PyTree]]]:
        """Runs compiled steps chunk by chunk; yields as `_run` does."""
        remaining = num_steps
        while remaining and (chunk := self._next_chunk()) is not None:
            program = self._programs.get(chunk)
            most = program.most_steps if self._method.options.compile_loop else 1
            start = self.feed.offset
            count, num_ended = _count_steps(chunk.ends[start:], most, remaining)
            # A program of one step has room for one result.
            first = start if program.is_nested else 0
            # If batches are not read ahead, the data may read the state before each
            # step.
            is_seen = num_ended == remaining or not self._reads_ahead
            arrays = self._start(flat, chunk, count, is_seen=is_seen)
            if remaining > 0:  # Otherwise, the end of the data is the end.
                remaining -= num_ended
            if not self._method.keep_results:
                yield num_ended, []
                continue
            # The code that gets the results may also read the state.
            flat.write_back()
            indices = range(first, first + count)
            yield num_ended, [program.results(arrays, index) for index in indices]

    @_collection_paused()
    def _start(
        self,
        flat: FlatState,
        chunk: Chunk,
        count: int,
        num_loops: int = 0,
        *,
        is_seen: bool = True,
    ) -> list[jax.Array]:
        """Starts steps of a chunk; returns the output arrays.

        If `is_seen`, Python may read the state after these steps, so the new arrays are
        written into the user's objects.
        """
        program = self._programs.get(chunk)
        feed = self.feed
        guard = self._guard
        start = feed.offset
        with flat.lent(program.changed) as (donated, others):
            values, arrays, token, guard.health = program(
                donated, others, chunk.inputs, start, count, guard.health, num_loops
            )
            # The outputs of a loop on the device are arrays of their own.
            flat.give(values, token)
            guard.add(chunk.positions[start : start + count])
            self._work.add(program.work, count)
            self.footprint = program.footprint
            feed.commit(count)
            feed.read_on()  # only now, when the device has work to do
            if is_seen:
                flat.write_back()  # in this block, where Ctrl-C is held back
        return arrays

    def detach(self, output: PyTree) -> PyTree:
        """Returns an output with full arrays, which the next loop does not change."""
        flat = self._programs.flat

        def detach_leaf(leaf: Any) -> Any:
            if flat is not None and flat.owns(leaf):
                leaf = leaf.copy()
            return as_whole(leaf)

        return map_output(detach_leaf, output)

    def _halt(self, position: Sequence[Position], bad: Sequence[int]) -> str | None:
        """Moves the data back before a bad step; returns the origin of its values."""
        self._guard.health = None
        if not self.feed.is_repositionable:
            return None
        self.feed.seek(position)
        if not self._strategy.peers.is_alone:
            return None
        try:
            return self._find_origin(bad)
        except Exception as error:
            # This is help for a first error, which an error here must not replace.
            logger.warning("The bad step could not be repeated: %r", error)
            return None

    def _find_origin(self, bad: Sequence[int]) -> str | None:
        """Repeats the next step, to find the origin of the values that it left bad."""
        flat = self._programs.flat
        chunk = self._next_chunk()
        assert flat is not None and chunk is not None
        program = self._programs.get(chunk)
        donated, others = flat.take(program.changed)
        arrays = flat.homes.bring(flat.join(program.changed, donated, others))
        batches = program.batches(chunk.inputs, self.feed.offset)
        paths = _find_batch_paths(chunk, self._programs.batches_per_step)
        self._strategy.dispatch.wait()
        return find_origin(program.step, arrays, batches, paths, bad)


def _find_batch_paths(chunk: Chunk, batches_per_step: Sequence[int]) -> list[str]:
    """Returns the path of each array in the batches of one step."""
    paths: list[str] = []
    for count, types in zip(batches_per_step, chunk.types, strict=True):
        batches = [types] * count
        for keys, _ in jax.tree_util.tree_leaves_with_path(batches):
            # The first key is the number of the batch in the step.
            path = jax.tree_util.keystr(keys[1:], simple=True, separator="/")
            paths.append(path or "values")
    return paths


def _count_steps(ends: Sequence[bool], most: int, remaining: int) -> tuple[int, int]:
    """Returns the number of steps to run, and the number of these that end a batch."""
    count = 0
    num_ended = 0
    for is_end in ends:
        if count == most or num_ended == remaining:
            break
        count += 1
        num_ended += is_end
    return count, num_ended


def find_loop(setup: Setup, method: StepMethod) -> Loop:
    """Returns the last loop, or a new loop if the step, data or options changed."""
    if isinstance(setup.loop, Loop):
        if setup.loop.serves(method, setup):
            return setup.loop
        setup.loop.feed.close()
    setup.loop = Loop(method, setup)
    return setup.loop
