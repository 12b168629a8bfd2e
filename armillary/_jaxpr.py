"""Traced programs: walks over their operations, their lines, and calls of them."""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core, source_info_util
from jax.extend.core.primitives import jit_p

from armillary._jax_compat import get_trace_state
from armillary._owners import is_library_file, is_own_file

_NO_TRACE = get_trace_state()

IDENTITIES = (
    *("copy", "copy_p", "optimization_barrier", "sharding_constraint"),
    *("stop_gradient", "pvary"),
)
"""Operations whose results are their operands, bit for bit."""

# Settings of JAX that change a trace, and that a program may set for some of its code.
_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


def is_in_trace() -> bool:
    """Returns whether JAX traces a function at the moment."""
    return get_trace_state() != _NO_TRACE


def read_settings() -> tuple[Any, ...]:
    """Returns the settings of JAX that change the trace of a function.

    If one of them has changed, `jax.jit` traces a function again, too.
    """
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


def walk_programs(program: core.ClosedJaxpr) -> Iterator[tuple[Any, list[Any]]]:
    """Yields the `Jaxpr` and constants of a program and of all nested programs."""
    pending: list[Any] = [program]
    while pending:
        current = pending.pop()
        jaxpr = getattr(current, "jaxpr", current)
        yield jaxpr, list(getattr(current, "consts", ()))
        for equation in jaxpr.eqns:
            pending.extend(programs_in(equation))


def walk_equations(program: core.ClosedJaxpr) -> Iterator[Any]:
    """Yields the equations of a program and of all nested programs."""
    for jaxpr, _ in walk_programs(program):
        yield from jaxpr.eqns


def programs_in(equation: Any) -> Iterator[Any]:
    """Yields the programs of one equation: bodies, branches and called programs."""
    for parameter in equation.params.values():
        several = isinstance(parameter, tuple | list)
        yield from filter(_is_program, parameter if several else (parameter,))


def named_axes(equation: Any) -> tuple[Any, ...]:
    """Returns the axes over which a collective runs."""
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
            return f"{_name_file(frame.file_name)}:{frame.line_num} ({name})"
    return source_info_util.summarize(equation.source_info)


def _name_file(file: str) -> str:
    """Returns a file, or `Cell In[3]` for the temporary file of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    find = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if find is None else find(file)
    return file if cell is None else " ".join(cell)


def is_called_by_library(equation: Any) -> bool:
    """Returns whether Armillary called JAX, and not a user or another library."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if is_own_file(frame.file_name):
            return True
        if not is_library_file(frame.file_name):
            return False
    return True


def is_made_by(equation: Any, *functions: str) -> bool:
    """Returns whether an equation was made in one of these functions of libraries."""
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if frame.function_name in functions and is_library_file(frame.file_name):
            return True
    return False


def _is_program(value: Any) -> bool:
    return isinstance(value, core.ClosedJaxpr | core.Jaxpr)


_PER_INPUT = ("in_shardings", "in_layouts", "donated_invars")
_PER_OUTPUT = ("out_shardings", "out_layouts")


def call_program(
    program: core.ClosedJaxpr, arguments: list[Any], name: str = "step"
) -> list[Any]:
    """Runs a program, or makes it one operation of the program that is traced."""
    # The parameters of a call of a compiled function, which JAX has no public API for.
    (call,) = jax.make_jaxpr(jax.jit(lambda value: value + 1))(0).eqns
    if call.primitive is not jit_p:  # for example, under `jax.disable_jit`
        return core.jaxpr_as_fun(program)(*arguments)

    if program.consts:
        inner = program.jaxpr
        arguments = [*program.consts, *arguments]
        invars = [*inner.constvars, *inner.invars]
        program = core.ClosedJaxpr(inner.replace(constvars=[], invars=invars), ())

    # XLA is slow for loops and branches with unused arrays.
    is_used = _find_used(program.jaxpr)
    program = take_inputs(program, is_used)
    arguments = list(itertools.compress(arguments, is_used))

    params = {**call.params, "jaxpr": program, "name": name}
    # The call in the trace had one input and one output.
    for parameter in _PER_INPUT:
        params[parameter] *= len(arguments)
    for parameter in _PER_OUTPUT:
        params[parameter] *= len(program.out_avals)
    return jit_p.bind(*arguments, **params)


def _find_used(jaxpr: Any) -> list[bool]:
    """Returns whether a program reads each of its inputs."""
    used = set(map(id, jaxpr.outvars))
    for equation in jaxpr.eqns:
        used.update(map(id, equation.invars))
    return [id(variable) in used for variable in jaxpr.invars]


def take_inputs(program: core.ClosedJaxpr, is_used: list[bool]) -> core.ClosedJaxpr:
    """Returns a program without its unused inputs."""
    if all(is_used):
        return program
    invars = list(itertools.compress(program.jaxpr.invars, is_used))
    return core.ClosedJaxpr(program.jaxpr.replace(invars=invars), program.consts)


VALUE_ERRORS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of JAX for code in a trace that needs the value of an array."""
