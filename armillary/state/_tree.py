"""Slots that hold pytrees, and the kind of each array, from the nodes around it.

In a library without variables, the place of an array shows its kind. For example, Linen
keeps batch statistics in a collection with this name, and Equinox in an `eqx.nn.State`.
The state of a pure step is a pytree all the way down. So the variables of an
`nnx.State` are nodes as well, and a step may return new variables.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from armillary.state import _equinox
from armillary.state._adapters import adapter_of, is_tree_variable
from armillary.state._holders import is_claimed
from armillary.state._slots import (
    AxisNames,
    LeafKind,
    Role,
    Slot,
    is_array,
    is_optax_state,
    join_keys,
)

PURE_STATE = "state"
"""The attribute of a trainer that holds the state of a pure step."""

_LEAF = jax.tree.structure(0)
_BATCH_STATISTICS = "batch_stats"


class Leaf(NamedTuple):
    """A leaf of a pytree, the keys that lead to it, and the nodes around it."""

    keys: tuple[Any, ...]
    value: Any
    above: tuple[Any, ...] = ()

    def path(self, root: str) -> str:
        """Returns the path in checkpoints, such as `state/params/kernel`."""
        return join_keys(root, self.keys)

    def expression(self, root: str) -> str:
        """Returns the expression in Python, such as `state.params['kernel']`."""
        return expression_of(root, self.keys)


def expression_of(root: str, keys: Sequence[Any]) -> str:
    """Returns the Python expression that some keys stand for."""
    shown = jax.tree_util.keystr(tuple(keys))
    return root + re.sub(r"\[<flat index (\d+)>\]", r"[\1]", shown)


def children_with_keys(node: Any) -> list[tuple[tuple[Any, ...], Any]] | None:
    """Returns the children of a node of a pytree with their keys; `None` for a leaf."""
    entries, structure = jax.tree_util.tree_flatten_with_path(
        node, is_leaf=lambda part: part is not node
    )
    return None if structure == _LEAF else entries


def leaves_of(
    tree: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    *,
    keys: tuple[Any, ...] = (),
    above: tuple[Any, ...] = (),
) -> Iterator[Leaf]:
    """Yields the leaves of a pytree, in the order of JAX."""
    children = None
    is_known_leaf = is_leaf is not None and is_leaf(tree)
    if not is_known_leaf:
        children = children_with_keys(tree)
    if children is None:
        yield Leaf(keys, tree, above)
        return

    # A variable has one value, and its key is left out of paths.
    depth = 1 if is_tree_variable(tree) else 0
    for own, child in children:
        inner = (*keys, *own[depth:])
        yield from leaves_of(child, is_leaf, keys=inner, above=(*above, tree))


def is_object(value: Any) -> bool:
    """Returns whether a pure step treats a value as one leaf, such as a module."""
    return not is_tree_variable(value) and is_claimed(value)


class TreeSlot(Slot):
    """A place that holds an array, or a pytree of arrays."""

    def kinds(self) -> list[LeafKind]:
        # Looking at the nodes around each leaf takes long, and few trees need it.
        has_statistics = any(_BATCH_STATISTICS in path for path in self.paths)
        may_have_kinds = has_statistics or "equinox" in sys.modules
        if self.is_single_array or not may_have_kinds:
            return super().kinds()
        return list(map(kind_of, self._leaves()))

    def axis_names(self) -> list[AxisNames | None]:
        if self.is_single_array:
            return super().axis_names()
        return list(map(_axis_names_of, self._leaves()))

    def _leaves(self) -> list[Leaf]:
        """Returns the arrays of the pytree, each with the nodes around it."""
        # Not cached, because leaves hold tracers inside a step.
        leaves = leaves_of(self.get(), self._stops_at)
        return [leaf for leaf in leaves if self._is_state(leaf.value)]


def _axis_names_of(leaf: Leaf) -> AxisNames | None:
    """Returns the annotation of a leaf by the node that holds it, if it has one."""
    node = leaf.above[-1]
    if is_tree_variable(node):
        return adapter_of(node).axis_names(node)
    if _is_box(node):
        rules = getattr(node, "rules", None) or ()
        return AxisNames(tuple(node.names), tuple(rules))
    return None


def _is_box(node: Any) -> bool:
    """Returns whether a node is a `Partitioned` of Linen."""
    meta = sys.modules.get("flax.core.meta")
    return meta is not None and isinstance(node, meta.Partitioned)


class PureSlot(TreeSlot):
    """The state of a pure step, which has an owner that may give leaves a kind."""

    def __init__(
        self,
        source: Any,
        name: Any,
        path: str,
        *,
        get: Callable[[Any, Any], Any],
        put: Callable[[Any, Any, Any], None],
        owner: "PureStateOwner",
    ) -> None:
        self.owner = owner
        super().__init__(source, name, path, get=get, put=put, stops_at=is_object)

    def _name_leaves(self, entries: Sequence[tuple[Any, Any]]) -> list[str]:
        value = self.get()
        has_variables = any(map(is_tree_variable, _shallow_leaves(value)))
        if not has_variables:
            return super()._name_leaves(entries)
        return [leaf.path(self.path) for leaf in leaves_of(value, is_object)]

    def kinds(self) -> list[LeafKind]:
        return [self.owner._kind_of_leaf(leaf) for leaf in self._leaves()]

    def is_of_optimizer(self) -> list[bool]:
        return [_is_of_optimizer(leaf) for leaf in self._leaves()]

    def display_names(self) -> list[str]:
        return [self.owner._place_of_leaf(leaf) for leaf in self._leaves()]


def _is_of_optimizer(leaf: Leaf) -> bool:
    for node in leaf.above:
        if is_optax_state(node):
            return True
        if is_tree_variable(node) and adapter_of(node).is_of_optimizer(node):
            return True
    return False


def _shallow_leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_claimed)


class PureStateOwner:
    """An object whose attribute `state` is the state of a pure step."""

    def _kind_of_leaf(self, leaf: Leaf) -> LeafKind:
        """Returns the kind of a leaf of the state."""
        return kind_of(leaf)

    def _place_of_leaf(self, leaf: Leaf) -> str:
        """Returns the name of a leaf of the state in messages."""
        return leaf.expression(PURE_STATE)


def pure_path_of(slot: Slot, path: str) -> str | None:
    """Returns the path of a leaf below the trainer, if a pure step's state holds it."""
    if not isinstance(slot, PureSlot):
        return None
    return PURE_STATE + path.removeprefix(slot.path)


def kind_of(leaf: Leaf) -> LeafKind:
    """Returns the kind of an array in a pytree, from the libraries of its nodes."""
    parent = None
    for node in leaf.above:
        if is_tree_variable(node):
            return adapter_of(node).kind_of(node, held_by=parent)
        parent = node
    # The moments of an optimizer have the names of the model's arrays in their paths.
    if any(map(is_optax_state, leaf.above)):
        return LeafKind(Role.PLAIN)

    names = join_keys("", leaf.keys).split("/")
    if _BATCH_STATISTICS in names:
        return LeafKind(Role.BATCH_STATISTIC)
    # The state of Equinox also holds flags and counts, which are equal everywhere.
    value = leaf.value
    is_float = is_array(value) and jnp.issubdtype(value.dtype, jnp.inexact)
    if is_float and any(map(_equinox.is_state, leaf.above)):
        return LeafKind(Role.BATCH_STATISTIC)
    return LeafKind(Role.PLAIN)
