"""What may differ between replicas, and what was reduced, in the program of a replica.

One pass follows every value from the batch, the number of the replica, keys and
callbacks. What it cannot follow it takes for different. A value is equal again only
after a reduction over all replicas; a branch or loop that a differing value decides
makes all differ that it returns, and may not reduce.

On the way, values carry labels: that a gradient was divided by the size of the global
batch already, that a value is the result of a reduction, that a loss was reduced before
it was differentiated. They tell whether a sum or a mean is the right one.
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.dtypes import issubdtype, prng_key
from jax.extend import core

from armillary._dataflow import Dataflow
from armillary._jaxpr import (
    is_made_by,
    named_axes,
    programs_in,
    source_line,
    walk_programs,
)
from armillary.distribute.replica._values import AXIS_NAME

Reasons = frozenset[str]
"""Why a value may differ between replicas; empty if it does not."""

_NUMBER = frozenset({"the number of the replica, or random keys made with it"})
_CALLBACK = frozenset({"a callback to Python"})
_DEVICE = frozenset({"the device"})
_SOURCES = {
    "axis_index": _NUMBER,
    "pure_callback": _CALLBACK,
    "io_callback": _CALLBACK,
    "infeed": _DEVICE,
    "rng_uniform": _DEVICE,
    "ffi_call": _DEVICE,
}
# How operations begin whose result is the same on all replicas that take part.
_REDUCTIONS = ("psum", "pmin", "pmax", "all_gather")
# Exchanges in which each replica gets something else.
_EXCHANGES = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter")
_COPIES = ("broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze")
_PARTS = (*_COPIES, "slice", "dynamic_slice", "gather")
_SUMS = ("add", "add_any", "sub")
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")
# A factor of the operand is none of the result.
_NOT_LINEAR = frozenset(
    {"integer_pow", "square", "sqrt", "rsqrt", "cbrt", "exp", "exp2", "expm1", "log"}
    | {"log1p", "pow", "tanh", "logistic", "erf", "erf_inv", "sin", "cos", "sign"}
)

DIVISOR = "armillary divisor"
"""Names the number that a loss is divided by, so that its sum is that of the batch."""
WEIGHT = "armillary weight"
"""Names the number that a loss is divided by, so that its mean is that of the batch."""
BY_OPS = "armillary %s by cross-device operations"
"""Names what a `CrossDeviceOps` is to sum, for a sum or a mean."""
MADE_BY_OPS = "armillary made by cross-device operations"
"""Names what it made: equal on all replicas, by its word."""


class Kind(enum.Enum):
    """What a label says of a value."""

    DIVISOR = "a loss is divided by it"
    WEIGHT = "a weighted loss is divided by it"
    DIVIDED = "was divided so that the sum over replicas is that of the batch"
    WEIGHED = "was divided so that the mean over replicas is that of the batch"
    REDUCED = "is the result of a reduction"
    OF_REDUCED = "is a gradient of a loss that was reduced"
    GRADIENT = "is a gradient of a loss of this replica"
    RAW_KEY = "is a key of `jax.random.PRNGKey`, or a part of one"
    KEY = "is a key made of one"


_DIVISIONS = {Kind.DIVISOR: Kind.DIVIDED, Kind.WEIGHT: Kind.WEIGHED}
_SCALES = tuple(_DIVISIONS.values())


class Label(NamedTuple):
    """A kind of label, and the line or path that it is from."""

    kind: Kind
    origin: str


class Facts(NamedTuple):
    """What is known of a value."""

    reasons: Reasons = frozenset()
    labels: frozenset[Label] = frozenset()

    def find(self, kind: Kind) -> str | None:
        """Returns the origin of a label, if there is one of that kind."""
        return min((x.origin for x in self.labels if x.kind is kind), default=None)


EQUAL = Facts()
BATCH = Facts(frozenset({"one replica's share of the batch"}))


class Problem(NamedTuple):
    """A reduction that is not the right one.

    Attributes:
        kind: What the reduced value is.
        origin: The line or path of that label.
        where: The line of the reduction.
    """

    kind: Kind
    origin: str
    where: str


class Conflict(NamedTuple):
    """A branch or loop in which some replicas would wait for the others for ever.

    Attributes:
        kind: The operation, `cond` or `while`.
        reasons: What decides it.
        where: Its line.
    """

    kind: str
    reasons: Reasons
    where: str


class Differences(Dataflow[Facts]):
    """What differs in the program of a replica.

    Args:
        program: What each replica runs.
        inputs: What is known of its operands.
        counts: The numbers of replicas by which a sum of them becomes their mean.
        with_gradients: Whether to label gradients of losses of one replica.

    Attributes:
        results: What is known of its results.
        conflicts: Branches and loops that replicas take differently, with a reduction.
        problems: Sums that should be means, and the other way round.
        sums_gradients: Whether gradients are summed, if they have labels.
    """

    nothing = EQUAL

    def __init__(
        self,
        program: core.ClosedJaxpr,
        inputs: Sequence[Facts],
        counts: Iterable[int],
        *,
        with_gradients: bool = False,
    ) -> None:
        super().__init__()
        self._counts, self._with_gradients = set(counts), with_gradients
        # By where the operation stands: a loop is looked at until nothing changes.
        self._conflicts: dict[Any, Conflict | None] = {}
        self._problems: dict[Any, Problem | None] = {}
        self._reduced_at: set[str] = set()
        self._users: dict[int, dict[Any, list[Any]]] = {}
        self.sums_gradients = False
        self.results = self.run(program, inputs)
        self.conflicts = [each for each in self._conflicts.values() if each]
        self.problems = [each for each in self._problems.values() if each]

    def join(self, facts: Iterable[Facts]) -> Facts:
        """Returns all reasons and labels."""
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else EQUAL
        reasons, labels = zip(*several, strict=True)
        return Facts(frozenset().union(*reasons), frozenset().union(*labels))

    def decide(self, equation: Any, decides: Facts) -> Facts:
        """Returns that results differ where replicas take different ways."""
        found = None
        if decides.reasons and any(map(_has_collective, programs_in(equation))):
            kind = equation.primitive.name
            found = Conflict(kind, decides.reasons, self._line(equation))
        self._conflicts[self._place(equation)] = found
        return Facts(decides.reasons)

    def transfer(self, equation: Any, operands: list[Facts]) -> list[Facts] | None:
        """Returns what is known of the results of one operation."""
        name = equation.primitive.name
        if name == "name":
            return [self._name(equation, operands[0])]
        if name in _SOURCES:
            reasons = self.join(operands).reasons | _SOURCES[name]
            return [Facts(reasons)] * len(equation.outvars)
        if name.startswith(_REDUCTIONS) and _is_over_all(equation):
            return [
                self._reduce(equation, operand, made)
                for operand, made in zip(operands, equation.outvars, strict=True)
            ]
        if name.startswith((*_REDUCTIONS, *_EXCHANGES)):
            return [self._exchange(equation, self.join(operands))]
        return None

    def _name(self, equation: Any, operand: Facts) -> Facts:
        name = equation.params["name"]
        if name in (DIVISOR, WEIGHT):
            kind = Kind.DIVISOR if name == DIVISOR else Kind.WEIGHT
            return Facts(operand.reasons, frozenset({self._label(kind, equation)}))
        if name == MADE_BY_OPS:
            return Facts(labels=frozenset({self._label(Kind.REDUCED, equation)}))
        for op in ("sum", "mean"):
            if name == BY_OPS % op:
                self._judge(equation, operand, None, is_mean=op == "mean")
                return Facts(operand.reasons)
        return operand

    def _reduce(self, equation: Any, operand: Facts, made: Any) -> Facts:
        """Returns what is known of a result that is the same on all replicas."""
        if self._is_backward(equation):
            # The transpose of a reduction within a loss. What it adds up is equal if
            # the loss was reduced last: a replica's part counts for every replica.
            kinds = (*_SCALES, Kind.OF_REDUCED)
            labels = {each for each in operand.labels if each.kind in kinds}
            if not operand.reasons and not labels:
                labels.add(self._label(Kind.OF_REDUCED, equation))
            elif self._line(equation) not in self._reduced_at:
                # No transpose, but a backward pass of the user's that reduces.
                labels.add(self._label(Kind.REDUCED, equation))
            return Facts(labels=frozenset(labels))
        self._reduced_at.add(self._line(equation))
        if equation.primitive.name.startswith("psum"):
            users = self._users_of(made)
            is_mean = bool(users) and all(map(_is_of_mean, users))
            is_by_hand = bool(users) and all(map(self._is_divided_by_count, users))
            if is_mean or not is_by_hand:
                self._judge(equation, operand, made, is_mean=is_mean)
        return Facts(labels=frozenset({self._label(Kind.REDUCED, equation)}))

    def _exchange(self, equation: Any, operand: Facts) -> Facts:
        labels = {each for each in operand.labels if each.kind in _SCALES}
        if self._is_backward(equation) and not (operand.reasons or labels):
            labels.add(self._label(Kind.OF_REDUCED, equation))
        return Facts(operand.reasons | _NUMBER, frozenset(labels))

    def _judge(
        self, equation: Any, operand: Facts, made: Any, *, is_mean: bool
    ) -> None:
        self.sums_gradients |= not is_mean and operand.find(Kind.GRADIENT) is not None
        kinds = [Kind.OF_REDUCED, *([] if operand.reasons else [Kind.REDUCED])]
        kinds += [] if is_mean else [Kind.WEIGHED]
        if is_mean:
            # Of a reduced loss a mean gives the sum of the parts, and of what was
            # reduced it is what it was.
            has_sum = any(map(operand.find, kinds))
            kinds = [] if has_sum else [Kind.DIVIDED]
        found = None
        for kind in kinds:
            origin = operand.find(kind)
            if origin is not None:
                found = Problem(kind, origin, self._line(equation))
                break
        self._problems[self._place(equation), made] = found

    def mix(self, equation: Any, operands: list[Facts]) -> Facts:
        """Returns what is known of a value computed from others."""
        reasons, labels = self.join(operands)
        if (
            self._with_gradients
            and reasons
            and not any(each.kind is Kind.GRADIENT for each in labels)
            and self._is_backward(equation)
        ):
            labels |= {self._label(Kind.GRADIENT, equation)}
        if not labels or not equation.outvars:
            return Facts(reasons)
        name, dtype = equation.primitive.name, equation.outvars[0].aval.dtype
        if equation.params.get("y") == 1:  # as Optax has `g**order`
            name = "copy"
        if name == "div":
            for by, kind in _DIVISIONS.items():
                if origin := operands[1].find(by):
                    labels = operands[0].labels | {Label(kind, origin)}
        kept = {each for each in labels if _goes_through(each, name, dtype, reasons)}
        if name == "random_wrap":
            origins = [x.origin for x in labels if x.kind is Kind.RAW_KEY]
            kept |= {Label(Kind.KEY, origin) for origin in origins}
        if name in ("random_bits", "random_gamma") and not reasons:
            self._note_draw(equation, operands[0])
        is_part = any(
            x.find(Kind.DIVIDED) and not x.find(Kind.REDUCED) for x in operands
        ) or (name == "div" and operands[1].find(Kind.DIVISOR))
        if is_part and name not in _SUMS:  # divided after it was reduced
            kept = {each for each in kept if each.kind is not Kind.REDUCED}
        if name in _SUMS:
            # What is equal, such as the zeros that a sum begins with, changes nothing.
            own = [each for each in operands if each.reasons]
            kept -= _not_in_all(kept, Kind.OF_REDUCED, own)
        if (
            name in _PRODUCTS
            and not self._is_backward(equation)
            and (
                all(each.find(Kind.DIVIDED) for each in operands)
                or self._is_times_count(equation)
            )
        ):
            kept = {each for each in kept if each.kind is not Kind.DIVIDED}
        return Facts(reasons, frozenset(kept))

    def _note_draw(self, equation: Any, key: Facts) -> None:
        origin = key.find(Kind.KEY)
        if origin is not None:
            problem = Problem(Kind.KEY, origin, self._line(equation))
            self._problems[self._place(equation), None] = problem

    def _label(self, kind: Kind, equation: Any) -> Label:
        return Label(kind, self._line(equation))

    def _line(self, equation: Any) -> str:
        """Returns the innermost line of the user's that is known."""
        # What JAX traced once and uses again does not know whom it was called by.
        lines = map(source_line, (equation, *reversed(self.within)))
        return next(filter(None, lines), "a line that JAX does not know")

    def _place(self, equation: Any) -> tuple[int, ...]:
        return (*map(id, self.within), id(equation))

    def _is_backward(self, equation: Any) -> bool:
        """Returns whether it is part of a backward pass, as JAX's name stack says."""
        for each in (equation, *reversed(self.within)):
            stack = str(each.source_info.name_stack)
            # What `jax.checkpoint` computes once more stands within a backward pass.
            if "rematted_computation" in stack.rpartition(")")[2]:
                return False
            if "transpose(" in stack:
                return True
        return False

    def _users_of(self, made: Any) -> list[Any]:
        """Returns the operations that use a value, through changes of its dtype."""
        jaxpr = self.jaxpr
        if id(jaxpr) not in self._users:
            users: dict[Any, list[Any]] = {}
            for equation in jaxpr.eqns:
                for atom in equation.invars:
                    if not isinstance(atom, core.Literal):
                        users.setdefault(atom, []).append(equation)
            self._users[id(jaxpr)] = users
        found: list[Any] = []
        for user in self._users[id(jaxpr)].get(made, []):
            is_cast = user.primitive.name == "convert_element_type"
            found += self._users_of(user.outvars[0]) if is_cast else [user]
        return found

    def _is_divided_by_count(self, equation: Any) -> bool:
        is_division = equation.primitive.name == "div"
        return is_division and _number(equation.invars[1]) in self._counts

    def _is_times_count(self, equation: Any) -> bool:
        # A loss for a report, not an array of gradients that happens to be weighed so.
        if equation.outvars[0].aval.ndim:
            return False
        numbers = map(_number, equation.invars)
        return equation.primitive.name == "mul" and any(
            n in self._counts for n in numbers
        )


def _goes_through(label: Label, name: str, dtype: Any, reasons: Reasons) -> bool:
    """Returns whether the result of an operation carries a label of its operand."""
    kind = label.kind
    if kind in _DIVISIONS:
        return name in _COPIES
    if kind is Kind.RAW_KEY:
        return name in _PARTS
    if kind is Kind.KEY:
        return not reasons and issubdtype(dtype, prng_key)
    if kind is Kind.GRADIENT:
        return bool(reasons)
    if not jnp.issubdtype(dtype, jnp.inexact) or name in _NOT_LINEAR:
        return False
    return kind is not Kind.REDUCED or not reasons


def _not_in_all(
    labels: Iterable[Label], kind: Kind, operands: Sequence[Facts]
) -> set[Label]:
    if all(each.find(kind) for each in operands):
        return set()
    return {each for each in labels if each.kind is kind}


def _number(atom: Any) -> float | None:
    """Returns the number that a literal is."""
    if not isinstance(atom, core.Literal) or np.ndim(atom.val):
        return None
    return float(atom.val) if np.isrealobj(atom.val) else None


def _is_of_mean(equation: Any) -> bool:
    """Returns whether it is the division of `jax.lax.pmean` or of `all_reduce`."""
    return equation.primitive.name == "div" and is_made_by(
        equation, "pmean", "ReplicaContext.all_reduce"
    )


def _is_over_all(equation: Any) -> bool:
    has_groups = equation.params.get("axis_index_groups") is not None
    return AXIS_NAME in named_axes(equation) and not has_groups


def _has_collective(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith((*_REDUCTIONS, *_EXCHANGES))
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )
