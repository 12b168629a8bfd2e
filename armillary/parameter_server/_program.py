"""The program of a scheduled function on a worker: reads variables, sends changes.

The function is traced like any step. Its effect on each variable then becomes one of
these, or an error names the variable:

    update      gradients for an optimizer, which runs on the parameter servers
    addition    a value to add to the variable (`count += 1`, metrics, batch statistics)
    nothing     random keys: each call draws its own numbers, and leaves the stored key
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from armillary._jaxpr import walk_equations
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import trace_step
from armillary.distribute.program._traced_step import TracedStep
from armillary.distribute.replica._policy import (
    Policy,
    as_before,
    as_keys,
    policies_of,
)
from armillary.errors import StateStructureError
from armillary.parameter_server._optimizers import (
    UpdateSpec,
    recording,
    server_update_p,
)
from armillary.state._lift import State, as_array
from armillary.state._slots import Trait, has_trait
from armillary.typing import PyTree
from armillary.xla._compile import compile_step

_COPIES = ("convert_element_type", "copy", "copy_p")
_SUMS = ("add", "add_any", "sub")


class TaskSpec(NamedTuple):
    """The effects of a scheduled function on variables, by number in its state."""

    updates: tuple[UpdateSpec, ...]
    additions: tuple[int, ...]
    reads: tuple[int, ...]

    @property
    def updated(self) -> list[int]:
        """The variables that optimizers change."""
        slots: list[int] = []
        for update in self.updates:
            slots += update.param_slots
        return slots


class TaskProgram:
    """A scheduled function, traced for arguments of one kind, and compiled."""

    def __init__(
        self,
        call: Callable[..., PyTree],
        flat: FlatState,
        arguments: tuple[PyTree, ...],
        fn: Callable[..., Any],
    ) -> None:
        updates: list[UpdateSpec] = []

        def body(*arguments: Any) -> PyTree:
            with recording() as recorded:
                result = call(*arguments)
            updates[:] = [spec for spec, _ in recorded]
            return result, [gradients for _, gradients in recorded]

        self._step = trace_step(body, flat, arguments, user_fn=fn, owner="the function")
        name = getattr(fn, "__name__", "the function")
        policies = _find_policies(flat)
        self._keys = {i for i, policy in policies.items() if policy is Policy.RANDOM}
        additions = _find_additions(self._step, updates, policies, flat.state, name)
        self._signs = [addition.sign for addition in additions.values()]
        self._shapes = [flat.types[i].shape for i in additions]

        self._program, used = _reduce(self._step, additions, len(flat.types))
        _check_updates_unused(self._program, name)
        reads = [i for i in used if i < len(flat.types)]
        self.spec = TaskSpec(tuple(updates), tuple(additions), tuple(reads))
        self._run = compile_step(self._compute, self._program, flat.platform, None)

    def __call__(
        self, values: dict[int, Any], arguments: PyTree, call: int
    ) -> tuple[PyTree, list[list[Any]], list[Any]]:
        """Runs the function; returns its result, the gradients and the additions."""
        leaves = jax.tree.leaves(arguments)
        read = [values[i] for i in self.spec.reads]
        results, additions = self._run(read, leaves, np.uint32(call))
        result, gradients = self._step.results(results)
        return result, gradients, additions

    def _compute(
        self, read: list[Any], arguments: list[Any], call: Any
    ) -> tuple[list[Any], list[Any]]:
        """Computes the results of the function, and the changes of variables."""
        values: dict[int, Any] = {}
        for i, value in zip(self.spec.reads, read, strict=True):
            values[i] = _fold_in(value, call) if i in self._keys else value
        run = core.jaxpr_as_fun(self._program)
        outputs = run(*values.values(), *arguments)

        num_results = len(outputs) - len(self._signs)
        results = outputs[:num_results]
        made = outputs[num_results:]
        changes: list[Any] = []
        for i, new, sign in zip(self.spec.additions, made, self._signs, strict=True):
            is_new_value = sign == 0
            changes.append(new - values[i] if is_new_value else sign * new)
        # The addition to an array may be a single number.
        changes = list(map(jnp.broadcast_to, changes, self._shapes))
        return results, changes


class _Addition(NamedTuple):
    """A value to add to a variable.

    Attributes:
        sign: 1 if `output` is added, -1 if it is subtracted, and 0 if `output` is the
            new value of the variable.
        output: The value in the program.
    """

    sign: int
    output: Any


def _find_policies(flat: FlatState) -> dict[int, Policy]:
    """Returns the policy of each array of a state; keys are always random."""
    arrays = list(map(as_array, flat.state.read()))
    policies = dict(enumerate(policies_of(flat.state, arrays)))
    for i, type_ in enumerate(flat.types):
        if jnp.issubdtype(type_.dtype, jax.dtypes.prng_key):
            policies[i] = Policy.RANDOM
    return policies


def _find_additions(
    step: TracedStep,
    updates: Sequence[UpdateSpec],
    policies: dict[int, Policy],
    state: State,
    name: str,
) -> dict[int, _Addition]:
    """Returns the additions of a function to variables, by the variable's number."""
    paths = state.paths
    in_parts = _find_in_parts(state)
    origins = _Origins(step.program.jaxpr)
    # The parameters of optimizers, with the number of the update and of the parameter
    # in it; and the variables of the optimizers' own state.
    owned: dict[int, tuple[int, int]] = {}
    states: set[int] = set()
    for call, spec in enumerate(updates):
        states.update(spec.state_slots)
        for leaf, slot in enumerate(spec.param_slots):
            owned[slot] = (call, leaf)

    found: dict[int, _Addition] = {}
    refused: list[str] = []
    for i, out in zip(step.changed, step.program.jaxpr.outvars, strict=False):
        if i in owned:
            if not origins.is_updated(out, i, owned[i]):
                refused.append(f"{paths[i]}: changed besides the optimizer's update")
        elif i in states:
            refused.append(f"{paths[i]}: an optimizer's state, which it alone changes")
        elif policies[i] is Policy.MEAN or i in in_parts:
            found[i] = _Addition(0, out)
        elif policies[i] is not Policy.RANDOM:
            addition = origins.find_addition(out, i)
            if addition is None:
                refused.append(f"{paths[i]}: set to a value, not added to")
            else:
                found[i] = addition

    # `x += f(x)` is not an addition: another worker may change `x` in the meantime.
    mirrored = {i for i in found if policies[i] is Policy.MIRRORED}
    for i in mirrored:
        _, needed = _prune(step.program, [found[i].output])
        if mirrored.intersection(needed):
            refused.append(
                f"{paths[i]}: the added amount depends on the values of such variables"
            )
    if refused:
        raise _explain_refused(name, refused)
    return found


def _explain_refused(name: str, refused: list[str]) -> StateStructureError:
    """Returns the error for variables that a function must not change in its way."""
    lines = "\n".join(f"  {line}" for line in sorted(refused))
    return StateStructureError(
        f"`{name}` is scheduled on workers, which run at the same time, so it can "
        "change variables only through an optimizer, or by adding to them "
        f"(`x[...] += change`). It changes these in another way:\n{lines}\n"
        "Use a metric, or a variable with `aggregation=VariableAggregation.SUM`, "
        "or change it on the coordinator, between calls of `schedule`."
    )


def _reduce(
    step: TracedStep, additions: dict[int, _Addition], num_variables: int
) -> tuple[core.ClosedJaxpr, list[int]]:
    """Returns the part of a step that computes its results and its additions.

    It takes all arguments, but only the variables that it needs. The second result has
    the numbers of these inputs.
    """
    jaxpr = step.program.jaxpr
    num_changed = len(step.changed)
    results = jaxpr.outvars[num_changed:]
    added = [addition.output for addition in additions.values()]

    is_kept = [i >= num_variables for i in range(len(jaxpr.invars))]
    for i, addition in additions.items():
        # The new value of a variable is compared with the old one, so it is read.
        is_new_value = addition.sign == 0
        if is_new_value:
            is_kept[i] = True
    return _prune(step.program, [*results, *added], is_kept)


def _find_in_parts(state: State) -> set[int]:
    """Returns the numbers of the variables whose elements carry into each other."""
    found: set[int] = set()
    for slot, start, stop in state.ranges:
        if has_trait(slot.variable, Trait.IN_PARTS):
            found.update(range(start, stop))
    return found


class _Origins:
    """The operands of a program's values, as far as its operations show them."""

    def __init__(self, jaxpr: Any) -> None:
        self._invars = jaxpr.invars
        self._made: dict[Any, Any] = {}
        for equation in jaxpr.eqns:
            self._made.update(dict.fromkeys(equation.outvars, equation))

    def is_updated(self, out: Any, slot: int, origin: tuple[int, int]) -> bool:
        """Returns whether `out` is the variable plus the update of `origin`."""
        # In half precision the sum is rounded, as it is on the servers.
        name, terms = self._terms(out, may_round=True)
        if not name.startswith("add"):
            return False
        old = self._invars[slot]
        first, second = (self._same(term, may_round=True) for term in terms)
        if first is old:
            added = second
        elif second is old:
            added = first
        else:
            return False

        update = self._equation(added)
        if update is None or update.primitive is not server_update_p:
            return False
        found = (update.params["call"], update.params["leaf"])
        return found == origin

    def find_addition(self, out: Any, slot: int) -> _Addition | None:
        """Returns the addition to a variable; `None` if it changes in another way."""
        name, terms = self._terms(out)
        old = self._invars[slot]
        if name and self._same(terms[0]) is old:
            found = _Addition(-1 if name == "sub" else 1, terms[1])
        elif name.startswith("add") and self._same(terms[1]) is old:
            found = _Addition(1, terms[0])
        else:
            return None
        # With an addition of a narrower type, the sum would be rounded differently.
        has_same_type = found.output.aval.dtype == old.aval.dtype
        return found if has_same_type else None

    def _equation(self, var: Any) -> Any:
        """Returns the operation that made a value; `None` for inputs and constants."""
        return None if isinstance(var, core.Literal) else self._made.get(var)

    def _same(self, var: Any, *, may_round: bool = False) -> Any:
        """Follows plain copies of a value back to the first variable."""
        while True:
            equation = self._equation(var)
            if equation is None or equation.primitive.name not in _COPIES:
                return var
            source = equation.invars[0]
            is_rounded = source.aval.dtype != var.aval.dtype
            if is_rounded and not may_round:
                return var
            var = source

    def _terms(self, out: Any, *, may_round: bool = False) -> tuple[str, list[Any]]:
        """Returns the name and the operands of a sum or a difference, if it is one."""
        equation = self._equation(self._same(out, may_round=may_round))
        if equation is None or equation.primitive.name not in _SUMS:
            return "", []
        return equation.primitive.name, list(equation.invars)


def _check_updates_unused(program: core.ClosedJaxpr, name: str) -> None:
    """Raises if the results of a function need the update of an optimizer."""
    for equation in walk_equations(program):
        if equation.primitive is server_update_p:
            raise StateStructureError(
                f"`{name}` uses the updates that an optimizer returned. They are "
                "computed on the parameter servers, after the function: use the "
                "gradients instead."
            )


def _prune(
    program: core.ClosedJaxpr, outputs: list[Any], kept: bool | list[bool] = False
) -> tuple[core.ClosedJaxpr, list[int]]:
    """Returns the part of a program that computes some values, and its inputs."""
    # The names of the outputs are removed, because their number changes.
    info = program.jaxpr.debug_info.with_unknown_names()
    whole = program.jaxpr.replace(debug_info=info, outvars=outputs)
    part, used = partial_eval.dce_jaxpr(whole, [True] * len(outputs), kept)
    inputs = [i for i, is_used in enumerate(used) if is_used]
    return core.ClosedJaxpr(part, program.consts), inputs


def _fold_in(value: jax.Array, call: Any) -> jax.Array:
    """Returns keys with the number of the call folded in, so each call has its own."""
    keys = as_keys(value)
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    folded = fold(keys, call)
    return as_before(folded, value)
