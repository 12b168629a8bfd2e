"""One compiled program: some steps of a chunk, with the state carried on the device.

The program takes the first step and the number of steps as numbers, not as shapes. So
one program serves every remainder, and a chunk may be used up over several loops. The
same instructions run for every step, for any length of the loop. That is why results do
not depend, bit for bit, on how steps are divided into loops and chunks.

If the hooks of the trainer are part of the program, it can run several loops. A loop
that is cut short runs without them, and Python runs the hooks around it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from armillary.data.feed._gather import Gather
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._traced_step import TracedStep
from armillary.lifeline._lifeline import waiting
from armillary.trainer._hooks import Hooks
from armillary.trainer._step_guard import Health, StepGuard
from armillary.trainer._step_method import StepMethod
from armillary.trainer._work import Footprint, Work, measure_footprint
from armillary.typing import PyTree
from armillary.xla._compile import compile_step

# Room for the outputs of loops that are one program.
_MAX_OUTPUT_BYTES = 2**20


class _Inputs(NamedTuple):
    """The arguments of a call, except the donated arrays."""

    others: Sequence[Any]
    chunk: list[Any]
    start: Any
    num_steps: Any
    num_loops: Any
    health: Any


class _Carry(NamedTuple):
    """The values that a loop over steps passes from step to step."""

    index: Any  # of the next step in the chunk
    changed: list[Any]  # the arrays that the step changes
    results: list[Any]  # stacks with the results of the steps so far
    health: Any


class Program:
    """Compiles a traced step into a loop over a chunk with room for `capacity` steps.

    If not `is_nested`, each call runs one step. `hooks` run at the beginning and the
    end of each loop, for at most `num_loops` loops in a call. If `hooks` is `None`,
    Python runs the hooks.

    Attributes:
        changed: Indices of the arrays of the state that the program changes.
        most_steps: The largest number of steps that one call may run.
        most_loops: The largest number of loops, with hooks, that one call may run.
        depth: The number of nested loops around a step in the program.
        work: The work of one step, if it is counted.
        footprint: The memory of the program, known after its first call if its work is
            counted.
    """

    def __init__(
        self,
        step: TracedStep,
        batches_per_step: Sequence[int],
        gathers: Sequence[Gather],
        capacity: int,
        flat: FlatState,
        method: StepMethod,
        hooks: Hooks | None,
        *,
        num_loops: int,
        is_nested: bool,
        work: Work | None = None,
    ) -> None:
        self.step = step
        self.hooks = hooks
        self.work = work or Work()
        self.footprint: Footprint | None = None
        self._is_measured = work is None
        self.is_nested = is_nested
        self._per_step = tuple(batches_per_step)
        self._gathers = tuple(gathers)
        self._capacity = capacity
        self._keep_results = method.keep_results
        self.most_steps = capacity if is_nested else 1
        self._flat = flat
        self._guard = None
        if method.options.on_non_finite is not None:
            types = step.program.in_avals
            self._guard = StepGuard(flat.state, types, step.changed, method)

        changed = set(step.changed)
        self.most_loops = 0
        if hooks is not None:
            changed.update(hooks.begin.changed, hooks.end.changed)
            most_loops = min(capacity, num_loops, _count_room(hooks))
            # One loop is always possible, however large its outputs are.
            self.most_loops = max(1, most_loops)
        self.changed = tuple(sorted(changed))
        self.depth = int(is_nested) + int(self.most_loops > 1)

        self._compiled = compile_step(
            self._run,
            step.program,
            flat.platform,
            method.options.compiler_options,
            split=flat.split,
            donate_argnums=0,
            out_shardings=self._out_shardings(),
        )

    def _out_shardings(self) -> tuple[Any, Any, Any, Any]:
        """Returns the shardings of the results of `_run`; XLA decides where `None`."""
        of_changed = self._flat.homes.of_outputs(self.changed)
        of_health = None if self._guard is None else self._guard.sharding
        of_outputs = None
        split = self._flat.split
        if self.hooks is not None and split is not None:
            # Python reads the hooks' outputs, so every process needs the full arrays.
            of_outputs = split((), None)
        return of_changed, of_outputs, None, of_health

    def is_of(self, step: TracedStep, hooks: Hooks | None) -> bool:
        """Returns whether new traces of the step and the hooks give this program."""
        if self.hooks is not None:
            has_same_hooks = hooks is not None and hooks.is_same(self.hooks)
            if not has_same_hooks:
                return False
        return step.is_same(self.step)

    def __call__(
        self,
        donated: Sequence[jax.Array],
        others: Sequence[jax.Array],
        chunk: Sequence[tuple[PyTree, PyTree]],
        start: int,
        num_steps: int,
        health: Health | None = None,
        num_loops: int = 0,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Health | None]:
        """Runs steps, or loops with hooks.

        `donated` and `others` are the arrays of `FlatState.lent`.
        """
        inputs = _Inputs(
            others,
            list(chunk),
            start=np.int32(start),
            num_steps=np.int32(num_steps),
            num_loops=np.int32(num_loops),
            health=health,
        )
        # The three numbers are transferred with the call, even if the user's program
        # forbids transfers.
        with waiting(), jax.transfer_guard_host_to_device("allow"):
            results = self._compiled(donated, inputs)  # On a CPU, this runs the steps.
            if not self._is_measured:
                self._is_measured = True
                state = [*donated, *others]
                self.footprint = measure_footprint(
                    self._compiled, donated, inputs, state
                )
        return results

    def abstract_call(
        self, chunk: Sequence[tuple[PyTree, PyTree]], health: Health | None
    ) -> tuple[Any, tuple[list[Any], list[Any]]]:
        """Returns this program, to be lowered, and the types of its two arguments.

        It donates the first argument. `chunk` and `health` are types with shardings.
        """
        donated, others = self._flat.types_to_take(self.changed)
        number = jax.ShapeDtypeStruct((), np.int32)
        inputs = _Inputs(
            others,
            list(chunk),
            start=number,
            num_steps=number,
            num_loops=number,
            health=health,
        )
        types, tree = jax.tree.flatten(inputs)

        def run(donated: list[Any], leaves: list[Any]) -> tuple[list[Any], list[Any]]:
            new, *rest = self._run(donated, tree.unflatten(leaves))
            return new, jax.tree.leaves(rest)

        out_shardings = (self._flat.homes.of_outputs(self.changed), None)
        fn = jax.jit(run, donate_argnums=0, out_shardings=out_shardings)
        return fn, (donated, types)

    def results(self, arrays: Sequence[jax.Array], index: int) -> PyTree:
        """Returns the result of the step at `index`."""
        return self.step.results([array[index] for array in arrays])

    def batches(self, chunk: Sequence[PyTree], index: Any) -> list[Any]:
        """Returns the arrays of the batches of one step."""
        return take_batches(chunk, self._per_step, self._gathers, index)

    def _one_step(
        self,
        slots: list[Any],
        chunk: Sequence[PyTree],
        index: Any,
        health: Any,
    ) -> tuple[list[Any], list[Any], Any]:
        """Returns the changed arrays, the results and the health after one step."""
        changed = self.step.changed
        slots = self._flat.homes.bring(slots)
        new, results = self.step.call(slots, self.batches(chunk, index))
        if self._guard is not None:
            old = [slots[i] for i in changed]
            new, health = self._guard.check(old, new, health)
        new = self._flat.homes.send_back(changed, new)
        kept_results = results if self._keep_results else []
        return new, kept_results, health

    def _run(
        self, donated: Sequence[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        """Returns the changed arrays, the outputs, the index after them, the health."""
        slots = self._flat.join(self.changed, donated, inputs.others)
        chunk = inputs.chunk
        start = inputs.start
        # It is also the token of the program: it is ready when the program has ended.
        stop = jnp.asarray(start + inputs.num_steps)
        if self.hooks is not None:
            new, outputs = self._run_loops(self.hooks, slots, inputs)
            return new, outputs, stop, None

        if not self.is_nested:
            new, results, health = self._one_step(slots, chunk, start, inputs.health)
            stacks = [result[None] for result in results]
            return new, stacks, stop, health

        changed = [slots[i] for i in self.step.changed]
        types = self.step.result_types if self._keep_results else []
        results = _empty(types, self._capacity)
        begin = _Carry(start, changed, results, inputs.health)
        end = self._run_steps(slots, chunk, begin, stop)
        return end.changed, end.results, stop, end.health

    def _run_steps(
        self,
        slots: list[Any],
        chunk: list[Any],
        begin: _Carry,
        stop: Any,
    ) -> _Carry:
        """Runs steps up to `stop`."""

        def is_running(carry: _Carry) -> Any:
            is_left = carry.index < stop
            if carry.health is None:
                return is_left
            return is_left & ~carry.health.is_halted

        def body(carry: _Carry) -> _Carry:
            index = carry.index
            now = _replace(slots, self.step.changed, carry.changed)
            new, values, health = self._one_step(now, chunk, index, carry.health)
            results = _put(carry.results, values, index)
            return _Carry(index + 1, new, results, health)

        return jax.lax.while_loop(is_running, body, begin)

    def _run_loops(
        self, hooks: Hooks, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any]]:
        """Runs loops with their hooks. With `num_loops` of 0, it skips the hooks."""
        has_hooks = inputs.num_loops > 0
        count = jnp.maximum(inputs.num_loops, 1)
        steps_per_loop = inputs.num_steps // count

        def body(number: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            changed, outputs = carry
            now = _replace(slots, self.changed, changed)
            now, _ = self._call_if(has_hooks, hooks.begin, now)

            first = inputs.start + number * steps_per_loop
            stop = first + steps_per_loop
            of_step = [now[i] for i in self.step.changed]
            begin = _Carry(first, of_step, results=[], health=None)
            end = self._run_steps(now, inputs.chunk, begin, stop)
            now = _replace(now, self.step.changed, end.changed)

            now, values = self._call_if(has_hooks, hooks.end, now)
            changed = [now[i] for i in self.changed]
            return changed, _put(outputs, values, number)

        changed = [slots[i] for i in self.changed]
        outputs = _empty(hooks.end.result_types, self.most_loops)
        if self.most_loops == 1:  # because XLA compiles a nested loop more slowly
            return body(0, (changed, outputs))
        return jax.lax.fori_loop(0, count, body, (changed, outputs))

    def _call_if(
        self, is_due: Any, hook: TracedStep, slots: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns the slots after a hook and its results; zeros if it is not due."""

        def call() -> tuple[list[Any], list[Any]]:
            near = self._flat.homes.bring(slots)
            new, results = hook.call(near, arguments=[])
            return self._flat.homes.send_back(hook.changed, new), results

        def skip() -> tuple[list[Any], list[Any]]:
            old = [slots[i] for i in hook.changed]
            zeros = [jnp.zeros(aval.shape, aval.dtype) for aval in hook.result_types]
            return old, zeros

        new, results = jax.lax.cond(is_due, call, skip)
        return _replace(slots, hook.changed, new), results


def _count_room(hooks: Hooks) -> int:
    """Returns the number of loops whose outputs one program may hold."""
    types = hooks.end.result_types
    size = sum(aval.size * aval.dtype.itemsize for aval in types)
    return _MAX_OUTPUT_BYTES // max(size, 1)


def _empty(types: Sequence[Any], size: int) -> list[Any]:
    """Returns stacks with room for the outputs of `size` steps or loops."""
    return [jnp.zeros((size, *aval.shape), aval.dtype) for aval in types]


def _put(stacks: list[Any], values: Sequence[Any], index: Any) -> list[Any]:
    """Returns stacks of outputs with the values of one step or loop at an index."""
    update = jax.lax.dynamic_update_index_in_dim
    pairs = zip(stacks, values, strict=True)
    return [update(stack, value, index, axis=0) for stack, value in pairs]


def _replace(slots: Sequence[Any], indices: Sequence[int], values: Any) -> list[Any]:
    """Returns the arrays of all slots, with new values at some indices."""
    now = list(slots)
    for index, value in zip(indices, values, strict=True):
        now[index] = value
    return now


def take_batches(
    inputs: Sequence[tuple[PyTree, PyTree]],
    batches_per_step: Sequence[int],
    gathers: Sequence[Gather],
    index: Any,
) -> list[Any]:
    """Returns the leaves of the batches of one step of `Chunk.inputs`, in order.

    If the compiler merged these operations with the arithmetic of the step, rounding
    could depend on the size of the chunk, and on whether rows come from arrays that
    stay on the device. So the step is compiled separately.
    """

    def row(arrays: PyTree, index: Any) -> PyTree:
        def row_of(stack: Any) -> Any:
            return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)

        return jax.tree.map(row_of, arrays)

    def take(index: Any) -> list[Any]:
        batches: list[Any] = []
        datasets = zip(inputs, batches_per_step, gathers, strict=True)
        for (arrays, resident), count, gather in datasets:
            for offset in range(count):
                batch = row(arrays, index * count + offset)
                batches.append(gather.on_device(resident, batch))
        return jax.tree.leaves(batches)

    if not inputs:
        return []

    def take_first(index: Any) -> list[Any]:
        return take(jnp.zeros_like(index))

    def take_in_branch(index: Any) -> list[Any]:
        # XLA's CPU compiler drops barriers before it merges operations, but it keeps a
        # branch whose condition it cannot know. The second branch is never taken. It
        # has the same operations, so the arrays are divided over devices in the same
        # way.
        return jax.lax.cond(index >= 0, take, take_first, index)

    def take_behind_barrier(index: Any) -> list[Any]:
        return jax.lax.optimization_barrier(take(index))

    return jax.lax.platform_dependent(
        index, cpu=take_in_branch, default=take_behind_barrier
    )
