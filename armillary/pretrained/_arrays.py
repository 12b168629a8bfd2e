"""The arrays of a model that files hold: by path, to read and to replace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import counted, list_lines
from armillary.checkpoint._checkpoint import Checkpoint
from armillary.checkpoint._content import describe_leaves
from armillary.checkpoint._in_parts import divide, restore_in_parts
from armillary.checkpoint._put import put_all
from armillary.checkpoint._room import all_have_room
from armillary.checkpoint._selection import is_inside
from armillary.distribute._global_arrays import is_key, read_part
from armillary.pretrained._names import Names
from armillary.pretrained._views import Box, View
from armillary.state._slots import Role
from armillary.state._walk import Walk

_ROOT = "model"
_OTHERS = (np.ndarray, np.generic, int, float, complex, jax.ShapeDtypeStruct)


class Arrays:
    """The arrays of a model, without random keys, metrics and optimizers.

    Args:
        model: The model.
        names: The table of names, for which the arrays are.

    Raises:
        TypeError: If the model holds no arrays of JAX, or the table names a place with
            a value that is not one.
    """

    def __init__(self, model: Any, names: Names) -> None:
        _check_kinds(model, names)
        # It also refuses a model whose arrays cannot be replaced.
        self._checkpoint = Checkpoint(**{_ROOT: model})
        others = _find_others(model)
        self._leaves = self._checkpoint.read_leaves()
        self.by_path: dict[str, Any] = {}
        for path, leaf in self._leaves.items():
            name = path.removeprefix(f"{_ROOT}/")
            if path not in others and not is_key(leaf):
                self.by_path[name] = leaf

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: leaf.shape for path, leaf in self.by_path.items()}

    def replace(
        self, names: Sequence[str], read: Callable[[Sequence[str]], Mapping[str, Any]]
    ) -> None:
        """Puts new arrays into the model: all or none, if memory has room for both.

        Args:
            names: The arrays to replace.
            read: Reads the new arrays of some names, together in all processes.
        """
        taken = {f"{_ROOT}/{name}": self.by_path[name] for name in names}
        specs = describe_leaves(taken)

        def read_some(paths: Sequence[str]) -> dict[str, Any]:
            new = read([path.removeprefix(f"{_ROOT}/") for path in paths])
            # So that this object lets go of the old arrays.
            self.by_path.update(new)
            return {f"{_ROOT}/{name}": array for name, array in new.items()}

        if all_have_room(taken, specs):
            all_leaves = {**self._leaves, **read_some([*taken])}
            put_all(self._checkpoint, all_leaves, {})
        else:
            parts = divide(taken, specs)
            # It holds the old arrays, too, whose memory the new ones need.
            taken.clear()
            restore_in_parts(self._checkpoint, self._leaves, parts, read_some, dict)


class ArrayView(View):
    """An array of a model. All processes must read the same parts in the same order."""

    def __init__(self, leaf: Any) -> None:
        self._leaf = leaf
        self.shape = tuple(leaf.shape)
        self.dtype = np.dtype(leaf.dtype)

    def read(self, box: Box) -> np.ndarray:
        return read_part(self._leaf, box)


def _check_kinds(model: Any, names: Names) -> None:
    """Raises if the table names values of a model that no load could replace."""
    abstract: list[str] = []
    other: list[str] = []
    for path, value in _find_others_than_arrays(model):
        if not names.has_path(path):
            continue
        if isinstance(value, jax.ShapeDtypeStruct):
            abstract.append(path)
        else:
            other.append(f"{path}: {type(value).__name__}")

    if abstract:
        raise TypeError(
            f"`model` has only shapes at {counted(len(abstract), 'path')} of `names`, "
            f"but it must have arrays of JAX:\n{list_lines(abstract)}\n"
            "Make the model by `strategy.make(...)`, which creates each array in the "
            "parts of its devices, instead of `jax.eval_shape` or `nnx.eval_shape`."
        )
    if other:
        raise TypeError(
            f"`model` has other values at {counted(len(other), 'path')} of `names`, "
            f"but it must have arrays of JAX:\n{list_lines(other)}\n"
            "Convert them first: `params = jax.tree.map(jnp.asarray, params)`."
        )


def _find_others_than_arrays(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the path and value of each number, shape and array of NumPy in a model.

    A variable may hold an array of NumPy, which a load replaces like any other array.
    """
    walk = Walk([(model, "")])
    for node in walk.nodes.values():
        for part in node.parts:
            for name, value in part.pairs:
                if isinstance(value, _OTHERS):
                    yield part.way.join(node.path, name), value

    for slot in walk.slots.values():
        whole = slot.get()
        if isinstance(whole, jax.ShapeDtypeStruct):  # in a variable of Flax NNX
            yield slot.path, whole
        for path, value in slot.others:
            if isinstance(value, _OTHERS):
                yield path, value


def _find_others(model: Any) -> set[str]:
    """Returns the paths of random state, metrics, optimizers and step counters."""
    walk = Walk([(model, _ROOT)], finds_plain=False)
    nodes = walk.nodes.values()
    # Optimizers of Flax NNX and of Keras.
    optimizers = [node.path for node in nodes if _is_a(node.value, "Optimizer")]

    paths: set[str] = set()
    for slot in walk.slots.values():
        # The counter next to a key of Flax NNX has no role of its own.
        is_random = slot.role is Role.RANDOM_KEY or _is_a(slot.variable, "RngState")
        is_counter = slot.role in (Role.METRIC, Role.FIRST_REPLICA)
        is_other_slot = is_random or is_counter
        flags = zip(slot.paths, slot.is_of_optimizer(), strict=True)
        for path, is_optax in flags:
            if is_other_slot or is_optax or is_inside(path, optimizers):
                paths.add(path)
    return paths


def _is_a(value: Any, name: str) -> bool:
    """Returns whether a value is of a class of this name, without importing it."""
    return any(base.__name__ == name for base in type(value).__mro__)
