"""What a trainer does where a loop begins and ends, as part of the compiled program.

`train_loop_begin` and `train_loop_end` are Python. Where they are part of the program,
many loops are one program, and Python's time between two loops is gone. They may be if
Python need not run: if all they do is to reset metrics, set arrays, and compute numbers
from them. Either the user says so (`compile_hooks=True`), or tracing shows it: what the
code computes is in the program, what it reads of the trainer is watched like what a
step reads, and `_Watch` stops it before it does anything else.
"""

import contextlib
import dis
import functools
import gc
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from armillary._frames import is_library
from armillary._logging import logger
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.typing import Output

BEGIN, END = "train_loop_begin", "train_loop_end"
# Libraries that compute: what they are called for is in the program.
_COMPUTING = ("flax", "jax", "jaxlib", "keras", "optax")
# Functions of Python's, and methods of its containers, that only look.
_LOOKING = (
    *("abs", "getattr", "hasattr", "isinstance", "len", "max", "min", "round", "sum"),
    *("count", "get", "index", "items", "keys", "values"),
)
# How Python asks a traced array for its value, or for a text.
_FETCHING = (
    *("__array__", "__bool__", "__complex__", "__float__", "__format__", "__index__"),
    *("__int__", "__repr__", "__str__", "item", "tolist"),
)
_PLAIN = (bool, int, float, str, jax.Array, np.ndarray, np.generic)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType)
_PYTHON = sys.modules["builtins"]


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


def trace_hooks(owner: Any, flat: FlatState, *, is_asked: bool) -> Hooks | None:
    """Traces the hooks of a trainer; `None` if they must stay in Python.

    The user may say (`is_asked`) that they need not.
    """
    try:
        with contextlib.nullcontext() if is_asked else _Watch(owner).watching():
            return _trace(owner, flat, is_asked)
    except (Exception, _NeedsPython) as error:
        if is_asked:
            error.add_note(
                "`compile_hooks=True` makes `train_loop_begin` and `train_loop_end` "
                "part of the compiled program. Leave it out if they need Python."
            )
            raise
        logger.debug("The hooks of the trainer run in Python: %s", error)
        return None


def _trace(owner: Any, flat: FlatState, is_asked: bool) -> Hooks:
    shapes: list[Any] = []

    def begin() -> None:
        owner.train_loop_begin()

    def end() -> list[Any]:
        leaves: list[Any] = []
        shapes[:] = [_number(owner.train_loop_end(), leaves)]
        for leaf in jax.tree.leaves(leaves):
            if not (is_asked or isinstance(leaf, _PLAIN)):
                raise _NeedsPython(f"they return {leaf!r:.60}")
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


class _NeedsPython(BaseException):
    """Python must run a hook in every loop. No handler of the user's stops it."""


class _Watch:
    """Stops the user's code, while it is traced, before it does more than compute.

    It may call code of the same kind, libraries that compute, and functions that look
    at their arguments only. It may read what hangs on the trainer, but no global value,
    since nobody would see in a program that it changes; and set arrays, but nothing
    else.
    """

    def __init__(self, owner: Any) -> None:
        self._owner, self._known = owner, set()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches all calls of this thread."""
        if sys.getprofile() is not None:
            raise _NeedsPython("a profiler watches their calls")
        # Callbacks of the garbage collector are calls of this thread, not of the hooks.
        collects = gc.isenabled()
        gc.disable()
        sys.setprofile(self._see)
        try:
            yield
            # Python drops what raises where nobody can catch it, as in a `__del__`.
            if sys.getprofile() is None:
                raise _NeedsPython("they were not watched to their end")
        finally:
            sys.setprofile(None)
            if collects:
                gc.enable()

    def _see(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and _is_of_user(frame.f_globals.get("__name__")):
            if frame.f_code not in self._known:
                self._check_code(frame)
            return
        caller = frame.f_back if event == "call" else frame
        is_return = event not in ("call", "c_call")
        if is_return or not caller or not _is_of_user(caller.f_globals.get("__name__")):
            return
        if event == "c_call":
            holder, name = getattr(argument, "__self__", None), argument.__name__
            is_known = holder is _PYTHON or isinstance(holder, dict | list | tuple)
            is_fine = is_known and name in _LOOKING
            is_fine |= _top(argument.__module__) in _COMPUTING
        else:
            name, module = frame.f_code.co_name, _top(frame.f_globals.get("__name__"))
            is_fine = module in _COMPUTING and name not in _FETCHING
            is_fine |= name in (BEGIN, END, "__getattribute__")
        if not is_fine:
            line = f"{caller.f_code.co_filename}:{caller.f_lineno}"
            raise _NeedsPython(f"they call `{name}` at {line}")

    def _check_code(self, frame: types.FrameType) -> None:
        """Looks at a function, before it runs, for what it reads and sets."""
        inner, names, index = [frame.f_code], set(), None
        while inner:
            self._known.add(code := inner.pop())
            inner += [each for each in code.co_consts if isinstance(each, type(code))]
            for each in dis.get_instructions(code):
                if each.opname == "LOAD_GLOBAL":
                    names.add(each.argval)
                elif each.opname.startswith(("STORE_", "DELETE_")):
                    held = vars(self._owner).get(str(each.argval))
                    is_fine = each.opname.startswith(("STORE_FAST", "STORE_DEREF"))
                    is_fine |= each.opname == "STORE_ATTR" and _is_array(held)
                    is_fine |= each.opname == "STORE_SUBSCR" and index is ...
                    if not is_fine:
                        name = each.argval or "an item"
                        raise _NeedsPython(f"they set `{name}`, which is no array")
                index = each.argval
        places = frame.f_globals, frame.f_builtins, frame.f_locals
        for name in names.union(frame.f_code.co_freevars):
            value = next((place[name] for place in places if name in place), None)
            is_module = isinstance(value, types.ModuleType)
            source = value.__name__ if is_module else type(value).__module__
            is_fixed = _top(source) in _COMPUTING and not _is_array(value)
            is_fixed |= isinstance(value, _FUNCTIONS) or value is self._owner
            if not is_fixed:
                raise _NeedsPython(f"they read the global name `{name}`")


@functools.cache
def _is_of_user(module: str | None) -> bool:
    is_made = str(module).startswith("namedtuple_")  # by the standard library
    return not (is_made or is_library(module))


def _top(module: Any) -> str:
    return str(module).partition(".")[0]


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array)


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
