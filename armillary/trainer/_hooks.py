"""What a trainer does where a loop begins and ends, as part of the compiled program.

`train_loop_begin` and `train_loop_end` are Python. Where they are part of the program,
many loops are one program, and Python's time between two loops is gone. They may be if
Python need not run: if all they do is to reset metrics, set arrays, and compute numbers
from them. Either the user says so (`compile_hooks=True`), or their code shows it
(`_pure_code.py`).

Reads the code of a hook, to tell whether Python must run it in every loop.

Code that prints, logs, keeps a count or asks for the time must run in every loop; code
that resets metrics and computes numbers from arrays need not. Only what is known to be
of the second kind counts as such. That is little, on purpose: the names of the trainer
itself, arithmetic, a few functions of `jax.numpy`, and the metrics of Flax.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from armillary._logging import logger
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.typing import Output

_STATEMENTS = (ast.Expr, ast.Return, ast.Pass, ast.Assign, ast.AugAssign, ast.AnnAssign)
_EXPRESSIONS = (
    *(ast.Constant, ast.Dict, ast.List, ast.Tuple, ast.BinOp, ast.UnaryOp),
    *(ast.operator, ast.unaryop, ast.expr_context, ast.keyword),
)
_FUNCTIONS = (
    *("abs", "array", "asarray", "exp", "float32", "full", "log", "max", "maximum"),
    *("mean", "min", "minimum", "ones", "ones_like", "prod", "sqrt", "square", "std"),
    *("sum", "var", "where", "zeros", "zeros_like"),
)
_METRIC_METHODS = ("compute", "reset")
_PLAIN = (bool, int, float, str, type(None), jax.Array, np.ndarray, np.generic)
_UNKNOWN = object()


def find_effect(owner: Any, name: str) -> str | None:
    """Returns why Python must run a method of a trainer in every loop, if it must."""
    method = getattr(type(owner), name)
    if name in vars(owner) or not inspect.isfunction(method):
        return "it is no plain method"
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return "its code cannot be read"
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return "it is no plain method"
    if type(owner).__setattr__ is not object.__setattr__:
        return f"`{type(owner).__name__}` defines `__setattr__`"
    reader = _Reader(owner, definition.args.args[0].arg, method.__globals__)
    return next(reader.effects(definition.body), None)


class _Reader:
    """Reads statements, and knows which names are local by now."""

    def __init__(self, owner: Any, self_name: str, names: dict[str, Any]) -> None:
        self._owner, self._self, self._globals = owner, self_name, names
        self._locals: set[str] = set()

    def effects(self, body: list[ast.stmt]) -> Iterator[str]:
        """Yields what is not known to need no Python."""
        for statement in body:
            if not isinstance(statement, _STATEMENTS):
                yield _quote(statement)
            elif isinstance(statement, ast.Assign):
                yield from self._value(statement.value)
                for target in statement.targets:
                    yield from self._target(target)
            elif isinstance(statement, ast.AugAssign | ast.AnnAssign):
                if statement.value is not None:
                    yield from self._value(statement.value)
                yield from self._target(statement.target)
            elif isinstance(statement, ast.Expr | ast.Return) and statement.value:
                yield from self._value(statement.value)

    def _target(self, target: ast.expr) -> Iterator[str]:
        if isinstance(target, ast.Name) and target.id != self._self:
            self._locals.add(target.id)
            return
        place = target.value if isinstance(target, ast.Subscript) else target
        held = self._find(place) if isinstance(place, ast.Attribute) else _UNKNOWN
        if isinstance(target, ast.Subscript):
            is_known = _is_variable(held) and _is_whole(target.slice)
        else:
            is_known = isinstance(held, jax.Array) and self._is_own(place)
        if not is_known:
            yield _quote(target)

    def _value(self, node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Call):
            if not self._is_known_call(node):
                yield _quote(node)
                return
            for argument in (*node.args, *node.keywords):
                yield from self._value(argument)
        elif isinstance(node, ast.Subscript):
            if not (_is_variable(self._find(node.value)) and _is_whole(node.slice)):
                yield _quote(node)
        elif isinstance(node, ast.Attribute):
            if not isinstance(self._find(node), _PLAIN):
                yield _quote(node)
        elif isinstance(node, ast.Name):
            if node.id not in self._locals:  # a global, which may change
                yield _quote(node)
        elif isinstance(node, _EXPRESSIONS):
            for part in ast.iter_child_nodes(node):
                yield from self._value(part)
        else:
            yield _quote(node)

    def _is_known_call(self, call: ast.Call) -> bool:
        function = call.func
        if not isinstance(function, ast.Attribute):
            return False
        if isinstance(function.value, ast.Name) and function.value.id != self._self:
            is_shadowed = function.value.id in self._locals
            module = self._globals.get(function.value.id)
            return (
                not is_shadowed and module is jax.numpy and function.attr in _FUNCTIONS
            )
        is_bare = not (call.args or call.keywords)
        held = self._find(function.value)
        return is_bare and function.attr in _METRIC_METHODS and _is_metric(held)

    def _is_own(self, place: ast.AST) -> bool:
        """Returns whether a place is an attribute of the trainer itself."""
        return isinstance(place, ast.Attribute) and isinstance(place.value, ast.Name)

    def _find(self, node: ast.AST) -> Any:
        """Returns what a chain of names such as `self.a.b` holds, if that runs no code.

        Properties and other code of the user are not known.
        """
        if isinstance(node, ast.Name):
            is_owner = node.id == self._self and node.id not in self._locals
            return self._owner if is_owner else _UNKNOWN
        if not isinstance(node, ast.Attribute):
            return _UNKNOWN
        holder = self._find(node.value)
        is_property = isinstance(getattr(type(holder), node.attr, None), property)
        if holder is _UNKNOWN or is_property:
            return _UNKNOWN
        return getattr(holder, "__dict__", {}).get(node.attr, _UNKNOWN)


def _is_whole(index: ast.AST) -> bool:
    return isinstance(index, ast.Constant) and index.value is ...


def _is_variable(value: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, nnx.Variable)


def _is_metric(value: Any) -> bool:
    """Returns whether a value is a metric of Flax, and made of such alone."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(value, nnx.Metric):
        return False
    if not type(value).__module__.startswith("flax."):
        return False
    return all(
        _is_metric(part)
        for part in vars(value).values()
        if isinstance(part, nnx.Metric)
    )


def _quote(node: ast.AST) -> str:
    return f"`{ast.unparse(node)}` is not known to be part of a program"


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

    def output(self, arrays: Sequence[Any]) -> Output:
        """Returns the output of one loop, from the arrays among its leaves."""
        leaves = self.end.results(arrays)
        return _rebuild(self.shape, leaves)


class LoopOutputs:
    """The outputs of loops that ran with their hooks, on the device until `fetch`."""

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._stacks: list[tuple[Sequence[Any], int]] = []
        self.num_loops = 0

    def add(self, arrays: Sequence[jax.Array], count: int) -> None:
        """Adds the first `count` loops of what a program puts out."""
        if count:
            self._stacks.append((arrays, count))
            self.num_loops += count

    def fetch(self) -> None:
        """Waits for the device, and fetches the values."""
        self._stacks = jax.device_get(self._stacks)

    def __iter__(self) -> Iterator[Output]:
        """Yields the output of each loop."""
        for arrays, count in self._stacks:
            for index in range(count):
                yield self._hooks.output([array[index] for array in arrays])


def without_python(hook: _Hook) -> _Hook:
    """Marks a hook of the library's own that may be traced, whatever its code calls.

    If it changes plain values or fails when it is traced, it stays in Python.
    """
    setattr(hook, _MARK, True)
    return hook


def find_reason(owner: Any) -> str | None:
    """Returns why the hooks of a trainer stay in Python; `None` if they need not."""
    for name in (BEGIN, END):
        if getattr(getattr(owner, name), _MARK, False):
            continue
        if effect := find_effect(owner, name):
            return f"`{name}` runs in Python: {effect}"
    return None


def trace_hooks(owner: Any, flat: FlatState, *, is_asked: bool) -> Hooks | None:
    """Traces the hooks of a trainer; `None` if they must stay in Python."""
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

    def end() -> list[Any]:
        leaves: list[Any] = []
        shapes[:] = [_number(owner.train_loop_end(), leaves)]
        return leaves

    def begin() -> None:
        owner.train_loop_begin()

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
