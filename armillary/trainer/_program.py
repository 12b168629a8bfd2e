"""One compiled program: some steps of a chunk, with the state carried on the device.

The program takes where to begin and how many steps to run as numbers, not as shapes. So
one program serves every remainder, a chunk may be used up over several loops, and the
same instructions run for every step whatever the loop's length is: that is why results
do not depend, bit for bit, on how steps are divided into loops and chunks.

Where the hooks of the trainer are part of the program, it runs many loops, one after
the other, or a part of one: how long a loop is, and how far the first one has come, are
numbers as well.

The same steps without a compiler, for finding a mistake.

Every operation runs when Python reaches it: a debugger stops in the step, `print` shows
values (on several replicas: one line, with the values of all). Slow, and equal to the
compiled loop up to rounding only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary.data.feed._reader import BatchReader
from armillary.data.feed._split import HostBatch
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import TracedStep, check_taken, explained
from armillary.distribute.replica._context import lifted
from armillary.state._lift import State, as_array
from armillary.trainer._guard import Health, LoopGuard, StepGuard
from armillary.trainer._hooks import Hooks
from armillary.trainer._loop_data import Gather, LoopData, take_batches
from armillary.trainer._step_checks import StepMethod
from armillary.typing import PyTree
from armillary.xla._compile import compile_step

# Room for the outputs of loops that are one program.
_MOST_OUTPUT_BYTES = 2**20


class Loops(NamedTuple):
    """How the steps of a call are divided into loops.

    Attributes:
        num_steps: Steps of a loop.
        num_done: Steps that the first loop has had already.
        is_end: Whether the last loop ends with the call, however short it is.
    """

    num_steps: Any
    num_done: Any
    is_end: Any


class _Inputs(NamedTuple):
    """What a call takes besides the arrays that it takes over."""

    others: Sequence[Any]
    chunk: list[Any]
    start: Any
    num_steps: Any
    health: Any
    loops: Any


class Program:
    """Compiles a traced step into a loop over a chunk with room for `capacity` steps.

    If it is not `is_nested`, each step is a program of its own. A `guard` undoes bad
    steps. `hooks` run where a loop begins and ends; without them, that is up to Python.

    Attributes:
        changed: Indices of the arrays of the state that the program changes.
        most_loops: The largest number of loops that one call may end, with hooks.
    """

    def __init__(
        self,
        step: TracedStep,
        batches_per_step: Sequence[int],
        gathers: Sequence[Gather],
        capacity: int,
        flat: FlatState,
        *,
        keep_results: bool,
        is_nested: bool,
        guard: StepGuard | None = None,
        hooks: Hooks | None = None,
        compiler_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.step = step
        self._batches_per_step = tuple(batches_per_step)
        self._gathers = tuple(gathers)
        self._capacity = capacity
        self._flat = flat
        self._keep_results = keep_results
        self._guard = guard
        self.is_nested = is_nested
        self.hooks = hooks
        parts = [step] if hooks is None else [hooks.begin, step, hooks.end]
        self.changed = tuple(sorted({i for part in parts for i in part.changed}))
        self.most_loops = 0 if hooks is None else self._count_loops(hooks)
        # What Python reads, each process must have whole.
        split = None if hooks is None else flat.split
        outputs = None if split is None else split((), None)
        self._compiled = compile_step(
            self._run,
            step.program,
            flat.platform,
            compiler_options,
            split=flat.split,
            donate_argnums=0,
            out_shardings=(
                flat.shardings(self.changed),
                outputs,
                None,
                None if guard is None else guard.sharding,
            ),
        )

    @property
    def most_steps(self) -> int:
        """The largest number of steps that one call may run."""
        return self._capacity if self.is_nested else 1

    def __call__(
        self,
        donated: Sequence[jax.Array],
        others: Sequence[jax.Array],
        chunk: Sequence[tuple[PyTree, PyTree]],
        start: int,
        num_steps: int,
        health: Health | None = None,
        loops: Loops | None = None,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Health | None]:
        """Runs steps `start` to `start + num_steps` of a chunk, given as `inputs`.

        `donated` and `others` are what `FlatState.lent` gives, and `health` what the
        guard knows, if there is one.
        """
        begin, count = np.int32(start), np.int32(num_steps)
        inputs = _Inputs(others, list(chunk), begin, count, health, loops)
        return self._compiled(donated, inputs)

    def describe(
        self, chunk: Sequence[tuple[PyTree, PyTree]], health: Health | None
    ) -> tuple[Any, tuple[list[Any], list[Any]]]:
        """Returns this program for a compiler: to be lowered, not to be run.

        `chunk` and `health` are types, with shardings. Returned are a function under
        `jax.jit` of two lists of arrays, of which it takes over the first and whose
        first output takes its place; and the types of both.
        """
        donated, others = self._flat.describe(self.changed)
        number = np.int32(0)
        loops = None if self.hooks is None else Loops(number, number, np.bool_(False))
        inputs = _Inputs(others, list(chunk), number, number, health, loops)
        leaves, tree = jax.tree.flatten(inputs)

        def run(donated: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
            new, *rest = self._run(donated, tree.unflatten(leaves))
            return new, jax.tree.leaves(rest)

        types = [
            leaf
            if isinstance(leaf, jax.ShapeDtypeStruct)
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for leaf in leaves
        ]
        out_shardings = (self._flat.shardings(self.changed), None)
        fn = jax.jit(run, donate_argnums=0, out_shardings=out_shardings)
        return fn, (donated, types)

    def results(self, arrays: Sequence[jax.Array], index: int) -> PyTree:
        """Returns what the step at `index` returned."""
        return self.step.results([array[index] for array in arrays])

    def batches(self, chunk: Sequence[PyTree], index: Any) -> list[Any]:
        """Returns the arrays of the batches of one step."""
        return take_batches(chunk, self._batches_per_step, self._gathers, index)

    def _one_step(
        self, slots: list[Any], chunk: Sequence[PyTree], index: Any, health: Any
    ) -> tuple[list[Any], list[Any], Any]:
        new, results = self.step.call(slots, self.batches(chunk, index))
        if self._guard is not None:
            old = [slots[i] for i in self.step.changed]
            new, health = self._guard.check(old, new, health)
        return new, results if self._keep_results else [], health

    def _run(
        self, donated: Sequence[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        slots = self._flat.join(self.changed, donated, inputs.others)
        if self.hooks is not None:
            return self._run_loops(self.hooks, slots, inputs)
        run = self._run_many if self.is_nested else self._run_one
        return run(slots, inputs)

    def _run_one(
        self, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        _, chunk, start, num_steps, health, _ = inputs
        new, results, health = self._one_step(slots, chunk, start, health)
        stop = jnp.asarray(start + num_steps)
        return new, [result[None] for result in results], stop, health

    def _run_many(
        self, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        _, chunk, start, num_steps, health, _ = inputs
        types = self.step.result_types if self._keep_results else []
        results = [
            jnp.zeros((self._capacity, *each.shape), each.dtype) for each in types
        ]
        stop = jnp.asarray(start + num_steps)
        changed = [slots[i] for i in self.step.changed]
        _, new, results, health = self._run_steps(
            slots, chunk, (start, changed, results, health), stop
        )
        return new, results, stop, health

    def _run_steps(
        self, slots: list[Any], chunk: list[Any], begin: tuple[Any, ...], stop: Any
    ) -> tuple[Any, ...]:
        """Runs steps up to `stop`, from what `begin` carries to what it carries then.

        That is the index of the step, the slots that steps change, their results, and
        what the guard knows.
        """

        def goes_on(carry: tuple[Any, ...]) -> Any:
            index, _, _, health = carry
            return (
                index < stop if health is None else ((index < stop) & ~health.is_halted)
            )

        def body(carry: tuple[Any, ...]) -> Any:
            index, changed, results, health = carry
            now = _replace(slots, self.step.changed, changed)
            new, values, health = self._one_step(now, chunk, index, health)
            results = [
                jax.lax.dynamic_update_index_in_dim(all_, value, index, 0)
                for all_, value in zip(results, values, strict=True)
            ]
            return index + 1, new, results, health

        return jax.lax.while_loop(goes_on, body, begin)

    def _run_loops(
        self, hooks: Hooks, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        _, chunk, start, num_steps, _, loops = inputs
        stop = jnp.asarray(start + num_steps)
        outputs = [
            jnp.zeros((self.most_loops, *result.shape), result.dtype)
            for result in hooks.end.result_types
        ]

        def goes_on(carry: tuple[Any, ...]) -> Any:
            # A call without steps only ends a loop.
            index, _, number, _, _ = carry
            return (index < stop) | ((num_steps == 0) & (number == 0))

        def body(carry: tuple[Any, ...]) -> Any:
            index, num_done, number, changed, outputs = carry
            now = _replace(slots, self.changed, changed)
            now = _call_if(num_done == 0, hooks.begin, now)[0]
            end = jnp.minimum(index + loops.num_steps - num_done, stop)
            new = [now[i] for i in self.step.changed]
            last, new, _, _ = self._run_steps(now, chunk, (index, new, [], None), end)
            now = _replace(now, self.step.changed, new)
            num_done = num_done + last - index
            is_over = (num_done == loops.num_steps) | (loops.is_end & (last == stop))
            now, values = _call_if(is_over, hooks.end, now)
            outputs = [
                jax.lax.dynamic_update_index_in_dim(all_, value, number, 0)
                for all_, value in zip(outputs, values, strict=True)
            ]
            num_done = jnp.where(is_over, 0, num_done)
            kept = [now[i] for i in self.changed]
            return last, num_done, number + is_over, kept, outputs

        changed = [slots[i] for i in self.changed]
        begin = (start, loops.num_done, jnp.int32(0), changed, outputs)
        _, _, _, new, outputs = jax.lax.while_loop(goes_on, body, begin)
        return new, outputs, stop, None

    def _count_loops(self, hooks: Hooks) -> int:
        """Returns how many outputs of loops there is room for."""
        types = hooks.end.result_types
        size = sum(aval.size * aval.dtype.itemsize for aval in types)
        return max(1, min(self._capacity, _MOST_OUTPUT_BYTES // max(size, 1)))


def _replace(
    slots: Sequence[Any], indices: Sequence[int], values: Sequence[Any]
) -> list[Any]:
    now = list(slots)
    for i, value in zip(indices, values, strict=True):
        now[i] = value
    return now


def _call_if(
    is_due: Any, hook: TracedStep, slots: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Returns the slots, and what a hook returns, or zeros if it is not due."""
    if not hook.program.out_avals:
        return slots, []

    def skip(slots: list[Any]) -> tuple[list[Any], list[Any]]:
        zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in hook.result_types]
        return [slots[i] for i in hook.changed], zeros

    new, results = jax.lax.cond(is_due, lambda slots: hook.call(slots, []), skip, slots)
    return _replace(slots, hook.changed, new), results


class EagerIterator:
    """Hands a reader's batches to an eager step."""

    def __init__(self, reader: BatchReader) -> None:
        self._reader = reader
        self.taken: HostBatch | None = None

    def __iter__(self) -> "EagerIterator":
        return self

    def __next__(self) -> PyTree:
        """Returns the next batch, placed on its devices."""
        self.taken = next(self._reader)
        gather = self._reader.gather
        return gather.layout.wrap(gather.place(self.taken), self.taken.num_active)

    get_next = __next__


def run_eagerly(
    method: StepMethod, data: LoopData, guard: LoopGuard
) -> Iterator[tuple[PyTree, bool]]:
    """Yields what each step returned, and whether it ended its batch, until data ends.

    It also ends when `guard` finds a step that ends training. A step for which the data
    ends in the middle is not counted, but what it did before stays done.
    """
    readers, step_fn = data.feed.readers, method.fn
    while all(reader.peek() is not None for reader in readers):
        if guard.health is not None and guard.health.is_halted:
            return
        state = State([(method.owner, "")])
        flat = FlatState(state, method.strategy)
        every = tuple(range(len(state.paths)))
        before = flat.join(every, *flat.take(every))
        state.write(before)
        iterators = [EagerIterator(reader) for reader in readers]
        with (
            lifted(state, method.strategy),
            explained(step_fn, state, method.owner_name),
        ):
            try:
                result = method(jax.tree.unflatten(data.structure, iterators))
            except StopIteration:
                return
        taken = [iterator.taken for iterator in iterators if iterator.taken is not None]
        check_taken(step_fn.__name__, [int(bool(i.taken)) for i in iterators])
        _undo_if_bad(guard, state, before)
        FlatState(state, method.strategy).settle(())
        data.feed.commit_taken()
        guard.add([data.feed.positions])
        yield result, all(batch.is_last for batch in taken)


def _undo_if_bad(guard: LoopGuard, state: State, before: list[jax.Array]) -> None:
    if guard.health is None:
        return
    after = [as_array(leaf) for leaf in state.read()]
    changed = [i for i, old in enumerate(before) if after[i] is not old]
    step_guard = guard.for_step(state, after, changed)
    assert step_guard is not None
    old, new = [before[i] for i in changed], [after[i] for i in changed]
    kept, guard.health = step_guard.check_now(old, new, guard.health)
    for i, array in zip(changed, kept, strict=True):
        after[i] = array
    state.write(after, set(changed))
