"""Walks a traced program and the programs nested in it; tells when one is traced."""

import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core, source_info_util

# Lines in these packages are not the user's.
_LIBRARIES = ("armillary", "contextlib", "flax", "functools", "jax", "jaxlib", "optax")
_NO_TRACE = core.get_opaque_trace_state(convention="flax")


def is_in_trace() -> bool:
    """Returns whether JAX traces a function at the moment."""
    return core.get_opaque_trace_state(convention="flax") != _NO_TRACE


def walk_programs(program: core.ClosedJaxpr) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the equations' owner (a `Jaxpr`) and the constants of each program.

    The program itself comes first, then the bodies of its loops, branches, calls and
    maps, at any depth.
    """
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        jaxpr = getattr(current, "jaxpr", current)
        yield jaxpr, list(getattr(current, "consts", ()))
        for equation in jaxpr.eqns:
            pending.extend(programs_in(equation))


def programs_in(equation: Any) -> Iterator[Any]:
    """Yields the programs of one equation: bodies, branches, what it calls."""
    for parameter in equation.params.values():
        for leaf in jax.tree.leaves(parameter, is_leaf=_is_program):
            if _is_program(leaf):
                yield leaf


def called_program(equation: Any) -> Any:
    """Returns the program that an equation runs once and does no more; else `None`."""
    programs = list(programs_in(equation))
    if len(programs) != 1 or equation.primitive.name == "scan":
        return None
    jaxpr = getattr(programs[0], "jaxpr", programs[0])
    is_call = len(jaxpr.outvars) == len(equation.outvars) and [
        atom.aval.strip_weak_type() for atom in equation.invars
    ] == [variable.aval.strip_weak_type() for variable in jaxpr.invars]
    return programs[0] if is_call else None


def source_line(equation: Any) -> str:
    """Returns the user's line that an equation comes from, or the closest known one."""
    traceback = equation.source_info.traceback
    libraries = _library_folders()
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(libraries):
            name = frame.function_name.rpartition(".")[2]
            return f"{frame.file_name}:{frame.line_num} ({name})"
    return source_info_util.summarize(equation.source_info)


def _library_folders() -> tuple[str, ...]:
    modules = [sys.modules[name] for name in _LIBRARIES if name in sys.modules]
    files = [str(module.__file__) for module in modules]
    return (*(file.removesuffix("__init__.py") for file in files), "<")


def _is_program(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)
