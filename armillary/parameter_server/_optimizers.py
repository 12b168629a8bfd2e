"""Optimizers: what they are given on workers, and how servers run them.

On a worker, each Optax transformation of a scheduled function stands for the one on the
parameter servers: its `update` takes down the gradients, which are sent, and returns
updates that nothing may use but `optax.apply_updates`.

A server runs the optimizer on the variables that it has, beside zeros for all others.
That the others do not matter is proved once, from the traced update of all variables:
an array of its state belongs to the variable whose gradients it is made of, or else
(such as a count of steps) each server has a copy. An optimizer that needs several
variables for one, as clipping by the norm of all gradients does, is refused.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import optax
from jax.extend import core
from jax.interpreters import partial_eval

from armillary._dataflow import find_dependencies
from armillary._jaxpr import programs_in, walk_programs
from armillary._optional import import_ray
from armillary.distribute.replica._context import lifted_state
from armillary.parameter_server._server import ArrayType, Part
from armillary.typing import PyTree


class UpdateSpec(NamedTuple):
    """One call of `update` in a scheduled function.

    Attributes:
        transformation: Which of the function's transformations.
        gradients: The structure of the gradients' tree.
        state: The state's tree, with the number of the slot of each array.
        params: The parameters' tree, likewise.
    """

    transformation: int
    gradients: Any
    state: PyTree
    params: PyTree

    @property
    def param_slots(self) -> list[int]:
        """The slots of the parameters."""
        return jax.tree.leaves(self.params)

    @property
    def state_slots(self) -> list[int]:
        """The slots of the state."""
        return jax.tree.leaves(self.state)

    def renumbered(self, numbers: Sequence[int]) -> "UpdateSpec":
        """Returns it with other numbers of slots."""
        state, params = jax.tree.map(numbers.__getitem__, (self.state, self.params))
        return self._replace(state=state, params=params)


# The updates that a worker's optimizer returns: an operation that names its call and
# leaf, so that their use can be found in the traced program.
server_update_p = core.Primitive("server_update")
server_update_p.def_abstract_eval(lambda gradient, **_: gradient)


class Recorded(NamedTuple):
    """What calls of `update` were given while a function was traced."""

    specs: list[UpdateSpec]
    gradients: list[list[jax.Array]]


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
    places = {id(leaf): i for i, leaf in enumerate(lifted.read())}

    def place_of(leaf: Any, what: str) -> int:
        if id(leaf) not in places:
            raise ValueError(
                f"`update` of an optimizer was given {what} that no variable holds "
                "(an array computed in the scheduled function). Pass what variables "
                "hold: updates are made where they live."
            )
        return places[id(leaf)]

    leaves, tree = jax.tree.flatten(gradients)
    spec = UpdateSpec(
        index,
        tree,
        jax.tree.map(lambda leaf: place_of(leaf, "state"), state),
        jax.tree.map(lambda leaf: place_of(leaf, "parameters"), params),
    )
    slots = spec.param_slots
    if len(slots) != len(leaves) or len(set(slots)) < len(slots):
        raise ValueError(
            f"`update` of an optimizer was given {len(leaves)} gradients for "
            f"{len(set(slots))} variables. Pass one gradient for each of `params`."
        )
    call = len(_recording[-1].specs)
    _recording[-1].specs.append(spec)
    _recording[-1].gradients.append(leaves)
    return tree.unflatten(
        server_update_p.bind(leaf, call=call, leaf=i) for i, leaf in enumerate(leaves)
    )


def load_transformation(dumped: bytes) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer, on the coordinator or a parameter server."""
    init, update = import_ray().cloudpickle.loads(dumped)
    return optax.with_extra_args_support(optax.GradientTransformation(init, update))


def call_update(
    transformation: optax.GradientTransformationExtraArgs,
    spec: UpdateSpec,
    gradients: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Calls an optimizer with flat lists, in the order of the trees of `spec`."""
    updates, new = transformation.update(
        spec.gradients.unflatten(gradients),
        jax.tree.structure(spec.state).unflatten(state),
        jax.tree.structure(spec.params).unflatten(params),
    )
    return jax.tree.leaves(updates), jax.tree.leaves(new)


class SplitUpdate:
    """Which arrays of an optimizer's state go with which variable.

    Args:
        transformation: The optimizer.
        spec: How it is called, by variable.
        types: Shape and dtype of each variable.
        paths: Their paths, for messages.

    Attributes:
        owners: For each array of the state, its variable; `None` if it is shared.

    Raises:
        ValueError: If the update of a variable needs another one.
    """

    def __init__(
        self,
        transformation: optax.GradientTransformationExtraArgs,
        spec: UpdateSpec,
        types: Mapping[int, ArrayType],
        paths: Mapping[int, str],
    ) -> None:
        self._transformation, self._spec, self._types = transformation, spec, types
        params, state = spec.param_slots, spec.state_slots
        self._program = self._trace({})
        # Gradients count as their variables.
        slots = [*params, *state, *params]
        needs = [{slots[i] for i in each} for each in find_dependencies(self._program)]
        of_state = dict(zip(state, needs[len(params) :], strict=True))
        # What an array is made of, however many steps ago.
        for between, found in of_state.items():
            for needed in of_state.values():
                if between in needed:
                    needed |= found
        self.owners: dict[int, int | None] = {}
        for slot, needed in (*of_state.items(), *zip(params, needs, strict=False)):
            before = (of_state.get(other, ()) for other in needed)
            owners = needed.union([slot], *before).intersection(params)
            if len(owners) > 1:
                names = ", ".join(sorted(paths[owner] for owner in owners)[:3])
                raise ValueError(
                    f"The optimizer computes {paths[slot]} from several variables "
                    f"({names}), which may live on several parameter servers. Norms "
                    "over all gradients belong into the step: take them out of the "
                    "optimizer's chain, and write `gradients, _ = "
                    "optax.clip_by_global_norm(1.0).update(gradients, "
                    "optax.EmptyState())` before the optimizer's `update`."
                )
            if slot in of_state:
                self.owners[slot] = next(iter(owners), None)

    def is_elementwise(self, slot: int) -> bool:
        """Returns whether a variable may be cut along its first axis."""
        shape, params = self._types[slot].shape, self._spec.param_slots
        own = [s for s, owner in self.owners.items() if owner == slot]
        if any(self._types[s].shape != shape for s in own):
            return False
        places = [len(params) + self._spec.state_slots.index(s) for s in own]
        outputs = [params.index(slot), *places]
        longer = dict.fromkeys((slot, *own), (shape[0] + 1, *shape[1:]))
        program = _prune(self._program, outputs)
        other = _prune(self._trace(longer), outputs)
        # What is computed from the shape is another number for a part.
        is_same = _literals(program) == _literals(other)
        return is_same and _is_elementwise(program, shape)

    def _trace(self, shapes: Mapping[int, tuple[int, ...]]) -> core.ClosedJaxpr:
        """Returns the traced update, with other shapes of some variables."""

        def abstract(slots: list[int]) -> list[Any]:
            types = (self._types[slot] for slot in slots)
            changed = (
                type_._replace(shape=shapes.get(slot, type_.shape))
                for slot, type_ in zip(slots, types, strict=True)
            )
            return [jax.eval_shape(type_.zeros) for type_ in changed]

        spec = self._spec
        params, state = abstract(spec.param_slots), abstract(spec.state_slots)
        update = functools.partial(call_update, self._transformation, spec)
        return jax.make_jaxpr(update)(params, state, params)


class LocalUpdate(NamedTuple):
    """What a server needs to know of an optimizer.

    Attributes:
        transformation: The pickled optimizer.
        spec: How it is called, by variable.
        owners: `SplitUpdate.owners`.
        types: Shape and dtype of each of its variables.
    """

    transformation: bytes
    spec: UpdateSpec
    owners: dict[int, int | None]
    types: dict[int, ArrayType]

    def make(self) -> Callable[[dict[Part, Any], dict[Part, Any]], dict[Part, Any]]:
        """Returns the update of the parts of variables that gradients are given of."""
        transformation = load_transformation(self.transformation)
        params, state = self.spec.param_slots, self.spec.state_slots

        def pick(held: dict[Part, Any], slot: int, number: int) -> Any:
            is_shared = self.owners.get(slot, slot) is None
            found = held.get((slot, 0 if is_shared else number))
            return self.types[slot].zeros() if found is None else found

        def update(
            gradients: dict[Part, Any], values: dict[Part, Any]
        ) -> dict[Part, Any]:
            new: dict[Part, Any] = {}
            # All parts of one number at once: whole variables are part 0.
            for number in sorted({part[1] for part in gradients}):
                updates, after = call_update(
                    transformation,
                    self.spec,
                    [pick(gradients, slot, number) for slot in params],
                    [pick(values, slot, number) for slot in state],
                    [pick(values, slot, number) for slot in params],
                )
                for slot, change in zip(params, updates, strict=True):
                    if (slot, number) in gradients:
                        old = values[slot, number]
                        new[slot, number] = optax.apply_updates(old, change)
                for slot, value in zip(state, after, strict=True):
                    owner = self.owners[slot]
                    if owner is None:
                        new[slot, 0] = value
                    elif (owner, number) in gradients:
                        new[slot, number] = value
            return new

        return update


def _prune(program: core.ClosedJaxpr, outputs: Sequence[int]) -> Any:
    wanted = [i in outputs for i in range(len(program.jaxpr.outvars))]
    return partial_eval.dce_jaxpr(program.jaxpr, wanted)[0]


def _literals(jaxpr: Any) -> list[str]:
    """Returns the numbers that stand in a program."""
    return [
        repr(atom.val)
        for inner, _ in walk_programs(jaxpr)
        for equation in inner.eqns
        for atom in equation.invars
        if isinstance(atom, core.Literal)
    ]


# Operations that compute each element from those at the same place.
_ELEMENTWISE = frozenset(
    """
    abs add add_any and atan2 broadcast_in_dim cbrt ceil clamp
    convert_element_type copy copy_p cos cosh div eq erf exp exp2 expm1
    floor ge gt imag integer_pow is_finite le log log1p logistic lt max
    min mul ne neg nextafter not or pow real rem round rsqrt select_n sign
    sin sinh sqrt square stop_gradient sub tan tanh xor
    """.split()  # noqa: SIM905
)
_CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "custom_vjp_call", "closed_call"})


def _is_elementwise(jaxpr: Any, shape: tuple[int, ...]) -> bool:
    """Returns whether a program computes arrays of a shape element by element."""
    if any(variable.aval.ndim for variable in jaxpr.constvars):
        return False
    for equation in jaxpr.eqns:
        atoms = (*equation.invars, *equation.outvars)
        shapes = {atom.aval.shape for atom in atoms if atom.aval.ndim}
        name, inner = equation.primitive.name, next(programs_in(equation), None)
        if shapes and name in _CALLS and inner is not None:
            if not _is_elementwise(getattr(inner, "jaxpr", inner), shape):
                return False
        elif shapes and (name not in _ELEMENTWISE or shapes != {shape}):
            return False
    return True
