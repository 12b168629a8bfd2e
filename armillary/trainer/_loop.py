"""Runs a user's step many times, over chunks of batches.

`Loop` is the engine of `StandardTrainer` and `StandardEvaluator`. It moves through the
data (`LoopData`): take a chunk, run those of its steps that the loop asks for with the
program for it (`Programs`), mark them as used.

What the trainer and the evaluator share: a loop over a step, under a strategy.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from armillary._logging import logger
from armillary.data.feed._chunks import Chunk
from armillary.distribute._global_arrays import as_whole
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._notes import add_part_note
from armillary.distribute.replica._context import get_strategy, has_strategy
from armillary.state._holders import held_by
from armillary.state._lift import State
from armillary.trainer._guard import LoopCheck, LoopGuard
from armillary.trainer._hooks import LoopOutputs
from armillary.trainer._loop_data import FEW_STEPS, LoopData
from armillary.trainer._options import LoopOptions
from armillary.trainer._origin import find_origin
from armillary.trainer._program import Loops, run_eagerly
from armillary.trainer._step_checks import RecordsReads, StepMethod
from armillary.trainer._tracer import Programs
from armillary.typing import PyTree


class Loop:
    """Runs one step of the user's over one nest of datasets.

    `exact` uses every example, in smaller steps where needed; `keep_results` says that
    what steps return is needed.

    Attributes:
        data: What it reads.
        is_cut_off: Whether the last `iterate` ended before it was done.
        num_iterated: How many steps it ran.
    """

    def __init__(
        self,
        method: StepMethod,
        datasets: PyTree,
        options: LoopOptions,
        *,
        exact: bool,
        keep_results: bool,
    ) -> None:
        self._method, self._strategy = method, method.strategy
        self._options, self._keep_results = options, keep_results
        self.data = LoopData(datasets, method, options, exact=exact)
        self._guard = LoopGuard(method, options)
        self._programs = Programs(
            method, self.data, options, self._guard, keep_results=keep_results
        )
        self.is_cut_off, self.num_iterated = False, 0

    def serves(
        self,
        datasets: PyTree,
        strategy: Strategy,
        options: LoopOptions,
        keep_results: bool,
    ) -> bool:
        """Returns whether this loop was made for these arguments."""
        return (
            not self.data.is_closed
            and datasets is self.data.nest
            and strategy is self._strategy
            and options is self._options
            and keep_results == self._keep_results
        )

    def has_data(self) -> bool:
        """Returns whether another step can run; waits for the data if it must."""
        if not self.data.feed.is_started:
            return self.data.peek() is not None
        return self._next_chunk() is not None

    def finds_hooks(self) -> bool:
        """Finds the state; returns whether `run_loops` can run the owner's hooks."""
        if self._programs.find_hooks() is None:
            return False
        chunk = self._next_chunk()
        return chunk is not None and self._programs.get(chunk).hooks is not None

    def run_loops(self, num_steps: int, num_loops: int) -> tuple[int, LoopOutputs]:
        """Runs loops with the hooks of the owner, after `finds_hooks` was true.

        Those that fit into what is left of a chunk are one program. One that does not
        runs alone. Returns for how many steps there was data, and what the loops put
        out.
        """
        hooks, flat = self._programs.hooks, self._programs.flat
        assert hooks is not None and flat is not None
        outputs = LoopOutputs(hooks)
        count = num_done = 0
        last: Chunk | None = None
        with flat.writing_back():
            while not outputs.num_loops:
                chunk = self._next_chunk()
                if chunk is None:
                    assert last is not None  # The data ends within the loop.
                    loops = Loops(num_steps, num_done, is_end=True)
                    outputs.add(self._start(flat, last, 0, loops), 1)
                    break
                last = chunk
                most = min(num_loops, self._programs.get(chunk).most_loops)
                size = chunk.num_steps - self.data.feed.offset
                if num_done + size >= num_steps:
                    size -= (num_done + size) % num_steps
                size = min(size, most * num_steps - num_done)
                loops = Loops(num_steps, num_done, is_end=False)
                arrays = self._start(flat, chunk, size, loops)
                outputs.add(arrays, (num_done + size) // num_steps)
                count, num_done = count + size, (num_done + size) % num_steps
        return count, outputs

    def run(self, num_steps: int) -> int:
        """Runs up to `num_steps` steps; returns how many there was data for."""
        self.data.set_chunk_size(num_steps)
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
        self._guard.fail(error, self.data.rewind)

    def check(self) -> LoopCheck | None:
        """Returns what is to be resolved of the last `run`, if it was guarded."""
        return self._guard.check(self.data.rewind, self._find_origin)

    def iterate(self, num_steps: int) -> Iterator[PyTree]:
        """Yields what each step returned; -1 runs until the data ends.

        The first pieces of a batch that runs as several smaller steps do not count.
        """
        self.data.set_chunk_size(FEW_STEPS if num_steps == -1 else num_steps)
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
        flat = self._programs.find_state()
        self._guard.begin(flat.state.paths, self.data.feed.positions, num_steps)
        with flat.writing_back():
            yield from self._run_chunks(num_steps, flat)

    def _run_chunks(
        self, num_steps: int, flat: FlatState
    ) -> Iterator[tuple[int, list[PyTree]]]:
        remaining = num_steps
        while remaining and (chunk := self._next_chunk()) is not None:
            program = self._programs.get(chunk)
            most = program.most_steps if self._options.compile_loop else 1
            start = self.data.feed.offset
            count, full = _count(chunk.ends[start:], most, remaining)
            first = start if program.is_nested else 0
            arrays = self._start(flat, chunk, count, is_last=full == remaining)
            remaining -= full if remaining > 0 else 0
            if not self._keep_results:
                yield full, []
                continue
            # Whoever gets the results may look at the state as well.
            flat.write_back()
            indices = range(first, first + count)
            yield full, [program.results(arrays, index) for index in indices]

    def _start(
        self,
        flat: FlatState,
        chunk: Chunk,
        count: int,
        loops: Loops | None = None,
        *,
        is_last: bool = True,
    ) -> list[jax.Array]:
        """Starts a program that runs steps of a chunk; returns the arrays it puts out.

        `is_last` says that the slots are to hold what it makes of them.
        """
        program, feed, guard = self._programs.get(chunk), self.data.feed, self._guard
        start = feed.offset
        with flat.lent(program.changed) as (donated, others):
            values, arrays, token, guard.health = program(
                donated, others, chunk.inputs, start, count, guard.health, loops
            )
            # The outputs of a loop on the device are arrays of their own.
            flat.give(values, token, may_share=not program.is_nested)
            if count:
                guard.add(chunk.positions[start : start + count])
                feed.commit(count)
            feed.read_on()  # when the device has something to do
            if is_last:
                flat.write_back()  # here, since Ctrl-C is kept away
        return arrays

    def _next_chunk(self) -> Chunk | None:
        """Returns the chunk that holds the next step, or `None` at the end."""
        if not self.data.feed.is_started:
            first = self.data.peek()
            if first is None:
                return None
            self.data.start(self._programs.count_batches(*first))
        return self.data.next_chunk()

    def detach(self, output: PyTree) -> PyTree:
        """Returns `output` with copies of arrays that the next loop takes over.

        What is divided between processes is whole in it: they may fetch it when they
        like.
        """
        if isinstance(output, dict):  # `jax.tree` would sort the user's names
            return {name: self.detach(value) for name, value in output.items()}
        flat = self._programs.flat
        if flat is None:
            return jax.tree.map(as_whole, output)
        return jax.tree.map(
            lambda leaf: as_whole(leaf.copy() if flat.owns(leaf) else leaf), output
        )

    def _run_eagerly(self, num_steps: int) -> Iterator[tuple[int, list[PyTree]]]:
        feed = self.data.feed
        paths = State([(self._method.owner, "")]).paths
        self._guard.begin(paths, feed.positions, num_steps)
        steps = run_eagerly(self._method, self.data, self._guard)
        with feed.reading():
            while num_steps and (outcome := next(steps, None)) is not None:
                result, is_end = outcome
                num_steps -= is_end if num_steps > 0 else 0
                yield int(is_end), [result]

    def _read_state(self) -> list[jax.Array]:
        """Returns the arrays of the state, on their devices."""
        flat = self._programs.flat
        if flat is None:
            flat = FlatState(State([(self._method.owner, "")]), self._strategy)
            flat.settle(())
        return flat.arrays

    def _find_origin(self, bad: Sequence[int]) -> str | None:
        """Returns where the next step gets its bad values from, if that can be told."""
        if not self.data.feed.is_repositionable or self._strategy.peers:
            return None
        try:
            return self._repeat_step(bad)
        except Exception as error:
            # It helps with an error that must not be lost to another one.
            logger.warning("The bad step could not be repeated: %r", error)
            return None

    def _repeat_step(self, bad: Sequence[int]) -> str | None:
        flat = self._programs.flat
        chunk = None if flat is None else self._next_chunk()
        if flat is None or chunk is None:
            return None
        program = self._programs.get(chunk)
        arrays = flat.join(program.changed, *flat.take(program.changed))
        batches = program.batches(chunk.inputs, self.data.feed.offset)
        paths = self.data.batch_paths(chunk)
        self._strategy.dispatch.wait()
        return find_origin(program.step, arrays, batches, paths, bad)


def _count(ends: Sequence[bool], most: int, remaining: int) -> tuple[int, int]:
    """Returns how many steps to run, and how many of them end a batch."""
    count = full = 0
    for is_end in ends:
        if count == most or full == remaining:
            break
        count += 1
        full += is_end
    return count, full


@dataclass
class Data:
    """Holds datasets apart from the user's attributes: data is not state."""

    datasets: PyTree
    steps_per_loop: int | None = None


class Runner(RecordsReads):
    """What runs a step of its own, many times."""

    @contextlib.contextmanager
    def _in_strategy(self) -> Iterator[Strategy]:
        """Enters the strategy that is in effect, or the one among the attributes."""
        own = []
        if not has_strategy():
            own = [value for _, value in held_by(self) if isinstance(value, Strategy)]
        strategy = own[0] if own else get_strategy()
        try:
            with strategy.scope() if own else contextlib.nullcontext():
                yield strategy
        except RuntimeError as error:
            add_part_note(error)
            raise

    def _check_initialized(self, attribute: str, argument: str) -> None:
        """Checks that the constructor of the base class was called."""
        if attribute not in vars(self):
            raise TypeError(
                f"`{type(self).__name__}.__init__` did not call that of its base "
                "class, which takes the data. Begin it with "
                f"`super().__init__({argument})`."
            )

    def _get_loop(
        self,
        loop: Loop | None,
        strategy: Strategy,
        datasets: PyTree,
        step_name: str,
        options: LoopOptions,
        *,
        exact: bool,
        keep_results: bool,
    ) -> Loop:
        """Returns `loop`, or a new one if there is none or its use has changed."""
        if loop is not None:
            if loop.serves(datasets, strategy, options, keep_results):
                return loop
            loop.data.feed.close()
        method = self._get_method(strategy, step_name, options)
        return Loop(method, datasets, options, exact=exact, keep_results=keep_results)

    def _get_method(
        self, strategy: Strategy, step_name: str, options: LoopOptions
    ) -> StepMethod:
        """Returns a step of this object, as its options have it run."""
        step, num_parts = getattr(self, step_name), options.accumulate_steps
        if hasattr(inspect.getattr_static(self, step_name), "lower"):
            raise TypeError(
                f"`{type(self).__name__}.{step_name}` is compiled by `jit`, which "
                "takes no trainer. Remove the decorator: the loop compiles its steps."
            )
        return StepMethod(self, step, step_name, strategy, num_parts)
