"""Gives values, and the programs of branches and loops, the type that they need.

JAX's type of a value says over which axes of the mesh it varies. A cast to "varying"
changes no number; its transpose is a sum over replicas.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

AXIS_NAME = "replica"
"""The axis of the mesh that counts replicas."""


def varies(value: Any) -> bool:
    """Returns whether JAX's type says that a value may differ between replicas."""
    return is_varying(jax.typeof(value))


def is_varying(kind: Any) -> bool:
    """Returns whether a type is that of values that may differ between replicas."""
    return isinstance(kind, ShapedArray) and AXIS_NAME in kind.manual_axis_type.varying


def as_varying(kind: Any) -> Any:
    """Returns a type as that of values that may differ between replicas."""
    if not isinstance(kind, ShapedArray):  # a token, or a reference
        return kind
    axes = kind.manual_axis_type
    if kind.sharding.mesh.empty:  # as a number of Python has it
        mesh = jax.sharding.get_abstract_mesh()
        kind = kind.update(sharding=NamedSharding(mesh, PartitionSpec()))
    varying = axes.update(varying=axes.varying | {AXIS_NAME})
    return kind.update(manual_axis_type=varying)


def cast(value: Any) -> Any:
    """Returns a value that is equal on all replicas, typed as if it varied."""
    kind = jax.typeof(value)
    if is_varying(kind) or not isinstance(kind, ShapedArray):
        return value
    return jax.lax.pcast(value, AXIS_NAME, to="varying")


def cast_where(values: Iterable[Any], needed: Iterable[bool]) -> list[Any]:
    """Returns the values, cast where needed."""
    return [
        cast(value) if is_needed else value
        for value, is_needed in zip(values, needed, strict=True)
    ]


def match(
    program: core.ClosedJaxpr, varying: Sequence[bool], needed: Sequence[bool]
) -> core.ClosedJaxpr:
    """Returns a program for operands, and with results, of other types.

    Args:
        program: The program of a branch or the body of a loop.
        varying: For each operand, whether it varies.
        needed: For each of the first results, whether it must vary.

    Returns:
        The program itself, if it fits. The others' results are typed by their operands.
    """
    given = [is_varying(aval) for aval in program.in_avals]
    made = [is_varying(aval) for aval in program.out_avals]
    if given == list(varying) and all(
        has or not need for has, need in zip(made, needed, strict=False)
    ):
        return program
    run = core.jaxpr_as_fun(program)

    def retyped(*operands: Any) -> list[Any]:
        results = run(*operands)
        count = len(needed)
        return [*cast_where(results[:count], needed), *results[count:]]

    types = [
        as_varying(aval) if is_varied else aval
        for aval, is_varied in zip(program.in_avals, varying, strict=True)
    ]
    traced = jax.make_jaxpr(retyped)(*types)
    # The same names and effects: branches are compared by them.
    jaxpr = traced.jaxpr.replace(
        debug_info=program.jaxpr.debug_info, effects=program.jaxpr.effects
    )
    return core.ClosedJaxpr(jaxpr, traced.consts)
