"""What may differ between replicas, and what was reduced, in the program of a replica.

One pass follows every value from the batch, the number of the replica, keys and
callbacks. What it cannot follow it takes for different. A value is equal again only
after a reduction over all replicas; a branch or loop that a differing value decides
makes all differ that it returns, and may not reduce.

On the way, values carry labels, which tell whether a sum or a mean is the right one::

    label        is put on                          goes on through
    DIVISOR,     what a loss is divided by          copies
      WEIGHT
    DIVIDED,     what is divided by such a number   linear operations; a product of two
      WEIGHED                                       losses, or with the count, loses it
    REDUCED      the result of a reduction          linear operations of equal values
    OF_REDUCED   a gradient of a reduced loss       linear operations; a sum has it if
                                                    all that differs in it has it
    GRADIENT     what differs in a backward pass    all that differs
    RAW_KEY      a key of `jax.random.PRNGKey`      parts of arrays
    KEY          a key made of one                  equal keys
"""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.dtypes import issubdtype, prng_key
from jax.extend import core

from armillary._jaxpr import (
    Dataflow,
    is_made_by,
    named_axes,
    programs_in,
    walk_equations,
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


class Kind(enum.Enum):
    """What a label says of a value: see the table above."""

    DIVISOR, WEIGHT, DIVIDED, WEIGHED, REDUCED, OF_REDUCED, GRADIENT, RAW_KEY, KEY = (
        range(9)
    )


_MARKED = {DIVISOR: Kind.DIVISOR, WEIGHT: Kind.WEIGHT}
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
        return min((x.origin for x in self.labels if x.kind is kind), default=None)

    def only(self, *kinds: Kind) -> set[Label]:
        return {label for label in self.labels if label.kind in kinds}


EQUAL = Facts()
BATCH = Facts(frozenset({"one replica's share of the batch"}))


class Problem(NamedTuple):
    """A reduction, at a line, that is not the right one for what has such a label."""

    kind: Kind
    origin: str
    where: str


class Conflict(NamedTuple):
    """A branch or loop in which some replicas would wait for the others for ever."""

    kind: str
    reasons: Reasons
    where: str


class Differences(Dataflow[Facts]):
    """What differs in the program of a replica, and the reductions that are not right.

    A sum of the replicas' values becomes their mean by one of the numbers `counts`.
    """

    nothing = EQUAL

    def __init__(
        self,
        program: core.ClosedJaxpr,
        inputs: Sequence[Facts],
        counts: Iterable[int],
    ) -> None:
        super().__init__()
        self._counts = set(counts)
        # By where the operation stands: a loop is looked at until nothing changes.
        self._conflicts: dict[Any, Conflict | None] = {}
        self._problems: dict[Any, Problem | None] = {}
        self._reduced_at: set[str] = set()
        self._users: dict[int, dict[Any, list[Any]]] = {}
        self.sums_gradients = False
        self.results = self.run(program, inputs)
        self.conflicts = list(filter(None, self._conflicts.values()))
        self.problems = list(filter(None, self._problems.values()))

    def join(self, facts: Iterable[Facts]) -> Facts:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else EQUAL
        reasons, labels = zip(*several, strict=True)
        return Facts(frozenset().union(*reasons), frozenset().union(*labels))

    def line(self, equation: Any) -> str:
        return super().line(equation) or "a line that JAX does not know"

    def decide(self, equation: Any, decides: Facts) -> Facts:
        """Returns that results differ where replicas take different ways."""
        found = None
        if decides.reasons and any(map(_has_collective, programs_in(equation))):
            kind, where = equation.primitive.name, self.line(equation)
            found = Conflict(kind, decides.reasons, where)
        self._conflicts[self._place(equation)] = found
        return Facts(decides.reasons)

    def transfer(self, equation: Any, operands: list[Facts]) -> list[Facts] | None:
        name = equation.primitive.name
        if name == "name":
            kind, (operand,) = _MARKED.get(equation.params["name"]), operands
            labels = operand.labels if kind is None else self._labels(kind, equation)
            return [Facts(operand.reasons, labels)]
        if name in _SOURCES:
            reasons = self.join(operands).reasons | _SOURCES[name]
            return [Facts(reasons)] * len(equation.outvars)
        if name.startswith(_REDUCTIONS) and _is_over_all(equation):
            pairs = zip(operands, equation.outvars, strict=True)
            return [self._reduce(equation, *pair) for pair in pairs]
        if name.startswith((*_REDUCTIONS, *_EXCHANGES)):
            return [self._exchange(equation, self.join(operands))]
        return None

    def _reduce(self, equation: Any, operand: Facts, made: Any) -> Facts:
        where = self.line(equation)
        if self._is_backward(equation):
            # The transpose of a reduction within a loss. What it adds up is equal if
            # the loss was reduced last: a replica's part counts for every replica.
            labels = frozenset(operand.only(*_SCALES, Kind.OF_REDUCED))
            if not operand.reasons and not labels:
                labels = self._labels(Kind.OF_REDUCED, equation)
            elif where not in self._reduced_at:
                # No transpose, but a backward pass of the user's that reduces.
                labels |= self._labels(Kind.REDUCED, equation)
            return Facts(labels=labels)
        self._reduced_at.add(where)
        if equation.primitive.name.startswith("psum"):
            users = self._users_of(made)
            is_mean = bool(users) and all(map(_is_of_mean, users))
            is_by_hand = bool(users) and all(
                user.primitive.name == "div" and self._is_count(user.invars[1])
                for user in users
            )
            if is_mean or not is_by_hand:
                self._judge(equation, operand, made, is_mean=is_mean)
        return Facts(labels=self._labels(Kind.REDUCED, equation))

    def _exchange(self, equation: Any, operand: Facts) -> Facts:
        labels = frozenset(operand.only(*_SCALES))
        if self._is_backward(equation) and not (operand.reasons or labels):
            labels = self._labels(Kind.OF_REDUCED, equation)
        return Facts(operand.reasons | _NUMBER, labels)

    def _judge(
        self, equation: Any, operand: Facts, made: Any, *, is_mean: bool
    ) -> None:
        self.sums_gradients |= not is_mean and operand.find(Kind.GRADIENT) is not None
        wrong = [Kind.OF_REDUCED, *([] if operand.reasons else [Kind.REDUCED])]
        if not is_mean:
            wrong.append(Kind.WEIGHED)
        else:
            # Of a reduced loss a mean gives the sum of the parts, and of what was
            # reduced it is what it was.
            wrong = [] if any(map(operand.find, wrong)) else [Kind.DIVIDED]
        self._note(equation, operand, wrong, made)

    def _note(
        self, equation: Any, operand: Facts, wrong: list[Kind], made: Any = None
    ) -> None:
        """Notes the first label that an operand must not have here."""
        where = self.line(equation)
        found = [Problem(x, operand.find(x) or "", where) for x in wrong]
        problem = next((each for each in found if each.origin), None)
        self._problems[self._place(equation), made] = problem

    def mix(self, equation: Any, operands: list[Facts]) -> Facts:
        both = self.join(operands)
        reasons, labels = both
        is_new = reasons and not both.only(Kind.GRADIENT)
        if is_new and self._is_backward(equation):
            labels |= self._labels(Kind.GRADIENT, equation)
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
            kept |= {Label(Kind.KEY, x.origin) for x in both.only(Kind.RAW_KEY)}
        if name in ("random_bits", "random_gamma") and not reasons:
            self._note(equation, operands[0], [Kind.KEY])
        return Facts(reasons, frozenset(kept - self._lost(equation, name, operands)))

    def _lost(self, equation: Any, name: str, operands: list[Facts]) -> set[Label]:
        """Returns the labels that a sum or a product of such operands has not."""
        both = self.join(operands)
        if name in _SUMS:
            # What is equal, such as the zeros that a sum begins with, changes nothing.
            own = [each for each in operands if each.reasons]
            is_all = all(each.find(Kind.OF_REDUCED) for each in own)
            return set() if is_all else both.only(Kind.OF_REDUCED)
        lost: set[Label] = set()
        divided = [each for each in operands if each.find(Kind.DIVIDED)]
        is_by_divisor = name == "div" and operands[1].find(Kind.DIVISOR)
        if is_by_divisor or not all(each.find(Kind.REDUCED) for each in divided):
            lost |= both.only(Kind.REDUCED)  # divided after it was reduced
        # A loss for a report, not an array of gradients that happens to be weighed so.
        is_report = (
            name == "mul"
            and not equation.outvars[0].aval.ndim
            and any(map(self._is_count, equation.invars))
        )
        is_square = name in _PRODUCTS and len(divided) == len(operands)
        if (is_report or is_square) and not self._is_backward(equation):
            lost |= both.only(Kind.DIVIDED)
        return lost

    def _labels(self, kind: Kind, equation: Any) -> frozenset[Label]:
        return frozenset({Label(kind, self.line(equation))})

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

    def _is_count(self, atom: Any) -> bool:
        is_number = isinstance(atom, core.Literal) and np.ndim(atom.val) == 0
        return is_number and np.isrealobj(atom.val) and float(atom.val) in self._counts


def _goes_through(label: Label, name: str, dtype: Any, reasons: Reasons) -> bool:
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


def _is_of_mean(equation: Any) -> bool:
    return equation.primitive.name == "div" and is_made_by(
        equation, "pmean", "ReplicaContext.all_reduce"
    )


def _is_over_all(equation: Any) -> bool:
    has_groups = equation.params.get("axis_index_groups") is not None
    return AXIS_NAME in named_axes(equation) and not has_groups


def _has_collective(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith((*_REDUCTIONS, *_EXCHANGES))
        for equation in walk_equations(program)
    )
