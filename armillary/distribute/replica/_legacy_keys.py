"""Finds keys of `jax.random.PRNGKey` from which all replicas draw the same numbers.

Such a key is an array like any other, so nobody can tell that each replica needs one of
its own, before a step makes random numbers of it. Where one does, that is an error.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from armillary.distribute.replica._retype import AXIS_NAME, is_varying
from armillary.state._lift import State
from armillary.state._slots import Role

_PARTS = ("slice", "squeeze", "reshape", "dynamic_slice", "gather", "pvary")
_DRAWS = ("random_bits", "random_gamma")


def check_keys(program: core.ClosedJaxpr, state: State) -> None:
    """Raises if several replicas draw the same numbers from a plain array.

    Args:
        program: A step, whose first inputs are the arrays of `state`.
        state: The slots.

    Raises:
        ValueError: If they do, unless the array belongs to an optimizer, or has an
            `aggregation`.
    """
    arrays: dict[Any, str] = {}
    for slot, start, stop in state.ranges:
        if slot.role is not Role.PLAIN or slot.annotations.get("aggregation"):
            continue
        for i, is_of_optimizer in zip(
            range(start, stop), slot.is_of_optimizer(), strict=True
        ):
            variable = program.jaxpr.invars[i]
            if variable.aval.dtype == jnp.uint32 and not is_of_optimizer:
                arrays[variable] = state.paths[i]
    if not arrays:
        return
    found = _find_draw(program.jaxpr, _Paths(arrays, {}), num_replicas=1)
    if found:
        raise ValueError(
            f"`{found}` holds a key of `jax.random.PRNGKey`, an array that is equal on "
            "all replicas, so that all of them would draw the same numbers. Hold a key "
            "of `jax.random.key` there (`jax.random.wrap_key_data(key)` makes it one), "
            "from which each replica draws its own. If the same numbers are meant, say "
            "so: `nnx.Variable(key, aggregation=VariableAggregation.NONE)`."
        )


class _Paths(NamedTuple):
    """The paths of plain arrays, and of those that keys were made of, by variable."""

    arrays: dict[Any, str]
    keys: dict[Any, str]

    def at(self, outer: list[Any], inner: list[Any]) -> "_Paths":
        """Returns the paths by the variables that a nested program has for them."""
        pairs = [
            (a, b)
            for a, b in zip(outer, inner, strict=False)
            if not isinstance(a, core.Literal)
        ]
        return _Paths(
            *({b: paths[a] for a, b in pairs if a in paths} for paths in self)
        )


def _find_draw(jaxpr: Any, paths: _Paths, num_replicas: int) -> str:
    """Returns the path of an array from which replicas draw the same, or nothing.

    What the program makes of the arrays and keys is added to `paths`.
    """
    arrays, keys = paths
    for equation in jaxpr.eqns:
        inputs = [v for v in equation.invars if not isinstance(v, core.Literal)]
        array = next((arrays[v] for v in inputs if v in arrays), "")
        key = next((keys[v] for v in inputs if v in keys), "")
        name = equation.primitive.name
        if key and name in _DRAWS and num_replicas > 1:
            return key
        if not (array or key):
            continue
        if name == "shard_map":
            num_replicas = equation.params["mesh"].shape.get(AXIS_NAME, 1)
        for body in _bodies(equation):
            # What a branch or a loop takes besides comes before.
            outer = equation.invars[len(equation.invars) - len(body.invars) :]
            inner = paths.at(outer, body.invars)
            found = _find_draw(body, inner, num_replicas)
            if found:
                return found
            for ours, theirs in zip(
                paths, inner.at(body.outvars, equation.outvars), strict=True
            ):
                ours.update(theirs)
        if array and name in _PARTS:
            arrays.update(dict.fromkeys(equation.outvars, array))
        if key or name == "random_wrap":
            shared = [
                output for output in equation.outvars if not is_varying(output.aval)
            ]
            keys.update(dict.fromkeys(shared, key or array))
    return ""


def _bodies(equation: Any) -> Iterator[Any]:
    for name, value in equation.params.items():
        for body in value if isinstance(value, tuple) else (value,):
            body = getattr(body, "jaxpr", body)
            if isinstance(body, core.Jaxpr) and name != "cond_jaxpr":
                yield body
