"""Keeps JAX's types right where a step runs once per replica.

In JAX's types a value *varies* over the replicas, or is equal on all of them. Where an
equal value meets a varying one JAX casts it, and the transpose of that cast is the sum
of gradients over replicas. A wrong type sums gradients in the wrong place, and some of
JAX's rules give wrong types or refuse right programs (docs/jax_types.md lists them).
So every operation of a replica passes through `_bind` while it is traced:

- if one operand varies, the others are cast and the results vary, for every operation
  that is not known to treat its operands apart;
- results of a branch, loop or custom derivative are cast to the type that they need,
  and results that depend on a varying predicate vary;
- JAX's own comparisons of types ignore differences that are corrected here.

Nothing changes outside a replica, or in other threads. This file alone replaces what
JAX does not export.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api as jax_api  # noqa: TID251
from jax._src import core as jax_core  # noqa: TID251
from jax.extend import core, linear_util, source_info_util

from armillary.distribute.replica._loss_scale import mark_loss
from armillary.distribute.replica._per_example import check_not_per_example
from armillary.distribute.replica._retype import (
    AXIS_NAME,
    as_varying,
    cast,
    cast_where,
    is_varying,
    match,
    varies,
)

# Messages name the line of the user's operation, not ours.
source_info_util.register_exclusion(__file__)

COLLECTIVES = ("psum", "pmin", "pmax", "all_gather", "all_to_all", "ppermute")
"""How the names of operations begin that take part in all replicas at once."""

# Operations that treat each operand by its own type.
_APART = frozenset({"custom_jvp_call", "custom_lin", "run_state", "shard_map"})
# Operations that change types on purpose.
_CASTS = ("reduced_vary", "vary_unreduced", "preduced", "axis_index", "reduce_scatter")

_lock = threading.Lock()
_local = threading.local()
_users = 0
_jax_bind = core.Primitive.bind
_jax_typematch = jax_core.typematch
_jax_check_scalar = jax_api._check_scalar


@contextlib.contextmanager
def corrected_types() -> Iterator[None]:
    """Corrects the types of what is traced under it, in this thread."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            core.Primitive.bind = _bind
            jax_core.typematch = _typematch
            jax_api._check_scalar = _check_scalar
    before = _is_active()
    _local.active = True
    try:
        yield
    finally:
        _local.active = before
        with _lock:
            _users -= 1
            if _users == 0:
                core.Primitive.bind = _jax_bind
                jax_core.typematch = _jax_typematch
                jax_api._check_scalar = _jax_check_scalar


def _is_active() -> bool:
    return getattr(_local, "active", False)


def _typematch(a: Any, b: Any, *args: Any, **kwargs: Any) -> bool:
    if _is_active() and is_varying(a) != is_varying(b):
        a, b = as_varying(a), as_varying(b)
    return _jax_typematch(a, b, *args, **kwargs)


def _check_scalar(loss: Any) -> None:
    _jax_check_scalar(loss)
    if _is_active():
        mark_loss(loss)


def _bind(self: Any, *args: Any, **params: Any) -> Any:
    if not _is_active():
        return _jax_bind(self, *args, **params)
    if any(map(varies, args)):
        check_not_per_example(args)
    rule = _RULES.get(self.name)
    if rule is not None:
        return rule(self, args, params)
    if self.name in _APART or self.name.startswith((*COLLECTIVES, *_CASTS)):
        return _jax_bind(self, *args, **params)
    name = _program_of(args, params)
    if name is not None:
        return _bind_call(self, args, params, name)
    _let_results_vary(self)
    return _jax_bind(self, *_cast_alike(args), **params)


def _cast_alike(args: Sequence[Any]) -> Sequence[Any]:
    varying = list(map(varies, args))
    if not any(varying) or all(varying):
        return args
    return list(map(cast, args))


@functools.cache
def _let_results_vary(primitive: Any) -> None:
    """Lets the results of an operation vary if an operand does."""
    rule = primitive.abstract_eval

    def abstract_eval(*avals: Any, **params: Any) -> Any:
        results, effects = rule(*avals, **params)
        if not (_is_active() and any(map(is_varying, avals))):
            return results, effects
        if not primitive.multiple_results:
            return as_varying(results), effects
        return list(map(as_varying, results)), effects

    primitive.abstract_eval = abstract_eval


def _bind_cast(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    # A value that varies need not be cast again, whoever asks for it.
    if params["axes"] == (AXIS_NAME,) and varies(args[0]):
        return args[0]
    return _jax_bind(self, *args, **params)


def _program_of(args: Sequence[Any], params: dict[str, Any]) -> str | None:
    """Returns which parameter is a program that an operation runs on its operands."""
    for name, value in params.items():
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            avals = [
                variable.aval for variable in getattr(value, "jaxpr", value).invars
            ]
            shapes = [getattr(aval, "shape", None) for aval in avals]
            if shapes == list(map(np.shape, args)):
                return name
    return None


def _bind_call(
    self: Any, args: Sequence[Any], params: dict[str, Any], name: str
) -> Any:
    # The program was traced for other types, if it is in a loop that was retyped.
    program = params[name]
    is_closed = isinstance(program, core.ClosedJaxpr)
    closed = program if is_closed else core.ClosedJaxpr(program, ())
    args = _cast_for(args, closed)
    fitting = match(closed, list(map(varies, args)), ())
    if fitting is closed:
        return _jax_bind(self, *args, **params)
    if not is_closed:
        inner = fitting.jaxpr
        invars = [*inner.constvars, *inner.invars]
        args = [*fitting.consts, *args]
        fitting = inner.replace(constvars=[], invars=invars)
    return _jax_bind(self, *args, **{**params, name: fitting})


def _bind_callback(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    results = _jax_bind(self, *args, **params)
    if AXIS_NAME not in jax.sharding.get_abstract_mesh().manual_axes:
        return results  # There is one replica.
    # Nobody knows whether a function of Python returns the same on all replicas.
    return list(map(cast, results))


def _bind_cond(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    index, *operands = args
    branches = params["branches"]
    is_local = varies(index)
    operands = _cast_for(operands, *branches)
    if is_local:
        # Each replica has the gradient of its own branch: the sum is outside of it.
        operands = list(map(cast, operands))
    varying = list(map(varies, operands))
    branches = [match(branch, varying, ()) for branch in branches]
    columns = zip(*(branch.out_avals for branch in branches), strict=True)
    needed = [is_local or any(map(is_varying, column)) for column in columns]
    branches = tuple(match(branch, varying, needed) for branch in branches)
    return _jax_bind(self, index, *operands, **{**params, "branches": branches})


def _bind_scan(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    program = params["jaxpr"]
    args = _cast_for(args, program)
    while True:
        varying = list(map(varies, args))
        fitting = match(program, varying, varying[first:last])
        made = list(map(is_varying, fitting.out_avals[: last - first]))
        if made == varying[first:last]:
            return _jax_bind(self, *args, **{**params, "jaxpr": fitting})
        args[first:last] = cast_where(args[first:last], made)


def _bind_while(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    decide, body = params["cond_jaxpr"], params["body_jaxpr"]
    args = [
        *_cast_for([*args[:first], *args[last:]], decide)[:first],
        *_cast_for(args[first:], body),
    ]
    while True:
        varying = list(map(varies, args))
        decides = match(decide, [*varying[:first], *varying[last:]], ())
        runs = match(body, varying[first:], varying[last:])
        # Replicas that leave a loop at different times take different values with them.
        is_local = is_varying(decides.out_avals[0])
        made = [is_local or is_varying(aval) for aval in runs.out_avals]
        if made == varying[last:]:
            programs = {"cond_jaxpr": decides, "body_jaxpr": runs}
            return _jax_bind(self, *args, **{**params, **programs})
        args[last:] = cast_where(args[last:], made)


def _cast_for(args: Sequence[Any], *programs: core.ClosedJaxpr) -> list[Any]:
    """Returns operands, cast where a program that takes them was traced for that."""
    columns = zip(*(program.in_avals for program in programs), strict=True)
    return cast_where(args, (any(map(is_varying, column)) for column in columns))


def _bind_custom_vjp(self: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    fun, fwd, bwd = params["subfuns"]
    was_varying = list(map(varies, args))
    if any(was_varying):
        # Inside everything is one replica's own, and the sum of gradients is outside:
        # JAX would ask the function for a gradient that is summed already.
        args = list(map(cast, args))

    def corrected(*residuals_and_cotangents: Any) -> list[Any]:
        cotangents = bwd.call_wrapped(*residuals_and_cotangents)
        return [
            _as_local(cotangent, is_own) if any(was_varying) else _as_total(cotangent)
            for cotangent, is_own in zip(cotangents, was_varying, strict=True)
        ]

    wrapped = linear_util.wrap_init(corrected, debug_info=bwd.debug_info)
    subfuns = (fun, fwd, wrapped)
    return _jax_bind(self, *args, **{**params, "subfuns": subfuns})


def _as_total(cotangent: Any) -> Any:
    """Returns a cotangent of what is equal on all replicas."""
    if not hasattr(cotangent, "dtype") or not varies(cotangent):
        return cotangent
    return jax.lax.psum(cotangent, AXIS_NAME)


def _as_local(cotangent: Any, is_own: bool) -> Any:
    """Returns a cotangent as this replica's part.

    Of a parameter, one that is equal on all replicas is a total (a constant, or summed
    by the user): the parts add up to it.
    """
    if not hasattr(cotangent, "dtype") or varies(cotangent):
        return cotangent
    if is_own:
        return cast(cotangent)
    is_first = jax.lax.axis_index(AXIS_NAME) == 0
    return jax.numpy.where(is_first, cotangent, jax.numpy.zeros_like(cotangent))


_RULES = {
    "cond": _bind_cond,
    "custom_vjp_call": _bind_custom_vjp,
    "io_callback": _bind_callback,
    "pure_callback": _bind_callback,
    "pvary": _bind_cast,
    "scan": _bind_scan,
    "while": _bind_while,
}
