"""The program of a function for one kind of arguments, and its calls."""

import random
from collections.abc import Callable, Mapping, Sequence
from types import GeneratorType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from armillary.cluster._peers import Peers
from armillary.distribute._global_arrays import is_array_or_number
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same_program
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import check_no_trace, trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._values import (
    array_of,
    is_argument,
    is_per_replica,
    other_count,
)
from armillary.errors import CapturedStateError
from armillary.typing import PyTree
from armillary.xla._compile import compile_step

_ITERATORS = GeneratorType, type(iter([])), map, zip, enumerate
_DRAWN_FROM = np.random.Generator, np.random.RandomState, random.Random, *_ITERATORS


class UserFunction(NamedTuple):
    """A function that a user compiles.

    Attributes:
        fn: The function.
        body: The function to trace: `fn`, or a function that calls it.
        compiler_options: As in `StandardTrainerOptions`.
    """

    fn: Callable[..., Any]
    body: Callable[..., Any]
    compiler_options: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", "the function")


class FunctionProgram:
    """A program of a function for one kind of arguments.

    Args:
        function: The function.
        step: The function as a traced step.
        flat: The state that it works on.
        leaves: The leaves of the arguments that it was traced with.

    Attributes:
        step: The function as a traced step.
    """

    def __init__(
        self,
        function: UserFunction,
        step: TracedStep,
        flat: FlatState,
        leaves: list[Any],
    ) -> None:
        self._function = function
        self._flat = flat
        self.step = step
        # Kept alive, because programs are found by the identities of these values.
        self._static = _without_arrays(leaves)
        self._compiled = self._compile()

    def _compile(self) -> Any:
        """Returns a function of `FlatState.take` and of arrays, which runs the step."""
        flat = self._flat
        step = self.step

        def pure(
            donated: Sequence[Any], others: Sequence[Any], arrays: list[Any]
        ) -> Any:
            slots = flat.join(step.changed, donated, others)
            new, results = step.call(flat.homes.bring(slots), arrays)
            new = flat.homes.send_back(step.changed, new)
            # The last result is a token: it is ready when the program has ended.
            return new, results, jnp.zeros(())

        return compile_step(
            pure,
            step.program,
            flat.platform,
            self._function.compiler_options,
            split=flat.split,
            donate_argnums=0,
            out_shardings=(flat.homes.of_outputs(step.changed), None, None),
        )

    @property
    def returns_objects(self) -> bool:
        """Returns whether the results hold objects of the state, not only arrays."""
        return any(map(self._flat.state.holds, self.step.static_results))

    def __call__(self, arguments: Any, leaves: list[Any]) -> PyTree:
        """Runs the program; returns the result of the function."""
        flat = self._flat
        check_no_trace(self._function.fn, flat.state)
        arrays = [leaf for leaf in leaves if is_array_or_number(leaf)]
        with flat.lent(self.step.changed) as (donated, others):
            try:
                values, results, token = self._compiled(donated, others, arrays)
            except ValueError:
                # Only after an error, because a look at the device of each argument
                # would take longer than a call.
                moved = _bring(arguments, flat.strategy)
                if moved is None:
                    raise
                values, results, token = self._compiled(donated, others, moved)
            flat.give(values, token)
            flat.write_back()
        return self.step.results(results)


def trace_function(
    function: UserFunction,
    flat: FlatState,
    leaves: list[Any],
    treedef: Any,
) -> TracedStep:
    """Traces a function, with its arrays as arguments and all else constant."""
    _check_arguments(function.name, leaves)
    static = _without_arrays(leaves)
    positions: list[int] = []
    arrays: list[Any] = []
    for position, leaf in enumerate(leaves):
        if is_array_or_number(leaf):
            positions.append(position)
            arrays.append(leaf)

    def call_body(*traced: Any) -> PyTree:
        values = list(static)
        for position, value in zip(positions, traced, strict=True):
            values[position] = value
        args, kwargs = treedef.unflatten(values)
        return function.body(*args, **kwargs)

    return trace_step(
        call_body,
        flat,
        tuple(arrays),
        user_fn=function.fn,
        owner="the function",
        is_live=True,
    )


def check_same_function(
    peers: Peers,
    function: UserFunction,
    step: TracedStep,
    arguments: PyTree,
) -> None:
    """Raises if the program of a function differs between processes."""
    shared = _arguments_for_all(arguments)
    check_same_program(peers, function.name, step.program, function.fn, shared)


def _without_arrays(leaves: list[Any]) -> list[Any]:
    """Returns leaves with `None` in place of each array."""
    return [None if is_array_or_number(leaf) else leaf for leaf in leaves]


def _bring(arguments: PyTree, strategy: Strategy) -> list[Any] | None:
    """Returns the arrays of arguments, moved to a strategy; `None` if none moved."""
    if not strategy.peers.is_alone:
        return None
    layout = strategy.layout
    is_moved = False
    devices = set(layout.devices)

    def move(leaf: Any) -> Any:
        nonlocal is_moved
        array = array_of(leaf)
        is_concrete = isinstance(array, jax.Array) and not isinstance(array, Tracer)
        if not is_concrete or array.sharding.device_set == devices:
            return array
        is_moved = True
        is_split = is_per_replica(leaf) and not leaf.is_shared
        if not is_split:
            return layout.replicate(array)
        if len(array) != strategy.num_replicas_in_sync:
            raise other_count(leaf, strategy)
        return layout.place(array)

    leaves = jax.tree.leaves(arguments, is_leaf=is_argument)
    arrays = [array for array in map(move, leaves) if is_array_or_number(array)]
    return arrays if is_moved else None


def _check_arguments(name: str, leaves: list[Any]) -> None:
    """Raises if a function would draw from an argument while it is traced."""
    for leaf in leaves:
        if isinstance(leaf, _DRAWN_FROM):
            raise CapturedStateError(
                f"An argument of `{name}` is of type {type(leaf).__name__}. A value "
                "that the function draws from it while it is traced would be a "
                "constant of each call. Pass a value instead: `next(iterator)`, or "
                "numbers."
            )


def _arguments_for_all(arguments: PyTree) -> dict[str, Any]:
    """Returns the arrays in `(args, kwargs)` that all replicas share, by path."""
    found: dict[str, Any] = {}
    flat = jax.tree_util.tree_leaves_with_path(arguments, is_leaf=is_per_replica)
    for (first, *rest), leaf in flat:
        is_whole = getattr(leaf, "is_fully_addressable", True)
        if is_array_or_number(leaf) and is_whole:
            argument = ("args", "kwargs")[first.idx]
            path = jax.tree_util.keystr(tuple(rest))
            found[f"{argument}{path}"] = leaf
    return found
