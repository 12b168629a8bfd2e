"""Slots in plain places: attributes of objects and items of dicts and lists.

A step changes such a place by rebinding it: `self.params = new_params`. The value may
be any pytree (a dict of arrays, an Optax state, an Equinox module); its arrays are
swapped, everything else in it must stay as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from armillary.errors import StateStructureError
from armillary.state._holders import Part
from armillary.state._opaque import is_array, is_equal
from armillary.state._slots import Held, Slot, describe, join_keys
from armillary.typing import PyTree


class PlaceSlot(Slot):
    """An attribute or item whose value is a pytree with arrays.

    Args:
        part: What holds the place.
        name: Name of the attribute, or key of the item.
        path: Where the place is.
        is_leaf: Tells which parts of a value are slots or objects of their own.

    Attributes:
        treedef: The structure of the value.
        leaf_paths: The path of each leaf.
        is_dynamic: For each leaf, whether it is an array.
        static: The leaves that are no arrays, and `None` in place of those that are.
        others: The leaves that are no arrays, with their paths.
    """

    def __init__(
        self, part: Part, name: Any, path: str, is_leaf: Callable[[Any], bool]
    ) -> None:
        self.part, self.name, self.path = part, name, path
        self.key = (id(part.source), name)
        self.annotations = {}
        self._is_leaf = is_leaf
        entries, self.treedef = jax.tree_util.tree_flatten_with_path(
            self.get(), is_leaf=is_leaf
        )
        self.static = [None if is_array(leaf) else leaf for _, leaf in entries]
        self.is_dynamic = [is_array(leaf) for _, leaf in entries]
        self._positions = [i for i, dynamic in enumerate(self.is_dynamic) if dynamic]
        # JAX looks for leaves of its own much faster if it need not ask.
        has_objects = any(map(is_leaf, self.static))
        self._is_leaf_if_any = is_leaf if has_objects else None
        self.leaf_paths = [join_keys(path, keys) for keys, _ in entries]
        self.paths = tuple(
            leaf_path
            for leaf_path, dynamic in zip(self.leaf_paths, self.is_dynamic, strict=True)
            if dynamic
        )

    @property
    def others(self) -> list[tuple[str, Any]]:
        triples = zip(self.leaf_paths, self.static, self.is_dynamic, strict=True)
        return [(path, leaf) for path, leaf, dynamic in triples if not dynamic]

    def get(self) -> PyTree:
        """Returns what the place holds."""
        return self.part.get(self.name)

    def put(self, value: PyTree) -> None:
        """Makes the place hold `value`."""
        self.part.put(self.name, value)

    def raw(self) -> Any:
        value = self.get()
        if isinstance(value, jax.Array):
            return value
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._is_leaf_if_any)
        return Held(treedef, leaves)

    def read(self) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(self.get(), is_leaf=self._is_leaf)
        if treedef != self.treedef:
            raise StateStructureError(
                f"{self.path}: tree structure {self.treedef} became {treedef}"
            )
        changes = [
            f"{path}: {'an array' if dynamic else describe(old)} became {describe(new)}"
            f"{_hint(old)}"
            for path, dynamic, old, new in zip(
                self.leaf_paths, self.is_dynamic, self.static, leaves, strict=True
            )
            if dynamic != is_array(new) or not (dynamic or is_equal(old, new))
        ]
        if changes:
            raise StateStructureError("\n".join(changes))
        return [
            leaf
            for leaf, dynamic in zip(leaves, self.is_dynamic, strict=True)
            if dynamic
        ]

    def write(self, leaves: list[Any]) -> None:
        arrays = iter(leaves)
        self.put(
            self.treedef.unflatten(
                next(arrays) if dynamic else static
                for dynamic, static in zip(self.is_dynamic, self.static, strict=True)
            )
        )

    def replace(self, raw: Any, leaves: Mapping[int, Any]) -> Any:
        if not isinstance(raw, Held):
            self.put(leaves[0])
            return leaves[0]
        # To look at hundreds of leaves again would cost as much as a small step.
        values = list(raw.leaves)
        for index, leaf in leaves.items():
            values[self._positions[index]] = leaf
        self.put(raw.treedef.unflatten(values))
        return Held(raw.treedef, values)

    def holds_same_objects(self) -> bool:
        # An object that is equal to another may hold other arrays.
        now = jax.tree.leaves(self.get(), is_leaf=self._is_leaf)
        pairs = zip(self.static, now, strict=False)
        return all(old is new for old, new in pairs if self._is_leaf(old))

    def is_of_optimizer(self) -> list[bool]:
        def is_part(value: Any) -> bool:
            return self._is_leaf(value) or _is_optax_state(value)

        return [
            _is_optax_state(part)
            for part in jax.tree.leaves(self.get(), is_leaf=is_part)
            for leaf in jax.tree.leaves(part, is_leaf=self._is_leaf)
            if is_array(leaf)
        ]

    def swap(self, leaves: list[Any]) -> Callable[[], None]:
        old = self.get()
        self.write(leaves)
        return lambda: self.put(old)


def _hint(old: Any) -> str:
    if not isinstance(old, int | float) or isinstance(old, bool):
        return ""
    return f", once, while the step was traced: begin with `jnp.asarray({old})`"


def _is_optax_state(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, tuple) and kind.__module__.partition(".")[0] == "optax"
