"""What a trainer does where a loop begins and ends, as part of the compiled program.

`train_loop_begin` and `train_loop_end` are Python. Where they are part of the program,
many loops are one program, and Python's time between two loops is gone. They may be if
Python need not run: if all they do is to reset metrics, set arrays, and compute numbers
from them. Either the user says so (`compile_hooks=True`), or their code shows it
(`_pure_code.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from armillary._logging import logger
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.trainer._pure_code import find_effect
from armillary.typing import Output

BEGIN, END = "train_loop_begin", "train_loop_end"
_MARK = "needs_no_python"
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


class Hooks(NamedTuple):
    """The traced hooks of a trainer.

    Attributes:
        begin: What runs before the first step of a loop.
        end: What runs after the last one; its results are the leaves of the output.
        shape: The output, with the number of its leaf in the place of each.
    """

    begin: TracedStep
    end: TracedStep
    shape: Any

    def is_same(self, other: "Hooks") -> bool:
        """Returns whether two traces are the same program."""
        return (
            self.shape == other.shape
            and self.begin.is_same(other.begin)
            and self.end.is_same(other.end)
        )

    def outputs(self, num_loops: int, arrays: Sequence[Any]) -> list[Output]:
        """Returns the output of each loop, from what a program put out for them."""
        results = self.end.results
        rows = [results([each[i] for each in arrays]) for i in range(num_loops)]
        return [_rebuild(self.shape, leaves) for leaves in rows]


def without_python(hook: _Hook) -> _Hook:
    """Marks a hook of the library's own that may be traced, whatever its code calls.

    If it changes plain values or fails when it is traced, it stays in Python.
    """
    setattr(hook, _MARK, True)
    return hook


def need_python(owner: Any) -> bool:
    """Returns whether the code of a trainer's hooks may do more than compute."""
    for name in (BEGIN, END):
        is_marked = getattr(getattr(owner, name), _MARK, False)
        if not is_marked and (effect := find_effect(owner, name)):
            logger.debug("`%s` runs in Python: %s", name, effect)
            return True
    return False


def trace_hooks(owner: Any, flat: FlatState, *, is_asked: bool) -> Hooks | None:
    """Traces the hooks of a trainer; `None` if they must stay in Python.

    The user may say (`is_asked`) that they need not.
    """
    try:
        return _trace(owner, flat)
    except Exception as error:
        if is_asked:
            error.add_note(
                "`compile_hooks=True` makes `train_loop_begin` and `train_loop_end` "
                "part of the compiled program. Leave it out if they need Python."
            )
            raise
        logger.debug("The hooks of the trainer run in Python: %r", error)
        return None


def _trace(owner: Any, flat: FlatState) -> Hooks:
    shapes: list[Any] = []

    def begin() -> None:
        owner.train_loop_begin()

    def end() -> list[Any]:
        leaves: list[Any] = []
        shapes[:] = [_number(owner.train_loop_end(), leaves)]
        return leaves

    traced = [
        trace_step(
            run,
            flat,
            (),
            user_fn=getattr(owner, name),
            owner="the trainer",
            refusal=_refusal,
        )
        for name, run in ((BEGIN, begin), (END, end))
    ]
    return Hooks(*traced, *shapes)


def _refusal(name: str, changes: dict[str, str]) -> str:
    return (
        f"`{name}` changes plain values ({', '.join(sorted(changes)[:5])}), which a "
        "compiled program would do once, and not in every loop. Hold them in arrays."
    )


def _number(output: Any, leaves: list[Any]) -> Any:
    """Returns an output with numbers for leaves, which it collects. Keeps all orders.

    `jax.tree` would sort the user's names.
    """
    if isinstance(output, dict):
        return {name: _number(value, leaves) for name, value in output.items()}
    if output is None:
        return None
    leaves.append(output)
    return len(leaves) - 1


def _rebuild(shape: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(shape, dict):
        return {name: _rebuild(part, leaves) for name, part in shape.items()}
    return None if shape is None else leaves[shape]
