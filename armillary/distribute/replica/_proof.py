"""Proves that a replica's program keeps mirrored state equal, and reduces correctly.

A replica's program is traced before it becomes a part of the step. One pass follows
every value from the batch, the number of the replica, keys and callbacks. A value that
it cannot follow counts as different on each replica. Only a reduction over all replicas
makes a value equal again. If a differing value decides a branch or a loop, all its
results differ, and it may not reduce.

On the way, values carry labels. They show whether a sum or a mean would be wrong::

    label        is put on                          is kept by
    DIVISOR,     the number that divides a loss     copies
      WEIGHT
    DIVIDED,     a value divided by such a number   linear operations; a product of two
      WEIGHED                                       losses, or with the count, loses it
    REDUCED      the result of a reduction          linear operations of equal values
    OF_REDUCED   a gradient of a reduced loss       linear operations; a sum keeps it if
                                                    all its differing operands have it
    AVERAGED     the gradient of a mean of Keras    the backward pass, copies and sums
    GRADIENT     a differing value in a backward    differing values
                 pass
    RAW_KEY      a key of `jax.random.PRNGKey`      parts of arrays
    KEY          a typed key made from a raw key    equal keys
    DRAWN        random numbers                     equal values, and functions of draws
    NOISED       a gradient plus random numbers     linear operations
"""

import enum
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.dtypes import issubdtype, prng_key
from jax.extend import core

from armillary._checks import list_lines
from armillary._jaxpr import (
    Dataflow,
    is_made_by,
    named_axes,
    programs_in,
    source_line,
    walk_equations,
)
from armillary.distribute.replica._kinds import as_kinds
from armillary.distribute.replica._sameness import kind_of
from armillary.distribute.replica._users import Users, is_of_mean
from armillary.errors import DoubleReductionError, ReplicaMismatchError
from armillary.state._lift import State
from armillary.state._tree import pure_path_of

_NUMBER = frozenset({"the number of the replica, or random keys made with it"})
_PYTHON = frozenset({"a callback to Python"})
SOURCES = {
    "axis_index": _NUMBER,
    **dict.fromkeys(("pure_callback", "io_callback"), _PYTHON),
    **dict.fromkeys(("infeed", "rng_uniform", "ffi_call"), frozenset({"the device"})),
}
# Beginnings of operations whose result is the same on all replicas that take part.
REDUCTIONS = ("psum", "pmin", "pmax", "all_gather")
# Exchanges in which each replica gets a different result.
EXCHANGES = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter")
# Operations that draw random numbers from a key.
DRAWS = ("random_bits", "random_gamma", "rng_bit_generator")
_COPIES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
_PARTS = (*_COPIES, "slice", "dynamic_slice", "gather")
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
# Operations that do not carry a factor of the operand over to the result.
_NOT_LINEAR = frozenset(
    {"integer_pow", "square", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log"}
    | {"log1p", "pow", "tanh", "logistic", "erf", "erf_inv", "sin", "cos", "sign"}
)

# The function of Keras that reduces losses to one number, and its functions that then
# divide this number by the number of replicas.
_KERAS_MEAN = "reduce_values"
_KERAS_SCALES = ("scale_loss_for_distribution", "_scale")

# The function of Optax that adds noise to a sum over examples, and divides the result.
_PRIVATE = "differentially_private_aggregate.<locals>.update_fn"

# Marks of the number that divides a loss: with `DIVISOR`, the sum over replicas is the
# loss of the batch, and with `WEIGHT` the mean.
DIVISOR = "armillary divisor"
WEIGHT = "armillary weight"
# Marks of the numbers that a metric adds up over replicas, and of the two sums of a
# metric that divides one sum by another.
SUMMED = "armillary summed"
NUMERATOR = "armillary numerator"
DENOMINATOR = "armillary denominator"
# How the name of a plain metric of a pure step begins; the name of the metric follows.
METRIC = "armillary metric "


class Kind(enum.Enum):
    """The name of a label: a row of the table above."""

    DIVISOR = enum.auto()
    WEIGHT = enum.auto()
    DIVIDED = enum.auto()
    WEIGHED = enum.auto()
    REDUCED = enum.auto()
    OF_REDUCED = enum.auto()
    AVERAGED = enum.auto()
    GRADIENT = enum.auto()
    RAW_KEY = enum.auto()
    KEY = enum.auto()
    DRAWN = enum.auto()
    NOISED = enum.auto()


_MARKED = {DIVISOR: Kind.DIVISOR, WEIGHT: Kind.WEIGHT}
_DIVISIONS = {Kind.DIVISOR: Kind.DIVIDED, Kind.WEIGHT: Kind.WEIGHED}
_SCALES = tuple(_DIVISIONS.values())
_MEAN = '`armillary.all_reduce("mean", gradients)`'
_SUMMED_TWICE = (
    "The metric at {where} adds up the values of all replicas, but its value was "
    "reduced over replicas already (at {origin}), so it would be {count} times too "
    "large. Give it the numbers of this replica, without the reduction."
)
_HALF_REDUCED = (
    "The metric at {where} divides one sum by another, and only one of them was "
    "reduced over replicas (at {origin}), so the quotient would be off by a factor of "
    "{count}. Give it both sums over the examples of this replica."
)
_WRONG = {
    Kind.REDUCED: (
        "The sum over replicas at {where} adds up a value that was already reduced at "
        "{origin}, so it would be {count} times too large. Use the value as it is."
    ),
    Kind.OF_REDUCED: (
        "The sum over replicas at {where} adds up gradients of a loss that was reduced "
        "before it was differentiated (at {origin}), so each replica's part counts "
        f"{{count}} times. Take the mean of the gradients ({_MEAN})."
    ),
    Kind.WEIGHED: (
        "The sum over replicas at {where} adds up values of `weighted_mean` (at "
        "{origin}), so it would be {count} times too large. Take the mean "
        f"({_MEAN})."
    ),
    Kind.AVERAGED: (
        "The sum over replicas at {where} adds up gradients of a loss that Keras has "
        "averaged over the examples of one replica (at {origin}), so it would be "
        f"{{count}} times too large. Take the mean ({_MEAN}), or make the loss object "
        "with `reduction=None` and write "
        "`armillary.compute_average_loss(loss_object(labels, predictions))`."
    ),
    Kind.DIVIDED: (
        "The mean over replicas at {where} averages values that were already divided "
        "by the size of the global batch, or by the number of replicas (at {origin}), "
        "so it would be {count} times too small. Take the sum "
        '(`armillary.all_reduce("sum", gradients)`), or let the loss be the plain mean '
        "over this replica's examples."
    ),
    Kind.NOISED: (
        "The sum over replicas at {where} adds up gradients to which each replica has "
        "added the same random numbers (at {origin}), so these numbers would count "
        "{count} times. Reduce the gradients first, and add random numbers to the "
        f"result, or take the mean ({_MEAN})."
    ),
    Kind.KEY: (
        "`{origin}` holds a key of `jax.random.PRNGKey`, from which all replicas would "
        "draw the same numbers (at {where}). Hold a key of `jax.random.key`. If equal "
        "numbers are intended, {as_meant}."
    ),
}
_SAME_KEY = "`nnx.Variable(key, aggregation=VariableAggregation.NONE)`"


class Label(NamedTuple):
    """A kind of label, and the line or the place where a value got it.

    If the place is a leaf of a pure step's state, `pure_path` is the path of the leaf.
    """

    kind: Kind
    origin: str
    pure_path: str | None = None


class Facts(NamedTuple):
    """The reasons why a value may differ between replicas, and its labels.

    A value without reasons is equal on all replicas.
    """

    reasons: frozenset[str] = frozenset()
    labels: frozenset[Label] = frozenset()

    def find(self, kind: Kind) -> str | None:
        label = self.find_label(kind)
        return None if label is None else label.origin

    def find_label(self, kind: Kind) -> Label | None:
        found = [label for label in self.labels if label.kind is kind]
        return min(found, key=lambda label: label.origin, default=None)

    def only(self, *kinds: Kind) -> set[Label]:
        return {label for label in self.labels if label.kind in kinds}

    def explain(self) -> str:
        return f"computed from {' and '.join(sorted(self.reasons))}"


EQUAL = Facts()
BATCH = Facts(frozenset({"one replica's share of the batch"}))


class Proof(Dataflow[Facts]):
    """The facts about the results of a replica's program.

    It raises an error if some replicas would wait forever in a reduction, or if the
    program reduces wrongly on `counts[0]` replicas.

    Args:
        program: The program of one replica.
        inputs: The facts of its inputs.
        counts: The number of replicas that run the program, and the number of replicas
            that hold data.
        axis_name: The axis of replicas.
    """

    nothing = EQUAL

    def __init__(
        self,
        program: core.ClosedJaxpr,
        inputs: Sequence[Facts],
        counts: Sequence[int],
        axis_name: str,
    ) -> None:
        super().__init__()
        self._counts = counts
        self._axis_name = axis_name
        # The last error at each operation, by its place: the analysis repeats a loop
        # until its facts are stable, and an error may go away.
        self._errors: dict[Any, Exception | None] = {}
        self._reduced_at: set[str] = set()
        self._users = Users()
        self._made = program.jaxpr
        self.sums_gradients = False
        self._numerator = EQUAL
        self.results = self.run(program, inputs)
        is_alone = counts[0] == 1
        self.is_equal = [is_alone or not facts.reasons for facts in self.results]
        self.is_divided = [
            facts.find(Kind.DIVIDED) is not None for facts in self.results
        ]
        error = next(filter(None, self._errors.values()), None)
        if error is not None and not is_alone:
            raise error

    def require_equal(self, mirrored: Mapping[int, int], state: State) -> None:
        """Raises if the new values of mirrored arrays may differ.

        Args:
            mirrored: The indices of arrays of the state, by the number of the result.
            state: The state.
        """
        differing = [i for i in mirrored if not self.is_equal[i]]
        if not differing:
            return
        makers = {made: each for each in self._made.eqns for made in each.outvars}
        lines = []
        for i in differing:
            maker = makers.get(self._made.outvars[i])
            where = "" if maker is None else f", written at {source_line(maker)}"
            role = state.kinds[mirrored[i]].role.value
            lines.append(f"{state.place_of(mirrored[i])} ({role}, mirrored){where}")
        facts = self.join(self.results[i] for i in differing)
        indices = [mirrored[i] for i in differing]
        found = (pure_path_of(state.owners[i], state.paths[i]) for i in indices)
        pure_paths = [path for path in found if path is not None]
        raise ReplicaMismatchError(
            f"{len(lines)} of {len(state.paths)} slots are mirrored, so they must be "
            "equal on all replicas, but `strategy.run` left values in them that "
            f"differ:\n{list_lines(sorted(lines), most=10)}\n"
            f"They were {facts.explain()}{_way_out(facts, pure_paths)}"
        )

    def join(self, facts: Iterable[Facts]) -> Facts:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else EQUAL
        reasons, labels = zip(*several, strict=True)
        return Facts(frozenset().union(*reasons), frozenset().union(*labels))

    def line(self, equation: Any) -> str:
        return super().line(equation) or "a line that JAX does not know"

    def decide(self, equation: Any, decides: Facts) -> Facts:
        """Returns the facts of the results of a branch or loop that a value decides."""
        error = None
        if decides.reasons and any(map(_has_collective, programs_in(equation))):
            error = ReplicaMismatchError(
                f"`{equation.primitive.name}` at {self.line(equation)} is decided by a "
                f"value that differs between replicas ({decides.explain()}), and "
                "reduces over replicas inside, so some replicas would wait there "
                "forever. Reduce the value that decides first "
                "(`armillary.all_reduce`), reduce outside, or choose with `jnp.where`."
            )
        self._errors[self._place(equation)] = error
        return Facts(decides.reasons)

    def transfer(self, equation: Any, operands: list[Facts]) -> list[Facts] | None:
        name = equation.primitive.name
        if name == "name":
            kind = _MARKED.get(equation.params["name"])
            [operand] = operands
            labels = operand.labels if kind is None else self._labels(kind, equation)
            if kind is Kind.DIVISOR and operand.reasons:
                self._note_divisor(equation, operand)
            self._look_at_metric(equation, operand)
            return [Facts(operand.reasons, labels)]
        if (by_ops := kind_of(equation)) is not None:
            # A call of a `CrossDeviceOps`, whose results `_sameness` proves to be
            # equal. Its captured arrays come before the arrays to reduce.
            given = operands[-len(equation.outvars) :]
            pairs = zip(given, equation.outvars, strict=True)
            return [self._reduce(equation, *pair, by_ops) for pair in pairs]
        if self._begins_keras_mean(equation):
            begun = self._labels(Kind.AVERAGED, equation)
            results = self._follow(equation, operands)
            return [Facts(reasons, labels | begun) for reasons, labels in results]
        if name in SOURCES:
            reasons = self.join(operands).reasons | SOURCES[name]
            return [Facts(reasons)] * len(equation.outvars)
        if name.startswith(REDUCTIONS) and is_over_all(equation, self._axis_name):
            pairs = zip(operands, equation.outvars, strict=True)
            return [self._reduce(equation, *pair) for pair in pairs]
        if name.startswith((*REDUCTIONS, *EXCHANGES)):
            operand = self.join(operands)
            labels = frozenset(operand.only(*_SCALES))
            if self.is_backward(equation) and not (operand.reasons or labels):
                labels = self._labels(Kind.OF_REDUCED, equation)
            return [Facts(operand.reasons | _NUMBER, labels)]
        return None

    def _reduce(
        self, equation: Any, operand: Facts, made: Any, by_ops: str | None = None
    ) -> Facts:
        """Returns the facts of the result `made` of a reduction.

        `by_ops` is the name of the operation if a `CrossDeviceOps` reduces.
        """
        where = self.line(equation)
        if self.is_backward(equation):
            # The transpose of a reduction within a loss. Its operands are equal if the
            # loss was reduced last: then each replica's part counts for every replica.
            labels = frozenset(operand.only(*_SCALES, Kind.OF_REDUCED))
            if not operand.reasons and not labels:
                labels = self._labels(Kind.OF_REDUCED, equation)
            elif where not in self._reduced_at:
                # Not a transpose: a backward pass that the user wrote reduces.
                labels |= self._labels(Kind.REDUCED, equation)
            return Facts(labels=labels)
        self._reduced_at.add(where)
        if by_ops in ("sum", "mean") or equation.primitive.name.startswith("psum"):
            users = [] if by_ops else self._users.find(self.jaxpr, made)
            is_mean = by_ops == "mean" or (bool(users) and all(map(is_of_mean, users)))
            is_by_hand = bool(users) and all(map(self._divides_by_count, users))
            if is_mean or not is_by_hand:
                is_of_gradient = operand.find(Kind.GRADIENT) is not None
                self.sums_gradients |= is_of_gradient and not is_mean
                wrong = [Kind.OF_REDUCED, *([] if operand.reasons else [Kind.REDUCED])]
                if not is_mean:
                    wrong += [Kind.WEIGHED, Kind.AVERAGED, Kind.NOISED]
                else:
                    # A mean of gradients of a reduced loss is the sum of their parts,
                    # and a mean of reduced values changes nothing. Both are correct.
                    wrong = [] if any(map(operand.find, wrong)) else [Kind.DIVIDED]
                self._note(equation, operand, wrong, made)
        return Facts(labels=self._labels(Kind.REDUCED, equation))

    def _note(
        self, equation: Any, operand: Facts, wrong: list[Kind], made: Any = None
    ) -> None:
        """Notes an error for the first of the `wrong` labels that an operand has."""
        found = [label for kind in wrong if (label := operand.find_label(kind))]
        error = None
        for kind, origin, pure_path in found[:1]:
            as_meant = _SAME_KEY
            if pure_path is not None:
                as_meant = f"name it in `StepTrainer(..., {as_kinds([pure_path])})`"
            message = _WRONG[kind].format(
                origin=origin,
                where=self.line(equation),
                count=self._counts[0],
                as_meant=as_meant,
            )
            is_key = kind is Kind.KEY
            error = ValueError(message) if is_key else DoubleReductionError(message)
        self._errors[self._place(equation), made] = error

    def _note_divisor(self, equation: Any, divisor: Facts) -> None:
        self._errors[self._place(equation)] = ReplicaMismatchError(
            "`global_batch_size` of `compute_average_loss` may differ between replicas "
            f"at {self.line(equation)} ({divisor.explain()}), so their losses would "
            "not add up to an average. Reduce it first: "
            '`global_batch_size=armillary.all_reduce("sum", num_examples)`.'
        )

    def _look_at_metric(self, equation: Any, operand: Facts) -> None:
        """Notes an error for a metric of numbers that were reduced before."""
        name = equation.params["name"]
        if name == NUMERATOR:
            self._numerator = operand
        origin = None
        message = _SUMMED_TWICE
        if name == SUMMED and not operand.reasons:
            origin = operand.find(Kind.REDUCED)
        elif name == DENOMINATOR:
            pair = (self._numerator, operand)
            reduced = [facts.find(Kind.REDUCED) for facts in pair if not facts.reasons]
            is_half = len(reduced) == 1
            origin = reduced[0] if is_half else None
            message = _HALF_REDUCED
        if origin is None:
            return
        text = message.format(
            where=self.line(equation), origin=origin, count=self._counts[0]
        )
        self._errors[self._place(equation)] = DoubleReductionError(text)

    def mix(self, equation: Any, operands: list[Facts]) -> Facts:
        both = self.join(operands)
        reasons, labels = both
        is_new = reasons and not both.only(Kind.GRADIENT)
        if is_new and self.is_backward(equation):
            labels |= self._labels(Kind.GRADIENT, equation)
        if equation.primitive.name in DRAWS:
            labels |= self._labels(Kind.DRAWN, equation)
        if not labels or not equation.outvars:
            return Facts(reasons)
        name = equation.primitive.name
        dtype = equation.outvars[0].aval.dtype
        labels |= self._noised(equation, operands)
        if equation.params.get("y") == 1:  # a power of 1, as Optax has `g**order`
            name = "copy"
        if name == "div":
            for by, kind in _DIVISIONS.items():
                if origin := operands[1].find(by):
                    labels = operands[0].labels | {Label(kind, origin)}
        kept = {each for each in labels if _goes_through(each, name, dtype, reasons)}
        if both.find(Kind.AVERAGED) and not self._keeps_scale(equation, name):
            kept -= both.only(Kind.AVERAGED)
        if name == "random_wrap":
            kept |= {x._replace(kind=Kind.KEY) for x in both.only(Kind.RAW_KEY)}
        if name == "random_unwrap" and not reasons:
            keys = operands[0].only(Kind.KEY)
            kept |= {x._replace(kind=Kind.RAW_KEY) for x in keys}
        if name in DRAWS and not reasons:
            self._note(equation, operands[0], [Kind.KEY])
        return Facts(reasons, frozenset(kept - self._lost(equation, name, operands)))

    def _noised(self, equation: Any, operands: list[Facts]) -> frozenset[Label]:
        """Returns the label `NOISED` if equal random numbers are added to a gradient.

        A mean over replicas keeps such numbers as they are, but a sum multiplies them.
        With the aggregate of differential privacy, a mean is wrong, too: it divides the
        numbers by the examples of one replica.
        """
        is_sum = equation.primitive.name in ("add", "add_any", "sub")
        drawn = [each for each in operands if each.find(Kind.DRAWN)]
        own = [each for each in operands if each.reasons and each not in drawn]
        if not (is_sum and drawn and own) or self.is_backward(equation):
            return frozenset()
        if is_made_by(equation, _PRIVATE):
            self._errors[self._place(equation)] = DoubleReductionError(
                "`optax.contrib.differentially_private_aggregate` (or `dpsgd`) at "
                f"{self.line(equation)} gets the gradients of one replica's examples, "
                f"so each of {self._counts[0]} replicas would add the noise of a whole "
                "batch. Give it the gradients of all examples: `gradients = armillary."
                "get_replica_context().all_gather(gradients, axis=0)` before `update`."
            )
        is_equal = not any(each.reasons for each in drawn)
        if is_equal and any(each.find(Kind.GRADIENT) for each in own):
            return self._labels(Kind.NOISED, equation)
        return frozenset()

    def _lost(self, equation: Any, name: str, operands: list[Facts]) -> set[Label]:
        """Returns the labels that do not survive this addition or multiplication."""
        both = self.join(operands)
        own = [each for each in operands if each.reasons]
        lost: set[Label] = set()
        if own and not self.is_backward(equation):
            # A product of an equal gradient and a differing value is not a gradient:
            # for example, the slope in a line search.
            lost |= both.only(Kind.OF_REDUCED) - self.join(own).labels
        if not all(each.find(Kind.DRAWN) for each in own):
            lost |= both.only(Kind.DRAWN)
        if name in ("add", "add_any", "sub"):
            # Equal operands do not count, such as the zeros that a sum begins with.
            is_all = all(each.only(Kind.OF_REDUCED, Kind.DIVIDED) for each in own)
            return lost if is_all else both.only(Kind.OF_REDUCED)
        divided = [each for each in operands if each.find(Kind.DIVIDED)]
        is_by_divisor = name == "div" and operands[1].find(Kind.DIVISOR)
        if is_by_divisor or not all(each.find(Kind.REDUCED) for each in divided):
            lost |= both.only(Kind.REDUCED)  # divided after it was reduced
        # A scalar times the number of replicas is a loss for a report. An array of
        # gradients may have such a factor by chance.
        is_report = (
            name == "mul"
            and not equation.outvars[0].aval.ndim
            and any(map(self._is_count, equation.invars))
        )
        is_square = name in _PRODUCTS and len(divided) == len(operands)
        if (is_report or is_square) and not self.is_backward(equation):
            lost |= both.only(Kind.DIVIDED)
        if name in _PRODUCTS and all(each.find(Kind.NOISED) for each in operands):
            lost |= both.only(Kind.NOISED)
        return lost

    def _labels(self, kind: Kind, equation: Any) -> frozenset[Label]:
        return frozenset({Label(kind, self.line(equation))})

    def _place(self, equation: Any) -> tuple[int, ...]:
        return (*map(id, self.within), id(equation))

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

    def _keeps_scale(self, equation: Any, name: str) -> bool:
        """Returns whether an operation is sure to keep the scale of a gradient."""
        return name in (*_COPIES, "add", "add_any") or self.is_backward(equation)

    def _divides_by_count(self, equation: Any) -> bool:
        """Returns whether an operation divides by a number of replicas."""
        name = equation.primitive.name
        if name == "div":
            return self._is_count(equation.invars[1])
        if name == "mul":
            numbers = filter(None, map(_number_of, equation.invars))
            return any(round(1 / number, 4) in self._counts for number in numbers)
        return False

    def _is_count(self, atom: Any) -> bool:
        return _number_of(atom) in self._counts


def _number_of(atom: Any) -> float | None:
    """Returns the real number that a program holds as a literal, or `None`."""
    is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
    return float(atom.val) if is_number and np.isrealobj(atom.val) else None


def _is_one(atom: Any) -> bool:
    return _number_of(atom) == 1 and jnp.issubdtype(atom.aval.dtype, jnp.floating)


def _goes_through(label: Label, name: str, dtype: Any, reasons: frozenset[str]) -> bool:
    kind = label.kind
    if kind in _DIVISIONS:
        return name in _COPIES
    if kind is Kind.RAW_KEY:
        return name in _PARTS
    if kind is Kind.KEY:
        return not reasons and issubdtype(dtype, prng_key)
    if kind is Kind.GRADIENT:
        return bool(reasons)
    if kind is Kind.DRAWN:
        return True
    if not jnp.issubdtype(dtype, jnp.inexact) or name in _NOT_LINEAR:
        return False
    return kind is not Kind.REDUCED or not reasons


def is_over_all(equation: Any, axis_name: str) -> bool:
    """Returns whether a collective is over all replicas, and not over groups."""
    has_groups = equation.params.get("axis_index_groups") is not None
    return axis_name in named_axes(equation) and not has_groups


def _has_collective(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith((*REDUCTIONS, *EXCHANGES))
        for equation in walk_equations(program)
    )


_GATHER = (
    "If its rows belong to single examples, as in a queue or a carried hidden state, "
    "a reduction would mix them: collect the rows of all replicas instead "
    "(`armillary.get_replica_context().all_gather(value, axis=0)`)."
)


def _way_out(facts: Facts, pure_paths: Sequence[str] = ()) -> str:
    where = facts.find(Kind.GRADIENT)
    if where is None and pure_paths:
        return (
            '. Reduce first (`armillary.all_reduce("mean", value)`), or let replicas '
            "differ during a step: "
            f'`StepTrainer(..., {as_kinds(pure_paths, "mean")})`, or "sum" or '
            f'"only_first_replica". {_GATHER}'
        )
    if where is None:
        return (
            '. Reduce first (`armillary.all_reduce("mean", value)`), or make the '
            "variable with `aggregation="
            "armillary.distribute.VariableAggregation.MEAN`, `SUM` or "
            f"`ONLY_FIRST_REPLICA`. {_GATHER}"
        )
    op = "mean" if facts.find(Kind.DIVIDED) is None else "sum"
    return (
        f", through the gradient of a loss of one replica (at {where}). Write this "
        f'before the update:\n  gradients = armillary.all_reduce("{op}", gradients)\n'
        '"mean" fits a loss that is a mean over the examples of its replica. "sum" '
        "fits a loss that `compute_average_loss` (or you) divided by the global batch "
        "size."
    )
