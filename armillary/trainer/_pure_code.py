"""Reads the code of a hook, to tell whether Python must run it in every loop.

Code that prints, logs, keeps a count or asks for the time must run in every loop; code
that resets metrics and computes numbers from arrays need not. Only what is known to be
of the second kind counts as such. That is little, on purpose: the names of the trainer
itself, arithmetic, a few functions of `jax.numpy`, and the metrics of Flax.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

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
