"""Follows facts about values through a traced program, and the programs nested in it.

An analysis starts with facts about the inputs. It defines the facts about the results
of an operation (`transfer`), and the facts where several ways meet (`join`). `Dataflow`
carries facts through calls, branches, loops and references.
"""

from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from jax.extend import core

from armillary._jax_compat import count_scan_operands
from armillary._jaxpr import IDENTITIES, programs_in, source_line
from armillary._passes import Pass, find_pass

Fact = TypeVar("Fact")
_Member = TypeVar("_Member")


class Dataflow(Generic[Fact]):
    """Follows facts about values through a program and all nested programs.

    `join` may only add to facts, so that the analysis of a loop ends. `nothing` is the
    fact about a constant. `within` has the equations around the current equation.
    """

    nothing: Fact

    def __init__(self) -> None:
        self.jaxpr: Any = None
        self.within: list[Any] = []
        # One fact for the contents of all references, because any operation may write
        # to any of them.
        self._written = self.nothing

    def join(self, facts: Iterable[Fact]) -> Fact:
        """Returns the fact about a value that may come from several places."""
        raise NotImplementedError

    def fact_of(self, constant: Any) -> Fact:
        """Returns the fact about an array that the program holds."""
        del constant
        return self.nothing

    def transfer(self, equation: Any, operands: list[Fact]) -> list[Fact] | None:
        """Returns the facts of an equation's results; `None` for the default rules."""
        del equation, operands

    def mix(self, equation: Any, operands: list[Fact]) -> Fact:
        """Returns the fact about the results of an equation without programs."""
        del equation
        return self.join(operands)

    def decide(self, equation: Any, decides: Fact) -> Fact:
        """Returns the fact to add to the results of a branch or loop.

        `decides` is the fact about the value that decides it.
        """
        del equation
        return decides

    def run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """Returns the facts of the program's results, given the facts of its inputs."""
        while True:
            before = self._written
            results = self._run(program, inputs)
            if self._written == before:
                return results

    def follow(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """Returns the facts of the results of one equation."""
        results = self.transfer(equation, operands)
        return self._follow(equation, operands) if results is None else results

    def _run(self, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        jaxpr = getattr(program, "jaxpr", program)
        outer = self.jaxpr
        self.jaxpr = jaxpr
        known = self._find_constants(program)
        known.update(zip(jaxpr.invars, inputs, strict=True))

        def read(atom: Any) -> Fact:
            return self.nothing if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            operands = list(map(read, equation.invars))
            if any(map(_is_reference, equation.invars)):
                self._written = self.join([self._written, *operands])
                operands = [self.join([fact, self._written]) for fact in operands]
            results = self.follow(equation, operands)
            known.update(zip(equation.outvars, results, strict=True))
        self.jaxpr = outer
        return list(map(read, jaxpr.outvars))

    def _find_constants(self, program: Any) -> dict[Any, Fact]:
        """Returns the facts of the constants of a program, by variable."""
        jaxpr = getattr(program, "jaxpr", program)
        # An open program has the variables of constants, but not their values.
        known: dict[Any, Fact] = dict.fromkeys(jaxpr.constvars, self.nothing)
        values = getattr(program, "consts", ())
        for variable, value in zip(jaxpr.constvars, values, strict=False):
            known[variable] = self.fact_of(value)
        return known

    def _follow(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        """Returns the facts of results through the programs of an equation."""
        name = equation.primitive.name
        known = {
            "cond": self._follow_branches,
            "while": self._follow_while,
            "scan": self._follow_scan,
            "custom_linear_solve": self._follow_solve,
        }
        if name in known:
            return known[name](equation, operands)

        programs = list(programs_in(equation))
        if not programs:
            return [self.mix(equation, operands)] * len(equation.outvars)
        if len(programs) == 1:
            [program] = programs
            is_map = name == "shard_map"
            if is_map or _is_call(equation, program):
                return self._enter(equation, program, operands)

        # The equation may use its programs in any way, so all facts are joined.
        everything = self.join(operands)
        for program in programs:
            count = len(getattr(program, "jaxpr", program).invars)
            made = self._enter(equation, program, [everything] * count)
            everything = self.join([everything, *made])
        return [everything] * len(equation.outvars)

    def line(self, equation: Any) -> str:
        """Returns the user's line of an equation, or of the closest equation around."""
        lines = map(source_line, (equation, *reversed(self.within)))
        return next(filter(None, lines), "")

    def is_backward(self, equation: Any) -> bool:
        """Returns whether an equation is in a backward pass, by JAX's name stack."""
        for candidate in (equation, *reversed(self.within)):
            found = find_pass(candidate)
            if found is not None:
                return found is Pass.BACKWARD
        return False

    def _enter(self, equation: Any, program: Any, inputs: Sequence[Fact]) -> list[Fact]:
        self.within.append(equation)
        try:
            return self._run(program, inputs)
        finally:
            self.within.pop()

    def _follow_branches(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        decides, *rest = operands
        gained = self.decide(equation, decides)
        branches = equation.params["branches"]
        results = [self._enter(equation, branch, rest) for branch in branches]

        joined: list[Fact] = []
        for of_branches in zip(*results, strict=True):
            joined.append(self.join([*of_branches, gained]))
        return joined

    def _follow_while(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        params = equation.params
        decide = params["cond_jaxpr"]
        body = params["body_jaxpr"]
        first = params["cond_nconsts"]
        last = first + params["body_nconsts"]
        constants = operands[:first]
        body_constants = operands[first:last]
        carry = operands[last:]

        # Each round can only add to facts, so the loop ends. The same goes for a scan.
        while True:
            (decides,) = self._enter(equation, decide, [*constants, *carry])
            gained = self.decide(equation, decides)
            if any(map(_is_reference, equation.invars)):
                self._written = self.join([self._written, gained])
            made = self._enter(equation, body, [*body_constants, *carry])

            now: list[Fact] = []
            for before, after in zip(carry, made, strict=True):
                now.append(self.join([before, after, gained]))
            if now == carry:
                return carry
            carry = now

    def _follow_solve(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        # The operands are the constants of each program, and then the right side. Only
        # the program that solves makes results.
        lengths = equation.params["const_lengths"]
        num_constants = sum(lengths)
        first = lengths.matvec + lengths.vecmat
        last = first + lengths.solve
        inputs = [*operands[first:last], *operands[num_constants:]]
        solve = equation.params["jaxprs"].solve
        return self._enter(equation, solve, inputs)

    def _follow_scan(self, equation: Any, operands: list[Fact]) -> list[Fact]:
        body = equation.params["jaxpr"]
        first, num_carry = count_scan_operands(equation)
        last = first + num_carry
        constants = operands[:first]
        carry = operands[first:last]
        rows = operands[last:]
        while True:
            made = self._enter(equation, body, [*constants, *carry, *rows])
            # The body returns the carry, and then the rows of its results.
            now = [self.join(pair) for pair in zip(carry, made, strict=False)]
            if now == carry:
                return [*carry, *made[num_carry:]]
            carry = now


def union(sets: Iterable[frozenset[_Member]]) -> frozenset[_Member]:
    """Returns the members of all sets: the usual way to join facts that are sets."""
    nothing: frozenset[_Member] = frozenset()
    return nothing.union(*sets)


def _is_call(equation: Any, program: Any) -> bool:
    """Returns whether an equation runs its program once and does no more."""
    jaxpr = getattr(program, "jaxpr", program)
    if len(jaxpr.outvars) != len(equation.outvars):
        return False
    given = [atom.aval.strip_weak_type() for atom in equation.invars]
    taken = [variable.aval.strip_weak_type() for variable in jaxpr.invars]
    return given == taken


def _is_reference(atom: Any) -> bool:
    return hasattr(atom.aval, "inner_aval")


class _Dependencies(Dataflow[frozenset[int]]):
    nothing = frozenset()

    def join(self, facts: Iterable[frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*facts)


def find_dependencies(program: core.ClosedJaxpr) -> list[frozenset[int]]:
    """Returns, for each result of a program, the numbers of inputs it depends on."""
    inputs = [frozenset({i}) for i in range(len(program.jaxpr.invars))]
    return _Dependencies().run(program, inputs)


_CALLS = {
    "checkpoint",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "remat2",
}
_BRANCHES_AND_LOOPS = {"cond", "scan", "while"}
_COMPUTED = -1


class _Identities(Dataflow[frozenset[int]]):
    """Finds values that are an input, bit for bit; `_COMPUTED` is for all other values.

    The empty set means that nothing is known yet, so it adds nothing in a join.
    """

    nothing = frozenset({_COMPUTED})

    def join(self, facts: Iterable[frozenset[int]]) -> frozenset[int]:
        return frozenset().union(*facts)

    def transfer(
        self, equation: Any, operands: list[frozenset[int]]
    ) -> list[frozenset[int]] | None:
        name = equation.primitive.name
        if name in IDENTITIES:
            return operands
        if name in _BRANCHES_AND_LOOPS:
            return None
        if name == "shard_map":
            return self._follow_map(equation, operands)
        if name in _CALLS and _is_call(equation, next(programs_in(equation))):
            return None
        return [self.nothing] * len(equation.outvars)

    def decide(self, equation: Any, decides: frozenset[int]) -> frozenset[int]:
        # If all branches return the same operand, the deciding value does not matter.
        del equation, decides
        return frozenset()

    def _follow_map(
        self, equation: Any, operands: list[frozenset[int]]
    ) -> list[frozenset[int]]:
        """Follows values that are whole on each device.

        Parts may be joined in a different order.
        """
        params = equation.params
        inputs = self._keep_whole(operands, params["in_specs"])
        results = self._enter(equation, params["jaxpr"], inputs)
        return self._keep_whole(results, params["out_specs"])

    def _keep_whole(
        self, facts: Sequence[frozenset[int]], specs: Sequence[Any]
    ) -> list[frozenset[int]]:
        """Returns the facts about values that devices do not share, and no others."""
        kept: list[frozenset[int]] = []
        for fact, spec in zip(facts, specs, strict=True):
            is_shared = any(spec)
            kept.append(self.nothing if is_shared else fact)
        return kept


def find_forwarded(equation: Any) -> list[int | None]:
    """Returns, for each result of an equation, the number of an equal operand.

    A loop or a call that returns an operand makes a new variable for it. `None` is for
    results that are computed.
    """
    operands = equation.invars
    own = [frozenset({number}) for number in range(len(operands))]
    facts = _Identities().follow(equation, own)
    forwarded: list[int | None] = []
    for fact, result in zip(facts, equation.outvars, strict=True):
        forwarded.append(None)
        if len(fact) != 1:
            continue
        [number] = fact
        if number == _COMPUTED:
            continue
        if operands[number].aval.shape == result.aval.shape:
            forwarded[-1] = number
    return forwarded


def find_unchanged(program: core.ClosedJaxpr, numbers: Sequence[int]) -> list[bool]:
    """Returns whether each of the first results is the input with its number.

    `jax.checkpoint` and loops pass values through, but the result is a new tracer, so
    Python cannot see it. The same bits in the same places count as the same value.
    """
    inputs = program.jaxpr.invars
    outputs = program.jaxpr.outvars
    own = [frozenset({number}) for number in range(len(inputs))]
    facts = _Identities().run(program, own)

    is_unchanged: list[bool] = []
    for number, fact, output in zip(numbers, facts, outputs, strict=False):
        has_same_shape = output.aval.shape == inputs[number].aval.shape
        is_unchanged.append(fact == {number} and has_same_shape)
    return is_unchanged
