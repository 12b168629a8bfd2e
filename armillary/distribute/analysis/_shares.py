"""Finds numbers of a step that depend on how replicas share the examples of a batch.

Every replica computes with its own share of a batch, and then the numbers of all
replicas are averaged. If a number is a mean over examples, the result is the mean over
the whole batch. A nonlinear function of such a mean, such as `exp` or a quotient of two
sums, gives another number than on one device, and so does the largest loss of a share.

One pass follows every value from the batch to the metrics of a pure step and to the
reductions that the step asks for::

    a value is    if it is                              an operation on it gives
    EQUAL         equal on all replicas                 EQUAL
    REDUCED       summed over the examples of a share   REDUCED; a nonlinear operation
                                                        adds a cause to it
    EXAMPLES      one number for each example           EXAMPLES, or REDUCED by a sum
    UNKNOWN       none of these, or not followed        UNKNOWN

A step that normalizes examples by the mean and the deviation of their share, as batch
normalization does, depends on the share, too. That is accepted: such a value counts as
EXAMPLES, and the mean of its statistics over replicas is no finding. Weights that a sum
over the share has normalized are a finding, because the loss is a quotient then.

Only causes that are certain are found, so a step that is right gets no warning.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

from armillary._jax_compat import count_scan_operands, read_real
from armillary.distribute.analysis._example_axes import axes_of_result
from armillary.distribute.analysis._marks import DENOMINATOR, METRIC, NUMERATOR, SUMMED
from armillary.distribute.analysis._operations import (
    EXTREMES,
    LINEAR,
    PRODUCTS,
    REDUCTIONS,
    SUMS,
)
from armillary.distribute.analysis._replica_dataflow import ReplicaDataflow
from armillary.distribute.analysis._share_facts import (
    ANY,
    COMBINED,
    EQUAL,
    LASTING,
    UNKNOWN,
    Cause,
    CauseKind,
    Reach,
    ShareFacts,
    Total,
    as_combined,
    as_stack,
    as_total,
    bends,
    depends_on_order,
    divides_by_own,
    divisors_in,
    first_of,
    is_difference,
    is_of_statistics,
    keep_totals,
    keeps_differences,
    leave_loop,
    uses_gradient,
    weighs_examples,
)


class MetricOfShare(NamedTuple):
    """A metric that depends on the share: its name, or its line."""

    name: str
    cause: Cause


class ReductionOfShare(NamedTuple):
    """A mean or a sum over replicas of numbers that depend on the share."""

    line: str
    cause: Cause


class MeanOfSums(NamedTuple):
    """A mean over replicas of the gradients of a sum over examples."""

    line: str
    num_examples: int


class SumOfEqual(NamedTuple):
    """A metric that adds the same number on every replica."""

    line: str


class SumOfMeans(NamedTuple):
    """A metric that adds up the means of the replicas."""

    line: str


class StateOfSum(NamedTuple):
    """A value of the state that holds a mean over replicas of a sum over examples.

    Attributes:
        result: The number of the value among the results of the step.
        line: The line of the mean; empty if the end of the step takes it.
        num_examples: The number of examples of one replica.
    """

    result: int
    line: str
    num_examples: int


ShareFinding = (
    StateOfSum | MetricOfShare | ReductionOfShare | MeanOfSums | SumOfEqual | SumOfMeans
)


def find_shares(
    program: core.ClosedJaxpr,
    is_split: Sequence[bool],
    axis_name: str,
    kept: Mapping[int, bool],
) -> list[ShareFinding]:
    """Returns the numbers that depend on how replicas share the examples.

    Args:
        program: The program of one replica.
        is_split: For each input, whether it is a part of a batch, examples first.
        axis_name: The axis of replicas.
        kept: For each result that is a new value of the state, by its number, whether
            the end of the step takes the mean over replicas.
    """
    inputs: list[ShareFacts] = []
    sizes: set[int] = set()
    for variable, is_own in zip(program.jaxpr.invars, is_split, strict=True):
        shape = variable.aval.shape
        if is_own and shape:
            sizes.add(shape[0])
            inputs.append(ShareFacts(Reach.EXAMPLES, frozenset({-len(shape)})))
        elif is_own:
            inputs.append(UNKNOWN)
        else:
            inputs.append(EQUAL if shape else COMBINED)
    search = _ShareDataflow(axis_name, sizes)
    results = search.run(program, inputs)
    in_state = [
        search.find_sum(result, results[result], is_averaged)
        for result, is_averaged in kept.items()
    ]
    # The first value shows the line to change.
    return [*search.findings(), *list(filter(None, in_state))[:1]]


class _ShareDataflow(ReplicaDataflow[ShareFacts]):
    nothing = EQUAL
    mixes_scatters = True

    def __init__(self, axis_name: str, sizes: set[int]) -> None:
        super().__init__(axis_name)
        self._sizes = sizes
        self._metrics: dict[str, set[Cause]] = {}
        self._reductions: dict[str, set[Cause]] = {}
        self._means_of_sums: dict[str, int] = {}
        self._equal_sums: set[str] = set()
        self._sums_of_means: set[str] = set()
        self._numerator = EQUAL
        # Whether replicas send examples to each other, to compare them part by part.
        self._exchanges = False

    def find_sum(
        self, result: int, value: ShareFacts, is_averaged: bool
    ) -> StateOfSum | None:
        """Returns the finding if a value of the state is smaller than on one device."""
        if is_averaged and not value.is_gradient and self._is_sum(value):
            return StateOfSum(result, "", max(value.sizes))
        for total in sorted(value.totals, key=lambda total: total.line):
            summed = ShareFacts(
                Reach.REDUCED, divisors=total.divisors, sizes=total.sizes
            )
            if total.is_mean and self._is_sum(summed):
                return StateOfSum(result, total.line, max(total.sizes))
        return None

    def findings(self) -> list[ShareFinding]:
        found: list[ShareFinding] = []
        for name, causes in self._metrics.items():
            if certain := self._certain(causes):
                found.append(MetricOfShare(name, first_of(certain)))
        for line, causes in self._reductions.items():
            if certain := self._certain(causes):
                found.append(ReductionOfShare(line, first_of(certain)))
        for line, num_examples in self._means_of_sums.items():
            found.append(MeanOfSums(line, num_examples))
        found += map(SumOfEqual, sorted(self._equal_sums))
        found += map(SumOfMeans, sorted(self._sums_of_means))
        return found

    def _certain(self, causes: set[Cause]) -> set[Cause]:
        """Returns the causes that no exchange between replicas can make up for.

        A step that sends examples around compares the examples of a replica with each
        other, and then with examples of the next replica.
        """
        if not self._exchanges:
            return causes
        return {cause for cause in causes if cause.kind is not CauseKind.PAIRS}

    def join(self, facts: Iterable[ShareFacts]) -> ShareFacts:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else EQUAL
        return ShareFacts(
            reach=max(share.reach for share in several),
            axes=frozenset().union(*(share.axes for share in several)),
            causes=frozenset().union(*(share.causes for share in several)),
            divisors=frozenset().union(*(share.divisors for share in several)),
            sizes=frozenset().union(*(share.sizes for share in several)),
            is_gradient=any(share.is_gradient for share in several),
            is_carried=any(share.is_carried for share in several),
            combined=frozenset().union(*(share.combined for share in several)),
            totals=frozenset().union(*(share.totals for share in several)),
        )

    def decide(self, equation: Any, decides: ShareFacts) -> ShareFacts:
        del equation
        return UNKNOWN if decides.reach else EQUAL

    def transfer(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts] | None:
        if equation.primitive.name == "scan":
            return self._follow_examples(equation, operands)
        return super().transfer(equation, operands)

    def follow_reduction(
        self, equation: Any, operands: list[ShareFacts], by_ops: str
    ) -> list[ShareFacts]:
        is_by_psum = equation.primitive.name.startswith("psum")
        if not by_ops and not is_by_psum:
            return [COMBINED] * len(equation.outvars)
        for operand, made in zip(operands, equation.outvars, strict=True):
            self._look_at_reduction(equation, operand, by_ops, made)
        return [
            self._combine(equation, operand, is_mean=by_ops == "mean")
            for operand in operands
        ]

    def follow_exchange(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts]:
        is_of_groups = equation.primitive.name.startswith(REDUCTIONS)
        if not is_of_groups and not self.is_backward(equation):
            has_examples = any(operand.reach is Reach.EXAMPLES for operand in operands)
            self._exchanges = self._exchanges or has_examples
        return [UNKNOWN] * len(equation.outvars)

    def follow_source(self, equation: Any, operands: list[ShareFacts]) -> ShareFacts:
        del equation, operands
        return UNKNOWN

    def follow_draw(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts] | None:
        if not any(operand.reach for operand in operands):
            return None
        return [UNKNOWN] * len(equation.outvars)

    def follow_mark(self, equation: Any, operand: ShareFacts) -> ShareFacts:
        self._look_at_mark(equation, operand)
        return operand

    def _look_at_mark(self, equation: Any, metric: ShareFacts) -> None:
        """Notes a metric that the step returns, or a part of one."""
        name = equation.params["name"]
        causes = metric.causes | metric.combined
        if name.startswith(METRIC) and causes:
            key = f"`{name.removeprefix(METRIC)}`"
            self._metrics.setdefault(key, set()).update(causes)
        if name in (SUMMED, NUMERATOR, DENOMINATOR) and causes:
            self._metrics.setdefault(f"at {self.line(equation)}", set()).update(causes)
        if name == NUMERATOR:
            self._numerator = metric
        # The numerator of a ratio comes before its denominator.
        is_divided = name == DENOMINATOR and self._is_sum(self._numerator)
        is_added = name == SUMMED or is_divided
        if is_added and self._is_equal_number(equation, metric):
            self._equal_sums.add(self.line(equation))
        if name == SUMMED and self._is_mean(metric):
            self._sums_of_means.add(self.line(equation))

    def _is_equal_number(self, equation: Any, metric: ShareFacts) -> bool:
        """Returns whether a number is equal on all replicas, and no size of a share.

        The size of a share is a constant, too, and its sum is right.
        """
        if metric.reach is not Reach.EQUAL:
            return False
        number = read_real(equation.invars[0])
        # A number of tokens is a multiple of the number of examples.
        is_size = number and any(number % size == 0 for size in self._sizes)
        return not is_size

    def _look_at_reduction(
        self, equation: Any, operand: ShareFacts, by_ops: str, made: Any
    ) -> None:
        """Notes a sum or a mean over replicas.

        Args:
            equation: The reduction.
            operand: The facts about the reduced value.
            by_ops: The kind of a reduction by a `CrossDeviceOps`; empty for others.
            made: The result.
        """
        if by_ops not in ("", "sum", "mean") or self.is_backward(equation):
            return
        line = self.line(equation)
        # Means of statistics, as of batch normalization, are accepted: see above.
        causes = {
            cause
            for cause in operand.causes
            if operand.is_gradient or cause.kind in LASTING
        }
        if causes:
            self._reductions.setdefault(line, set()).update(causes)
            return
        is_mean = self.is_mean(made, by_ops)
        if is_mean and operand.is_gradient and self._is_sum(operand):
            self._means_of_sums[line] = max(operand.sizes)

    def _combine(
        self, equation: Any, operand: ShareFacts, *, is_mean: bool
    ) -> ShareFacts:
        """Returns the facts about the sum or the mean of a value over replicas."""
        result = as_combined(operand)
        if operand.is_gradient or not self._is_sum(operand):
            return result
        line = self.line(equation)
        total = Total(line, operand.sizes, operand.divisors, is_mean)
        return result._replace(totals=frozenset({total}))

    def _is_mean(self, metric: ShareFacts) -> bool:
        """Returns whether a number was summed over a share, and divided by its size."""
        is_scaled = any(
            divisor % size == 0
            for divisor in metric.divisors - {ANY, 1, 2}
            for size in metric.sizes
        )
        return metric.reach is Reach.REDUCED and is_scaled

    def _is_sum(self, value: ShareFacts) -> bool:
        """Returns whether a value was summed, and divided by no number of rows."""
        is_followed = value.reach is Reach.REDUCED and value.sizes
        divisors = value.divisors
        if not is_followed or ANY in divisors:
            return False
        # The mean of parts of a batch divides by the size and by the number of parts,
        # and a mean of pairs of examples by their number. Half a square is no mean.
        sizes = {*value.sizes, *self._sizes}
        no_means = {1, 2} - value.sizes
        for divisor in {*divisors, math.prod(divisors)} - no_means:
            if any(divisor % size == 0 or size % divisor == 0 for size in sizes):
                return False
        return True

    def _follow_examples(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts]:
        """Follows a scan, which may take examples one by one."""
        num_whole, num_carry = count_scan_operands(equation)
        first = num_whole + num_carry
        variables = equation.invars[first:]
        pairs = zip(variables, operands[first:], strict=True)
        is_over_examples = any(
            -variable.aval.ndim in facts.axes for variable, facts in pairs
        )
        if not is_over_examples:
            return self._follow_scan(equation, operands)

        body = equation.params["jaxpr"]
        line = self.line(equation)
        carry = operands[num_whole:first]
        while True:
            handed = [
                fact._replace(is_carried=True) if fact.reach else fact for fact in carry
            ]
            inputs = [*operands[:num_whole], *handed, *operands[first:]]
            made = self._enter(equation, body, inputs)
            now = [self.join(pair) for pair in zip(carry, made, strict=False)]
            if now == carry:
                break
            carry = now
        stacked = equation.outvars[num_carry:]
        pairs = zip(made[num_carry:], stacked, strict=True)
        results = [
            *(as_total(facts, equation.params["length"]) for facts in carry),
            *(as_stack(facts, variable.aval.ndim) for facts, variable in pairs),
        ]
        return [leave_loop(facts, line) for facts in results]

    def mix(self, equation: Any, operands: list[ShareFacts]) -> ShareFacts:
        """Returns the facts of a result: how it depends on the share, and why.

        Only statistics of a share carry causes. Values of single examples lose them,
        except for the lasting causes, because normalization is accepted.
        """
        name = equation.primitive.name
        both = self.join(operands)
        divisors = both.divisors | divisors_in(equation)
        is_gradient = both.is_gradient or self.is_backward(equation)
        totals = keep_totals(equation, operands)
        both = both._replace(divisors=divisors, is_gradient=is_gradient, totals=totals)

        if not equation.outvars:  # as of a print
            return both
        if both.reach is Reach.EQUAL:
            # A sum of ones may be a number of examples.
            is_sum = name in SUMS and not equation.outvars[0].aval.shape
            return both._replace(divisors=divisors | {ANY}) if is_sum else both
        both = both._replace(totals=frozenset())
        if divides_by_own(equation, operands):
            both = both._replace(divisors=both.divisors | {ANY})
        if both.is_carried and bends(equation, operands):
            both = self._with_cause(both, CauseKind.LOOP, equation)
        if both.reach is Reach.REDUCED:
            return self._mix_reduced(equation, operands, both)
        # Statistics of a share may normalize examples, also after a dropout, which is
        # not followed.
        kept = {cause for cause in both.causes if cause.kind in LASTING}
        if not any(operand.reach is Reach.EXAMPLES for operand in operands):
            unknown = (
                operand for operand in operands if operand.reach is Reach.UNKNOWN
            )
            kept |= self.join(unknown).causes
        if keeps_differences(equation):
            kept |= {cause for cause in both.causes if cause.kind is CauseKind.VARIANCE}
        both = both._replace(causes=frozenset(kept), combined=frozenset())
        if both.reach is Reach.EXAMPLES:
            if not self.is_backward(equation):
                both = self._look_at_statistics(equation, operands, both)
            return self._mix_examples(equation, operands, both)
        return both._replace(axes=frozenset())

    def _look_at_statistics(
        self, equation: Any, operands: list[ShareFacts], both: ShareFacts
    ) -> ShareFacts:
        """Adds the cause that lies in how examples meet statistics of their share."""
        if weighs_examples(equation, operands):
            return self._with_cause(both, CauseKind.WEIGHTS, equation)
        if uses_gradient(operands):
            return self._with_cause(both, CauseKind.GRADIENT, equation)
        if depends_on_order(equation, operands):
            return self._with_cause(both, CauseKind.ORDER, equation)
        if is_difference(equation, operands):
            return self._with_cause(both, CauseKind.VARIANCE, equation)
        return both

    def _mix_reduced(
        self, equation: Any, operands: list[ShareFacts], both: ShareFacts
    ) -> ShareFacts:
        """Returns the facts of an operation on statistics of a share."""
        name = equation.primitive.name
        made = equation.outvars[0].aval
        if made.dtype == jnp.bool_:
            return both._replace(causes=frozenset())
        is_backward = self.is_backward(equation)
        if is_backward and is_of_statistics(equation, operands):
            return self._with_cause(both, CauseKind.LOSS, equation)
        if is_backward and made.shape:
            # The derivative of a product with statistics, as of batch normalization.
            gradients = [operand for operand in operands if operand.is_gradient]
            if 0 < len(gradients) < len(operands) and name in (*PRODUCTS, "div"):
                return both._replace(causes=self.join(gradients).causes)
        # The backward pass of a loss that is a nonlinear function begins with numbers.
        if is_backward and not made.shape:
            of_loss = {
                cause if cause.kind in LASTING else cause._replace(kind=CauseKind.LOSS)
                for cause in both.causes
            }
            both = both._replace(causes=frozenset(of_loss))
            if bends(equation, operands):
                return self._with_cause(both, CauseKind.LOSS, equation)
        if bends(equation, operands):
            is_quotient = name == "div" and bool(operands[0].reach)
            kind = CauseKind.QUOTIENT if is_quotient else CauseKind.NONLINEAR
            return self._with_cause(both, kind, equation)
        is_choice = name == "select_n" and not operands[0].reach
        is_linear = name in (*LINEAR, *PRODUCTS, "div", "integer_pow")
        is_kept = is_choice or is_linear
        return both if is_kept else both._replace(reach=Reach.UNKNOWN)

    def _mix_examples(
        self, equation: Any, operands: list[ShareFacts], both: ShareFacts
    ) -> ShareFacts:
        """Returns the facts of an operation on examples, which may reduce over them."""
        name = equation.primitive.name
        moved: list[frozenset[int]] = []
        sizes: set[int] = set()
        for index, operand in enumerate(operands):
            if operand.reach is not Reach.EXAMPLES:
                continue
            shape = equation.invars[index].aval.shape
            places = [axis for axis in operand.axes if axis + len(shape) >= 0]
            sizes.update(shape[axis] for axis in places)
            axes = [axes_of_result(equation, index, axis) for axis in places]
            moved.append(frozenset().union(*axes))

        axes = frozenset().union(*moved)
        if axes:
            result = both._replace(axes=axes)
            is_of_pairs = any(a - b and b - a for a in moved for b in moved if a and b)
            if is_of_pairs:
                result = self._with_cause(result, CauseKind.PAIRS, equation)
            return result
        if not sizes:
            # A loop has taken the examples apart, so this is one of them.
            return both._replace(axes=frozenset())
        reduced = ShareFacts(
            Reach.REDUCED,
            causes=both.causes,
            divisors=both.divisors,
            sizes=both.sizes | sizes,
            is_gradient=both.is_gradient,
            is_carried=both.is_carried,
        )
        if name in SUMS:
            return reduced
        if name in EXTREMES:
            return self._with_cause(reduced, CauseKind.EXTREME, equation)
        return reduced._replace(reach=Reach.UNKNOWN)

    def _with_cause(
        self, facts: ShareFacts, kind: CauseKind, equation: Any
    ) -> ShareFacts:
        cause = Cause(kind, equation.primitive.name, self.line(equation))
        return facts._replace(causes=facts.causes | {cause})
