"""Tests of which calls of an `armillary.function` share a program."""

import array
import copy
import datetime
import functools
import random
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from armillary.distribute.program import _function
from armillary.errors import CapturedStateError
from tests.problems import Holder


def add(variable, amount=1):
    variable[...] = variable[...] + amount


def test_other_arguments_are_static(traces):
    @armillary.function
    def step(x, mode, *, scale=1.0, fn=None, nest=None):
        traces.append(mode)
        y = x * scale if mode == "times" else x
        return fn(y) if fn else y, nest

    x = jnp.ones(2)
    assert step(x, "times", scale=3.0)[0].tolist() == [3, 3]
    assert step(x, "none", scale=3.0)[0].tolist() == [1, 1]
    assert step(x, "times", scale=4.0)[0].tolist() == [4, 4]
    assert step(x, "times", scale=3.0)[0].tolist() == [3, 3]
    assert step(x, "none", fn=jnp.sum, nest={"a": [None, 1]})[1] == {"a": [None, 1]}
    assert len(traces) == 4


@pytest.mark.parametrize(("first", "second"), [(1, True), (1, 1.0), (0, False)])
def test_equal_static_arguments_of_different_types_are_distinguished(first, second):
    @armillary.function
    def kind(value):
        return type(value).__name__

    assert kind(first) == type(first).__name__
    assert kind(second) == type(second).__name__


@pytest.mark.parametrize(
    ("first", "change"),
    [
        ({1}, lambda s: s.add(5)),
        (bytearray([1]), lambda s: s.append(5)),
        (array.array("d", [1]), lambda s: s.append(5)),
    ],
)
def test_an_argument_that_changes_in_place_counts_as_different(
    first, change, make_mirrored
):
    strategy = make_mirrored(2)

    def double(x, values):
        return x * max(values["of"])

    calls = (
        armillary.function(double),
        lambda *args: strategy.reduce("mean", strategy.run(double, args)),
    )
    for call in calls:
        values = {"of": copy.copy(first)}
        assert call(jnp.ones(()), values) == 1
        change(values["of"])
        assert call(jnp.ones(()), values) == 5


@pytest.mark.parametrize(
    "argument", [iter([1.0]), np.random.default_rng(0), random.Random(0)]
)
def test_a_generator_that_is_drawn_from_is_no_argument(argument):
    kind = type(argument).__name__
    with pytest.raises(CapturedStateError, match=f"`take` is of type {kind}.*next"):

        @armillary.function
        def take(source):
            return jnp.zeros(())

        take([argument])


def test_a_new_argument_at_the_address_of_an_old_one_is_another_argument():
    @armillary.function
    def seconds(duration):
        return duration.total_seconds()

    # Python gives the address of an object that is gone to the next object.
    for number in range(10):
        assert seconds(datetime.timedelta(seconds=number)) == number


def test_a_zero_has_a_sign_as_a_static_argument_too():
    divide = armillary.function(lambda x, by: x / by)
    assert [divide(jnp.ones(()), each) for each in (0.0, -0.0)] == [np.inf, -np.inf]


def test_run_is_compiled_once_for_closures_that_are_made_again(
    make_mirrored, traces, no_retrace
):
    strategy, count = make_mirrored(2), nnx.Variable(jnp.asarray(0))

    def iterate(amount):
        def step_fn(x):
            traces.append("fn")
            add(count)
            return x * 2

        return strategy.run(step_fn, args=(amount,))

    iterate(jnp.ones(2))
    with no_retrace():
        for _ in range(5):
            iterate(jnp.ones(2))
    assert len(traces) == 1 and int(count[...]) == 6


@pytest.mark.parametrize("kind", ["partial", "method", "lambda"])
def test_run_is_compiled_once_for(kind, make_mirrored, traces):
    strategy, count = make_mirrored(2), nnx.Variable(jnp.asarray(0))

    def body(x, *, variable):
        traces.append("fn")
        add(variable)
        return x

    class Step:
        variable = None

        def __call__(self):
            raise AssertionError("another method is called")

        def step(self, x):
            return body(x, variable=self.variable)

    owner = Step()
    owner.variable = count
    makers = {
        "partial": lambda: functools.partial(body, variable=count),
        "method": lambda: owner.step,
        "lambda": lambda: lambda x: body(x, variable=count),
    }
    for _ in range(4):
        strategy.run(makers[kind](), args=(jnp.ones(2),))
    assert len(traces) == 1 and int(count[...]) == 4


def times(factor):
    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return factor * fn(x)

        return wrapper

    return decorate


def subtract(x, *, a, b):
    return x + a - b


class Times:
    def __eq__(self, other):  # which takes the hash away
        return isinstance(other, Times) and self.factor == other.factor

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ([lambda x, n=n: x * n for n in (2, 3, 2.5, True)], [2, 3, 2.5, 1]),
        (
            [
                functools.partial(subtract, a=1, b=2),
                functools.partial(subtract, b=1, a=2),
            ],
            [0, 2],
        ),
        ([times(n)(lambda x: x + 1) for n in (2, 3)], [4, 6]),
        ([Times(2), Times(3)], [2, 3]),
    ],
    ids=["closures", "partials", "wrappers", "objects"],
)
def test_functions_that_captured_other_values_are_others(
    make_mirrored, functions, expected
):
    strategy = make_mirrored(2)
    results = [strategy.run(fn, args=(jnp.ones(()),)) for fn in functions]
    assert [float(result.values[0]) for result in results] == expected


def test_only_so_many_programs_are_kept(monkeypatch, traces):
    monkeypatch.setattr(_function, "_MAX_PROGRAMS", 2)

    @armillary.function
    def step(n):
        traces.append(str(n))
        return n

    for n in (1, 2, 1, 3, 1, 2):
        assert step(n) == n
    assert list(traces) == ["1", "2", "3", "2"]


def test_another_structure_or_shape_is_another_program(traces):
    holder = Holder(params={"a": jnp.ones(2)})

    @armillary.function
    def step():
        traces.append("fn")
        holder.params = jax.tree.map(lambda leaf: leaf + 1, holder.params)

    step()
    for params in ({"a": jnp.zeros(2), "b": jnp.zeros(1)}, {"a": jnp.zeros(3)}):
        holder.params = params
        step()
        step()
        assert all(leaf[0] == 2 for leaf in jax.tree.leaves(holder.params))
    assert len(traces) == 3


def test_a_numpy_array_that_is_replaced_by_an_equal_one_is_watched_like_it():
    holder = Holder(scale=np.ones(1, np.float32))

    @armillary.function
    def step(x):
        return x * holder.scale

    step(jnp.ones(1))
    holder.scale = np.ones(1, np.float32)
    assert step(jnp.ones(1)).tolist() == [1]
    holder.scale += 9
    assert step(jnp.ones(1)).tolist() == [10]


@pytest.mark.slow
def test_a_lambda_that_captures_what_changes_is_named_once(caplog, make_mirrored):
    strategy = make_mirrored(2)
    for rate in range(20):
        strategy.run(lambda x: x * rate, args=(jnp.ones(()),))  # noqa: B023
    assert caplog.text.count("`<lambda>` was compiled 16 times") == 1
    assert "its captured variables (rate)" in caplog.text


def test_objects_made_again_are_the_same_function(traces):
    holder = Holder(config={"rate": 2.0}, total=jnp.zeros(()))

    @armillary.function
    def step():
        traces.append("fn")
        holder.total = holder.total + holder.config["rate"]

    for rate in (2.0, 2.0, 3.0):
        holder.config = {"rate": rate}
        step()
    assert float(holder.total) == 7 and len(traces) == 2


RATE = 2.0


def test_a_function_that_returns_a_numpy_array_is_traced_again(monkeypatch):
    fn = armillary.function(lambda x: (x * RATE, np.arange(3)))
    assert fn(jnp.ones(()))[0] == 2

    monkeypatch.setattr(sys.modules[__name__], "RATE", 3.0)

    number, array = fn(jnp.ones(()))
    assert number == 3
    assert array.tolist() == [0, 1, 2]
