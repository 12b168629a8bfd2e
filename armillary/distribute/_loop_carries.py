"""Lets JAX's loops inside a replica start from a shared value.

A recurrent cell begins with zeros, which are equal on all replicas, and continues with
values that are not. JAX wants the first carry cast to the type of the later ones and
fails with "manual axis types do not match"; a user cannot do that inside
`nnx.RNN`. While a replica is traced, `lax.scan`, `lax.while_loop` and `lax.fori_loop`
retry such a call with the initial carry cast. Nothing changes outside a replica, in
other threads, or for calls that JAX accepts. Needed until JAX casts carries itself
(jax-ml/jax, `jax_auto_pcast`).
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import source_info_util

from armillary._typing import PyTree

_MESSAGE_OF_JAX = "manual axis types do not match"
# Messages name the line of the user's loop, not ours.
source_info_util.register_exclusion(__file__)
_lock = threading.Lock()
_local = threading.local()
_users = 0


@contextlib.contextmanager
def cast_loop_carries() -> Iterator[None]:
    """Casts initial loop carries for the code under it, in this thread."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            jax.lax.scan, jax.lax.while_loop = _scan, _while_loop
            jax.lax.fori_loop = _fori_loop
    before = getattr(_local, "active", False)
    _local.active = True
    try:
        yield
    finally:
        _local.active = before
        with _lock:
            _users -= 1
            if _users == 0:
                jax.lax.scan, jax.lax.while_loop = _jax_scan, _jax_while_loop
                jax.lax.fori_loop = _jax_fori_loop


_jax_scan, _jax_while_loop = jax.lax.scan, jax.lax.while_loop
_jax_fori_loop = jax.lax.fori_loop


def _scan(
    f: Callable[..., Any], init: PyTree, xs: PyTree = None, *args: Any, **kwargs: Any
) -> Any:
    def call(carry: PyTree) -> Any:
        return _jax_scan(f, carry, xs, *args, **kwargs)

    def body(carry: PyTree) -> PyTree:
        first = jax.tree.map(
            lambda leaf: jax.lax.index_in_dim(leaf, 0, keepdims=False), xs
        )
        return f(carry, first)[0]

    return _retry(call, body, init)


def _while_loop(
    cond_fun: Callable[..., Any], body_fun: Callable[..., Any], init_val: PyTree
) -> Any:
    def call(carry: PyTree) -> Any:
        return _jax_while_loop(cond_fun, body_fun, carry)

    return _retry(call, body_fun, init_val)


def _fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[..., Any],
    init_val: PyTree,
    **kwargs: Any,
) -> Any:
    def call(carry: PyTree) -> Any:
        return _jax_fori_loop(lower, upper, body_fun, carry, **kwargs)

    return _retry(call, functools.partial(body_fun, lower), init_val)


def _retry(
    call: Callable[[PyTree], Any], body: Callable[[PyTree], PyTree], carry: PyTree
) -> Any:
    if not getattr(_local, "active", False):
        return call(carry)
    # A cast of one leaf can make another one vary, so at most one round per leaf.
    for _ in jax.tree.leaves(carry):
        try:
            return call(carry)
        except TypeError as error:
            if _MESSAGE_OF_JAX not in str(error):
                raise
            cast = _cast_like_output(body, carry)
            if cast is None:
                raise
            carry = cast
    return call(carry)


def _cast_like_output(body: Callable[[PyTree], PyTree], carry: PyTree) -> PyTree | None:
    """Returns `carry` with the axes that `body` adds, or `None` if it adds none."""
    leaves, treedef = jax.tree.flatten(carry)
    after: list[frozenset[str]] = []

    def probe(value: PyTree) -> PyTree:
        result = body(value)
        after[:] = [_axes(leaf) for leaf in jax.tree.leaves(result)]
        return result

    jax.eval_shape(probe, carry)
    missing = [
        tuple(sorted(axes - _axes(leaf)))
        for leaf, axes in zip(leaves, after, strict=True)
    ]
    if not any(missing):
        return None
    return treedef.unflatten(
        jax.lax.pcast(leaf, axes, to="varying") if axes else leaf
        for leaf, axes in zip(leaves, missing, strict=True)
    )


def _axes(leaf: Any) -> frozenset[str]:
    kind = jax.typeof(leaf)
    return frozenset(getattr(kind, "manual_axis_type", kind).varying)
