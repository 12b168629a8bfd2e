"""Reads the code of the hooks of a trainer, to find out whether they need Python.

A hook needs no Python if it only resets metrics, sets arrays, and computes numbers from
them. Then it can be a part of the device program.
"""

import ast
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from armillary._logging import logger
from armillary.state._adapters import NodePart, is_tree_variable, plays

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


def without_python(hook: _Hook) -> _Hook:
    """Marks a hook or metric of this library that may be traced without a check."""
    setattr(hook, _MARK, True)
    return hook


def need_python(owner: Any) -> bool:
    """Returns whether a trainer's hooks may have effects that need Python."""
    for name in (BEGIN, END):
        effect = find_effect(owner, name)
        if effect is not None:
            logger.debug("`%s` runs in Python: %s", name, effect)
            return True
    return False


def find_effect(owner: Any, name: str) -> str | None:
    """Returns the reason why Python must run a hook in every loop, or `None`."""
    method = getattr(type(owner), name)
    if _is_marked(getattr(owner, name)):
        return None

    try:
        source = textwrap.dedent(inspect.getsource(method))
        [definition] = ast.parse(source).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return "its code cannot be read"

    not_plain = "it is not a plain method of a plain class"
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return not_plain
    if not inspect.isfunction(method) or not definition.args.args:
        return not_plain

    # The object may have a method of its own, and setting an attribute may run code.
    is_replaced = name in vars(owner)
    has_own_setattr = type(owner).__setattr__ is not object.__setattr__
    if is_replaced or has_own_setattr:
        return not_plain
    if not _is_text_of(definition, method.__code__):
        return "its file has changed since the program was started"

    self_name = definition.args.args[0].arg
    reader = _Reader(owner, self_name, method.__globals__)
    for statement in definition.body:
        if not reader.computes(statement):
            return f"`{ast.unparse(statement)}` is not known to be part of a program"
    return None


def _is_text_of(definition: ast.FunctionDef, code: types.CodeType) -> bool:
    """Returns whether a method was compiled from this text, or its file was edited."""
    module = compile(ast.Module([definition], []), "<hook>", "exec")
    # The code of the method is the only code among the constants of its module.
    [compiled] = filter(_is_code, module.co_consts)
    return (
        compiled.co_name == code.co_name
        and compiled.co_code == code.co_code
        and compiled.co_names == code.co_names
        and compiled.co_varnames == code.co_varnames
        and compiled.co_consts == code.co_consts
    )


def _is_code(constant: Any) -> bool:
    return isinstance(constant, types.CodeType)


def _is_marked(thing: Any) -> bool:
    """Returns whether `without_python` has marked a hook or a class of metrics."""
    return getattr(thing, _MARK, False)


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
                if self._is_jax_numpy(holder):  # such as `jnp.mean(x)`
                    return name in _FUNCTIONS and all(map(self.computes, arguments))
                # Such as `self.accuracy.compute()`.
                is_of_metric = name in ("compute", "reset") and not arguments
                return is_of_metric and _is_metric(self._find(holder))
            case ast.Subscript(value=holder, slice=ast.Constant(value=index)):
                # Only `variable[...]`, the value of a variable of NNX.
                return index is ... and is_tree_variable(self._find(holder))
            case ast.Attribute():
                return isinstance(self._find(node), _PLAIN)
            case ast.Name(id=name):  # a global may change
                return name in self._locals

        if not isinstance(node, _NODES):
            return False
        parts = ast.iter_child_nodes(node)
        return all(map(self.computes, parts))

    def _may_set(self, target: ast.expr, source: ast.AST) -> bool:
        """Returns whether a program may assign to a target.

        It may assign to a local name, to an array (`self.total`), and to the value of a
        variable (`self.total[...]`).
        """
        match target:
            case ast.Name(id=name):
                self._locals.add(name)
                return name != self._self
            case ast.Attribute(value=ast.Name()):
                held = self._find(target)
                return isinstance(held, jax.Array) and self._is_exact(held, source)
            case ast.Subscript(value=holder) if self.computes(target):
                held = self._find(holder)[...]
                return self._is_exact(held, source)
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

        name = node.attr
        holder = self._find(node.value)
        in_class = getattr(type(holder), name, None)
        if isinstance(in_class, property):
            return _UNKNOWN
        # Not by `getattr`, because a class may have a `__getattr__`.
        own = getattr(holder, "__dict__", {})
        return own.get(name, _UNKNOWN)


def _is_metric(value: Any) -> bool:
    """Returns whether a value is a metric of this library, or a plain one of Flax."""
    if _is_marked(type(value)):
        return True
    is_of_flax = type(value).__module__.startswith("flax.")
    if not is_of_flax or not plays(value, NodePart.METRIC):
        return False
    # A metric of several others.
    parts = [part for part in vars(value).values() if plays(part, NodePart.METRIC)]
    return all(map(_is_metric, parts))
