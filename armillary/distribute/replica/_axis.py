"""The name of the axis of replicas, for the functions of `jax.lax`.

A strategy has one name, which a model or a step may choose. This file has the default,
the check of a name, and the note on a step that uses a name of its own.
"""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

DEFAULT_AXIS_NAME = "replica"
"""The default name of the axis of replicas."""

_FIX = 'Use the name that the model has, such as `axis_name="batch"`, or leave it out.'
_UNBOUND = re.compile(r"unbound axis name: (\S+?)[.,]?(?:\s|$)")


def check_axis_name(axis_name: Any, taken: Collection[str] = ()) -> str:
    """Returns a checked name for the axis of replicas, which must not be in `taken`."""
    if not isinstance(axis_name, str):
        raise TypeError(
            f"`axis_name` is {axis_name!r:.60} of type {type(axis_name).__name__}, but "
            f"the axis of replicas has one name, a string. {_FIX}"
        )
    if not axis_name.strip():
        raise ValueError(
            f"`axis_name` is {axis_name!r}, but the axis of replicas needs a name. "
            f"{_FIX}"
        )
    if axis_name in taken:
        raise ValueError(
            f"`axis_name` is {axis_name!r}, but the mesh of this strategy has an axis "
            f"of that name: {', '.join(map(repr, taken))}. {_FIX}"
        )
    return axis_name


def find_free_name(axis_name: str, taken: Collection[str]) -> str:
    """Returns the name of the axis of replicas next to the axes of a user's mesh.

    The default name gives way to an axis of the mesh. Any other name stays.
    """
    name = axis_name
    while axis_name == DEFAULT_AXIS_NAME and name in taken:
        name += "_"
    return name


def explain_unbound_axis(error: Exception, strategy: "Strategy") -> str | None:
    """Returns a note on an axis that JAX does not know; `None` for other errors.

    Args:
        error: The error of a step.
        strategy: The strategy that the step runs under.
    """
    found = _UNBOUND.search(str(error))
    if found is None:
        return None
    name = found[1]
    axis = strategy.axis_name
    if name == axis:
        return (
            f"The axis of replicas is called {axis!r}, and exists only inside "
            "`strategy.run`, under every strategy. Put the code into a function, and "
            "call it with `strategy.run(replica_fn, args=(batch,))`."
        )
    mesh = strategy.mesh
    if mesh is not None and name in mesh.axis_names:
        return (
            f"{name!r} is an axis of the mesh of {strategy!r}. Its devices run one "
            "program, which XLA divides, so a collective along it belongs into "
            "`jax.shard_map(fn, in_specs=..., out_specs=...)`."
        )
    kind = type(strategy).__name__
    if kind == "DefaultStrategy":
        kind = "MirroredStrategy"
    return (
        f"The axis of replicas is called {axis!r} under {strategy!r}, and exists "
        f"inside `strategy.run`. If {name!r} means that axis, give the strategy its "
        f'name: `{kind}(axis_name="{name}")`.'
    )
