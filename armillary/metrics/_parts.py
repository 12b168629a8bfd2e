"""Metric objects as integers that steps and replicas add up, and back.

A step returns new metric objects, made and updated in it. Their numbers become integers
in three parts, as in `Counts`, so that any number of steps adds up exactly.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from armillary.distribute.program._batch_sums import mark_metric
from armillary.distribute.replica._context import lifted_state
from armillary.metrics._counts import (
    NUM_INTEGERS,
    Counts,
    float_parts,
    split_in_parts,
    split_integers,
    sum_integers,
)
from armillary.metrics._sums import as_numbers, sum_parts
from armillary.state._nnx import merges_by_sum
from armillary.state._slots import describe


class Number(NamedTuple):
    """A variable of a metric object: its class, and the type of its value."""

    kind: type
    shape: tuple[int, ...]
    dtype: Any

    @property
    def is_count(self) -> bool:
        return issubclass(self.kind, Counts)

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    @property
    def num_integers(self) -> int:
        if self.is_count:
            # The first axis has the three parts of an integer.
            return int(np.prod(self.shape[1:]))
        num_elements = int(np.prod(self.shape))
        if self.is_float:
            return num_elements * NUM_INTEGERS
        return num_elements


class MetricStructure(NamedTuple):
    """A metric object without its values."""

    graph: Any
    structure: Any
    numbers: tuple[Number, ...]

    @property
    def num_integers(self) -> int:
        return sum(number.num_integers for number in self.numbers)


NUM_PER_PLAIN = NUM_INTEGERS + 1
"""The number of integers for a plain number: its sum in parts, and its weight."""


def split_plain(plain: Mapping[str, Any], num_examples: int) -> list[jax.Array]:
    """Returns the integers of plain metrics: all sums, and then all weights."""
    arrays: list[jax.Array] = []
    times: list[int] = []
    weights: list[int] = []
    for name, value in plain.items():
        array = as_numbers(f'metrics["{name}"]', "step", value)
        if array.ndim == 0:
            # A number is the mean over its batch, so it counts once for each example.
            arrays.append(mark_metric(array, name))
            times.append(num_examples)
            weights.append(num_examples)
        else:
            arrays.append(array)
            times.append(1)
            weights.append(array.size)

    by_metric = sum_parts(tuple(arrays), tuple(times))
    # From metric, part, integer to part, metric, integer: all integers of one part are
    # neighbors.
    by_part = by_metric.transpose(1, 0, 2)
    sums = by_part.reshape(3, -1)
    counts = split_in_parts(np.array(weights, np.int32))
    return [sums, counts]


def join_plain(integers: np.ndarray, num_plain: int) -> list[float]:
    """Returns the means of plain metrics; the mean of nothing is NaN."""
    sums, weights = np.split(integers, [num_plain * NUM_INTEGERS])
    totals = sum_integers(sums.reshape(num_plain, NUM_INTEGERS))
    with np.errstate(invalid="ignore"):
        return (totals / weights).tolist()


def split_metric(
    name: str, metric: nnx.Metric
) -> tuple[MetricStructure, list[jax.Array]]:
    """Returns a metric object without its values, and its values as integers.

    Raises:
        TypeError: If it holds values that do not add up.
        ValueError: If it was not made in this step.
    """
    shown = f"`step` returned the metric `{name}`, a `{type(metric).__name__}`"
    last_name = name.rpartition("/")[2]
    by_hand = (
        f"Pass it as `metrics=nnx.MultiMetric({last_name}=metric)`, and "
        "return the arguments of its `update` by name."
    )
    state = lifted_state()
    if state is not None and state.holds(metric):
        raise ValueError(
            f"{shown} that was made outside of the step, so it would count earlier "
            f"steps again. Make a new one in the step, or keep this one. {by_hand}"
        )

    graph, values = nnx.split(metric)
    leaves, structure = jax.tree.flatten(values, is_leaf=_is_variable)
    adds_up = all(map(merges_by_sum, _metrics_in(metric)))
    numbers: list[Number] = []
    parts: list[jax.Array] = []
    for leaf in leaves:
        value = leaf[...]
        is_sum = _is_sum(leaf, value.dtype)
        if not (is_sum and adds_up):
            fault = "has a running mean" if is_sum else f"holds {describe(leaf)}"
            raise TypeError(
                f"{shown}, but it {fault}, so the values of several steps cannot be "
                f"added. {by_hand}"
            )

        number = Number(type(leaf), value.shape, value.dtype)
        numbers.append(number)
        parts.append(_split_number(number, value))
    return MetricStructure(graph, structure, tuple(numbers)), parts


def _is_variable(leaf: object) -> bool:
    return isinstance(leaf, nnx.Variable)


def _is_sum(leaf: object, dtype: Any) -> bool:
    """Returns whether a variable holds numbers that a metric has added up."""
    is_real = jnp.issubdtype(dtype, jnp.floating)
    is_whole = jnp.issubdtype(dtype, jnp.integer)
    is_number = bool(is_real or is_whole)
    return isinstance(leaf, nnx.metrics.MetricState) and is_number


def _metrics_in(metric: nnx.Metric) -> Iterator[nnx.Metric]:
    """Yields a metric object, and the objects that it is made of."""
    yield metric
    for part in vars(metric).values():
        if isinstance(part, nnx.Metric):
            yield from _metrics_in(part)


def join_metric(described: MetricStructure, integers: np.ndarray) -> Any:
    """Returns the value of a metric object whose integers were added up."""
    stops = np.cumsum([number.num_integers for number in described.numbers])
    pieces = np.split(integers, stops[:-1])
    variables: list[Any] = []
    for number, piece in zip(described.numbers, pieces, strict=True):
        value = _join_number(number, piece)
        variables.append(number.kind(jnp.asarray(value)))
    values = described.structure.unflatten(variables)
    metric = nnx.merge(described.graph, values)
    return jax.tree.map(_as_plain, metric.compute())


def _as_plain(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array):
        return leaf
    # The index `()` makes a scalar of an array without axes.
    return np.asarray(leaf)[()]


def _split_number(number: Number, value: jax.Array) -> jax.Array:
    if number.is_count:
        return value.reshape(3, -1)
    flat = value.reshape(-1)
    if not number.is_float:
        return split_in_parts(flat)
    parts = float_parts(flat, 1, NUM_INTEGERS)
    return parts.reshape(3, -1)


def _join_number(number: Number, integers: np.ndarray) -> np.ndarray:
    if number.is_count:
        return split_integers(integers).reshape(number.shape)
    if number.is_float:
        integers = integers.reshape(*number.shape, NUM_INTEGERS)
        return sum_integers(integers).astype(number.dtype)
    counts = integers.reshape(number.shape)
    limits = np.iinfo(number.dtype)
    fits = np.all((limits.min <= counts) & (counts <= limits.max))
    # A count of pixels may be larger than 32 bits hold.
    dtype = number.dtype if fits else np.float32
    return counts.astype(dtype)
