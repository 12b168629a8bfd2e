"""Compiles the methods `train_loop_begin` and `train_loop_end` with the steps.

With these methods inside, one program can run many loops. This is possible if they need
no Python, and only reset metrics, set arrays, and compute numbers from them. The user
can declare this (`compile_hooks=True`). Otherwise, `_hook_code.py` reads the code of
the methods to find out.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from armillary._logging import logger
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.trainer._hook_code import BEGIN, END
from armillary.typing import Output


class Hooks(NamedTuple):
    """The traced hooks of a trainer."""

    begin: TracedStep
    end: TracedStep  # its results are the leaves of the output
    shape: Any  # the output, with an index into the leaves in place of each leaf

    def is_same(self, other: "Hooks") -> bool:
        return (
            self.shape == other.shape
            and self.begin.is_same(other.begin)
            and self.end.is_same(other.end)
        )

    def outputs(self, num_loops: int, arrays: Sequence[Any]) -> list[Output]:
        """Returns the output of each loop, from the output arrays of a program."""
        outputs: list[Output] = []
        for number in range(num_loops):
            leaves = self.end.results([array[number] for array in arrays])
            outputs.append(map_output(leaves.__getitem__, self.shape))
        return outputs


def map_output(fn: Callable[[Any], Any], output: Any) -> Any:
    """Applies `fn` to each leaf of an output, and keeps the order of its names.

    `jax.tree.map` would sort the names.
    """
    if isinstance(output, dict):
        return {name: map_output(fn, value) for name, value in output.items()}
    return jax.tree.map(fn, output)


def trace_hooks(owner: Any, flat: FlatState, *, is_asked: bool) -> Hooks | None:
    """Traces the hooks.

    Returns:
        The traced hooks, or `None` if they must run in Python. If the user asked for
        compiled hooks (`is_asked`), that is an error instead.
    """
    shapes: list[Any] = []

    def begin() -> None:
        owner.train_loop_begin()

    def end() -> list[Any]:
        output = owner.train_loop_end()
        leaves: list[Any] = []
        numbers = itertools.count()
        map_output(leaves.append, output)
        shapes[:] = [map_output(lambda _: next(numbers), output)]
        return leaves

    try:
        # A hook that changes plain values is refused, so each trace starts from the
        # same values.
        before = flat.state.look()

        def trace(hook: Callable[[], Any], name: str) -> TracedStep:
            return trace_step(
                hook,
                flat,
                (),
                user_fn=getattr(owner, name),
                owner="the trainer",
                refusal=_refusal,
                before=before,
            )

        traced_begin = trace(begin, BEGIN)
        traced_end = trace(end, END)
    except Exception as error:
        if is_asked:
            error.add_note(
                "`compile_hooks=True` makes `train_loop_begin` and `train_loop_end` "
                "part of the compiled program. Leave it out if they need Python."
            )
            raise
        logger.debug("The hooks of the trainer run in Python: %r", error)
        return None
    [shape] = shapes
    return Hooks(traced_begin, traced_end, shape)


def _refusal(name: str, changes: dict[str, str]) -> str:
    return (
        f"`{name}` changes plain values ({', '.join(sorted(changes)[:5])}). A compiled "
        "program would do this once, and not in every loop. Hold these values in "
        "arrays."
    )
