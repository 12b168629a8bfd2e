"""Random steps, and the numbers that they must compute on several replicas.

A program is a list of instructions. Each instruction makes one more vector from the
earlier vectors. Bodies of branches, loops and losses are programs too. `run_traced`
writes a program in JAX, as a user would. `run_by_hand` computes it for all replicas
without the library: collectives combine the replicas' values, and each replica takes
its own branch.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import armillary

SIZE = 3
NUMBER = 3
"""The index of the replica's number among the first values."""
UNARY = (
    "tanh",
    "sort",
    "argsort",
    "cumsum",
    "permutation",
    "callback",
    "stop_gradient",
    "jit",
    "checkpoint",
    "custom_vjp",
    "shift_scan",
)
BINARY = (
    "add",
    "multiply",
    "where",
    "take",
    "select_cond",
    "vmap_cond",
    "dot",
    "jit_pair",
    "checkpoint_pair",
    "custom_vjp_pair",
    "custom_jvp_pair",
    "scan_of_jit",
    "scan_of_checkpoint",
)
COLLECTIVE = ("mean", "gather", "max")
WITH_GRADIENT = 2
"""The number of these that have one."""


class WouldHangError(Exception):
    """Some replicas reach a collective that others do not."""


@jax.custom_vjp
def _scaled(x):
    return 2 * x


_scaled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


@jax.custom_vjp
def _product(a, b):
    return a * b


_product.defvjp(lambda a, b: (a * b, (a, b)), lambda res, g: (g * res[1], g * res[0]))


@jax.custom_jvp
def _sum(a, b):
    return a + 2 * b


_sum.defjvp(lambda args, dots: (_sum(*args), dots[0] + 2 * dots[1]))


def _scan_of(body):
    def run(a, b):
        return jax.lax.scan(lambda c, y: (body(c, a, y), None), jnp.zeros(SIZE), b)[0]

    return run


_UNARY = {
    "tanh": jnp.tanh,
    "sort": jnp.sort,
    "argsort": lambda x: jnp.argsort(x).astype(jnp.float32),
    "cumsum": jnp.cumsum,
    "permutation": lambda x: jax.random.permutation(jax.random.key(0), x),
    "callback": lambda x: jax.lax.stop_gradient(
        jax.pure_callback(
            lambda v: np.asarray(v) + np.float32(1),
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.lax.stop_gradient(x),
            vmap_method="sequential",
        )
    ),
    "stop_gradient": jax.lax.stop_gradient,
    "jit": jax.jit(lambda x: x * x - 1),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x) * x),
    "custom_vjp": _scaled,
    "shift_scan": lambda x: jax.lax.scan(
        lambda c, y: (c * 0.5 + y, c), jnp.float32(0), x
    )[1],
}
_BINARY = {
    "add": jnp.add,
    "multiply": jnp.multiply,
    "where": lambda a, b: jnp.where(a > b, a, 0.5 * b),
    "take": lambda a, b: a[jnp.argsort(b)],
    "select_cond": lambda a, b: jax.lax.cond(
        jnp.sum(b) > 0.1, lambda: a, lambda: jnp.ones(SIZE)
    ),
    "vmap_cond": lambda a, b: jax.vmap(
        lambda y: jax.lax.cond(y > 0.1, lambda: jnp.sum(a), lambda: y)
    )(b),
    "dot": lambda a, b: a * (a @ b),
    "jit_pair": jax.jit(lambda a, b: jnp.sin(a) * b),
    "checkpoint_pair": jax.checkpoint(lambda a, b: jnp.sin(a) * b),
    "custom_vjp_pair": _product,
    "custom_jvp_pair": _sum,
    "scan_of_jit": _scan_of(jax.jit(lambda c, a, y: 0.5 * c + a * y)),
    "scan_of_checkpoint": _scan_of(jax.checkpoint(lambda c, a, y: 0.5 * c + a * y)),
}


@st.composite
def programs(draw, max_size=6, depth=2, is_loss=False):
    """Draws a program: a tuple of instructions."""
    kinds = ["unary", "binary", "binary", "collective", "number"]
    if depth:
        kinds += ["cond", "scan"]
        if not is_loss:  # loops of unknown length have no gradient
            kinds += ["while", "grad", "grad"]
    collectives = COLLECTIVE[:WITH_GRADIENT] if is_loss else COLLECTIVE
    index = st.integers(0, 9)
    program = []
    for _ in range(draw(st.integers(1, max_size))):
        kind = draw(st.sampled_from(kinds))
        body = programs(2, depth - 1, is_loss) if depth else st.nothing()
        if kind == "unary":
            item = (draw(st.sampled_from(UNARY)), draw(index))
        elif kind == "binary":
            item = (draw(st.sampled_from(BINARY)), draw(index), draw(index))
        elif kind == "collective":
            item = (draw(st.sampled_from(collectives)), draw(index))
        elif kind == "number":
            item = ("number",)
        elif kind == "cond":
            item = ("cond", draw(index), draw(body), draw(body))
        elif kind == "while":
            item = ("while", draw(index), draw(index), draw(body))
        elif kind == "scan":
            item = ("scan", draw(st.integers(0, 2)), draw(index), draw(body))
        else:
            item = ("grad", draw(programs(3, depth - 1, is_loss=True)))
        program.append(item)
    return tuple(program)


def run_traced(program, values: list[Any]) -> Any:
    """Runs a program in one replica; returns its last value.

    The first of `values` is what gradients are taken with respect to.
    """
    context = armillary.get_replica_context()
    values = list(values)
    for op, *rest in program:
        values.append(_run_traced(op, rest, values, context))
    return values[-1]


def _run_traced(op, rest, values, context):
    def at(index):
        return values[index % len(values)]

    if op in _UNARY:
        return _UNARY[op](at(rest[0]))
    if op in _BINARY:
        return _BINARY[op](at(rest[0]), at(rest[1]))
    if op in COLLECTIVE:
        return _collect(op, at(rest[0]), context)
    if op == "number":
        return jnp.full(SIZE, context.replica_id_in_sync_group, jnp.float32)
    if op == "cond":
        index, *bodies = rest
        yes, no = (lambda body=body: run_traced(body, values) for body in bodies)
        return jax.lax.cond(_is_large(at(index)), yes, no)
    if op == "while":
        start, bound, body = rest
        return jax.lax.while_loop(
            lambda carry: (carry[0] < 2) & (carry[0] < _count(at(bound))),
            lambda carry: (carry[0] + 1, run_traced(body, [*values, carry[1]])),
            (0, at(start)),
        )[1]
    if op == "scan":
        length, start, body = rest
        return jax.lax.scan(
            lambda carry, _: (run_traced(body, [*values, carry]), None),
            at(start),
            length=length,
        )[0]
    assert op == "grad"

    def loss_fn(w):
        result = run_traced(rest[0], [w, *values[1:]])
        return armillary.compute_average_loss(result)

    return armillary.all_reduce("sum", jax.grad(loss_fn)(values[0]))


def _collect(op, value, context):
    # JAX adds up a constant without asking the other replicas.
    value = value + 0.0 * context.replica_id_in_sync_group
    if op == "mean":
        return context.all_reduce("mean", value)
    if op == "max":
        return jax.lax.pmax(value, "replica")
    return jnp.mean(context.all_gather(value[None], 0), axis=0)


def run_by_hand(program, replicas: list[list[Any]]) -> list[Any]:
    """Runs a program for all replicas; returns the last value of each.

    The first of each one's values is what gradients are taken with respect to.

    Raises:
        WouldHangError: If replicas do not agree on the way to a collective.
    """
    replicas = [list(values) for values in replicas]
    for op, *rest in program:
        made = _run_by_hand(op, rest, replicas)
        for values, value in zip(replicas, made, strict=True):
            values.append(value)
    return [values[-1] for values in replicas]


def _run_by_hand(op, rest, replicas):
    def at(index):
        return [values[index % len(values)] for values in replicas]

    if op in _UNARY:
        return [_UNARY[op](value) for value in at(rest[0])]
    if op in _BINARY:
        return [
            _BINARY[op](a, b) for a, b in zip(at(rest[0]), at(rest[1]), strict=True)
        ]
    if op in COLLECTIVE:
        return _collect_by_hand(op, at(rest[0]))
    if op == "number":
        return at(NUMBER)
    if op == "cond":
        index, yes, no = rest
        takes = [bool(_is_large(value)) for value in at(index)]
        bodies = [yes if take else no for take in takes]
        return _run_apart(bodies, replicas, (yes, no))
    if op == "while":
        start, bound, body = rest
        counts = [min(2, int(_count(value))) for value in at(bound)]
        return _repeat(body, counts, at(start), replicas)
    if op == "scan":
        length, start, body = rest
        return _repeat(body, [length] * len(replicas), at(start), replicas)
    assert op == "grad"

    def loss(w):
        results = run_by_hand(rest[0], [[w, *values[1:]] for values in replicas])
        return jnp.mean(jnp.stack(results))

    return [jax.grad(loss)(replicas[0][0])] * len(replicas)


def _collect_by_hand(op, values):
    reduce = jnp.max if op == "max" else jnp.mean
    return [reduce(jnp.stack(values), axis=0)] * len(values)


def _repeat(body, counts, carry, replicas):
    for step in range(max(counts)):
        bodies = [body if step < count else () for count in counts]
        extended = [[*v, c] for v, c in zip(replicas, carry, strict=True)]
        carry = _run_apart(bodies, extended, (body,))
    return carry


def _run_apart(bodies, replicas, every_body):
    if all(body == bodies[0] for body in bodies):
        return run_by_hand(bodies[0], replicas)
    if any(map(_has_collective, every_body)):
        raise WouldHangError
    return [
        run_by_hand(body, [values])[0] if body else values[-1]
        for body, values in zip(bodies, replicas, strict=True)
    ]


def _has_collective(program):
    return any(
        op in (*COLLECTIVE, "grad")
        or any(_has_collective(part) for part in rest if isinstance(part, tuple))
        for op, *rest in program
    )


def reduces_in_loss(program):
    """Returns whether a loss of the program reduces before it is differentiated."""
    for op, *rest in program:
        bodies = [part for part in rest if isinstance(part, tuple)]
        if any(map(_has_collective if op == "grad" else reduces_in_loss, bodies)):
            return True
    return False


def _is_large(value):
    return jnp.sum(value) > 0.3


def _count(value):
    return jnp.clip(jnp.sum(value), 0, 2).astype(jnp.int32)
