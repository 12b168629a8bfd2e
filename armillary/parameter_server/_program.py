"""A scheduled function as a worker runs it: reads variables, sends what changes them.

The function is traced as any step is. What it does to each variable then becomes one of
these, or is refused by name:

    update      gradients for an optimizer, which runs on the parameter servers
    addition    what is added to the variable (`count += 1`, metrics, batch statistics)
    nothing     random keys: each call draws its own numbers, and leaves the stored key

What becomes of optimizers in a scheduled function.

On a worker, each Optax transformation of the function stands for the one on the
parameter servers: its `update` takes down the gradients, which are sent, and returns
updates that nothing may use but `optax.apply_updates`.
"""

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend import core
from jax.extend.core import Primitive
from jax.interpreters import partial_eval

from armillary._jaxpr import walk_programs
from armillary.distribute.program._flat_state import FlatState
from armillary.distribute.program._trace import TracedStep, trace_step
from armillary.distribute.replica._context import get_replica_context, lifted_state
from armillary.distribute.replica._differences import EQUAL
from armillary.distribute.replica._policy import (
    Policy,
    as_before,
    as_keys,
    policies_of,
)
from armillary.distribute.replica._proof import Proof
from armillary.distribute.replica._reductions import AllReduceState
from armillary.errors import (
    ReplicaContextError,
    ReplicaMismatchError,
    StateStructureError,
)
from armillary.parameter_server._data import SENT, alone_message
from armillary.state._lift import as_array
from armillary.typing import PyTree
from armillary.xla._compile import compile_step


class UpdateSpec(NamedTuple):
    """One call of `update` in a scheduled function.

    Attributes:
        transformation: Which of the function's transformations.
        gradients: The gradients' tree, with their number among all of this call.
        state: The state's tree, with the number of the slot of each array.
        params: The parameters' tree, likewise.
        types: Shape and dtype of each gradient.
    """

    transformation: int
    gradients: PyTree
    state: PyTree
    params: PyTree
    types: tuple[Any, ...]


class Recorded(NamedTuple):
    """What calls of `update` were given while a function was traced."""

    specs: list[UpdateSpec]
    gradients: list[list[jax.Array]]


# The updates that a worker's optimizer returns: an operation that names its call and
# leaf, so that their use can be found in the traced program.
server_update_p = Primitive("server_update")
server_update_p.def_abstract_eval(lambda gradient, **_: gradient)

_recording: list[Recorded] = []


@contextmanager
def recording() -> Iterator[Recorded]:
    """Takes down what optimizers are given, while a function is traced."""
    _recording.append(Recorded([], []))
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def make_stand_in(index: int) -> optax.GradientTransformationExtraArgs:
    """Returns what stands for a transformation on a worker."""

    def init(params: PyTree) -> PyTree:
        raise RuntimeError(
            "`init` of an Optax transformation was called in a scheduled function, "
            "where its state would be made anew at each call. Make it once, outside, "
            "and hold it in an attribute."
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **others: Any
    ) -> tuple[PyTree, PyTree]:
        return _record(index, updates, state, params, others), state

    return optax.GradientTransformationExtraArgs(init, update)


def _record(
    index: int, gradients: PyTree, state: PyTree, params: PyTree, others: dict[str, Any]
) -> PyTree:
    """Takes down one call, and returns its updates."""
    lifted = lifted_state()
    if not _recording or lifted is None:
        raise RuntimeError(
            "An optimizer was used on a worker outside of a scheduled function."
        )
    given = sorted(name for name, value in others.items() if value is not None)
    if given:
        raise ValueError(
            f"`update` of an optimizer was given {', '.join(given)} in a scheduled "
            "function. Parameter servers get gradients only: use an optimizer that "
            "needs nothing else."
        )
    if params is None:
        raise ValueError(
            "`update` of an optimizer was called without `params` in a scheduled "
            "function, so nothing tells which variables are to be updated. Write "
            "`tx.update(gradients, state, params)`."
        )
    context = get_replica_context()
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, AllReduceState))
    has_own = any(isinstance(leaf, AllReduceState) for leaf in leaves)
    if has_own and context is not None and context.num_replicas_in_sync > 1:
        raise ReplicaContextError(alone_message("all_reduce_gradients"))
    places = {id(leaf): i for i, leaf in enumerate(lifted.read())}

    def place_of(leaf: Any, what: str) -> int:
        if id(leaf) not in places:
            raise ValueError(
                f"`update` of an optimizer was given {what} that no variable holds "
                "(an array computed in the scheduled function). Pass what variables "
                "hold: updates are made where they live."
            )
        return places[id(leaf)]

    leaves, treedef = jax.tree.flatten(gradients)
    recorded = _recording[-1]
    spec = UpdateSpec(
        index,
        treedef.unflatten(range(len(leaves))),
        jax.tree.map(lambda leaf: place_of(leaf, "state"), state),
        jax.tree.map(lambda leaf: place_of(leaf, "parameters"), params),
        tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves),
    )
    slots = jax.tree.leaves(spec.params)
    if len(slots) != len(leaves) or len(set(slots)) < len(slots):
        raise ValueError(
            f"`update` of an optimizer was given {len(leaves)} gradients for "
            f"{len(set(slots))} variables. Pass one gradient for each of `params`."
        )
    number = len(recorded.specs)
    recorded.specs.append(spec)
    recorded.gradients.append(leaves)
    return treedef.unflatten(
        server_update_p.bind(leaf, call=number, leaf=i) for i, leaf in enumerate(leaves)
    )


class Addition(enum.Enum):
    """How additions of calls that run together become one."""

    SUM = "sum"
    MEAN = "mean"
    EQUAL = "equal"
    FIRST = "first"


_ADDITIONS = {
    Policy.SUM: Addition.SUM,
    Policy.MIRRORED: Addition.EQUAL,
    Policy.FIRST_REPLICA: Addition.FIRST,
}


class TaskSpec(NamedTuple):
    """What a scheduled function does to variables, by their number in its state.

    Attributes:
        updates: Its calls of optimizers.
        additions: How it adds to variables, by their number.
        reads: The variables whose values it needs.
    """

    updates: tuple[UpdateSpec, ...]
    additions: dict[int, Addition]
    reads: tuple[int, ...]

    @property
    def has_updates(self) -> bool:
        """Whether it changes anything."""
        return bool(self.updates or self.additions)


class TaskProgram:
    """A scheduled function, traced for arguments of one kind, and compiled.

    Args:
        call: Calls the function with traced arguments.
        flat: The state that it reaches.
        arguments: Arrays, or their types.
        fn: The user's function.

    Attributes:
        spec: What it does to variables.
    """

    def __init__(
        self,
        call: Callable[..., PyTree],
        flat: FlatState,
        arguments: tuple[PyTree, ...],
        fn: Callable[..., Any],
    ) -> None:
        specs: list[tuple[UpdateSpec, ...]] = [()]

        def body(*arguments: Any) -> PyTree:
            with recording() as recorded:
                result = call(*arguments)
            specs[0] = tuple(recorded.specs)
            return result, recorded.gradients

        self._step = trace_step(body, flat, arguments, user_fn=fn, owner="the function")
        analysis = _Analysis(self._step, specs[0], flat, fn)
        self._program, self._signs = analysis.program, analysis.signs
        self._types, self._keys = flat.types, analysis.keys
        self.spec = TaskSpec(specs[0], analysis.additions, analysis.reads)
        self._run = compile_step(self._compute, self._program, flat.platform, None)

    def __call__(
        self, values: dict[int, Any], arguments: PyTree, call: int
    ) -> tuple[PyTree, list[list[Any]], dict[int, Any]]:
        """Runs the function."""
        leaves = jax.tree.leaves(arguments)
        results, additions = self._run(
            [values[i] for i in self.spec.reads], leaves, np.uint32(call)
        )
        result, gradients = self._step.results(results)
        return result, gradients, dict(zip(self.spec.additions, additions, strict=True))

    def _compute(
        self, read: list[Any], arguments: list[Any], call: Any
    ) -> tuple[list[Any], list[Any]]:
        values = {
            i: _fold_in(value, call) if i in self._keys else value
            for i, value in zip(self.spec.reads, read, strict=True)
        }
        outputs = core.jaxpr_as_fun(self._program)(*values.values(), *arguments)
        count = len(outputs) - len(self._signs)
        additions = [
            # What is added may be a number for a whole array.
            jnp.broadcast_to(
                new - values[i] if sign == 0 else sign * new, self._types[i].shape
            )
            for i, new, sign in zip(
                self.spec.additions, outputs[count:], self._signs, strict=True
            )
        ]
        return outputs[:count], additions


class _Analysis:
    """Finds what a traced function does to each variable that it changes.

    Attributes:
        program: The part of it that a worker runs, from the variables that it reads and
            its arguments to its results, and then what each addition is computed from.
        additions: As in `TaskSpec`.
        signs: For each addition, 1 or -1 if the output is to be added or subtracted, 0
            if it is the new value, of which the old one is to be subtracted.
        reads: As in `TaskSpec`.
        keys: The variables that hold random keys.
    """

    def __init__(
        self,
        step: TracedStep,
        specs: Sequence[UpdateSpec],
        flat: FlatState,
        fn: Callable[..., Any],
    ) -> None:
        policies = policies_of(flat.state, list(map(as_array, flat.state.read())))
        jaxpr = step.program.jaxpr
        self.keys = {
            i
            for i, (policy, var) in enumerate(zip(policies, jaxpr.invars, strict=False))
            if policy is Policy.RANDOM
            or jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)
        }
        self._invars = jaxpr.invars
        self._made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        self._name = getattr(fn, "__name__", "the function")
        owned = {
            slot: (call, leaf)
            for call, spec in enumerate(specs)
            for slot, leaf in zip(
                jax.tree.leaves(spec.params),
                jax.tree.leaves(spec.gradients),
                strict=True,
            )
        }
        states = {slot for spec in specs for slot in jax.tree.leaves(spec.state)}
        self.additions: dict[int, Addition] = {}
        self.signs: list[int] = []
        refused: list[str] = []
        outputs: list[Any] = []
        for i, out in zip(step.changed, jaxpr.outvars, strict=False):
            policy, path = policies[i], flat.state.paths[i]
            if i in owned:
                if not self._is_updated(out, i, owned[i]):
                    refused.append(f"{path}: changed besides the optimizer's update")
            elif i in states:
                refused.append(f"{path}: an optimizer's state, which it alone changes")
            elif i in self.keys:
                continue
            elif policy is Policy.MEAN:
                self.additions[i] = Addition.MEAN
                self.signs.append(0)
                outputs.append(out)
            else:
                found = self._find_addition(out, i)
                if found is None:
                    refused.append(f"{path}: set to a value, not added to")
                    continue
                self.additions[i] = _ADDITIONS[policy]
                self.signs.append(found[0])
                outputs.append(found[1])
        equal = [i for i, how in self.additions.items() if how is Addition.EQUAL]
        fragile = set(equal)
        for i, out in zip(self.additions, outputs, strict=True):
            if i in equal and fragile.intersection(_prune(step.program, [out])[1]):
                refused.append(
                    f"{flat.state.paths[i]}: added to, by an amount that depends on "
                    "what such variables held"
                )
        if refused:
            raise StateStructureError(_refused_message(self._name, refused))
        results = jaxpr.outvars[len(step.changed) :]
        count = flat.strategy.num_replicas_in_sync
        if count > 1:
            _check_sent(step.program, sum(len(spec.types) for spec in specs), count)
        # What is averaged is compared with what it was, and arguments are all taken.
        averaged = {
            i for i, sign in zip(self.additions, self.signs, strict=True) if sign == 0
        }
        count = len(flat.types)
        kept = [i >= count or i in averaged for i in range(len(self._invars))]
        self.program, used = _prune(step.program, [*results, *outputs], kept)
        self.reads = tuple(i for i in used if i < count)
        for inner, _ in walk_programs(self.program):
            if any(eqn.primitive is server_update_p for eqn in inner.eqns):
                raise StateStructureError(
                    f"`{self._name}` uses the updates that an optimizer returned. They "
                    "are computed on the parameter servers, after the function: use "
                    "the gradients instead."
                )

    def _same(self, var: Any, *, may_round: bool = False) -> Any:
        """Returns the variable of the program that `var` is a plain copy of."""
        while not isinstance(var, core.Literal) and var in self._made:
            eqn = self._made[var]
            name = eqn.primitive.name
            if name not in {"convert_element_type", "copy", "copy_p"}:
                break
            source = eqn.invars[0]
            if source.aval.dtype != var.aval.dtype and not may_round:
                break
            var = source
        return var

    def _terms(self, out: Any, *, may_round: bool = False) -> tuple[str, list[Any]]:
        var = self._same(out, may_round=may_round)
        eqn = None if isinstance(var, core.Literal) else self._made.get(var)
        if eqn is None or eqn.primitive.name not in {"add", "add_any", "sub"}:
            return "", []
        return eqn.primitive.name, list(eqn.invars)

    def _is_updated(self, out: Any, slot: int, origin: tuple[int, int]) -> bool:
        """Returns whether `out` is the variable plus the update of `origin`."""
        # In half precision, the sum is rounded, here as on the servers.
        name, terms = self._terms(out, may_round=True)
        if not name.startswith("add"):
            return False
        a, b = (self._same(term, may_round=True) for term in terms)
        update = b if a is self._invars[slot] else a
        eqn = None if isinstance(update, core.Literal) else self._made.get(update)
        return (
            self._invars[slot] in (a, b)
            and eqn is not None
            and eqn.primitive is server_update_p
            and (eqn.params["call"], eqn.params["leaf"]) == origin
        )

    def _find_addition(self, out: Any, slot: int) -> tuple[int, Any] | None:
        """Returns the sign and the value that is added to a variable, if one is."""
        name, terms = self._terms(out)
        old = self._invars[slot]
        if name and self._same(terms[0]) is old:
            found = (-1 if name == "sub" else 1), terms[1]
        elif name.startswith("add") and self._same(terms[1]) is old:
            found = 1, terms[0]
        else:
            return None
        # Of a narrower type, the sum would be rounded otherwise.
        return found if found[1].aval.dtype == old.aval.dtype else None


def _check_sent(
    program: core.ClosedJaxpr, num_gradients: int, num_workers: int
) -> None:
    """Raises if gradients, the last outputs, are not what workers in sync reduce.

    Raises:
        ReplicaMismatchError: If nothing reduces them.
        ReplicaContextError: If anything but an optimizer uses what is reduced.
    """
    Proof(program, [EQUAL] * len(program.jaxpr.invars), (num_workers, num_workers))
    sent: set[Any] = set()
    used: list[Any] = []
    for jaxpr, _ in walk_programs(program):
        is_whole = jaxpr is program.jaxpr
        count = len(jaxpr.outvars) - (num_gradients if is_whole else 0)
        used += jaxpr.outvars[:count]
        for equation in jaxpr.eqns:
            if equation.params.get("name") in SENT.values():
                sent.update(equation.outvars)
            elif equation.primitive is not server_update_p:
                used += equation.invars
    if not sent.isdisjoint(v for v in used if isinstance(v, core.Var)):
        raise ReplicaContextError(alone_message("all_reduce"))
    gradients = program.jaxpr.outvars[len(program.jaxpr.outvars) - num_gradients :]
    if any(isinstance(v, core.Literal) or v not in sent for v in gradients):
        raise ReplicaMismatchError(
            "An optimizer was given gradients of one worker, under "
            "`ParameterServerStrategy(max_staleness=0)`, which nothing reduces. Write "
            'this before the update: `gradients = armillary.all_reduce("mean", '
            'gradients)`, or "sum" for a loss that was divided by the global batch '
            "size."
        )


def _prune(
    program: core.ClosedJaxpr, outputs: list[Any], kept: bool | list[bool] = False
) -> tuple[core.ClosedJaxpr, list[int]]:
    """Returns the part of a program that makes some of its values, and its inputs."""
    # The names of its outputs are no longer as many as they.
    info = program.jaxpr.debug_info.with_unknown_names()
    whole = program.jaxpr.replace(debug_info=info, outvars=outputs)
    part, used = partial_eval.dce_jaxpr(whole, [True] * len(outputs), kept)
    inputs = [i for i, is_used in enumerate(used) if is_used]
    return core.ClosedJaxpr(part, program.consts), inputs


def _fold_in(value: jax.Array, call: Any) -> jax.Array:
    keys = as_keys(value)
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, in_axes=(0, None))
    return as_before(fold(keys, call), value)


def _refused_message(name: str, refused: Sequence[str]) -> str:
    lines = "\n".join(f"  {line}" for line in refused)
    return (
        f"`{name}` is scheduled on workers, which run at the same time, so it can "
        "change variables only through an optimizer, or by adding to them "
        f"(`x[...] += change`). It does otherwise with:\n{lines}\n"
        "Use a metric, or a variable with `aggregation=VariableAggregation.SUM`, or "
        "change it on the coordinator, between calls of `schedule`."
    )
