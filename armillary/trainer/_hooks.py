"""Compiles the methods `train_loop_begin` and `train_loop_end` with the steps.

With these methods inside, one program can run many loops. This is possible if they need
no Python, and only reset metrics, set arrays, and compute numbers from them. The user
can declare this (`compile_hooks=True`). Otherwise, this file reads the code of the
methods to find out.
"""

import ast
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from armillary._logging import logger
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.typing import Output

BEGIN = "train_loop_begin"
END = "train_loop_end"
_MARK = "needs_no_python"
_Hook = TypeVar("_Hook", bound=Callable[..., Any])

# Syntax that only computes if all its parts only compute.
_NODES = (
    *(ast.Expr, ast.Return, ast.Pass, ast.Constant, ast.Dict, ast.List, ast.Tuple),
    *(ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.expr_context, ast.keyword),
)
_FUNCTIONS = (
    *("abs", "array", "asarray", "exp", "float32", "full", "log", "max", "maximum"),
    *("mean", "min", "minimum", "ones", "ones_like", "prod", "sqrt", "square", "std"),
    *("sum", "var", "where", "zeros", "zeros_like"),
)
_EXACT = ("array", "asarray", "full", "ones", "ones_like", "zeros", "zeros_like")
_UNKNOWN = object()
_PLAIN = (bool, int, float, str, type(None), jax.Array, np.ndarray, np.generic)


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
        results = self.end.results
        rows = [results([each[i] for each in arrays]) for i in range(num_loops)]
        return [map_output(leaves.__getitem__, self.shape) for leaves in rows]


def map_output(fn: Callable[[Any], Any], output: Any) -> Any:
    """Applies `fn` to each leaf of an output, and keeps the order of its names.

    `jax.tree.map` would sort the names.
    """
    if isinstance(output, dict):
        return {name: map_output(fn, value) for name, value in output.items()}
    return jax.tree.map(fn, output)


def without_python(hook: _Hook) -> _Hook:
    """Marks a hook or metric of this library that may be traced without a check."""
    setattr(hook, _MARK, True)
    return hook


def need_python(owner: Any) -> bool:
    """Returns whether a trainer's hooks may have effects that need Python."""
    for name in (BEGIN, END):
        if effect := find_effect(owner, name):
            logger.debug("`%s` runs in Python: %s", name, effect)
            return True
    return False


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
        trace = functools.partial(
            trace_step,
            owner="the trainer",
            refusal=_refusal,
            before=flat.state.look(),
        )
        begin_and_end = [
            trace(run, flat, (), user_fn=getattr(owner, name))
            for name, run in ((BEGIN, begin), (END, end))
        ]
    except Exception as error:
        if is_asked:
            error.add_note(
                "`compile_hooks=True` makes `train_loop_begin` and `train_loop_end` "
                "part of the compiled program. Leave it out if they need Python."
            )
            raise
        logger.debug("The hooks of the trainer run in Python: %r", error)
        return None
    return Hooks(*begin_and_end, *shapes)


def _refusal(name: str, changes: dict[str, str]) -> str:
    return (
        f"`{name}` changes plain values ({', '.join(sorted(changes)[:5])}). A compiled "
        "program would do this once, and not in every loop. Hold these values in "
        "arrays."
    )


def find_effect(owner: Any, name: str) -> str | None:
    """Returns the reason why Python must run a hook in every loop, or `None`."""
    method = getattr(type(owner), name)
    if getattr(getattr(owner, name), _MARK, False):
        return None
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(method))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return "its code cannot be read"
    not_plain = "it is not a plain method of a plain class"
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return not_plain
    if not inspect.isfunction(method) or not definition.args.args:
        return not_plain
    if name in vars(owner) or type(owner).__setattr__ is not object.__setattr__:
        return not_plain
    if not _is_text_of(definition, method.__code__):
        return "its file has changed since the program was started"
    reader = _Reader(owner, definition.args.args[0].arg, method.__globals__)
    for statement in definition.body:
        if not reader.computes(statement):
            return f"`{ast.unparse(statement)}` is not known to be part of a program"
    return None


def _is_text_of(definition: ast.FunctionDef, code: types.CodeType) -> bool:
    """Returns whether a method was compiled from this text, or its file was edited."""
    module = compile(ast.Module([definition], []), "<hook>", "exec")
    [own] = [each for each in module.co_consts if isinstance(each, types.CodeType)]
    parts = ("co_name", "co_code", "co_names", "co_varnames", "co_consts")
    return all(getattr(own, part) == getattr(code, part) for part in parts)


class _Reader:
    """Checks statement by statement whether code only computes.

    It collects the local names that the statements assign.
    """

    def __init__(self, owner: Any, self_name: str, names: dict[str, Any]) -> None:
        self._owner = owner
        self._self = self_name
        self._globals = names
        self._locals: set[str] = set()

    def computes(self, node: ast.AST) -> bool:
        """Returns whether code is sure to compute, and to have no other effect."""
        match node:
            case ast.Assign(targets=[target], value=value):
                return self.computes(value) and self._may_set(target, value)
            case ast.AugAssign(target=target, value=value):
                return self.computes(value) and self._may_set(target, node)
            case ast.Call(func=ast.Attribute(value=holder, attr=name)):
                arguments = [*node.args, *node.keywords]
                if self._is_jax_numpy(holder):
                    return name in _FUNCTIONS and all(map(self.computes, arguments))
                is_known = name in ("compute", "reset") and not arguments
                return is_known and _is_metric(self._find(holder))
            case ast.Subscript(value=holder, slice=ast.Constant(value=index)):
                return index is ... and _is_nnx(self._find(holder), "Variable")
            case ast.Attribute():
                return isinstance(self._find(node), _PLAIN)
            case ast.Name(id=name):  # a global may change
                return name in self._locals
        parts = ast.iter_child_nodes(node)
        return isinstance(node, _NODES) and all(map(self.computes, parts))

    def _may_set(self, target: ast.expr, source: ast.AST) -> bool:
        match target:
            case ast.Name(id=name):
                self._locals.add(name)
                return name != self._self
            case ast.Attribute(value=ast.Name()):
                held = self._find(target)
                return isinstance(held, jax.Array) and self._is_exact(held, source)
            case ast.Subscript(value=holder) if self.computes(target):
                return self._is_exact(self._find(holder)[...], source)
        return False

    def _is_exact(self, held: jax.Array, source: ast.AST) -> bool:
        """Returns whether a new value of the state is the same in Python and compiled.

        If a loop is cut short, Python runs its hooks, but XLA may round sums and
        products differently in a program. Such a difference is allowed in an output,
        but not in the state, which is carried to the next loop.
        """
        if not jax.numpy.issubdtype(held.dtype, jax.numpy.inexact):
            return True
        for node in ast.walk(source):
            match node:
                case ast.Call(func=ast.Attribute(attr=name)) if name in _EXACT:
                    continue
                case ast.Call() | ast.BinOp() | ast.AugAssign():
                    return False
                case ast.Name(id=name) if name in self._locals:
                    return False
        return True

    def _is_jax_numpy(self, node: ast.expr) -> bool:
        if not isinstance(node, ast.Name) or node.id in self._locals:
            return False
        return self._globals.get(node.id) is jax.numpy

    def _find(self, node: ast.AST) -> Any:
        """Returns the value of `self.a.b`, unless that would run the user's code."""
        if isinstance(node, ast.Name) and node.id == self._self:
            return self._owner
        if not isinstance(node, ast.Attribute):
            return _UNKNOWN
        holder = self._find(node.value)
        if isinstance(getattr(type(holder), node.attr, None), property):
            return _UNKNOWN
        return getattr(holder, "__dict__", {}).get(node.attr, _UNKNOWN)


def _is_nnx(value: Any, kind: str) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(value, getattr(nnx, kind))


def _is_metric(value: Any) -> bool:
    """Returns whether a value is a metric of this library, or a plain one of Flax."""
    if getattr(type(value), _MARK, False):
        return True
    is_of_flax = type(value).__module__.startswith("flax.")
    if not (is_of_flax and _is_nnx(value, "Metric")):
        return False
    parts = [part for part in vars(value).values() if _is_nnx(part, "Metric")]
    return all(map(_is_metric, parts))
