"""A table of a model's arrays with their shapes and sizes.

Only shapes and dtypes are read. So the arrays may be abstract, and no device is used.
"""

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._checks import check_methods
from armillary._format import as_text, format_bytes, make_table
from armillary._traceback import hides_frames
from armillary.state._adapters import Adapter, adapter_of
from armillary.state._holders import attributes_of, held_by, is_claimed
from armillary.state._lift import State
from armillary.state._slots import Role, Slot, join_keys
from armillary.state._tree import PureSlot
from armillary.state._walk import Walk

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class ArrayRow:
    """One array of a model.

    Attributes:
        path: The place of the array, such as `encoder/dense/kernel`.
        shape: The shape of the whole array, over all devices.
        dtype: The name of the dtype.
        kind: The type of the variable, such as `"Param"`; `"array"` if the array is in
            no variable.
        is_parameter: Whether the array is trained, judging by its kind. Parameters are
            each `nnx.Param`, each weight of a Keras layer except batch statistics, and,
            in a pytree, each array of real or complex numbers. In the state of a pure
            step, statistics and the state of Optax are not parameters.
        count: The number of elements.
        bytes: The size of one copy in memory.
        place: The place of the array under a strategy, if the table is for one.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    is_parameter: bool
    count: int
    bytes: int
    place: "ArrayPlace | None" = None


@dataclass(frozen=True)
class ArrayPlace:
    """The place of an array on the devices of a strategy.

    Attributes:
        spec: The axes of the mesh along each axis of the array, such as
            `(None, "fsdp")`; empty for an array that is whole on each device.
        bytes_on_device: The size of the part that a device holds.
        decided_by: The cause, such as `"rule 'kernel'"` or `"automatic"`.
    """

    spec: tuple[Any, ...]
    bytes_on_device: int
    decided_by: str


@dataclass(frozen=True)
class ModuleSize:
    """The number of parameters in one part of a model, and their size in memory."""

    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """The arrays of a model, each once, as `summarize` returns them.

    Print it to see a table.
    """

    rows: tuple[ArrayRow, ...]

    @property
    def parameters(self) -> list[ArrayRow]:
        """The rows of parameters."""
        return [row for row in self.rows if row.is_parameter]

    @property
    def count(self) -> int:
        """The number of elements in all parameters."""
        return _sum("parameters", self.parameters).count

    @property
    def bytes(self) -> int:
        """The size of one copy of the parameters in memory."""
        return _sum("parameters", self.parameters).bytes

    @property
    def modules(self) -> list[ModuleSize]:
        """The parts into which the model divides first, the largest part first."""
        holders = [row.path.split("/")[:-1] for row in self.parameters]
        depth = 1 + _count_shared(holders)

        parts: dict[str, list[ArrayRow]] = collections.defaultdict(list)
        for row, names in zip(self.parameters, holders, strict=True):
            part = "/".join(names[:depth])
            # An array that is in no part stands for itself.
            parts[part or row.path].append(row)

        sizes = [_sum(name, rows) for name, rows in parts.items()]
        return sorted(sizes, key=lambda size: -size.count)

    def __rich__(self) -> "Table":
        sums = [_sum("parameters", self.parameters)]
        others = [row for row in self.rows if not row.is_parameter]
        if others:
            sums.append(_sum("other state", others))

        has_places = any(row.place for row in self.rows)
        if has_places:
            return self._make_table_of_places(sums)
        return self._make_table_of_sizes(sums)

    def _make_table_of_sizes(self, sums: "list[ModuleSize]") -> "Table":
        rows: list[tuple[str, ...]] = []
        for row in self.rows:
            count, size = _format_size(row)
            rows.append((row.path, str(row.shape), row.dtype, row.kind, count, size))

        totals: list[tuple[str, ...]] = []
        for total in sums:
            count, size = _format_size(total)
            totals.append((total.name, "", "", "", count, size))

        head = ["array", "shape", "dtype", "kind", "count", "size"]
        return make_table(head, rows, totals, numbers=["count", "size"])

    def _make_table_of_places(self, sums: "list[ModuleSize]") -> "Table":
        rows: list[tuple[str, ...]] = []
        on_device = 0
        for row in self.rows:
            place = row.place
            assert place is not None
            on_device += place.bytes_on_device
            shape = f"{row.dtype} {row.shape}"
            axes = ", ".join(map(_format_axes, place.spec)) or "whole"
            size = format_bytes(place.bytes_on_device)
            rows.append((row.path, shape, axes, size, place.decided_by))

        totals: list[tuple[str, ...]] = []
        for total in sums:
            size = format_bytes(total.bytes)
            totals.append((total.name, size, "", "", ""))
        totals.append(("on each device", "", "", format_bytes(on_device), ""))

        head = ["array", "shape", "divided over", "on each device", "decided by"]
        return make_table(head, rows, totals, numbers=["on each device"])

    def __str__(self) -> str:
        return as_text(self.__rich__(), width=88)


def _count_shared(paths: list[list[str]]) -> int:
    """Returns the number of names with which all paths begin."""
    count = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        count += 1
    return count


def _format_axes(entry: Any) -> str:
    """Returns one entry of a `PartitionSpec` as text."""
    if entry is None:
        return "-"
    if isinstance(entry, tuple):
        return " x ".join(entry)
    return entry


def _format_size(of: ArrayRow | ModuleSize) -> tuple[str, str]:
    return f"{of.count:,}", format_bytes(of.bytes)


def _sum(name: str, rows: list[ArrayRow]) -> ModuleSize:
    return ModuleSize(
        name,
        count=sum(row.count for row in rows),
        bytes=sum(row.bytes for row in rows),
    )


@hides_frames
def summarize(model: Any, strategy: Any = None) -> ModelSummary:
    """Returns the arrays of a model, with their shapes, dtypes and sizes.

    For example, `print(armillary.summarize(model))` prints them as a table. No device
    is used. If a model is too large to make here, pass the abstract model that
    `nnx.eval_shape` returns.

    With a strategy, or for a trainer that holds one, the table has all arrays of the
    state, and instead of kinds and counts the place of each array: the axes of the mesh
    that divide it, the size of its part on a device, and what has decided this.

    Args:
        model: An NNX or Keras module, an Equinox module or any other pytree of arrays
            or `jax.ShapeDtypeStruct`, or an object that holds such things.
        strategy: A strategy, for the places of the arrays.

    Raises:
        TypeError: If `model` has no array, or `strategy` is no strategy.
    """
    placement = find_placement(model)
    if strategy is not None:
        fix = "Use a strategy such as `armillary.ShardedStrategy()`, or leave it out."
        check_methods("strategy", strategy, ["scope", "run"], fix)
        placement = strategy.placement

    if placement is None:
        rows = tuple(_find_rows(model))
    else:
        rows = tuple(find_placed_rows(model, placement))
    if not rows:
        raise TypeError(
            f"`model` is of type {type(model).__name__}, and holds no arrays. Pass a "
            "model that already has its parameters (build a Keras model, or call it "
            "once), or a pytree of arrays."
        )
    return ModelSummary(rows)


def find_placement(model: Any) -> Any:
    """Returns the placement of the strategy that a trainer holds, if it holds one."""
    for _, value in held_by(model):
        attributes = attributes_of(value) or {}
        placement = attributes.get("placement")
        if hasattr(placement, "decide"):
            return placement
    return None


def find_placed_rows(model: Any, placement: Any) -> Iterator[ArrayRow]:
    """Yields all arrays of a state, with the place of each on the devices."""
    known = {row.path: row for row in _find_rows(model)}
    for path, array, (spec, num_parts, reason) in _find_places(model, placement):
        row = known.get(path)
        if row is None:  # as for an array that is not part of the model
            row = _row(path, array, kind="array", is_parameter=False)
        bytes_on_device = row.bytes // num_parts
        place = ArrayPlace(tuple(spec), bytes_on_device, reason)
        yield replace(row, place=place)


def _find_places(model: Any, placement: Any) -> list[tuple[str, Any, Any]]:
    """Returns the path, the array and the place of each array of a model.

    The arrays of a pytree may be abstract or of NumPy. A state holds arrays of JAX, so
    they become the arrays of a trace.
    """
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_claimed)
    others: dict[int, Any] = {}
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray | jax.ShapeDtypeStruct):
            others[i] = leaf

    found: list[tuple[str, Any, Any]] = []

    def find(arrays: dict[int, jax.Array]) -> None:
        for i, array in arrays.items():
            leaves[i] = array
        tree = treedef.unflatten(leaves)
        # A slot needs a place, here in a dictionary. The empty name adds nothing to
        # the paths.
        state = State([({"": tree}, "")])
        places = placement.decide(state)
        found.extend(zip(state.paths, state.read(), places, strict=True))

    if others:
        jax.eval_shape(find, others)
    else:
        find({})
    return found


def _find_rows(model: Any) -> Iterator[ArrayRow]:
    """Yields a row for each array of a model: variables, or else leaves of a pytree."""
    walk = Walk([(model, "")])
    slots = walk.slots.values()
    has_variables = any(slot.variable is not None for slot in slots)
    if not has_variables:
        # The walk finds no abstract arrays, and a pytree may have them.
        rows = list(_find_rows_of_tree(model))
        if rows:
            yield from rows
            return

    kinds = _find_kinds(walk)
    for slot in slots:
        # The trainer of a pure step has variables of its own, such as the global step.
        may_be_trained = isinstance(slot, PureSlot) or not has_variables
        flags = slot.is_of_optimizer()
        arrays = zip(slot.paths, slot.read(), slot.kinds(), flags, strict=True)
        for path, array, leaf_kind, is_of_optimizer in arrays:
            if slot.variable is not None:
                if slot.key in kinds:
                    kind, is_parameter = kinds[slot.key]
                    yield _row(path, array, kind, is_parameter)
                continue

            # A scalar in an attribute is a loss, a rate or a count.
            is_trainable = _is_number(array) and array.shape != ()
            is_plain = leaf_kind.role is Role.PLAIN and not is_of_optimizer
            is_parameter = may_be_trained and is_trainable and is_plain
            yield _row(path, array, "array", is_parameter)


def _find_rows_of_tree(model: Any) -> Iterator[ArrayRow]:
    """Yields the arrays of a pytree, which may be abstract.

    Objects of classes that JAX does not know are leaves of the pytree.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            path = join_keys("", keys)
            yield _row(path, leaf, "array", _is_number(leaf))


def _find_kinds(walk: Walk) -> dict[Any, tuple[str, bool]]:
    """Returns the kinds of variables, and whether they are parameters, by slot key."""
    slots: dict[Adapter, list[Slot]] = collections.defaultdict(list)
    for slot in walk.slots.values():
        if slot.variable is not None:
            slots[adapter_of(slot.variable)].append(slot)

    nodes = [node.value for node in walk.nodes.values()]
    kinds: dict[Any, tuple[str, bool]] = {}
    for adapter, own in slots.items():
        kinds.update(adapter.summarize(own, nodes))
    return kinds


def _row(path: str, array: Any, kind: str, is_parameter: bool) -> ArrayRow:
    shape = tuple(array.shape)
    count = math.prod(shape)
    return ArrayRow(
        path=path,
        shape=shape,
        dtype=str(array.dtype),
        kind=kind,
        is_parameter=is_parameter,
        count=count,
        bytes=count * array.dtype.itemsize,
    )


def _is_number(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
