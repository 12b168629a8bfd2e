"""Rematerialization: keeps fewer values of a forward pass for the backward pass.

`jax.checkpoint` computes the values of a function again when the backward pass needs
them. For a whole model, that alone would save nothing, because all values would be
there at once in the end. So this pass cuts the program of a loss into parts, where the
fewest bytes are in use, and each part is a function for `jax.checkpoint`. With n
products in about the root of n parts, the backward pass holds the inputs of all parts
and the values of one part. In a loop, such as a scan over layers, each iteration is a
part.

Parts of a program that have `jax.checkpoint` of their own stay as they are.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
from jax.extend import core

from armillary._jaxpr import programs_in, walk_equations

Remat: TypeAlias = str | Callable[..., Any]
"""The name of a policy, or a policy of `jax.checkpoint_policies`."""

_FULL = "full"
_NAMES = {
    _FULL: "nothing_saveable",
    "nothing_saveable": "nothing_saveable",
    "everything_saveable": "everything_saveable",
    "dots_saveable": "dots_saveable",
    "dots_with_no_batch_dims_saveable": "dots_with_no_batch_dims_saveable",
}
_PRODUCTS = {"dot_general", "ragged_dot_general", "conv_general_dilated"}
_CHECKPOINTS = {"checkpoint", "remat2"}


def find_policy(remat: Any) -> Callable[..., Any]:
    """Returns a policy of JAX, which says which values to keep.

    Raises:
        TypeError: If `remat` is neither a name nor a policy.
        ValueError: If no policy has the name.
    """
    if callable(remat):
        return remat
    if not isinstance(remat, str):
        raise TypeError(
            f"`remat` is {remat!r:.60} of type {type(remat).__name__}, but it must be "
            'a name or a policy. Write `remat="dots_saveable"`.'
        )
    if remat not in _NAMES:
        names = ", ".join(f'"{name}"' for name in _NAMES)
        raise ValueError(
            f"`remat` is {remat!r}, but it must be one of {names}, or a policy such as "
            '`jax.checkpoint_policies.save_only_these_names("name")`.'
        )
    return getattr(jax.checkpoint_policies, _NAMES[remat])


def rematerialized(
    fn: Callable[..., Any], policy: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a function with the same results, which keeps the values of a policy."""

    @functools.wraps(fn)
    def call(*args: Any) -> Any:
        program, types = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _run(program, jax.tree.leaves(args), policy)
        return jax.tree.unflatten(jax.tree.structure(types), results)

    return call


class _Part(NamedTuple):
    """Some equations of a program, as a program."""

    program: core.ClosedJaxpr
    inputs: list[Any]
    outputs: list[Any]
    is_whole: bool  # It takes part in rematerialization only inside, if at all.


def _run(
    program: core.ClosedJaxpr,
    arguments: Sequence[Any],
    policy: Callable[..., Any],
) -> list[Any]:
    """Runs a program part by part."""
    jaxpr = program.jaxpr
    values = dict(zip(jaxpr.constvars, program.consts, strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))
    for part in _divide(jaxpr, policy):
        run = core.jaxpr_as_fun(part.program)
        if not part.is_whole:
            run = jax.checkpoint(run, policy=policy)
        inputs = [values[variable] for variable in part.inputs]
        results = run(*inputs)
        values.update(zip(part.outputs, results, strict=True))
    return [
        atom.val if isinstance(atom, core.Literal) else values[atom]
        for atom in jaxpr.outvars
    ]


def _divide(jaxpr: Any, policy: Callable[..., Any]) -> list[_Part]:
    """Divides a program into parts, which run one after the other."""
    ranges: list[tuple[int, int, bool]] = []
    first = 0
    for is_whole, group in itertools.groupby(jaxpr.eqns, _stands_alone):
        equations = list(group)
        last = first + len(equations)
        cuts = [] if is_whole else _find_cuts(jaxpr, first, last)
        borders = [first, *cuts, last]
        for start, stop in itertools.pairwise(borders):
            ranges.append((start, stop, is_whole))
        first = last

    last_uses = _find_last_uses(jaxpr)
    parts: list[_Part] = []
    for start, stop, is_whole in ranges:
        equations = [
            _edit_loop(equation, policy) for equation in jaxpr.eqns[start:stop]
        ]
        parts.append(_make_part(jaxpr, equations, stop, last_uses, is_whole=is_whole))
    return parts


def _stands_alone(equation: Any) -> bool:
    """Returns whether an equation is not computed again as a whole."""
    name = equation.primitive.name
    is_loop = name in ("scan", "while")
    # An effect, such as a print, must not happen twice.
    if name in _CHECKPOINTS or is_loop or equation.effects:
        return True
    return any(map(_has_checkpoint, programs_in(equation)))


def _has_checkpoint(program: Any) -> bool:
    return any(
        equation.primitive.name in _CHECKPOINTS for equation in walk_equations(program)
    )


def _find_last_uses(jaxpr: Any) -> dict[Any, int]:
    """Returns the number of the last equation that uses each variable."""
    last_uses: dict[Any, int] = {}
    for number, equation in enumerate(jaxpr.eqns):
        last_uses.update(dict.fromkeys(_variables(equation.invars), number))
    end = len(jaxpr.eqns)
    last_uses.update(dict.fromkeys(_variables(jaxpr.outvars), end))
    return last_uses


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, core.Literal)]


def _find_cuts(jaxpr: Any, first: int, last: int) -> list[int]:
    """Returns the numbers of equations before which to cut a range of equations."""
    products = [
        number
        for number in range(first, last)
        if jaxpr.eqns[number].primitive.name in _PRODUCTS
    ]
    num_parts = math.isqrt(len(products))
    sizes = _count_live_bytes(jaxpr)
    cuts: list[int] = []
    for part in range(1, num_parts):
        # Any place is good in the middle half of the distance to the next cuts.
        middle = part * len(products) // num_parts
        distance = len(products) // num_parts
        reach = max(distance // 4, 1)
        begin = products[max(middle - reach, 0)] + 1
        end = products[min(middle + reach, len(products) - 1)]

        previous = cuts[-1] if cuts else first
        begin = max(begin, previous + 1)
        if begin <= end:
            places = range(begin, end + 1)
            cuts.append(min(places, key=lambda place: sizes[place]))
    return cuts


def _count_live_bytes(jaxpr: Any) -> list[int]:
    """Returns the bytes that are made before each equation, and used from there on."""
    last_uses = _find_last_uses(jaxpr)
    changes = [0] * (len(jaxpr.eqns) + 2)
    for number, equation in enumerate(jaxpr.eqns):
        for variable in equation.outvars:
            last_use = last_uses.get(variable, number)
            num_elements = math.prod(getattr(variable.aval, "shape", ()))
            num_bytes = num_elements * getattr(variable.aval.dtype, "itemsize", 1)
            # A value takes memory from the next equation on, until its last use.
            changes[number + 1] += num_bytes
            changes[last_use + 1] -= num_bytes
    return list(itertools.accumulate(changes))


def _make_part(
    jaxpr: Any,
    equations: list[Any],
    stop: int,
    last_uses: dict[Any, int],
    *,
    is_whole: bool,
) -> _Part:
    made: list[Any] = []
    used: dict[Any, None] = {}  # A set in the order of use.
    for equation in equations:
        made += equation.outvars
        used.update(dict.fromkeys(_variables(equation.invars)))
    own = set(made)
    inputs = [variable for variable in used if variable not in own]
    # Only values that a later part uses leave this one.
    outputs = [variable for variable in made if last_uses.get(variable, -1) >= stop]
    program = jaxpr.replace(
        constvars=[],
        invars=inputs,
        outvars=outputs,
        eqns=equations,
    )
    return _Part(core.ClosedJaxpr(program, ()), inputs, outputs, is_whole)


def _edit_loop(equation: Any, policy: Callable[..., Any]) -> Any:
    """Makes each iteration of a loop a part, if the equation is such a loop."""
    if equation.primitive.name != "scan":
        return equation
    body = equation.params["jaxpr"]
    if equation.effects or _has_checkpoint(body):
        return equation
    # Values of two iterations of a loop are never merged.
    run_body = core.jaxpr_as_fun(body)
    run = jax.checkpoint(run_body, policy=policy, prevent_cse=False)
    edited = jax.make_jaxpr(run)(*body.in_avals)
    return equation.replace(params={**equation.params, "jaxpr": edited})
