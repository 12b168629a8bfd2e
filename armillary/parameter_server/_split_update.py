"""An optimizer's update, cut into one for each variable.

An optimizer is traced once over all variables. An array of its state belongs to the
variable whose gradients it is made of; one that is made of none (a count of steps) is
shared, and each server has a copy. Where a variable's update needs another variable, as
clipping by the norm of all gradients does, the optimizer cannot run on several servers,
and is refused.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.interpreters import partial_eval

from armillary._dataflow import find_dependencies
from armillary._jaxpr import programs_in, walk_programs
from armillary.parameter_server._array_types import ArrayType
from armillary.parameter_server._program import UpdateSpec
from armillary.typing import PyTree

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


class SplitUpdate:
    """Which arrays of an optimizer's state go with which variable.

    Args:
        transformation: The optimizer.
        spec: How the scheduled function calls it.
        types: Shape and dtype of each slot.
        paths: Path of each slot, for messages.

    Attributes:
        owners: For each slot of the state, the slot of its variable; `None` if it is
            shared.

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
        self._spec = spec
        self._params = jax.tree.leaves(spec.params)
        self._state = jax.tree.leaves(spec.state)
        self._types, self._paths = types, paths
        self._update = functools.partial(call_update, transformation, spec)
        self._program = self._trace({})
        count = len(self._params)
        # Gradients count as their variables.
        slots = [*self._params, *self._state, *self._params]
        needs = [
            {slots[i] for i in inputs} for inputs in find_dependencies(self._program)
        ]
        self.owners: dict[int, int | None] = {}
        for number, slot in enumerate(self._state):
            self.owners[slot] = self._owner(needs[count + number], paths[slot])
        for slot, needed in zip(self._params, needs[:count], strict=True):
            others = {self.owners[s] for s in needed if s in self.owners}
            self._owner(needed, paths[slot])
            wrong = others - {None, slot} or {
                p for p in needed if p not in self.owners and p != slot
            }
            if wrong:
                raise ValueError(self._message(paths[slot], {slot, *wrong}))

    def is_elementwise(self, slot: int) -> bool:
        """Returns whether a variable may be cut along its first axis."""
        shape = self._types[slot].shape
        own = [s for s, owner in self.owners.items() if owner == slot]
        if any(self._types[s].shape != shape for s in own):
            return False
        outputs = [self._params.index(slot)]
        outputs += [len(self._params) + self._state.index(s) for s in own]
        program = _prune(self._program, outputs)
        if not _is_elementwise(program, shape):
            return False
        # What is computed from the shape is another number for a part.
        longer = (shape[0] + 1, *shape[1:])
        other = _prune(self._trace(dict.fromkeys((slot, *own), longer)), outputs)
        return _literals(program) == _literals(other)

    def _trace(self, shapes: Mapping[int, tuple[int, ...]]) -> core.ClosedJaxpr:
        """Returns the traced update, with other shapes of some slots."""
        gradients = [
            jax.ShapeDtypeStruct(shapes.get(slot, shape), dtype)
            for slot, (shape, dtype) in zip(self._params, self._spec.types, strict=True)
        ]
        others = (
            [
                _abstract(
                    self._types[i]._replace(shape=shapes.get(i, self._types[i].shape))
                )
                for i in slots
            ]
            for slots in (self._state, self._params)
        )
        return jax.make_jaxpr(self._update)(gradients, *others)

    def _owner(self, needed: set[int], path: str) -> int | None:
        params = needed & set(self._params)
        if len(params) > 1:
            raise ValueError(self._message(path, params))
        return next(iter(params), None)

    def _message(self, path: str, slots: set[Any]) -> str:
        names = ", ".join(sorted(self._paths[slot] for slot in slots)[:3])
        return (
            f"The optimizer computes {path} from several variables ({names}), which "
            "may live on several parameter servers. Norms over all gradients belong "
            "into the step: take them out of the optimizer's chain, and write "
            "`gradients, _ = optax.clip_by_global_norm(1.0).update(gradients, "
            "optax.EmptyState())` before the optimizer's `update`."
        )


def call_update(
    transformation: optax.GradientTransformationExtraArgs,
    spec: UpdateSpec,
    gradients: Sequence[Any],
    state: Sequence[Any],
    params: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Calls an optimizer with flat lists, in the order of the trees of `spec`."""
    trees: list[PyTree] = [
        jax.tree.structure(tree).unflatten(leaves)
        for tree, leaves in (
            (spec.gradients, gradients),
            (spec.state, state),
            (spec.params, params),
        )
    ]
    updates, new = transformation.update(*trees)
    return jax.tree.leaves(updates), jax.tree.leaves(new)


def make_local_update(
    transformation: optax.GradientTransformationExtraArgs,
    spec: UpdateSpec,
    split: Mapping[int, int | None],
    types: Mapping[int, ArrayType],
    parts: Sequence[tuple[int, int, int]],
) -> Callable[[dict[Any, Any], dict[Any, Any]], dict[Any, Any]]:
    """Returns the update of those parts of variables that one server has."""
    params, state = jax.tree.leaves(spec.params), jax.tree.leaves(spec.state)

    def run(
        gradients: dict[Any, Any], values: dict[Any, Any], cut: tuple[int, int] | None
    ) -> tuple[list[Any], list[Any]]:
        """Updates all whole variables, or one part of another."""

        def find(held: dict[Any, Any], slot: int, owner: int) -> Any:
            if cut is None:
                return held.get((slot, 0))
            return held.get((slot, cut[1])) if owner == cut[0] else None

        def value(slot: int) -> Any:
            owner = split.get(slot, slot)
            if owner is None:
                return values[slot, 0]
            found = find(values, slot, owner)
            return types[slot].zeros() if found is None else found

        def gradient(place: int, slot: int) -> Any:
            found = find(gradients, slot, slot)
            return jnp.zeros(*spec.types[place]) if found is None else found

        return call_update(
            transformation,
            spec,
            [gradient(place, slot) for place, slot in enumerate(params)],
            [value(slot) for slot in state],
            [value(slot) for slot in params],
        )

    whole = [(slot, number) for slot, number, rows in parts if rows < 0]
    pieces = [(slot, number) for slot, number, rows in parts if rows >= 0]

    def update(gradients: dict[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
        new: dict[Any, Any] = {}
        for cut, local in [(None, whole), *((piece, [piece]) for piece in pieces)]:
            if not local:
                continue
            updates, after = run(gradients, values, cut)
            for slot, number in local:
                param = values[slot, number]
                change = updates[params.index(slot)]
                new[slot, number] = optax.apply_updates(param, change)
            owned = {slot for slot, _ in local}
            number = 0 if cut is None else cut[1]
            for slot, value in zip(state, after, strict=True):
                if split[slot] is None:
                    new[slot, 0] = value
                elif split[slot] in owned:
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
        for eqn in inner.eqns
        for atom in eqn.invars
        if isinstance(atom, core.Literal)
    ]


def _is_elementwise(jaxpr: Any, shape: tuple[int, ...]) -> bool:
    constants = {var for var in jaxpr.constvars if var.aval.ndim}
    for eqn in jaxpr.eqns:
        variables = [v for v in eqn.invars if isinstance(v, core.Var)]
        if not constants.isdisjoint(variables):
            return False
        large = [v for v in (*eqn.invars, *eqn.outvars) if v.aval.ndim]
        if not large:
            continue
        name = eqn.primitive.name
        if name in _CALLS:
            inner = next(programs_in(eqn), None)
            if inner is None or not _is_elementwise(
                getattr(inner, "jaxpr", inner), shape
            ):
                return False
        elif name not in _ELEMENTWISE or any(v.aval.shape != shape for v in large):
            return False
    return True


def _abstract(type_: ArrayType) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(type_.zeros)
