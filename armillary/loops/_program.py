"""One compiled program: some steps of a chunk, with the state carried on the device.

The program takes where to begin and how many steps to run as numbers, not as shapes. So
one program serves every remainder, a chunk may be used up over several loops, and the
same instructions run for every step whatever the loop's length is: that is why results
do not depend, bit for bit, on how steps are divided into loops and chunks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._jaxpr import walk_programs
from armillary._typing import PyTree
from armillary.distribute import Placement, TracedStep
from armillary.loops._step_iterator import take_batch


class Program:
    """Compiles a traced step into a loop over a chunk.

    Args:
        step: The step.
        batches_per_step: How many batches of each dataset it takes.
        capacity: Steps for which the chunk has room.
        placement: Where the state lives.
        keep_results: Whether to return what each step returned.
        is_nested: Whether the loop runs on the device. If not, each step is a program
            of its own.
    """

    def __init__(
        self,
        step: TracedStep,
        batches_per_step: Sequence[int],
        capacity: int,
        placement: Placement,
        *,
        keep_results: bool,
        is_nested: bool,
    ) -> None:
        self._step = step
        self._batches_per_step = tuple(batches_per_step)
        self._capacity = capacity
        self._keep_results = keep_results
        self.is_nested = is_nested
        self._compiled = jax.jit(
            self._run_many if is_nested else self._run_one,
            donate_argnums=0,
            out_shardings=(placement.shardings(step.changed), None, None),
        )

    @property
    def most_steps(self) -> int:
        """The largest number of steps that one call may run."""
        return self._capacity if self.is_nested else 1

    def __call__(
        self,
        changed: list[jax.Array],
        kept: list[jax.Array],
        chunk: Sequence[PyTree],
        start: int,
        num_steps: int,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """Runs steps `start` to `start + num_steps` of a chunk.

        Returns:
            The changed slots, and the result arrays with the steps as first axis: step
            `start + i` at index `start + i` of a nested program, at 0 of any other. The
            last one is there to be waited for.
        """
        begin, count = np.int32(start), np.int32(num_steps)
        return self._compiled(changed, kept, list(chunk), begin, count)

    def results(self, arrays: Sequence[jax.Array], index: int) -> PyTree:
        """Returns what the step at `index` returned."""
        return self._step.results([array[index] for array in arrays])

    def _batches(self, chunk: Sequence[PyTree], index: Any) -> list[Any]:
        return jax.tree.leaves(
            [
                [take_batch(arrays, index * count + offset) for offset in range(count)]
                for arrays, count in zip(chunk, self._batches_per_step, strict=True)
            ]
        )

    def _one_step(
        self, changed: list[Any], kept: list[Any], chunk: Sequence[PyTree], index: Any
    ) -> tuple[list[Any], list[Any]]:
        slots = self._step.join(changed, kept)
        new, results = self._step.call(slots, self._batches(chunk, index))
        return new, results if self._keep_results else []

    def _run_one(
        self, changed: list[Any], kept: list[Any], chunk: Any, start: Any, count: Any
    ) -> tuple[list[Any], list[Any], Any]:
        new, results = self._one_step(changed, kept, chunk, start)
        return new, [result[None] for result in results], start + count

    def _run_many(
        self, changed: list[Any], kept: list[Any], chunk: Any, start: Any, count: Any
    ) -> tuple[list[Any], list[Any], Any]:
        _, shapes = jax.eval_shape(self._one_step, changed, kept, chunk, start)
        results = [
            jnp.zeros((self._capacity, *shape.shape), shape.dtype) for shape in shapes
        ]

        def body(index: Any, carry: tuple[list[Any], list[Any]]) -> Any:
            changed, results = carry
            new, values = self._one_step(changed, kept, chunk, index)
            return new, [
                jax.lax.dynamic_update_index_in_dim(all_, value, index, 0)
                for all_, value in zip(results, values, strict=True)
            ]

        stop = start + count
        return *jax.lax.fori_loop(start, stop, body, (changed, results)), stop


def has_slow_loop(program: core.ClosedJaxpr, platform: str) -> bool:
    """Returns whether a step is much slower inside a loop on the device.

    XLA's CPU compiler optimizes convolutions only in a program's outermost part; the
    gradient of one inside a loop runs ten times slower. The answer depends on nothing
    but the step, so that a resumed run makes the same choice.
    """
    return platform == "cpu" and any(
        equation.primitive.name == "conv_general_dilated"
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )
