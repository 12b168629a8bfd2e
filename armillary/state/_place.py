"""Slots in plain places: attributes of objects and items of dicts and lists.

A step changes such a place by rebinding it: `self.params = new_params`. The value may
be any pytree (a dict of arrays, an Optax state, an Equinox module); its arrays are
swapped, everything else in it must stay as it is.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from armillary._typing import PyTree
from armillary.errors import StateStructureError
from armillary.state._slots import Held, Slot, describe, join, key_name


class PlaceSlot(Slot):
    """An attribute or item whose value is a pytree with arrays.

    Args:
        owner: The object that has the attribute, or a dict or list.
        name: Name of the attribute, or key of the item.
        path: Where the place is.
        is_leaf: Tells which parts of a value are slots or objects of their own.
    """

    def __init__(
        self,
        owner: Any,
        name: Any,
        path: str,
        is_leaf: Callable[[Any], bool],
    ) -> None:
        self.owner, self.name, self.path = owner, name, path
        self.key = (id(owner), name)
        self.annotations = {}
        self._is_leaf = is_leaf
        self._is_item = isinstance(owner, dict | list)
        self._is_in_slots = not self._is_item and name not in getattr(
            owner, "__dict__", ()
        )
        entries, self._treedef = jax.tree_util.tree_flatten_with_path(
            self.get(), is_leaf=is_leaf
        )
        self._static = [None if is_array(leaf) else leaf for _, leaf in entries]
        self._is_array = [is_array(leaf) for _, leaf in entries]
        self._positions = [i for i, dynamic in enumerate(self._is_array) if dynamic]
        # JAX looks for leaves of its own much faster if it need not ask.
        has_objects = any(map(is_leaf, self._static))
        self._is_leaf_if_any = is_leaf if has_objects else None
        self._leaf_paths = [_leaf_path(path, keys) for keys, _ in entries]
        self.paths = tuple(
            leaf_path
            for leaf_path, dynamic in zip(self._leaf_paths, self._is_array, strict=True)
            if dynamic
        )

    def get(self) -> PyTree:
        """Returns what the place holds."""
        if self._is_item:
            return self.owner[self.name]
        if self._is_in_slots:
            return object.__getattribute__(self.owner, self.name)
        return vars(self.owner)[self.name]

    def put(self, value: PyTree) -> None:
        """Makes the place hold `value`."""
        if self._is_item:
            self.owner[self.name] = value
        else:
            # Frozen dataclasses and NNX modules guard assignment; the place does not
            # change its meaning here, only the arrays in it.
            object.__setattr__(self.owner, self.name, value)

    def remove(self) -> None:
        """Removes the attribute or item; an item of a list becomes `None`."""
        if isinstance(self.owner, list):
            self.owner[self.name] = None
        elif self._is_item:
            del self.owner[self.name]
        else:
            object.__delattr__(self.owner, self.name)

    def raw(self) -> Any:
        value = self.get()
        if isinstance(value, jax.Array):
            return value
        leaves, treedef = jax.tree.flatten(value, is_leaf=self._is_leaf_if_any)
        return Held(treedef, leaves)

    def changes_since(self, old: "PlaceSlot") -> set[str]:
        """Returns the paths of what is another than in `old`, but for arrays.

        Args:
            old: The same place, as an earlier search found it.
        """
        if self._treedef != old._treedef:
            return {self.path}
        triples = zip(self._leaf_paths, old._static, self._static, strict=True)
        return {path for path, was, now in triples if _differs(was, now)}

    def read(self) -> list[jax.Array]:
        leaves, treedef = jax.tree.flatten(self.get(), is_leaf=self._is_leaf)
        if treedef != self._treedef:
            raise StateStructureError(
                f"{self.path}: tree structure {self._treedef} became {treedef}"
            )
        changes = [
            f"{path}: {'an array' if dynamic else describe(old)} became {describe(new)}"
            for path, dynamic, old, new in zip(
                self._leaf_paths, self._is_array, self._static, leaves, strict=True
            )
            if dynamic != is_array(new) or (not dynamic and _differs(old, new))
        ]
        if changes:
            raise StateStructureError("\n".join(changes))
        return [
            leaf
            for leaf, dynamic in zip(leaves, self._is_array, strict=True)
            if dynamic
        ]

    def write(self, leaves: list[Any]) -> None:
        arrays = iter(leaves)
        self.put(
            self._treedef.unflatten(
                next(arrays) if dynamic else static
                for dynamic, static in zip(self._is_array, self._static, strict=True)
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


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf of a plain place is carried as an array."""
    return isinstance(leaf, jax.Array)


def _is_optax_state(value: Any) -> bool:
    kind = type(value)
    return issubclass(kind, tuple) and kind.__module__.partition(".")[0] == "optax"


def _leaf_path(path: str, keys: tuple[Any, ...]) -> str:
    for entry in keys:
        path = join(path, key_name(entry))
    return path


def _differs(old: Any, new: Any) -> bool:
    if old is new:
        return False
    # NumPy arrays compare elementwise; another array object is another constant.
    return type(old) is not type(new) or hasattr(old, "shape") or bool(old != new)
