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

from armillary._jaxpr import find_dependencies, programs_in, walk_equations
from armillary._optional import import_ray
from armillary.distribute.replica._context import lifted_state
from armillary.parameter_server._server import ArrayType, Part
from armillary.typing import PyTree


class UpdateSpec(NamedTuple):
    """One call of `update`, with the trees of its gradients, state and parameters."""

    transformation: int
    trees: tuple[Any, Any, Any]
    state_slots: list[int]
    param_slots: list[int]

    def renumbered(self, numbers: Sequence[int]) -> "UpdateSpec":
        state, params = ([numbers[slot] for slot in slots] for slots in self[2:])
        return self._replace(state_slots=state, param_slots=params)


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
        trees = tree, jax.tree.structure(state), jax.tree.structure(params)
        spec = UpdateSpec(index, trees, _find_slots(state), _find_slots(params))
        slots = spec.param_slots
        if len(slots) != len(leaves) or len(set(slots)) < len(slots):
            raise ValueError(
                f"`update` of an optimizer was given {len(leaves)} gradients for "
                f"{len(set(slots))} variables. Pass one gradient for each of `params`."
            )
        call = len(_recording[-1])
        _recording[-1].append((spec, leaves))
        marked = (
            server_update_p.bind(leaf, call=call, leaf=i)
            for i, leaf in enumerate(leaves)
        )
        return tree.unflatten(marked), state

    return optax.GradientTransformationExtraArgs(init, update)


def _find_slots(tree: PyTree) -> list[int]:
    lifted = lifted_state()
    if not _recording or lifted is None:
        raise RuntimeError(
            "An optimizer was used on a worker outside of a scheduled function."
        )
    places = {id(leaf): i for i, leaf in enumerate(lifted.read())}
    slots = [places.get(id(leaf), -1) for leaf in jax.tree.leaves(tree)]
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
    stops = list(itertools.accumulate(tree.num_leaves for tree in spec.trees))

    def update(*leaves: Any) -> list[Any]:
        parts = zip(spec.trees, [0, *stops], stops, strict=False)
        given = (tree.unflatten(leaves[start:stop]) for tree, start, stop in parts)
        return jax.tree.leaves(transformation.update(*given))

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
        needs = [{self._slots[i] for i in each} for each in find_dependencies(program)]
        of_state = dict(zip(state, needs[len(params) :], strict=True))
        # The arrays from which each array is computed, in any number of steps.
        for between, found in of_state.items():
            for needed in of_state.values():
                if between in needed:
                    needed |= found
        self.owners: dict[int, int | None] = {}
        for slot, needed in zip(self._results, needs, strict=True):
            before = (of_state.get(other, ()) for other in needed)
            owners = needed.union([slot], *before).intersection(params)
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
        own = {slot, *(s for s, owner in self.owners.items() if owner == slot)}
        if len({self._types[each].shape for each in own}) > 1:
            return False

        def update(*leaves: Any) -> list[Any]:
            pairs = zip(self._results, self._update(*leaves), strict=True)
            return [result for each, result in pairs if each in own]

        axes = [0 if each in own else None for each in self._slots]
        whole = jax.make_jaxpr(update)(*self._leaves)
        try:
            mapped = jax.make_jaxpr(jax.vmap(update, axes))(*self._leaves)
        except Exception:  # The update cannot take a single row.
            return False
        return _operations(whole) == _operations(mapped)


def _operations(program: core.ClosedJaxpr) -> list[Any]:
    """Returns the operations of a program, except repeating values along new axes."""
    return [
        (
            equation.primitive.name,
            "" if any(programs_in(equation)) else str(equation.params),
            [str(atom) for atom in equation.invars if isinstance(atom, core.Literal)],
            [variable.aval.shape for variable in equation.outvars],
        )
        for equation in walk_equations(program)
        if equation.primitive.name != "broadcast_in_dim"
    ]


class LocalUpdate(NamedTuple):
    """The parts of an optimizer that a server needs, by variable."""

    transformation: bytes
    spec: UpdateSpec
    owners: dict[int, int | None]
    types: dict[int, ArrayType]

    def make(self) -> Callable[[dict[Part, Any], dict[Part, Any]], dict[Part, Any]]:
        """Returns a function that updates the parts of variables with gradients."""
        update = flat_update(load_transformation(self.transformation), self.spec)
        params = self.spec.param_slots
        state = self.spec.state_slots

        def pick(held: dict[Part, Any], slot: int, number: int) -> Any:
            is_shared = self.owners.get(slot, slot) is None
            found = held.get((slot, 0 if is_shared else number))
            return self.types[slot].zeros() if found is None else found

        def run(gradients: dict[Part, Any], values: dict[Part, Any]) -> dict[Part, Any]:
            new: dict[Part, Any] = {}
            # All parts of one number are updated together. Whole variables are part 0.
            for number in sorted({part[1] for part in gradients}):
                results = update(
                    *(pick(gradients, slot, number) for slot in params),
                    *(pick(values, slot, number) for slot in (*state, *params)),
                )
                for slot, result in zip((*params, *state), results, strict=True):
                    owner = self.owners.get(slot, slot)
                    if owner is None:
                        new[slot, 0] = result
                    elif (owner, number) not in gradients:
                        continue
                    elif slot == owner:
                        old = values[slot, number]
                        new[slot, number] = optax.apply_updates(old, result)
                    else:
                        new[slot, number] = result
            return new

        return run
