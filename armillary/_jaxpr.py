"""Walks a traced program and the programs nested in it; tells when one is traced."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.extend.core.primitives import jit_p

from armillary._frames import is_library_file
from armillary._jax_compat import get_trace_state

_NO_TRACE = get_trace_state()


def is_in_trace() -> bool:
    """Returns whether JAX traces a function at the moment."""
    return get_trace_state() != _NO_TRACE


def walk_programs(program: core.ClosedJaxpr) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the `Jaxpr` and constants of a program and of each one nested in it."""
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        jaxpr = getattr(current, "jaxpr", current)
        yield jaxpr, list(getattr(current, "consts", ()))
        for equation in jaxpr.eqns:
            pending.extend(programs_in(equation))


def walk_equations(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the equations of a program and of each one nested in it."""
    for jaxpr, _ in walk_programs(program):
        yield from jaxpr.eqns


def programs_in(equation: Any) -> Iterator[Any]:
    """Yields the programs of one equation: bodies, branches, what it calls."""
    for parameter in equation.params.values():
        yield from filter(_is_program, jax.tree.leaves(parameter, is_leaf=_is_program))


def named_axes(equation: Any) -> tuple[Any, ...]:
    """Returns the axes that a collective is over."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def mark(value: Any, name: str) -> Any:
    """Returns a value that carries a name through the program, and its derivatives."""
    # Not above: only programs with several replicas need it.
    from jax.ad_checkpoint import checkpoint_name

    return checkpoint_name(value, name)


def source_line(equation: Any) -> str:
    """Returns the user's line that an equation comes from, or the closest known one."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not is_library_file(frame.file_name):
            name = frame.function_name.rpartition(".")[2]
            return f"{frame.file_name}:{frame.line_num} ({name})"
    return source_info_util.summarize(equation.source_info)


def is_made_by(equation: Any, *functions: str) -> bool:
    """Returns whether an equation was made in one of these functions of libraries."""
    traceback = equation.source_info.traceback
    return traceback is not None and any(
        frame.function_name in functions and is_library_file(frame.file_name)
        for frame in traceback.frames
    )


def _is_program(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


_PER_INPUT = ("in_shardings", "in_layouts", "donated_invars")
_PER_OUTPUT = ("out_shardings", "out_layouts")


def call_program(
    program: core.ClosedJaxpr, arguments: list[Any], name: str = "step"
) -> list[Any]:
    """Runs a program, or makes it one operation of the program that is traced.

    To trace its operations once more takes a tenth of the start of training.
    """
    # How JAX calls a compiled function here, of which there is nothing public.
    (call,) = jax.make_jaxpr(jax.jit(lambda value: value + 1))(0).eqns
    if call.primitive is not jit_p:  # as under `jax.disable_jit`
        return core.jaxpr_as_fun(program)(*arguments)
    if program.consts:
        inner = program.jaxpr
        arguments = [*program.consts, *arguments]
        invars = [*inner.constvars, *inner.invars]
        program = core.ClosedJaxpr(inner.replace(constvars=[], invars=invars), ())
    params = {**call.params, "jaxpr": program, "name": name}
    params |= {name: params[name] * len(arguments) for name in _PER_INPUT}
    params |= {name: params[name] * len(program.out_avals) for name in _PER_OUTPUT}
    return jit_p.bind(*arguments, **params)
