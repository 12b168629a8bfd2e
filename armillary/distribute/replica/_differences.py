"""Finds what may differ between replicas, by what a traced step computes.

JAX's types are what sums gradients, but they are not a proof: some rules of JAX type
values as equal that are not. So nothing a step leaves in mirrored state is taken for
equal because of its type. After tracing, this analysis follows every value from the
batch, the number of the replica and callbacks through the whole program. What it cannot
follow it takes for different. A value is equal again only after a reduction over all
replicas; branches and loops that a differing value decides make everything differ that
they return, and may not reduce.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core
from jax.extend.core import primitives

from armillary._jaxpr import (
    called_program,
    programs_in,
    source_line,
    walk_programs,
)
from armillary.distribute.replica._retype import AXIS_NAME

Reasons = frozenset[str]
"""Why a value may differ between replicas; empty if it does not."""

_EQUAL: Reasons = frozenset()
_BATCH: Reasons = frozenset({"one replica's share of the batch"})
_NUMBER: Reasons = frozenset({"the number of the replica, or random keys made with it"})
_CALLBACK: Reasons = frozenset({"a callback to Python"})
_DEVICE: Reasons = frozenset({"the device"})

_SOURCES = {
    "axis_index": _NUMBER,
    "pure_callback": _CALLBACK,
    "io_callback": _CALLBACK,
    "infeed": _DEVICE,
    "rng_uniform": _DEVICE,
    "ffi_call": _DEVICE,
}
REDUCTIONS = ("psum", "pmin", "pmax", "all_gather")
"""How operations begin whose result is the same on all replicas that take part."""

# Exchanges in which each replica gets something else.
_EXCHANGES = ("ppermute", "all_to_all", "ragged_all_to_all", "reduce_scatter")
_MARK = "armillary: "


class Mismatch(NamedTuple):
    """Mirrored state that may differ between replicas.

    Attributes:
        reasons: What it was computed from.
        where: The line that computed it.
    """

    reasons: Reasons
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


def mark(value: Any, name: str) -> Any:
    """Marks a value that must be equal on all replicas, for `find_differences`."""
    return primitives.name_p.bind(value, name=_MARK + name)


class Differences:
    """What differs in a traced program.

    Args:
        program: A program that runs a step on all replicas, perhaps several times.

    Attributes:
        mismatches: By the name of the mark, each marked value that may differ.
        conflicts: Branches and loops that replicas take differently, with a reduction.
    """

    def __init__(self, program: core.ClosedJaxpr) -> None:
        self.mismatches: dict[str, Mismatch] = {}
        self.conflicts: dict[str, Conflict] = {}
        self._written = _EQUAL
        for jaxpr, _ in walk_programs(program):
            for equation in jaxpr.eqns:
                if equation.primitive.name == "shard_map":
                    self._enter(equation)

    def _enter(self, equation: Any) -> None:
        inputs = [
            _BATCH if AXIS_NAME in str(spec) else _EQUAL
            for spec in equation.params["in_specs"]
        ]
        self._fix(lambda: self._run(equation.params["jaxpr"], inputs))

    def _fix(self, run: Any) -> Any:
        """Runs until references, which any operation may write to, hold no more."""
        while True:
            before = self._written
            result = run()
            if self._written == before:
                return result

    def _run(self, program: Any, inputs: Sequence[Reasons]) -> list[Reasons]:
        """Returns the reasons of each result."""
        jaxpr = getattr(program, "jaxpr", program)
        known: dict[Any, Reasons] = dict.fromkeys(jaxpr.constvars, _EQUAL)
        made_by: dict[Any, Any] = {}
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Reasons:
            return _EQUAL if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = list(map(read, equation.invars))
            if equation.primitive.name == "name" and operands[0]:
                self._look_at_mark(equation, operands[0], made_by)
            if _has_reference(equation.invars):
                self._written |= _union(operands)
                operands = [reasons | self._written for reasons in operands]
            results = self._apply(equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
            made_by.update(dict.fromkeys(equation.outvars, equation))
        return list(map(read, jaxpr.outvars))

    def _apply(self, equation: Any, operands: list[Reasons]) -> list[Reasons]:
        name, params = equation.primitive.name, equation.params
        everything = _union(operands)
        if name in _SOURCES:
            return [everything | _SOURCES[name]] * len(equation.outvars)
        if name.startswith(REDUCTIONS) and _is_over_all(params):
            return [_EQUAL] * len(equation.outvars)
        if name.startswith((*_EXCHANGES, *REDUCTIONS)):
            return [everything | _NUMBER] * len(equation.outvars)
        if name == "cond":
            return self._apply_cond(equation, operands)
        if name == "while":
            return self._apply_while(equation, operands)
        if name == "scan":
            first = params["num_consts"]
            last = first + params["num_carry"]
            return self._repeat(params["jaxpr"], operands, first, last)
        called = called_program(equation)
        if called is not None:
            return self._run(called, operands)
        # How an operation uses its programs is not known: all that goes in comes out.
        for program in programs_in(equation):
            jaxpr = getattr(program, "jaxpr", program)
            inner = self._run(program, [everything] * len(jaxpr.invars))
            everything |= _union(inner)
        return [everything] * len(equation.outvars)

    def _apply_cond(self, equation: Any, operands: list[Reasons]) -> list[Reasons]:
        decides, *rest = operands
        branches = equation.params["branches"]
        self._check_decision(equation, decides, branches)
        results = [self._run(branch, rest) for branch in branches]
        return [_union(column) | decides for column in zip(*results, strict=True)]

    def _apply_while(self, equation: Any, operands: list[Reasons]) -> list[Reasons]:
        params = equation.params
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        constants, carry = operands[:first], operands[last:]
        while True:
            (decides,) = self._run(params["cond_jaxpr"], [*constants, *carry])
            made = self._run(params["body_jaxpr"], [*operands[first:last], *carry])
            now = [a | b | decides for a, b in zip(carry, made, strict=True)]
            if now == carry:
                break
            carry = now
        programs = (params["cond_jaxpr"], params["body_jaxpr"])
        self._check_decision(equation, decides, programs)
        return carry

    def _repeat(
        self, body: Any, operands: list[Reasons], first: int, last: int
    ) -> list[Reasons]:
        """Returns the results of a body whose first results are its operands again."""
        carry = operands[first:last]
        while True:
            made = self._run(body, [*operands[:first], *carry, *operands[last:]])
            now = [a | b for a, b in zip(carry, made[: len(carry)], strict=True)]
            if now == carry:
                return [*carry, *made[len(carry) :]]
            carry = now

    def _check_decision(
        self, equation: Any, decides: Reasons, programs: Sequence[Any]
    ) -> None:
        if decides and any(map(_has_collective, programs)):
            where = source_line(equation)
            kind = equation.primitive.name
            self.conflicts[where] = Conflict(kind, decides, where)

    def _look_at_mark(
        self, equation: Any, reasons: Reasons, made_by: dict[Any, Any]
    ) -> None:
        name = equation.params["name"]
        if name.startswith(_MARK):
            maker = made_by.get(equation.invars[0], equation)
            mismatch = Mismatch(reasons, source_line(maker))
            self.mismatches[name.removeprefix(_MARK)] = mismatch


def _union(reasons: Iterable[Reasons]) -> Reasons:
    return _EQUAL.union(*reasons)


def _is_over_all(params: dict[str, Any]) -> bool:
    axes = params.get("axes", params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    return AXIS_NAME in axes and params.get("axis_index_groups") is None


def _has_reference(atoms: Sequence[Any]) -> bool:
    return any(hasattr(atom.aval, "inner_aval") for atom in atoms)


def _has_collective(program: Any) -> bool:
    return any(
        equation.primitive.name.startswith((*REDUCTIONS, *_EXCHANGES))
        for jaxpr, _ in walk_programs(program)
        for equation in jaxpr.eqns
    )
