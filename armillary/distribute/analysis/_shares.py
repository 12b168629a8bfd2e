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

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core

from armillary._dataflow import union
from armillary._jax_compat import count_scan_operands
from armillary.distribute.analysis._example_axes import axes_of_result
from armillary.distribute.analysis._marks import METRIC
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
    as_carried,
    as_combined,
    as_stack,
    as_total,
    bends,
    depends_on_order,
    divides_by_own,
    divisors_in,
    is_difference,
    is_of_statistics,
    keep_totals,
    keeps_differences,
    leave_loop,
    uses_gradient,
    weighs_examples,
)
from armillary.distribute.analysis._share_findings import (
    PARTS,
    ShareFinding,
    ShareRecords,
    StateOfSum,
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

    records = ShareRecords(sizes)
    results = _ShareDataflow(axis_name, records).run(program, inputs)
    in_state: list[StateOfSum] = []
    for result, is_averaged in kept.items():
        found = records.find_sum(result, results[result], is_averaged)
        if found is not None:
            in_state.append(found)
    # The first value shows the line to change.
    return [*records.findings(), *in_state[:1]]


class _ShareDataflow(ReplicaDataflow[ShareFacts]):
    """Follows values from the batch through the program of one replica."""

    nothing = EQUAL
    mixes_scatters = True

    def __init__(self, axis_name: str, records: ShareRecords) -> None:
        super().__init__(axis_name)
        self._records = records

    def join(self, facts: Iterable[ShareFacts]) -> ShareFacts:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else EQUAL
        return ShareFacts(
            reach=max(share.reach for share in several),
            axes=union(share.axes for share in several),
            causes=union(share.causes for share in several),
            divisors=union(share.divisors for share in several),
            sizes=union(share.sizes for share in several),
            is_gradient=any(share.is_gradient for share in several),
            is_carried=any(share.is_carried for share in several),
            combined=union(share.combined for share in several),
            totals=union(share.totals for share in several),
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

        is_sum_or_mean = by_ops in ("", "sum", "mean")
        if is_sum_or_mean and not self.is_backward(equation):
            line = self.line(equation)
            for operand, made in zip(operands, equation.outvars, strict=True):
                is_mean = self.is_mean(made, by_ops)
                self._records.look_at_reduction(operand, line, is_mean)

        is_mean_by_ops = by_ops == "mean"
        return [self._combine(equation, each, is_mean_by_ops) for each in operands]

    def follow_exchange(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts]:
        is_of_groups = equation.primitive.name.startswith(REDUCTIONS)
        has_examples = any(operand.reach is Reach.EXAMPLES for operand in operands)
        if has_examples and not is_of_groups and not self.is_backward(equation):
            self._records.exchanges = True
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
        mark = equation.params["name"]
        if mark.startswith(METRIC):
            name = mark.removeprefix(METRIC)
            self._records.look_at_metric(f"`{name}`", operand)
        elif mark in PARTS:
            line = self.line(equation)
            self._records.look_at_part(mark, equation.invars[0], operand, line)
        return operand

    def _combine(self, equation: Any, operand: ShareFacts, is_mean: bool) -> ShareFacts:
        """Returns the facts about the sum or the mean of a value over replicas."""
        result = as_combined(operand)
        if operand.is_gradient or not self._records.is_sum(operand):
            return result
        line = self.line(equation)
        total = Total(line, operand.sizes, operand.divisors, is_mean)
        return result._replace(totals=frozenset({total}))

    def _follow_examples(
        self, equation: Any, operands: list[ShareFacts]
    ) -> list[ShareFacts]:
        """Follows a scan, which may take examples one by one."""
        num_whole, num_carry = count_scan_operands(equation)
        first = num_whole + num_carry
        whole = operands[:num_whole]
        carry = operands[num_whole:first]
        stacks = operands[first:]
        if not _takes_examples(equation.invars[first:], stacks):
            return self._follow_scan(equation, operands)

        body = equation.params["jaxpr"]
        while True:
            handed = list(map(as_carried, carry))
            made = self._enter(equation, body, [*whole, *handed, *stacks])
            now = [self.join(pair) for pair in zip(carry, made, strict=False)]
            if now == carry:
                break
            carry = now

        num_examples = equation.params["length"]
        results = [as_total(facts, num_examples) for facts in carry]
        made_stacks = zip(made[num_carry:], equation.outvars[num_carry:], strict=True)
        for facts, stack in made_stacks:
            results.append(as_stack(facts, stack.aval.ndim))
        line = self.line(equation)
        return [leave_loop(facts, line) for facts in results]

    def mix(self, equation: Any, operands: list[ShareFacts]) -> ShareFacts:
        """Returns the facts of a result: how it depends on the share, and why.

        Only statistics of a share carry causes. Values of single examples lose them,
        except for the lasting causes, because normalization is accepted.
        """
        name = equation.primitive.name
        joined = self.join(operands)
        divisors = joined.divisors | divisors_in(equation)
        joined = joined._replace(
            divisors=divisors,
            is_gradient=joined.is_gradient or self.is_backward(equation),
            totals=keep_totals(equation, operands),
        )
        if not equation.outvars:  # as of a print
            return joined
        if joined.reach is Reach.EQUAL:
            # A sum of ones may be a number of examples.
            is_sum = name in SUMS and not equation.outvars[0].aval.shape
            return joined._replace(divisors=divisors | {ANY}) if is_sum else joined

        # Only a value that is equal on all replicas has totals.
        joined = joined._replace(totals=frozenset())
        if divides_by_own(equation, operands):
            joined = joined._replace(divisors=joined.divisors | {ANY})
        if joined.is_carried and bends(equation, operands):
            joined = self._with_cause(joined, CauseKind.LOOP, equation)
        if joined.reach is Reach.REDUCED:
            return self._mix_reduced(equation, operands, joined)

        causes = self._keep_causes(equation, operands, joined)
        joined = joined._replace(causes=causes, combined=frozenset())
        if joined.reach is not Reach.EXAMPLES:
            return joined._replace(axes=frozenset())
        if not self.is_backward(equation):
            joined = self._look_at_statistics(equation, operands, joined)
        return self._mix_examples(equation, operands, joined)

    def _keep_causes(
        self, equation: Any, operands: list[ShareFacts], joined: ShareFacts
    ) -> frozenset[Cause]:
        """Returns the causes that stay with values of single examples.

        Statistics of a share may normalize examples, also after a dropout, which is not
        followed.
        """
        kept = {cause for cause in joined.causes if cause.kind in LASTING}
        has_examples = any(operand.reach is Reach.EXAMPLES for operand in operands)
        if not has_examples:
            for operand in operands:
                if operand.reach is Reach.UNKNOWN:
                    kept |= operand.causes
        if keeps_differences(equation):
            kept |= {
                cause for cause in joined.causes if cause.kind is CauseKind.VARIANCE
            }
        return frozenset(kept)

    def _look_at_statistics(
        self, equation: Any, operands: list[ShareFacts], joined: ShareFacts
    ) -> ShareFacts:
        """Adds the cause that lies in how examples meet statistics of their share."""
        if weighs_examples(equation, operands):
            return self._with_cause(joined, CauseKind.WEIGHTS, equation)
        if uses_gradient(operands):
            return self._with_cause(joined, CauseKind.GRADIENT, equation)
        if depends_on_order(equation, operands):
            return self._with_cause(joined, CauseKind.ORDER, equation)
        if is_difference(equation, operands):
            return self._with_cause(joined, CauseKind.VARIANCE, equation)
        return joined

    def _mix_reduced(
        self, equation: Any, operands: list[ShareFacts], joined: ShareFacts
    ) -> ShareFacts:
        """Returns the facts of an operation on statistics of a share."""
        name = equation.primitive.name
        made = equation.outvars[0].aval
        if made.dtype == jnp.bool_:
            return joined._replace(causes=frozenset())

        is_backward = self.is_backward(equation)
        if is_backward and is_of_statistics(equation, operands):
            return self._with_cause(joined, CauseKind.LOSS, equation)
        if is_backward and made.shape:
            # The derivative of a product with statistics, as of batch normalization.
            gradients = [operand for operand in operands if operand.is_gradient]
            is_of_both = 0 < len(gradients) < len(operands)
            if is_of_both and name in (*PRODUCTS, "div"):
                return joined._replace(causes=self.join(gradients).causes)
        # The backward pass of a loss that is a nonlinear function begins with numbers.
        if is_backward and not made.shape:
            joined = joined._replace(causes=_as_of_loss(joined.causes))
            if bends(equation, operands):
                return self._with_cause(joined, CauseKind.LOSS, equation)

        if bends(equation, operands):
            is_quotient = name == "div" and bool(operands[0].reach)
            kind = CauseKind.QUOTIENT if is_quotient else CauseKind.NONLINEAR
            return self._with_cause(joined, kind, equation)
        is_choice = name == "select_n" and not operands[0].reach
        is_linear = name in (*LINEAR, *PRODUCTS, "div", "integer_pow")
        is_kept = is_choice or is_linear
        return joined if is_kept else joined._replace(reach=Reach.UNKNOWN)

    def _mix_examples(
        self, equation: Any, operands: list[ShareFacts], joined: ShareFacts
    ) -> ShareFacts:
        """Returns the facts of an operation on examples, which may reduce over them."""
        # For each operand with examples, the axes of the result that they lie along.
        moved: list[frozenset[int]] = []
        # The numbers of examples in the operands.
        sizes: set[int] = set()
        for index, operand in enumerate(operands):
            if operand.reach is not Reach.EXAMPLES:
                continue
            shape = equation.invars[index].aval.shape
            new_axes: set[int] = set()
            for axis in operand.axes:
                if axis + len(shape) >= 0:
                    sizes.add(shape[axis])
                    new_axes.update(axes_of_result(equation, index, axis))
            moved.append(frozenset(new_axes))

        axes = union(moved)
        if axes:
            result = joined._replace(axes=axes)
            if _has_pairs(moved):
                result = self._with_cause(result, CauseKind.PAIRS, equation)
            return result
        if not sizes:
            # A loop has taken the examples apart, so this is one of them.
            return joined._replace(axes=frozenset())

        # The result has no axis of examples, so the operation has reduced over them.
        reduced = ShareFacts(
            Reach.REDUCED,
            causes=joined.causes,
            divisors=joined.divisors,
            sizes=joined.sizes | sizes,
            is_gradient=joined.is_gradient,
            is_carried=joined.is_carried,
        )
        name = equation.primitive.name
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


def _takes_examples(stacks: Sequence[Any], facts: Sequence[ShareFacts]) -> bool:
    """Returns whether a scan takes the examples of one of these stacks one by one."""
    for stack, of_stack in zip(stacks, facts, strict=True):
        first_axis = -stack.aval.ndim
        if first_axis in of_stack.axes:
            return True
    return False


def _as_of_loss(causes: Iterable[Cause]) -> frozenset[Cause]:
    """Returns causes in a backward pass, which are causes in the loss."""
    found: set[Cause] = set()
    for cause in causes:
        is_lasting = cause.kind in LASTING
        found.add(cause if is_lasting else cause._replace(kind=CauseKind.LOSS))
    return frozenset(found)


def _has_pairs(moved: Sequence[frozenset[int]]) -> bool:
    """Returns whether a result has a number for each pair of examples.

    Then the examples of two operands lie along different axes of the result.
    """
    for one, other in itertools.permutations(moved, 2):
        if one - other and other - one:
            return True
    return False
