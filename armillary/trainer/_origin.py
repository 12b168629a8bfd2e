"""Finds the operation of a step that first left values that are not finite.

A bad step is undone, and its data is given back, so the step can run again. This time,
each value has a number next to it. If the value is bad, the number identifies its
cause: an operation, or an array of the batch. An operation passes on the smallest
number of its operands. If all operands are good, it uses its own number.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec

from armillary._jax_compat import get_mapped_axes
from armillary._jaxpr import source_line
from armillary.distribute.program._traced_step import TracedStep
from armillary.trainer._step_guard import is_bad

# Programs that are part of the one around them.
_CALLS = ("jit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint")
_NO_CAUSE = np.int32(2**31 - 1)

_Value = tuple[Any, Any]  # an array, and the number of the cause of its bad values
_Path = tuple[Any, ...]  # an equation, after the equations around it


def find_origin(
    step: TracedStep,
    slots: Sequence[Any],
    batches: Sequence[Any],
    batch_paths: Sequence[str],
    bad: Sequence[int],
) -> str | None:
    """Returns a sentence on the cause of bad values, or `None` if it is not found.

    `bad` has the indices of the arrays of the state that the step left bad.
    """
    # The paths of the batch, and then equations, each with the equations around it. A
    # cause has its place in this list as its number.
    causes: list[Any] = list(batch_paths)

    def run(slots: Sequence[Any], batches: Sequence[Any]) -> list[Any]:
        # Values that were bad before the step are not a cause.
        inputs = [(array, _NO_CAUSE) for array in slots]
        for number, array in enumerate(batches):
            inputs.append(_with_cause(array, number))
        outputs = _interpret(step.program, inputs, (), causes)

        # The results of the step follow the changed arrays, and are not asked for.
        of_changed = outputs[: len(step.changed)]
        numbers: dict[int, Any] = {}
        for index, (_, number) in zip(step.changed, of_changed, strict=True):
            numbers[index] = number
        return [numbers[index] for index in bad]

    # The trace fills `causes`.
    numbers = jax.jit(run)(slots, batches)
    first = min(map(int, numbers))
    if first == _NO_CAUSE:
        return None
    return _describe(causes[first])


def _interpret(
    program: Any,
    inputs: Sequence[_Value],
    within: _Path,
    causes: list[Any],
) -> list[_Value]:
    """Returns the results of a program, and adds its operations to `causes`."""
    jaxpr = getattr(program, "jaxpr", program)
    constants = [(value, _NO_CAUSE) for value in getattr(program, "consts", ())]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(zip(variables, [*constants, *inputs], strict=True))

    def read(atom: Any) -> _Value:
        if isinstance(atom, core.Literal):
            return atom.val, _NO_CAUSE
        return known[atom]

    for equation in jaxpr.eqns:
        operands = list(map(read, equation.invars))
        path = (*within, equation)
        name = equation.primitive.name
        if name in _CALLS:
            params = equation.params
            body = params.get("call_jaxpr", params.get("jaxpr"))
            results = _interpret(body, operands, path, causes)
        elif name == "shard_map":
            results = _interpret_mapped(operands, path, causes)
        else:
            results = _apply(jaxpr, operands, path, causes)
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def _interpret_mapped(
    operands: Sequence[_Value], path: _Path, causes: list[Any]
) -> list[_Value]:
    """Interprets the program of each replica; the smallest number of all counts."""
    equation = path[-1]
    params = equation.params
    axes = get_mapped_axes(equation)

    def body(arrays: list[Any], numbers: list[Any]) -> tuple[list[Any], Any]:
        """Returns the results, and a row of numbers, with one number for each."""
        inputs = list(zip(arrays, numbers, strict=True))
        results = _interpret(params["jaxpr"], inputs, path, causes)
        arrays = [array for array, _ in results]
        numbers = [jnp.int32(number) for _, number in results]
        return arrays, jnp.array(numbers, jnp.int32)[None]

    on_replicas = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=(list(params["in_specs"]), PartitionSpec()),
        out_specs=(list(params["out_specs"]), PartitionSpec(tuple(axes))),
        axis_names=axes,
        check_vma=params["check_vma"],
    )
    arrays = [array for array, _ in operands]
    numbers = [number for _, number in operands]
    arrays, rows = on_replicas(arrays, numbers)
    smallest = rows.min(0)
    return list(zip(arrays, smallest, strict=True))


def _apply(
    jaxpr: Any,
    operands: Sequence[_Value],
    path: _Path,
    causes: list[Any],
) -> list[_Value]:
    """Runs one equation as a whole: a loop or a branch is one operation."""
    equation = path[-1]
    number = len(causes)
    causes.append(path)

    # By variable, because an equation may have one operand twice.
    arrays: dict[Any, Any] = {}
    for atom, (array, _) in zip(equation.invars, operands, strict=True):
        if isinstance(atom, core.Var):
            arrays[atom] = array
    alone = jaxpr.replace(
        constvars=[],
        invars=list(arrays),
        outvars=equation.outvars,
        eqns=[equation],
        effects=equation.effects,
    )
    run = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))
    results = run(*arrays.values())

    smallest = number
    for _, inherited in operands:
        smallest = jnp.minimum(smallest, inherited)
    return [_with_cause(array, smallest) for array in results]


def _with_cause(array: Any, number: Any) -> _Value:
    """Returns an array, with the number of the cause if it has bad values."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return array, _NO_CAUSE
    has_bad = jnp.any(is_bad(array))
    return array, jnp.where(has_bad, number, _NO_CAUSE)


def _describe(cause: Any) -> str:
    """Returns the sentence about a cause: a path of the batch, or equations."""
    if isinstance(cause, str):
        return f"They come from the batch, whose `{cause}` holds such values."

    # If JAX used the trace of a function again, inner equations have no line of the
    # caller. So the last known line counts.
    lines = list(filter(None, map(source_line, cause)))
    where = f", at {lines[-1]}" if lines else ""
    name = cause[-1].primitive.name
    text = f"The first operation to leave such values is `{name}`{where}."
    # For an index out of range, `gather` of JAX returns NaN.
    if name == "gather":
        text += (
            " One of its indices is out of range: for example, a label that is not a "
            "class."
        )
    return text
