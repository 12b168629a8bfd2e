"""Sums, and quotients of sums, in a metric or as a value that a pure step returns.

A metric that is made with numbers has added them already. So the same class works in a
`StandardTrainer`, which updates one metric in every step, and in a pure step, which
returns a new metric from every step.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from armillary._jaxpr import mark
from armillary.distribute.analysis._marks import DENOMINATOR, NUMERATOR, SUMMED
from armillary.distribute.replica._context import get_replica_context
from armillary.metrics._counts import (
    NUM_INTEGERS,
    CountingMetric,
    FloatSum,
    add_parts,
    float_parts,
)

# A sum of integers is split in digits, whose sums are exact in 32 bits.
_DIGIT_BITS = 12
_DIGIT = (1 << _DIGIT_BITS) - 1
# Below these limits, each integer is exact as a float and as an integer of 32 bits.
_EXACT_IN_FLOAT = 1 << 24
_EXACT_IN_INTEGER = 1 << 31


class Sum(CountingMetric):
    """The total of values over all examples, replicas and steps.

    In a `StandardTrainer` or a `StandardEvaluator`, make one `Sum` and update it in
    each step. In a pure step of a `StepTrainer` or a `StepEvaluator`, return a new
    `Sum` of the numbers of this batch::

        return {"tokens": armillary.metrics.Sum(batch["mask"])}

    Inside `strategy.run`, and therefore in a pure step, each replica adds the numbers
    of its own examples. Do not reduce them over replicas first.

    Args:
        values: Numbers to begin with, an array of any shape; `None` for 0.

    Raises:
        TypeError: If `values` is not an array of real numbers.
        DoubleReductionError: When the step is traced, if `values` was reduced over
            replicas.
    """

    def __init__(self, values: Any = None) -> None:
        self.total = FloatSum.zeros(NUM_INTEGERS)
        if values is not None:
            self.update(values=values)

    def update(self, *, values: Any, **_: Any) -> None:
        """Adds all elements of an array.

        Args:
            values: Numbers, an array of any shape.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If `values` is not an array of real numbers.
        """
        name = f"{type(self).__name__}.update"
        array = as_numbers("values", name, values)
        add_sum(self.total, _marked(array, SUMMED))

    def compute(self) -> float:
        """Returns the total; waits for the device."""
        return self.total.read_float()


class _Quotient(CountingMetric):
    """One sum divided by another."""

    def __init__(self) -> None:
        self.total = FloatSum.zeros(NUM_INTEGERS)
        self.weight = FloatSum.zeros(NUM_INTEGERS)

    def compute(self) -> float:
        """Returns the quotient, NaN if the divisor is 0; waits for the device."""
        weight = self.weight.read_float()
        if not weight:
            return float("nan")
        return self.total.read_float() / weight


class Ratio(_Quotient):
    """A sum divided by another sum, both over all examples, replicas and steps.

    An example is the loss per token. The sums are divided once, at the end, so each
    example counts by its weight, whatever batch it is in.

    In a `StandardTrainer` or a `StandardEvaluator`, make one `Ratio` and update it in
    each step. In a pure step of a `StepTrainer` or a `StepEvaluator`, return a new
    `Ratio` of the sums of this batch::

        return {"loss": armillary.metrics.Ratio(losses.sum(), weights.sum())}

    Inside `strategy.run`, and therefore in a pure step, each replica adds the sums over
    its own examples. It may also add sums over all replicas, if both arguments are such
    sums.

    Args:
        sum: The first value of the sum: a number, or an array, whose elements are
            added; `None` for 0.
        denominator: The first value of the divisor, in the same form. Give both
            arguments or neither.

    Raises:
        TypeError: If only one argument is given, or one is not an array of real
            numbers.
        DoubleReductionError: When the step is traced, if only one argument was reduced
            over replicas.
    """

    def __init__(self, sum: Any = None, denominator: Any = None) -> None:
        super().__init__()
        if _are_given("Ratio", sum=sum, denominator=denominator):
            self.update(sum=sum, denominator=denominator)

    def update(self, *, sum: Any, denominator: Any, **_: Any) -> None:
        """Adds numbers to both sums.

        Args:
            sum: A number, or an array, whose elements are added.
            denominator: A number, or an array, whose elements are added.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If an argument is not an array of real numbers.
        """
        name = f"{type(self).__name__}.update"
        total = _marked(as_numbers("sum", name, sum), NUMERATOR)
        weight = _marked(as_numbers("denominator", name, denominator), DENOMINATOR)
        add_sum(self.total, total)
        add_sum(self.weight, weight)


class WeightedMean(_Quotient):
    """The mean of values with weights, over all examples, replicas and steps.

    In a `StandardTrainer` or a `StandardEvaluator`, make one `WeightedMean` and update
    it in each step. In a pure step of a `StepTrainer` or a `StepEvaluator`, return a
    new `WeightedMean` of the values of this batch::

        return {"loss": armillary.metrics.WeightedMean(losses, batch["mask"])}

    Args:
        values: The values of this replica's examples, shape `(batch, ...)`; `None` for
            no examples yet.
        weights: The weights of the values: numbers or booleans, of the shape of
            `values` or of its first axes. A value with the weight 0 does not count,
            even if it is NaN. Give both arguments or neither.

    Raises:
        TypeError: If only one argument is given, or one is not an array of real
            numbers.
        ValueError: If the shapes do not fit.
        DoubleReductionError: When the step is traced, if only one argument was reduced
            over replicas.
    """

    def __init__(self, values: Any = None, weights: Any = None) -> None:
        super().__init__()
        if _are_given("WeightedMean", values=values, weights=weights):
            self.update(values=values, weights=weights)

    def update(self, *, values: Any, weights: Any, **_: Any) -> None:
        """Adds values with their weights.

        Args:
            values: Numbers of shape `(batch, ...)`.
            weights: Numbers or booleans of the shape of `values` or of its first axes.
            **_: Arguments that an `nnx.MultiMetric` passes to other metrics.

        Raises:
            TypeError: If an argument is not an array of real numbers.
            ValueError: If the shapes do not fit.
        """
        name = f"{type(self).__name__}.update"
        numbers = as_numbers("values", name, values)
        given = as_numbers("weights", name, weights)
        if given.shape != numbers.shape[: given.ndim]:
            raise ValueError(
                f"`weights` of `{name}` has the shape {given.shape}, but it must be "
                f"the shape of `values`, {numbers.shape}, or its first axes. Use one "
                "weight for each example."
            )

        numbers = _marked(numbers, NUMERATOR)
        given = _marked(given, DENOMINATOR)
        missing_axes = (1,) * (numbers.ndim - given.ndim)
        spread = given.reshape(*given.shape, *missing_axes)
        spread = jnp.broadcast_to(spread, numbers.shape)
        add_sum(self.total, _weigh(numbers, spread))
        add_sum(self.weight, spread)


def _weigh(numbers: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns numbers times their weights, and 0 for NaN with the weight 0."""
    if weights.dtype == bool:
        return jnp.where(weights, numbers, jnp.zeros_like(numbers))

    wide = jnp.promote_types(numbers.dtype, weights.dtype)
    wide = jnp.promote_types(wide, jnp.float32)
    product = numbers.astype(wide) * weights.astype(wide)
    # The product of NaN and 0 would be NaN.
    return jnp.where(weights == 0, 0, product)


class Pending(NamedTuple):
    """The state of a quotient, for an output whose value is not needed yet."""

    total: jax.Array
    weight: jax.Array

    def read(self) -> float:
        """Returns the quotient; waits for the device."""
        # A new object, because the metric itself may be reset or updated by now.
        quotient = Mean()
        quotient.total[...] = self.total
        quotient.weight[...] = self.weight
        return quotient.compute()


class Mean(_Quotient):
    """The mean of all values that it was updated with; each value counts once."""

    def pend(self) -> Pending:
        return Pending(self.total[...], self.weight[...])

    def update(self, *, values: Any, **_: Any) -> None:
        name = f"{type(self).__name__}.update"
        array = as_numbers("values", name, values)
        add_sum(self.total, array)
        self.weight.add_float(jnp.float32(1), array.size)


def as_numbers(argument: str, owner: str, value: Any) -> jax.Array:
    """Returns a value as an array of booleans, integers or floats."""
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(
            f"`{argument}` of `{owner}` is {value!r:.80} of type "
            f"{type(value).__name__}, but it must be an array of numbers. Pass numbers "
            "that are computed from the batch."
        ) from error
    is_real = jnp.issubdtype(array.dtype, jnp.floating)
    is_whole = jnp.issubdtype(array.dtype, jnp.integer)
    is_boolean = array.dtype == bool
    if not (is_real or is_whole or is_boolean):
        raise TypeError(
            f"`{argument}` of `{owner}` has the dtype {array.dtype}, but it must hold "
            "real numbers. Pass a part of them, such as `values.real` or "
            "`jnp.abs(values)`."
        )
    return array


def add_sum(total: FloatSum, values: jax.Array) -> None:
    """Adds all elements of an array to one sum."""
    [parts] = sum_parts((values,), (1,))
    total[...] = add_parts(total[...], parts)


@functools.partial(jax.jit, static_argnums=1)
def sum_parts(arrays: tuple[jax.Array, ...], times: tuple[int, ...]) -> jax.Array:
    """Returns the parts of the sum of each array, times an integer.

    All arrays share one program, because a step that is not compiled runs it, too.
    """
    rows = [_sum_as_floats(array) for array in arrays]
    total = jnp.zeros((3, len(rows), NUM_INTEGERS), jnp.int32)
    # The number of floats depends on the dtype, so the shorter rows end with zeros.
    nothing = jnp.float32(0)
    for column in itertools.zip_longest(*rows, fillvalue=nothing):
        parts = float_parts(jnp.stack(column), times, NUM_INTEGERS)
        total = add_parts(total, parts)
    return total.transpose(1, 0, 2)


def _sum_as_floats(values: jax.Array) -> list[jax.Array]:
    """Returns floats of 32 bits whose total is the sum of an array.

    A sum of integers is exact below 2**19 elements, and a sum of booleans below 2**31.
    Floats are summed in 32 bits, or in 64 bits if they have 64 bits.
    """
    if jnp.issubdtype(values.dtype, jnp.floating):
        wide = jnp.promote_types(values.dtype, jnp.float32)
        return _split_float(jnp.sum(values, dtype=wide))
    if values.dtype == bool:
        return _sum_digits(values.astype(jnp.int32), 1)

    num_bits = 8 * values.dtype.itemsize
    floats: list[jax.Array] = []
    for position in range(0, num_bits, _DIGIT_BITS):
        digits = values >> position
        is_last = position + _DIGIT_BITS >= num_bits
        if not is_last:  # The last digit keeps the sign.
            digits &= _DIGIT
        parts = _sum_digits(digits.astype(jnp.int32), _DIGIT)
        unit = 2.0**position
        floats += [part * unit for part in parts]
    return floats


def _sum_digits(digits: jax.Array, most: int) -> list[jax.Array]:
    """Returns floats whose total is the sum of integers from 0 to `most`."""
    highest = digits.size * most
    if highest < _EXACT_IN_FLOAT:
        return [jnp.sum(digits).astype(jnp.float32)]
    if highest < _EXACT_IN_INTEGER:
        # A float is exact up to 24 bits. These two have 19 and 12.
        total = jnp.sum(digits)
        low = total & _DIGIT
        high = total & ~_DIGIT
        return [high.astype(jnp.float32), low.astype(jnp.float32)]
    return [jnp.sum(digits.astype(jnp.float32))]


def _split_float(number: jax.Array) -> list[jax.Array]:
    """Returns a float of 64 bits as two of 32 bits, or a float of 32 bits alone."""
    high = number.astype(jnp.float32)
    if number.dtype == jnp.float32:
        return [high]
    rest = number - high.astype(number.dtype)
    # A number too large for 32 bits is infinite there, and so is the sum.
    rest = jnp.where(jnp.isfinite(high), rest, 0)
    return [high, rest.astype(jnp.float32)]


def _marked(array: jax.Array, name: str) -> jax.Array:
    """Marks an array that replicas add up, for the proof that they may add it."""
    context = get_replica_context()
    has_several = context is not None and context.axis_name is not None
    if not has_several:
        return array
    return mark(array, name)


def _are_given(name: str, **pair: Any) -> bool:
    """Returns whether both arguments of a constructor are given.

    Raises:
        TypeError: If only one of them is given.
    """
    left_out = [argument for argument, value in pair.items() if value is None]
    if len(left_out) == 1:
        arguments = ", ".join(pair)
        raise TypeError(
            f"`{left_out[0]}` of `{name}` is None, but the other argument is given. "
            f"Give both, `{name}({arguments})`, or neither."
        )
    return not left_out
