"""Tests of finding results that are inputs, and the pass of operations."""

import collections

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from armillary._dataflow import Dataflow, find_unchanged
from armillary._jaxpr import walk_equations
from armillary._passes import is_repeated

ROWS = jnp.ones((3, 2))
FLAG = jnp.ones((), bool)


def in_scan(change):
    def body(carry, row):
        return change(carry), row

    return lambda a, rows: lax.scan(body, a, rows)


def in_replicas(spec):
    def program(a, rows):
        mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        fn = jax.shard_map(
            lambda a, rows: (a, rows),
            mesh=mesh,
            in_specs=(P(), spec),
            out_specs=(P(), spec),
            check_vma=False,
        )
        return fn(a, rows)

    return program


@jax.custom_vjp
def with_own_gradient(a, b):
    return a, 2 * b


with_own_gradient.defvjp(lambda a, b: (with_own_gradient(a, b), None), lambda _, g: g)


@pytest.mark.parametrize(
    ("fn", "arguments", "expected"),
    [
        (lambda a, b: (a, b), (1.0, 2.0), [True, True]),
        (lambda a, b: (b, a), (1.0, 2.0), [False, False]),
        (lambda a, b: (a + 0, b), (1.0, 2.0), [False, True]),
        (jax.jit(lambda a, b: (a, a * b)), (1.0, 2.0), [True, False]),
        (jax.checkpoint(lambda a, b: (a, jnp.sin(b))), (1.0, 2.0), [True, False]),
        (jax.checkpoint(jax.jit(lambda a, b: (b, a))), (1.0, 2.0), [False, False]),
        (with_own_gradient, (1.0, 2.0), [True, False]),
        (in_scan(lambda a: a), (1.0, ROWS), [True, True]),
        (in_scan(lambda a: 2 * a), (1.0, ROWS), [False, True]),
        # A constant of the loop comes out once for each of its steps.
        (
            lambda a, b: lax.scan(lambda c, _: (c, a), b, None, length=1)[::-1],
            (jnp.ones(()), jnp.ones(())),
            [False, True],
        ),
        # The carry changes places only in the second step.
        (
            lambda a, b: lax.fori_loop(0, 3, lambda _, ab: ab[::-1], (a, b)),
            (1.0, 2.0),
            [False, False],
        ),
        (
            lambda a, b: lax.fori_loop(0, 3, lambda _, ab: ab, (a, b)),
            (1.0, 2.0),
            [1, 1],
        ),
        (
            lambda a, b: lax.cond(FLAG, lambda: (a, b), lambda: (a, a)),
            (1.0, 2.0),
            [True, False],
        ),
        (in_replicas(P()), (1.0, ROWS), [True, True]),
        (in_replicas(P("x")), (1.0, ROWS), [True, False]),
    ],
)
def test_results_that_are_inputs_are_found(fn, arguments, expected):
    program = jax.make_jaxpr(fn)(*map(jnp.asarray, arguments))

    assert find_unchanged(program, [0, 1]) == expected


class PassesSeen(Dataflow[int]):
    """Notes whether each operation is in a backward pass, by its name."""

    nothing = 0

    def __init__(self):
        super().__init__()
        self.seen = collections.defaultdict(list)

    def join(self, facts):
        return 0

    def follow(self, equation, operands):
        self.seen[equation.primitive.name].append(self.is_backward(equation))
        return super().follow(equation, operands)


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.vmap], ids=["plain", "vmap"])
def test_the_forward_pass_that_checkpoint_repeats_is_not_backward(wrap):
    @jax.checkpoint
    def block(x):
        return wrap(lambda y: jnp.sin(jnp.sin(y)))(x)

    program = jax.make_jaxpr(jax.grad(lambda x: block(x).sum()))(jnp.ones(3))
    analysis = PassesSeen()
    analysis.run(program, [0])

    # Two sines forward, and one that the backward pass computes again.
    assert analysis.seen["sin"] == [False] * 3
    assert True in analysis.seen["mul"]


def test_exactly_the_repeated_operations_of_checkpoint_are_repeated():
    block = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))
    program = jax.make_jaxpr(jax.grad(lambda x: block(x).sum()))(jnp.ones(3))

    equations = list(walk_equations(program))
    repeated = [each for each in equations if is_repeated(each)]
    sines = [each for each in equations if each.primitive.name == "sin"]

    assert len(sines) == 3
    assert [each.primitive.name for each in repeated].count("sin") == 1
