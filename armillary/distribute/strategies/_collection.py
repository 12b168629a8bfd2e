"""Collects a divided parameter at the operation that uses it, and not before the step.

Without constraints, XLA's partitioner might divide the results of an operation like its
parameter, instead of by examples. So a parameter must be collected from its devices. If
this happened before the step, every device would hold the whole model. Therefore this
pass adds the constraints to the traced program, as late as possible: after a cast to
`bfloat16`, and inside the body of a loop over layers. So a device holds one layer at a
time, and a rematerialized layer is collected again in the backward pass.

A constraint is the identity, so the pass changes no number. Operations between
parameters, such as the update of an optimizer, stay divided. An operation that the pass
does not know gets the whole parameter.

A parameter that every iteration of a loop uses, such as a weight of a recurrent cell,
is collected once before the loop. The exception is the library's own loop over parts of
a batch, whose body is a whole model.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from armillary._dataflow import find_forwarded
from armillary._jax_compat import count_scan_operands
from armillary._jaxpr import is_called_by_library
from armillary.distribute.strategies._division import Division, Fact, follow
from armillary.distribute.strategies._rules import AnyMesh, axes_of

# Sums along a divided axis are added up between devices, and a `shard_map` of the user
# says itself how it divides its inputs.
_TAKES_DIVIDED = frozenset(
    {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"}
    | {"argmax", "argmin", "shard_map", "sharding_constraint"}
)


def collect_at_use(
    program: core.ClosedJaxpr,
    specs: Sequence[PartitionSpec | None],
    mesh: AnyMesh,
    batch_axes: Sequence[str],
) -> core.ClosedJaxpr:
    """Returns a program whose parameters stay divided until an operation uses them.

    Args:
        program: The program of a step.
        specs: The division of each input that is a parameter; `None` for other inputs.
        mesh: The devices.
        batch_axes: The axes of the mesh that batches are divided over. A collected
            parameter stays divided over the other axes.
    """
    facts: list[Fact] = []
    for variable, spec in zip(program.jaxpr.invars, specs, strict=True):
        if spec is None:
            facts.append(None)
            continue
        # A spec may be shorter than the shape: the axes at its end are not divided.
        num_missing = variable.aval.ndim - len(spec)
        missing = [None] * num_missing
        facts.append(Division((*spec, *missing)))

    editor = _Editor(mesh, frozenset(batch_axes))
    edited = editor.edit(program.jaxpr, facts)
    return core.ClosedJaxpr(edited.jaxpr, program.consts)


def without_axes(spec: Sequence[Any], axes: frozenset[str]) -> PartitionSpec:
    """Returns a division without some axes of the mesh."""
    kept: list[Any] = []
    for entry in spec:
        names = tuple(name for name in axes_of(entry) if name not in axes)
        kept.append(names or None)
    return PartitionSpec(*kept)


class _Edited(NamedTuple):
    """A program with constraints.

    Attributes:
        jaxpr: The program.
        results: The facts about its results.
        early: The constants of the innermost loop that an operation in it uses.
    """

    jaxpr: Any
    results: list[Fact]
    early: frozenset[int]


class _Call(NamedTuple):
    """An equation with programs, edited.

    Attributes:
        equation: The equation.
        inputs: The facts that its programs make use of. An operand whose fact is not
            among them must be collected before.
        results: The facts about its results.
        early: As in `_Edited`.
        forwarded: For each result, the number of the operand that it is, if any. For
            example, a loop over layers returns their parameters.
    """

    equation: Any
    inputs: list[Fact]
    results: list[Fact]
    early: frozenset[int] = frozenset()
    forwarded: Sequence[int | None] = ()


class _Editor:
    """Adds the constraints to a program and to the programs nested in it."""

    def __init__(self, mesh: AnyMesh, batch_axes: frozenset[str]) -> None:
        self._mesh = mesh
        self._batch_axes = batch_axes
        # The programs are kept alive, so that Python does not reuse their identities.
        self._edited: dict[Any, tuple[Any, _Edited]] = {}

    def edit(self, jaxpr: Any, inputs: Sequence[Fact]) -> _Edited:
        """Edits a program, given the facts about its inputs."""
        key = id(jaxpr), tuple(inputs)
        if key not in self._edited:
            self._edited[key] = jaxpr, self._edit(jaxpr, inputs)
        _, edited = self._edited[key]
        return edited

    def _edit(self, jaxpr: Any, inputs: Sequence[Fact]) -> _Edited:
        """Returns a program with constraints, and the facts of its results.

        An operation that takes a full parameter gets a constraint right before it.
        `early` has the constants to collect before a loop around the program.
        """
        if not any(inputs):
            nothing: list[Fact] = [None] * len(jaxpr.outvars)
            return _Edited(jaxpr, nothing, frozenset())

        known: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
        # Variables that are a parameter, and the parameter.
        same: dict[Any, Any] = {}
        equations: list[Any] = []
        early: set[int] = set()

        def resolve(atom: Any) -> Any:
            """Returns the parameter that a variable is, or the variable itself."""
            if isinstance(atom, core.Literal):
                return atom
            return same.get(atom, atom)

        def read(atom: Any) -> Fact:
            if isinstance(atom, core.Literal):
                return None
            return known.get(atom)

        for equation in jaxpr.eqns:
            operands = list(map(resolve, equation.invars))
            facts = list(map(read, operands))
            if not any(facts):
                equations.append(equation)
                continue

            call = self._edit_equation(equation, facts)
            early |= call.early
            known.update(zip(equation.outvars, call.results, strict=True))
            # A program may constrain a parameter itself. Then its result has no fact,
            # and must stay.
            pairs = zip(equation.outvars, call.forwarded, strict=False)
            for result, number in pairs:
                if number is not None and known[result] is not None:
                    same[result] = operands[number]

            for number, fact in enumerate(facts):
                stays_divided = call.inputs[number] is not None
                if fact is None or stays_divided:
                    continue
                early |= fact.constants
                constraint = self._collect(operands[number], fact, equation)
                equations.append(constraint)
                (operands[number],) = constraint.outvars
            equations.append(call.equation.replace(invars=operands))

        outputs = list(map(resolve, jaxpr.outvars))
        edited = jaxpr.replace(eqns=equations, outvars=outputs)
        results = list(map(read, outputs))
        return _Edited(edited, results, frozenset(early))

    def _edit_equation(self, equation: Any, facts: list[Fact]) -> _Call:
        """Returns an operation with edited inner programs, and the facts it needs."""
        name = equation.primitive.name
        calls: dict[str, Callable[[Any, list[Fact]], _Call]] = {
            "jit": self._edit_call,
            "closed_call": self._edit_call,
            "checkpoint": self._edit_call,
            "remat2": self._edit_call,
            "cond": self._edit_branches,
            "while": self._edit_while,
            "scan": self._edit_scan,
        }
        if name in calls:
            call = calls[name](equation, facts)
            return call._replace(forwarded=find_forwarded(equation))

        nothing: list[Fact] = [None] * len(equation.outvars)
        if name in _TAKES_DIVIDED:
            return _Call(equation, facts, nothing)
        results = follow(equation, facts)
        if results is None:  # an unknown operation, which needs whole operands
            collected: list[Fact] = [None] * len(facts)
            return _Call(equation, collected, nothing)
        return _Call(equation, facts, results)

    def _collect(self, variable: Any, division: Division, user: Any) -> Any:
        """Returns the equation that collects a value for its user."""
        spec = without_axes(division.entries, self._batch_axes)
        result = copy.copy(variable)
        equation = self._constrain(variable, result, spec)
        return equation.replace(source_info=user.source_info)

    def _constrain(self, variable: Any, result: Any, spec: PartitionSpec) -> Any:
        """Returns the equation that divides a value over the devices."""
        sharding = NamedSharding(self._mesh, spec)

        def constrain(array: Any) -> Any:
            return jax.lax.with_sharding_constraint(array, sharding)

        # JAX has no public way to make an equation, so it is taken from a trace.
        traced = jax.make_jaxpr(constrain)(variable.aval)
        (equation,) = traced.eqns
        return equation.replace(invars=[variable], outvars=[result])

    def _hold_rows(self, body: Any, rows: Sequence[Fact]) -> Any:
        """Returns the body of a scan in which each row of a stack begins in parts.

        Otherwise, XLA would collect a row before it removes the row's first axis. For
        that, it would copy this device's part of the whole stack into another layout.

        The rows are the last inputs of a body. A new variable takes the place of each
        row, and the first equations make the row from it.
        """
        variables = body.jaxpr.invars
        first = len(variables) - len(rows)
        inputs = list(variables)
        equations: list[Any] = []
        for number, row in enumerate(rows, start=first):
            if row is None:
                continue
            variable = variables[number]
            given = copy.copy(variable)
            inputs[number] = given
            spec = PartitionSpec(*row.entries)
            equations.append(self._constrain(given, variable, spec))

        equations += body.jaxpr.eqns
        jaxpr = body.jaxpr.replace(invars=inputs, eqns=equations)
        return core.ClosedJaxpr(jaxpr, body.consts)

    def _edit_program(self, program: Any, inputs: Sequence[Fact]) -> _Edited:
        """Edits a program with or without constants of its own."""
        if not isinstance(program, core.ClosedJaxpr):
            return self.edit(program, inputs)
        edited = self.edit(program.jaxpr, inputs)
        closed = core.ClosedJaxpr(edited.jaxpr, program.consts)
        return edited._replace(jaxpr=closed)

    def _edit_call(self, equation: Any, facts: list[Fact]) -> _Call:
        name = "jaxpr" if "jaxpr" in equation.params else "call_jaxpr"
        edited = self._edit_program(equation.params[name], facts)
        params = {**equation.params, name: edited.jaxpr}
        called = equation.replace(params=params)
        return _Call(called, facts, edited.results, edited.early)

    def _edit_branches(self, equation: Any, facts: list[Fact]) -> _Call:
        """Edits all branches; a fact must hold after each of them."""
        # The first operand is the number of the branch.
        _, *inputs = facts
        programs: list[Any] = []
        results: list[list[Fact]] = []
        early: set[int] = set()
        for branch in equation.params["branches"]:
            edited = self._edit_program(branch, inputs)
            programs.append(edited.jaxpr)
            results.append(edited.results)
            early |= edited.early

        params = {**equation.params, "branches": tuple(programs)}
        chosen = equation.replace(params=params)
        return _Call(chosen, [None, *inputs], _agreed(results), frozenset(early))

    def _edit_while(self, equation: Any, facts: list[Fact]) -> _Call:
        """Edits the body of a loop, until the facts about its carry are stable."""
        params = equation.params
        num_tested = params["cond_nconsts"]
        num_constants = params["body_nconsts"]

        def edit(inputs: list[Fact]) -> _Edited:
            return self._edit_program(params["body_jaxpr"], inputs)

        body, inputs = _settle(
            edit,
            facts[num_tested:],
            num_constants,
            len(equation.outvars),
            is_own=is_called_by_library(equation),
        )
        edited = equation.replace(params={**params, "body_jaxpr": body.jaxpr})
        # The test of a loop rarely uses parameters, so it gets its constants whole.
        tested: list[Fact] = [None] * num_tested
        return _Call(edited, [*tested, *inputs], inputs[num_constants:])

    def _edit_scan(self, equation: Any, facts: list[Fact]) -> _Call:
        """Edits the body of a scan; a stack of parameters is collected row by row."""
        num_constants, num_carry = count_scan_operands(equation)
        num_whole = num_constants + num_carry
        whole = facts[:num_whole]
        stacks = facts[num_whole:]
        rows = list(map(_row_of, stacks))

        def edit(inputs: list[Fact]) -> _Edited:
            return self._edit_program(equation.params["jaxpr"], [*inputs, *rows])

        body, inputs = _settle(
            edit,
            whole,
            num_constants,
            num_carry,
            is_own=is_called_by_library(equation),
        )
        carry = inputs[num_constants:]
        made = list(map(_stack_of, body.results[num_carry:]))
        used: list[Fact] = []
        for row, stack in zip(rows, stacks, strict=True):
            used.append(None if row is None else stack)

        program = self._hold_rows(body.jaxpr, rows)
        edited = equation.replace(params={**equation.params, "jaxpr": program})
        return _Call(edited, [*inputs, *used], [*carry, *made])


def _row_of(stack: Fact) -> Fact:
    """Returns the division of a row of a stack; `None` if rows must be whole."""
    if stack is None:
        return None
    first, *others = stack.entries
    # The loop takes row by row, so devices cannot share the first axis.
    return Division(tuple(others)) if first is None else None


def _stack_of(row: Fact) -> Fact:
    """Returns the division of a stack of such rows."""
    return None if row is None else Division((None, *row.entries))


def _settle(
    edit: Callable[[list[Fact]], _Edited],
    facts: Sequence[Fact],
    num_constants: int,
    num_carry: int,
    *,
    is_own: bool,
) -> tuple[_Edited, list[Fact]]:
    """Edits the body of a loop; returns it, and the facts that hold in all iterations.

    Args:
        edit: Edits the body, given the facts about its constants and its carry.
        facts: The facts about them before the loop.
        num_constants: The number of constants.
        num_carry: The number of values that an iteration passes to the next one.
        is_own: Whether the library made the loop.
    """
    kept = list(facts)
    while True:
        inputs: list[Fact] = []
        for number, fact in enumerate(kept):
            if fact is None:
                inputs.append(None)
                continue
            # A constant that the body uses comes back in `early`, by this number.
            has_number = number < num_constants and not is_own
            numbers = frozenset({number} if has_number else ())
            inputs.append(Division(fact.entries, numbers))

        body = edit(inputs)
        carry = inputs[num_constants:]
        following = _agreed([carry, body.results[:num_carry]])
        is_stable = not body.early and following == carry
        if is_stable:
            return body, kept

        # Each round takes facts away, so the loop ends.
        for number in body.early:
            kept[number] = None
        for number, fact in enumerate(following, start=num_constants):
            if fact is None:
                kept[number] = None


def _agreed(found: Sequence[Sequence[Fact]]) -> list[Fact]:
    """Returns the facts that are the same in all of several lists."""
    agreed: list[Fact] = []
    for facts in zip(*found, strict=True):
        is_same = all(fact == facts[0] for fact in facts)
        agreed.append(facts[0] if is_same else None)
    return agreed
