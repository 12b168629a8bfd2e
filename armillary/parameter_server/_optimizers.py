"""Optimizers: stand-ins that record gradients on workers, and updates on servers.

On a worker, a stand-in replaces each Optax transformation. Its `update` records the
gradients, which are sent to the parameter servers.

A server runs the transformation on its own variables, with zeros for all others. The
traced update of all variables proves once that the zeros do not matter. An array of the
optimizer's state belongs to the variable from whose gradients it is computed. Other
arrays, such as a count of steps, have a copy on each server. An array that is computed
from several variables is an error.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import optax
from jax.extend import core

from armillary._dataflow import find_dependencies
from armillary._jaxpr import programs_in, walk_equations
from armillary._optional import import_ray
from armillary.distribute.replica._context import lifted_state
from armillary.parameter_server._server import ArrayType, PartKey
from armillary.typing import PyTree


class UpdateSpec(NamedTuple):
    """One call of `update`, with the trees of its gradients, state and parameters."""

    transformation: int
    trees: tuple[Any, Any, Any]
    state_slots: list[int]
    param_slots: list[int]

    def renumbered(self, numbers: Sequence[int]) -> "UpdateSpec":
        """Returns the same call, with other numbers for its variables."""
        return self._replace(
            state_slots=[numbers[slot] for slot in self.state_slots],
            param_slots=[numbers[slot] for slot in self.param_slots],
        )


# The updates that a worker's optimizer returns: an operation that names its call and
# leaf, so that their use can be found in the traced program.
server_update_p = core.Primitive("server_update")
server_update_p.def_abstract_eval(lambda gradient, **_: gradient)


# The calls of `update` while a function was traced, and their gradients.
Recorded = list[tuple[UpdateSpec, list[jax.Array]]]
_recording: list[Recorded] = []


@contextmanager
def recording() -> Iterator[Recorded]:
    """Records the calls of optimizers while a function is traced."""
    _recording.append([])
    try:
        yield _recording[-1]
    finally:
        _recording.pop()


def make_stand_in(index: int) -> optax.GradientTransformationExtraArgs:
    """Returns the stand-in for a transformation on a worker."""

    def init(params: PyTree) -> PyTree:
        raise RuntimeError(
            "`init` of an Optax transformation was called in a scheduled function, "
            "where each call would make a new state. Make the state once, outside, "
            "and hold it in an attribute."
        )

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, **others: Any
    ) -> tuple[PyTree, PyTree]:
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
                "function, so the variables to update are unknown. Write "
                "`tx.update(gradients, state, params)`."
            )
        leaves, tree = jax.tree.flatten(updates)
        spec = UpdateSpec(
            transformation=index,
            trees=(tree, jax.tree.structure(state), jax.tree.structure(params)),
            state_slots=_find_slots(state),
            param_slots=_find_slots(params),
        )
        marked = _record(spec, leaves)
        return tree.unflatten(marked), state

    return optax.GradientTransformationExtraArgs(init, update)


def _record(spec: UpdateSpec, gradients: list[Any]) -> list[Any]:
    """Records a call of `update`, and returns a mark for each of its updates."""
    num_variables = len(set(spec.param_slots))
    has_repeated = num_variables < len(spec.param_slots)
    if has_repeated or len(gradients) != num_variables:
        raise ValueError(
            f"`update` of an optimizer was given {len(gradients)} gradients for "
            f"{num_variables} variables. Pass one gradient for each of `params`."
        )
    recorded = _recording[-1]
    call = len(recorded)
    recorded.append((spec, gradients))
    marked: list[Any] = []
    for number, gradient in enumerate(gradients):
        marked.append(server_update_p.bind(gradient, call=call, leaf=number))
    return marked


def _find_slots(tree: PyTree) -> list[int]:
    """Returns the numbers of the variables that hold the leaves of a tree."""
    lifted = lifted_state()
    if not _recording or lifted is None:
        raise RuntimeError(
            "An optimizer was used on a worker outside of a scheduled function."
        )
    numbers = {id(leaf): i for i, leaf in enumerate(lifted.read())}
    slots = [numbers.get(id(leaf), -1) for leaf in jax.tree.leaves(tree)]
    if -1 in slots:
        raise ValueError(
            "`update` of an optimizer was given state or parameters that no variable "
            "holds (an array computed in the scheduled function). Pass arrays that "
            "variables hold, because the servers of these variables make the update."
        )
    return slots


def load_transformation(dumped: bytes) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer, on the coordinator or a parameter server."""
    init, update = import_ray().cloudpickle.loads(dumped)
    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def flat_update(
    transformation: optax.GradientTransformationExtraArgs, spec: UpdateSpec
) -> Callable[..., list[Any]]:
    """Returns an update as a function of leaves: of gradients, state, parameters."""

    def update(*leaves: Any) -> list[Any]:
        remaining = iter(leaves)
        arguments = []
        for tree in spec.trees:
            of_tree = itertools.islice(remaining, tree.num_leaves)
            arguments.append(tree.unflatten(of_tree))
        return jax.tree.leaves(transformation.update(*arguments))

    return update


class SplitUpdate:
    """An update divided by variables: each array of the state has an owner or `None`.

    An array of the optimizer's state that several variables share has no owner.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformationExtraArgs,
        spec: UpdateSpec,
        types: Mapping[int, ArrayType],
        paths: Mapping[int, str],
    ) -> None:
        params = spec.param_slots
        state = spec.state_slots
        # A gradient has the slot of its variable.
        self._slots = [*params, *state, *params]
        self._results = [*params, *state]
        self._types = types
        self._update = flat_update(transformation, spec)
        self._leaves = [jax.eval_shape(types[slot].zeros) for slot in self._slots]
        program = jax.make_jaxpr(self._update)(*self._leaves)

        # The variables from which each result of one step is computed.
        needs: list[set[int]] = []
        for dependencies in find_dependencies(program):
            needs.append({self._slots[number] for number in dependencies})
        needs_of_state = needs[len(params) :]
        of_state = dict(zip(state, needs_of_state, strict=True))
        _close(of_state)

        self.owners: dict[int, int | None] = {}
        for slot, needed in zip(self._results, needs, strict=True):
            reached = {slot, *needed}
            for other in needed:
                reached.update(of_state.get(other, ()))
            owners = reached.intersection(params)
            if len(owners) > 1:
                names = ", ".join(sorted(paths[owner] for owner in owners)[:3])
                raise ValueError(
                    f"The optimizer computes {paths[slot]} from several variables "
                    f"({names}), which may live on several parameter servers. Norms "
                    "over all gradients belong in the step: remove them from the "
                    "optimizer's chain, and write `gradients, _ = "
                    "optax.clip_by_global_norm(1.0).update(gradients, "
                    "optax.EmptyState())` before the optimizer's `update`."
                )
            if slot in of_state:
                self.owners[slot] = next(iter(owners), None)

    def is_rowwise(self, slot: int) -> bool:
        """Returns whether a variable's update is the same when mapped over its rows."""
        # The variable, and the state that it owns.
        own = {slot}
        own.update(other for other, owner in self.owners.items() if owner == slot)
        shapes = {self._types[index].shape for index in own}
        if len(shapes) > 1:
            return False

        def update(*leaves: Any) -> list[Any]:
            results = self._update(*leaves)
            pairs = zip(self._results, results, strict=True)
            return [result for index, result in pairs if index in own]

        # If both programs have the same operations, none of them mixes rows.
        axes = [0 if index in own else None for index in self._slots]
        whole = jax.make_jaxpr(update)(*self._leaves)
        try:
            mapped = jax.make_jaxpr(jax.vmap(update, axes))(*self._leaves)
        except Exception:  # The update cannot take a single row.
            return False
        return _operations(whole) == _operations(mapped)


def _close(needs: Mapping[int, set[int]]) -> None:
    """Adds the arrays from which each array is computed in any number of steps.

    It is Warshall's algorithm, so one pass over the arrays in between is enough.
    """
    for between, found in needs.items():
        for needed in needs.values():
            if between in needed:
                needed |= found


def _operations(program: core.ClosedJaxpr) -> list[Any]:
    """Returns the operations of a program, except repeating values along new axes."""
    operations: list[Any] = []
    for equation in walk_equations(program):
        if equation.primitive.name == "broadcast_in_dim":
            continue
        # The operations inside are walked, too, so their text would count twice.
        has_programs = any(programs_in(equation))
        params = "" if has_programs else str(equation.params)
        literals: list[str] = []
        for atom in equation.invars:
            if isinstance(atom, core.Literal):
                literals.append(str(atom))
        shapes = [variable.aval.shape for variable in equation.outvars]
        operations.append((equation.primitive.name, params, literals, shapes))
    return operations


class LocalUpdate(NamedTuple):
    """The parts of an optimizer that a server needs, by variable."""

    transformation: bytes
    spec: UpdateSpec
    owners: dict[int, int | None]
    types: dict[int, ArrayType]

    def make(
        self,
    ) -> Callable[[dict[PartKey, Any], dict[PartKey, Any]], dict[PartKey, Any]]:
        """Returns a function that updates the parts of variables with gradients."""
        update = flat_update(load_transformation(self.transformation), self.spec)
        params = self.spec.param_slots
        state = self.spec.state_slots

        def pick(held: dict[PartKey, Any], slot: int, number: int) -> Any:
            """Returns a part of a variable; zeros if it is on another server."""
            is_shared = self.owners.get(slot, slot) is None
            part = (slot, 0 if is_shared else number)
            return held[part] if part in held else self.types[slot].zeros()

        def run(
            gradients: dict[PartKey, Any], values: dict[PartKey, Any]
        ) -> dict[PartKey, Any]:
            new: dict[PartKey, Any] = {}
            # All parts of one number are updated together. Whole variables are part 0.
            numbers = {number for _, number in gradients}
            for number in sorted(numbers):
                leaves = [pick(gradients, slot, number) for slot in params]
                leaves += [pick(values, slot, number) for slot in (*state, *params)]
                results = update(*leaves)

                for slot, result in zip((*params, *state), results, strict=True):
                    owner = self.owners.get(slot, slot)
                    if owner is None:
                        new[slot, 0] = result
                    elif (owner, number) not in gradients:
                        continue  # The result of zeros, for a variable elsewhere.
                    elif slot == owner:
                        old = values[slot, number]
                        new[slot, number] = optax.apply_updates(old, result)
                    else:
                        new[slot, number] = result
            return new

        return run
