"""Proofs that plain values next to the arrays of a step mean what Python means.

Random nests of containers are changed at random, between loops and by the step. The
result must equal the result of plain Python, step by step. Otherwise, the change must
be refused, and no array may have changed.
"""

import argparse
import collections
import copy
import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import armillary
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.errors import StateStructureError
from armillary.state._lift import State

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optimized")]


@dataclasses.dataclass
class Record:
    first: Any
    second: Any


class Slotted:
    __slots__ = ("first", "second")

    def __init__(self, first: Any, second: Any) -> None:
        self.first, self.second = first, second


NUMBERS = st.sampled_from([0, 1, 2, 3.5, True, False, None, "a", "bcd"])
LEAVES = NUMBERS | st.sampled_from([1, 2]).map(jnp.float32) | st.just(1).map(np.ones)


def make_nests(parts: Any) -> Any:
    pairs = st.tuples(parts, parts)
    keys = st.sampled_from(["x", "y", 7])
    return (
        st.dictionaries(keys, parts, min_size=1, max_size=3)
        | st.lists(parts, min_size=1, max_size=3)
        | pairs
        | st.lists(parts, min_size=1, max_size=2).map(collections.deque)
        | st.dictionaries(keys, parts, min_size=1).map(collections.UserDict)
        | pairs.map(lambda pair: argparse.Namespace(first=pair[0], second=pair[1]))
        | pairs.map(lambda p: types.SimpleNamespace(first=p[0], second=p[1]))
        | pairs.map(lambda pair: Record(*pair))
        | pairs.map(lambda pair: Slotted(*pair))
    )


NESTS = st.recursive(LEAVES, make_nests, max_leaves=6).filter(
    lambda nest: places(nest) != []
)
CHANGES = st.sampled_from(["set", "count", "toggle", "grow", "move", "rename"])


def places(nest: Any) -> list[tuple[Any, Any]]:
    """Returns the places below a nest that can be assigned to."""
    if isinstance(nest, dict | collections.UserDict):
        # A compiled step sorts the keys of a dictionary of arrays.
        names = sorted(nest, key=str)
        own = [(nest, name) for name in names]
        parts = [nest[name] for name in names]
    elif isinstance(nest, list | collections.deque):
        own, parts = [(nest, i) for i in range(len(nest))], list(nest)
    elif isinstance(nest, tuple):
        own, parts = [], list(nest)
    elif hasattr(nest, "first"):
        own = [(nest, "first"), (nest, "second")]
        parts = [nest.first, nest.second]
    else:
        return []
    return own + [place for part in parts for place in places(part)]


def read(holder: Any, name: Any) -> Any:
    return getattr(holder, name) if hasattr(holder, "first") else holder[name]


def write(holder: Any, name: Any, value: Any) -> None:
    if hasattr(holder, "first"):
        setattr(holder, name, value)
    else:
        holder[name] = value


def change(nest: Any, index: int, kind: str, value: Any) -> None:
    found = places(nest)
    if not found:
        return
    holder, name = found[index % len(found)]
    held = read(holder, name)
    if kind == "set":
        write(holder, name, value)
    elif kind == "count" and isinstance(held, int | float | jax.Array | np.ndarray):
        write(holder, name, held + 1)
    elif kind == "toggle" and isinstance(held, bool | None):
        write(holder, name, not held)
    elif kind == "grow" and isinstance(holder, list | collections.deque):
        holder.append(value)
    elif kind == "move" and isinstance(held, np.ndarray):
        held += 1
    elif kind == "rename" and isinstance(holder, dict):
        holder["new"] = holder.pop(name)


def weigh(nest: Any) -> Any:
    """Returns a number that depends on everything in a nest."""
    if isinstance(nest, dict | collections.UserDict):
        # Not by position: a compiled step sorts the keys of a dictionary of arrays.
        names = [(len(str(name)), part) for name, part in nest.items()]
        return 1.5 + sum(n * weigh(part) for n, part in names)
    if isinstance(nest, list | tuple | collections.deque):
        return 2.5 + sum((i + 1) * weigh(part) for i, part in enumerate(nest))
    if hasattr(nest, "first"):
        return 3.5 + weigh(nest.first) + 2 * weigh(nest.second)
    if isinstance(nest, bool):
        return 10.25 if nest else 11.25
    if isinstance(nest, str):
        return 20.5 + len(nest)
    if nest is None:
        return 30.5
    if isinstance(nest, int):
        return 40.5 + nest
    return jnp.sum(nest) if isinstance(nest, jax.Array) else np.sum(nest)


class Weigher(armillary.StandardTrainer):
    """Adds up the weights of a nest, and optionally changes it in each step."""

    def __init__(self, nest: Any, in_step: Any = None) -> None:
        super().__init__([np.zeros(1, np.float32)] * 12)
        self.nest, self.total, self.in_step = nest, jnp.zeros(()), in_step

    def train_step(self, iterator: Any) -> None:
        next(iterator)
        self.total = self.total + jnp.float32(weigh(self.nest))
        if self.in_step is not None:
            change(self.nest, *self.in_step)


def is_like(a: Any, b: Any) -> bool:
    """Returns whether two nests are equal, down to the types."""
    if type(a) is not type(b):
        is_array = isinstance(a, jax.Array) and isinstance(b, jax.Array)
        return is_array and bool(a == b)
    if isinstance(a, dict | collections.UserDict):
        return set(a) == set(b) and all(is_like(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple | collections.deque):
        return len(a) == len(b) and all(map(is_like, a, b))
    if hasattr(a, "first"):
        return is_like(a.first, b.first) and is_like(a.second, b.second)
    return bool(np.all(a == b))


def run_in_python(nest: Any, in_step: Any, num_steps: int) -> float:
    total = 0.0
    for _ in range(num_steps):
        total += float(weigh(nest))
        if in_step is not None:
            change(nest, *in_step)
    return total


@settings(max_examples=25, deadline=None)
@given(NESTS, st.lists(st.tuples(st.integers(0, 20), CHANGES, LEAVES), max_size=2))
def test_a_change_between_loops_counts_from_the_next_loop(nest, changes):
    trainer, expected = Weigher(nest), run_in_python(nest, None, 2)
    trainer.train(2)
    for one in changes:
        change(nest, *one)
        expected += run_in_python(trainer.nest, None, 1)
        trainer.train(1)
    assert float(trainer.total) == pytest.approx(expected, rel=1e-5)


@settings(max_examples=25, deadline=None)
@given(
    NESTS,
    st.tuples(st.integers(0, 20), CHANGES, LEAVES),
    st.sampled_from([[4], [1, 3], [1, 1, 1, 1]]),
)
def test_changes_by_a_step_equal_python_or_are_refused(nest, step, loops):
    expected = copy.deepcopy(nest)
    trainer = Weigher(nest, step)
    try:
        for num_steps in loops:
            trainer.train(num_steps)
    except StateStructureError:
        assert float(trainer.total) == 0
        return
    total = run_in_python(expected, step, 4)
    assert float(trainer.total) == pytest.approx(total, rel=1e-5)
    assert is_like(trainer.nest, expected)


@settings(max_examples=50, deadline=None)
@given(NESTS, st.lists(st.tuples(st.integers(0, 20), CHANGES), min_size=1, max_size=4))
def test_a_step_that_fails_leaves_all_arrays_as_they_were(nest, changes):
    holder = types.SimpleNamespace(nest=nest, total=jnp.zeros(()))
    state = State([(holder, "")])
    arrays = state.read()

    def step() -> None:
        for one in changes:
            holder.total = holder.total + 1
            change(holder.nest, *one, holder.total * 2)
        raise RuntimeError("a mistake of the user")

    flat = FlatState(state, armillary.distribute.DefaultStrategy())
    with pytest.raises(RuntimeError, match="a mistake of the user"):
        trace_step(step, flat, (), user_fn=step, owner="the test")
    assert float(holder.total) == 0
    assert all(old is new for old, new in zip(arrays, state.read(), strict=True))
    jax.block_until_ready(State([(holder, "")]).read())
