"""Proves that a replica's program keeps mirrored state equal, and reduces correctly.

A replica's program is traced before it becomes a part of the step. One pass follows
every value from the batch, the number of the replica, keys and callbacks. A value that
it cannot follow counts as different on each replica. Only a reduction over all replicas
makes a value equal again. If a differing value decides a branch or a loop, all its
results differ, and it may not reduce.

On the way, values carry labels (`_labels`). They show whether a sum or a mean would be
wrong.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._jaxpr import is_made_by, source_line
from armillary.distribute.analysis._label_rules import (
    SCALES,
    divide,
    find_lost,
    follow_keys,
    goes_through,
    keeps_scale,
    wrong_in_mean,
    wrong_in_sum,
)
from armillary.distribute.analysis._labels import (
    EQUAL,
    Facts,
    Label,
    LabelKind,
    join_facts,
)
from armillary.distribute.analysis._marks import (
    DENOMINATOR,
    DIVISOR,
    NUMERATOR,
    SUMMED,
    WEIGHT,
)
from armillary.distribute.analysis._operations import (
    ADDITIONS,
    DRAWS,
    NUMBER,
    SOURCES,
    has_collective,
)
from armillary.distribute.analysis._proof_messages import (
    explain_difference,
    explain_divisor,
    explain_half_reduced,
    explain_label,
    explain_noise,
    explain_summed_twice,
    explain_wait,
)
from armillary.distribute.analysis._replica_dataflow import ReplicaDataflow
from armillary.state._lift import State
from armillary.state._tree import pure_path_of

# The function of Keras that reduces losses to one number, and its functions that then
# divide this number by the number of replicas.
_KERAS_MEAN = "reduce_values"
_KERAS_SCALES = ("scale_loss_for_distribution", "_scale")

# The function of Optax that adds noise to a sum over examples, and divides the result.
_PRIVATE = "differentially_private_aggregate.<locals>.update_fn"

_MARKED = {DIVISOR: LabelKind.DIVISOR, WEIGHT: LabelKind.WEIGHT}


class Proof(ReplicaDataflow[Facts]):
    """The facts about the results of a replica's program.

    It raises an error if some replicas would wait forever in a reduction, or if the
    program reduces wrongly on `counts[0]` replicas.

    Args:
        program: The program of one replica.
        inputs: The facts of its inputs.
        counts: The number of replicas that run the program, and the number of replicas
            that hold data.
        axis_name: The axis of replicas.

    Attributes:
        results: The facts of the results of the program.
        is_equal: For each result, whether it is equal on all replicas.
        is_divided: For each result, whether it is one replica's part of a sum.
        sums_gradients: Whether the program sums gradients over replicas.
    """

    nothing = EQUAL

    def __init__(
        self,
        program: core.ClosedJaxpr,
        inputs: Sequence[Facts],
        counts: Sequence[int],
        axis_name: str,
    ) -> None:
        super().__init__(axis_name)
        self._program = program.jaxpr
        self._counts = counts
        # The last error at each operation, by its place: the analysis repeats a loop
        # until its facts are stable, and an error may go away.
        self._errors: dict[Any, Exception | None] = {}
        self._reduced_at: set[str] = set()
        self._numerator = EQUAL
        self.sums_gradients = False

        self.results = self.run(program, inputs)
        is_alone = counts[0] == 1
        self.is_equal: list[bool] = []
        self.is_divided: list[bool] = []
        for facts in self.results:
            self.is_equal.append(is_alone or not facts.reasons)
            self.is_divided.append(facts.find(LabelKind.DIVIDED) is not None)

        errors = filter(None, self._errors.values())
        first_error = next(errors, None)
        if first_error is not None and not is_alone:
            raise first_error

    def require_equal(self, mirrored: Mapping[int, int], state: State) -> None:
        """Raises if the new values of mirrored arrays may differ.

        Args:
            mirrored: The indices of arrays of the state, by the number of the result.
            state: The state.
        """
        differing = [number for number in mirrored if not self.is_equal[number]]
        if not differing:
            return
        lines: list[str] = []
        pure_paths: list[str] = []
        for number in differing:
            index = mirrored[number]
            name = state.display_name(index)
            role = state.kinds[index].role.value
            where = self._where_written(number)
            lines.append(f"{name} ({role}, mirrored){where}")
            pure_path = pure_path_of(state.owners[index], state.paths[index])
            if pure_path is not None:
                pure_paths.append(pure_path)
        facts = self.join(self.results[number] for number in differing)
        raise explain_difference(lines, len(state.paths), facts, pure_paths)

    def _where_written(self, number: int) -> str:
        """Returns the line that makes a result, as a part of a sentence."""
        result = self._program.outvars[number]
        for equation in self._program.eqns:
            if any(made is result for made in equation.outvars):
                return f", written at {source_line(equation)}"
        return ""

    def join(self, facts: Iterable[Facts]) -> Facts:
        return join_facts(facts)

    def line(self, equation: Any) -> str:
        return super().line(equation) or "a line that JAX does not know"

    def decide(self, equation: Any, decides: Facts) -> Facts:
        """Returns the facts of the results of a branch or loop that a value decides."""
        error = None
        if decides.reasons and has_collective(equation):
            operation = equation.primitive.name
            error = explain_wait(operation, self.line(equation), decides)
        self._errors[self._place(equation)] = error
        return Facts(decides.reasons)

    def transfer(self, equation: Any, operands: list[Facts]) -> list[Facts] | None:
        results = super().transfer(equation, operands)
        if results is not None or not self._begins_keras_mean(equation):
            return results
        averaged = self._labels(LabelKind.AVERAGED, equation)
        results = self._follow(equation, operands)
        return [Facts(reasons, labels | averaged) for reasons, labels in results]

    def follow_source(self, equation: Any, operands: list[Facts]) -> Facts:
        reasons = self.join(operands).reasons | SOURCES[equation.primitive.name]
        return Facts(reasons)

    def follow_mark(self, equation: Any, operand: Facts) -> Facts:
        """Returns the facts of a marked value, and looks at the numbers of metrics."""
        mark_name = equation.params["name"]
        self._look_at_metric(equation, operand)
        kind = _MARKED.get(mark_name)
        if kind is None:
            return operand
        if kind is LabelKind.DIVISOR and operand.reasons:
            error = explain_divisor(self.line(equation), operand)
            self._errors[self._place(equation)] = error
        return Facts(operand.reasons, self._labels(kind, equation))

    def _look_at_metric(self, equation: Any, operand: Facts) -> None:
        """Notes an error for a metric of numbers that were reduced before."""
        mark_name = equation.params["name"]
        error = None
        if mark_name == SUMMED:
            error = self._find_summed_twice(equation, operand)
        elif mark_name == NUMERATOR:
            self._numerator = operand
        elif mark_name == DENOMINATOR:
            error = self._find_half_reduced(equation, operand)
        if error is not None:
            self._errors[self._place(equation)] = error

    def _find_summed_twice(self, equation: Any, total: Facts) -> Exception | None:
        """Returns the error for a total that was reduced before it is summed."""
        origin = None if total.reasons else total.find(LabelKind.REDUCED)
        if origin is None:
            return None
        line = self.line(equation)
        return explain_summed_twice(line, origin, self._counts[0])

    def _find_half_reduced(self, equation: Any, denominator: Facts) -> Exception | None:
        """Returns the error for a ratio of which only one part was reduced before."""
        reduced: list[str | None] = []
        for total in (self._numerator, denominator):
            if not total.reasons:
                reduced.append(total.find(LabelKind.REDUCED))
        origin = reduced[0] if len(reduced) == 1 else None
        if origin is None:
            return None
        line = self.line(equation)
        return explain_half_reduced(line, origin, self._counts[0])

    def follow_exchange(self, equation: Any, operands: list[Facts]) -> list[Facts]:
        operand = self.join(operands)
        labels = frozenset(operand.only(*SCALES))
        is_equal = not operand.reasons and not labels
        if is_equal and self.is_backward(equation):
            labels = self._labels(LabelKind.OF_REDUCED, equation)
        # Each replica may receive another value, as if it depended on its number.
        received = Facts(operand.reasons | NUMBER, labels)
        return [received] * len(equation.outvars)

    def follow_reduction(
        self, equation: Any, operands: list[Facts], by_ops: str
    ) -> list[Facts]:
        if self.is_backward(equation):
            return [self._reduce_backward(equation, operand) for operand in operands]

        self._reduced_at.add(self.line(equation))
        is_psum = equation.primitive.name.startswith("psum")
        is_sum = is_psum or by_ops in ("sum", "mean")
        if is_sum:
            for operand, made in zip(operands, equation.outvars, strict=True):
                self._look_at_sum(equation, operand, made, by_ops)
        labels = self._labels(LabelKind.REDUCED, equation)
        return [Facts(labels=labels)] * len(operands)

    def _reduce_backward(self, equation: Any, operand: Facts) -> Facts:
        """Returns the facts of a reduction in a backward pass.

        It is the transpose of a reduction within a loss. Its operands are equal if the
        loss was reduced last. Then each replica's part counts for every replica.
        """
        labels = frozenset(operand.only(*SCALES, LabelKind.OF_REDUCED))
        if not operand.reasons and not labels:
            labels = self._labels(LabelKind.OF_REDUCED, equation)
        elif self.line(equation) not in self._reduced_at:
            # Not a transpose: a backward pass that the user wrote reduces.
            labels |= self._labels(LabelKind.REDUCED, equation)
        return Facts(labels=labels)

    def _look_at_sum(
        self,
        equation: Any,
        operand: Facts,
        made: Any,
        by_ops: str,
    ) -> None:
        """Notes an error for a sum or a mean over replicas that is wrong."""
        users = [] if by_ops else self.find_users(made)
        is_mean = self.is_mean(made, by_ops)
        is_mean_by_hand = bool(users) and all(map(self._divides_by_count, users))
        if is_mean_by_hand and not is_mean:
            return  # A mean by hand: the user decides by which number to divide.

        is_of_gradients = operand.find(LabelKind.GRADIENT) is not None
        if is_of_gradients and not is_mean:
            self.sums_gradients = True
        wrong = wrong_in_mean(operand) if is_mean else wrong_in_sum(operand)
        self._note(equation, operand, wrong, made)

    def _note(
        self,
        equation: Any,
        operand: Facts,
        wrong: Sequence[LabelKind],
        made: Any = None,
    ) -> None:
        """Notes an error for the first of the `wrong` labels that an operand has."""
        labels = filter(None, map(operand.find_label, wrong))
        label = next(labels, None)
        error = None
        if label is not None:
            error = explain_label(label, self.line(equation), self._counts[0])
        self._errors[self._place(equation), made] = error

    def mix(self, equation: Any, operands: list[Facts]) -> Facts:
        """Returns all reasons of the operands, and the labels that the result keeps."""
        joined = self.join(operands)
        reasons = joined.reasons
        labels = joined.labels | self._new_labels(equation, joined)
        if not labels or not equation.outvars:
            return Facts(reasons)  # the usual case

        labels |= self._noised(equation, operands)
        name = equation.primitive.name
        is_power_of_one = equation.params.get("y") == 1
        if is_power_of_one:  # as Optax has `g**order`
            name = "copy"
        if name == "div":
            labels = divide(labels, *operands)

        dtype = equation.outvars[0].aval.dtype
        is_backward = self.is_backward(equation)
        is_report = name == "mul" and self._is_report(equation)
        kept = {label for label in labels if goes_through(label, name, dtype, reasons)}
        if not is_backward and not keeps_scale(name):
            kept -= joined.only(LabelKind.AVERAGED)
        kept |= follow_keys(name, joined)
        kept -= find_lost(name, operands, is_backward=is_backward, is_report=is_report)

        if name in DRAWS and not reasons:
            self._note(equation, operands[0], [LabelKind.KEY])
        return Facts(reasons, frozenset(kept))

    def _new_labels(self, equation: Any, joined: Facts) -> frozenset[Label]:
        """Returns the labels that do not depend on labels of the operands."""
        labels: frozenset[Label] = frozenset()
        is_marked = bool(joined.only(LabelKind.GRADIENT))
        if joined.reasons and not is_marked and self.is_backward(equation):
            labels |= self._labels(LabelKind.GRADIENT, equation)
        if equation.primitive.name in DRAWS:
            labels |= self._labels(LabelKind.DRAWN, equation)
        return labels

    def _noised(self, equation: Any, operands: list[Facts]) -> frozenset[Label]:
        """Returns the label `NOISED` if equal random numbers are added to a gradient.

        A mean over replicas keeps such numbers as they are, but a sum multiplies them.
        With the aggregate of differential privacy, a mean is wrong, too: it divides the
        numbers by the examples of one replica.
        """
        drawn: list[Facts] = []
        own: list[Facts] = []
        for operand in operands:
            if operand.find(LabelKind.DRAWN):
                drawn.append(operand)
            elif operand.reasons:
                own.append(operand)
        is_addition = equation.primitive.name in ADDITIONS
        adds_noise = is_addition and bool(drawn) and bool(own)
        if not adds_noise or self.is_backward(equation):
            return frozenset()

        if is_made_by(equation, _PRIVATE):
            error = explain_noise(self.line(equation), self._counts[0])
            self._errors[self._place(equation)] = error
        is_equal = not any(operand.reasons for operand in drawn)
        has_gradient = any(operand.find(LabelKind.GRADIENT) for operand in own)
        if is_equal and has_gradient:
            return self._labels(LabelKind.NOISED, equation)
        return frozenset()

    def _labels(self, kind: LabelKind, equation: Any) -> frozenset[Label]:
        return frozenset({Label(kind, self.line(equation))})

    def _place(self, equation: Any) -> tuple[int, ...]:
        """Returns a key: an operation, and the calls around it that share a trace."""
        around = map(id, self.within)
        return (*around, id(equation))

    def _begins_keras_mean(self, equation: Any) -> bool:
        """Returns whether the backward pass of an unscaled mean of Keras begins here.

        A backward pass begins with the number 1. This 1 reaches the mean if the loss is
        the mean itself, or a sum of the mean and other terms. If the loss was divided
        by the number of replicas, a different number reaches the mean.
        """
        return (
            "keras" in sys.modules
            and any(map(_is_one, equation.invars))
            and self.is_backward(equation)
            and is_made_by(equation, _KERAS_MEAN)
            and not is_made_by(equation, *_KERAS_SCALES)
        )

    def _divides_by_count(self, equation: Any) -> bool:
        """Returns whether an operation divides by a number of replicas."""
        name = equation.primitive.name
        if name == "div":
            return self._is_count(equation.invars[1])
        if name == "mul":
            numbers = filter(None, map(_number_of, equation.invars))
            return any(round(1 / number, 4) in self._counts for number in numbers)
        return False

    def _is_report(self, equation: Any) -> bool:
        """Returns whether a product is a loss for a report, and not for a gradient.

        It is a scalar times the number of replicas. An array of gradients may have such
        a factor by chance.
        """
        is_scalar = not equation.outvars[0].aval.ndim
        return is_scalar and any(map(self._is_count, equation.invars))

    def _is_count(self, atom: Any) -> bool:
        return _number_of(atom) in self._counts


def _number_of(atom: Any) -> float | None:
    """Returns the real number that a program holds as a literal, or `None`."""
    if not isinstance(atom, core.Literal):
        return None
    value = atom.val
    is_real_number = np.ndim(value) == 0 and np.isrealobj(value)
    return float(value) if is_real_number else None


def _is_one(atom: Any) -> bool:
    if _number_of(atom) != 1:
        return False
    return jnp.issubdtype(atom.aval.dtype, jnp.floating)
