"""One compiled program: some steps of a chunk, with the state carried on the device.

The program takes where to begin and how many steps to run as numbers, not as shapes. So
one program serves every remainder, a chunk may be used up over several loops, and the
same instructions run for every step whatever the loop's length is: that is why results
do not depend, bit for bit, on how steps are divided into loops and chunks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._jaxpr import walk_programs
from armillary._typing import PyTree
from armillary.distribute import Placement, TracedStep, corrected_types
from armillary.loops._non_finite import Health, StepGuard
from armillary.loops._take_batches import Gather, take_batches
from armillary.xla._lowerings import is_canonical


class _Inputs(NamedTuple):
    """What a call takes besides the arrays that it takes over."""

    others: list[Any]
    chunk: list[Any]
    start: Any
    num_steps: Any
    health: Any


class Program:
    """Compiles a traced step into a loop over a chunk.

    Args:
        step: The step.
        batches_per_step: How many batches of each dataset it takes.
        gathers: For each dataset, `Gather.on_device`.
        capacity: Steps for which the chunk has room.
        placement: Where the state lives.
        keep_results: Whether to return what each step returned.
        is_nested: Whether the loop runs on the device. If not, each step is a program
            of its own.
        guard: Undoes bad steps. Without it, none is looked at.
        health_shardings: Where what the guard knows belongs; `None` for anywhere.
    """

    def __init__(
        self,
        step: TracedStep,
        batches_per_step: Sequence[int],
        gathers: Sequence[Gather],
        capacity: int,
        placement: Placement,
        *,
        keep_results: bool,
        is_nested: bool,
        guard: StepGuard | None = None,
        health_shardings: Any = None,
    ) -> None:
        self._step = step
        self._batches_per_step = tuple(batches_per_step)
        self._gathers = tuple(gathers)
        self._capacity = capacity
        self._placement = placement
        self._keep_results = keep_results
        self._guard = guard
        self.is_nested = is_nested
        self._compiled = jax.jit(
            self._run,
            donate_argnums=0,
            out_shardings=(
                placement.shardings(step.changed),
                None,
                None,
                health_shardings,
            ),
        )

    @property
    def most_steps(self) -> int:
        """The largest number of steps that one call may run."""
        return self._capacity if self.is_nested else 1

    def __call__(
        self,
        donated: list[jax.Array],
        others: list[jax.Array],
        chunk: Sequence[tuple[PyTree, PyTree]],
        start: int,
        num_steps: int,
        health: Health | None = None,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array, Health | None]:
        """Runs steps `start` to `start + num_steps` of a chunk, given as `inputs`.

        `donated` and `others` are what `Placement.place` gives, and `health` what the
        guard knows, if there is one.

        Returns:
            The changed slots, and the result arrays with the steps as first axis: step
            `start + i` at index `start + i` of a nested program, at 0 of any other. An
            array that is there to be waited for, and what the guard knows now.
        """
        begin, count = np.int32(start), np.int32(num_steps)
        inputs = _Inputs(others, list(chunk), begin, count, health)
        # JAX traces some operations while it compiles.
        with corrected_types():
            return self._compiled(donated, inputs)

    def results(self, arrays: Sequence[jax.Array], index: int) -> PyTree:
        """Returns what the step at `index` returned."""
        return self._step.results([array[index] for array in arrays])

    def batches(self, chunk: Sequence[PyTree], index: Any) -> list[Any]:
        """Returns the arrays of the batches of one step."""
        return take_batches(chunk, self._batches_per_step, self._gathers, index)

    def _one_step(
        self, slots: list[Any], chunk: Sequence[PyTree], index: Any, health: Any
    ) -> tuple[list[Any], list[Any], Any]:
        new, results = self._step.call(slots, self.batches(chunk, index))
        if self._guard is not None:
            old = [slots[i] for i in self._step.changed]
            new, health = self._guard.check(old, new, health)
        return new, results if self._keep_results else [], health

    def _run(
        self, donated: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        slots = self._placement.join(self._step.changed, donated, inputs.others)
        run = self._run_many if self.is_nested else self._run_one
        return run(slots, inputs)

    def _run_one(
        self, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        _, chunk, start, num_steps, health = inputs
        new, results, health = self._one_step(slots, chunk, start, health)
        stop = jnp.asarray(start + num_steps)
        return new, [result[None] for result in results], stop, health

    def _run_many(
        self, slots: list[Any], inputs: _Inputs
    ) -> tuple[list[Any], list[Any], Any, Any]:
        _, chunk, start, num_steps, health = inputs
        _, shapes, _ = jax.eval_shape(self._one_step, slots, chunk, start, health)
        results = [
            jnp.zeros((self._capacity, *shape.shape), shape.dtype) for shape in shapes
        ]
        stop = jnp.asarray(start + num_steps)

        def goes_on(carry: tuple[Any, ...]) -> Any:
            index, _, _, health = carry
            return (
                index < stop if health is None else ((index < stop) & ~health.is_halted)
            )

        def body(carry: tuple[Any, ...]) -> Any:
            index, changed, results, health = carry
            now = list(slots)
            for i, value in zip(self._step.changed, changed, strict=True):
                now[i] = value
            new, values, health = self._one_step(now, chunk, index, health)
            results = [
                jax.lax.dynamic_update_index_in_dim(all_, value, index, 0)
                for all_, value in zip(results, values, strict=True)
            ]
            return index + 1, new, results, health

        changed = [slots[i] for i in self._step.changed]
        begin = (start, changed, results, health)
        _, new, results, health = jax.lax.while_loop(goes_on, body, begin)
        return new, results, stop, health


def has_slow_loop(program: core.ClosedJaxpr, platform: str) -> bool:
    """Returns whether a step is much slower inside a loop on the device.

    XLA's CPU compiler optimizes convolutions only in a program's outermost part; the
    gradient of one inside a loop runs ten times slower, unless it is lowered in the
    form that needs no optimizing. The answer depends on nothing but the step and that
    setting, so that a resumed run makes the same choice.
    """
    return platform == "cpu" and any(
        equation.primitive.name == "conv_general_dilated" and not is_canonical(equation)
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )
