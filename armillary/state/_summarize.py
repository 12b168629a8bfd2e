"""A table of a model's arrays with their shapes and sizes.

Only shapes and dtypes are read. So the arrays may be abstract, and no device is used.
"""

import collections
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._format import as_text, format_bytes, make_table
from armillary._traceback import hides_frames
from armillary.state._adapters import Adapter, adapter_of
from armillary.state._slots import Slot, join_keys
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
            in a pytree, each array of real or complex numbers.
        count: The number of elements.
        bytes: The size of one copy in memory.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    kind: str
    is_parameter: bool
    count: int
    bytes: int


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
            parts[part or row.path].append(row)
        sizes = [_sum(name, rows) for name, rows in parts.items()]
        return sorted(sizes, key=lambda size: -size.count)

    def __rich__(self) -> "Table":
        sums = [_sum("parameters", self.parameters)]
        others = [row for row in self.rows if not row.is_parameter]
        if others:
            sums.append(_sum("other state", others))

        rows = [
            (row.path, str(row.shape), row.dtype, row.kind, *_format_size(row))
            for row in self.rows
        ]
        totals = [(each.name, "", "", "", *_format_size(each)) for each in sums]
        head = ["array", "shape", "dtype", "kind", "count", "size"]
        return make_table(head, rows, totals, numbers=["count", "size"])

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


def _format_size(of: ArrayRow | ModuleSize) -> tuple[str, str]:
    return f"{of.count:,}", format_bytes(of.bytes)


def _sum(name: str, rows: list[ArrayRow]) -> ModuleSize:
    return ModuleSize(
        name,
        count=sum(row.count for row in rows),
        bytes=sum(row.bytes for row in rows),
    )


@hides_frames
def summarize(model: Any) -> ModelSummary:
    """Returns the arrays of a model, with their shapes, dtypes and sizes.

    For example, `print(armillary.summarize(model))` prints them as a table. No device
    is used. If a model is too large to make here, pass the abstract model that
    `nnx.eval_shape` returns.

    Args:
        model: An NNX or Keras module, an Equinox module or any other pytree of arrays
            or `jax.ShapeDtypeStruct`, or an object that holds such things.

    Raises:
        TypeError: If `model` has no array.
    """
    rows = tuple(_find_rows(model))
    if not rows:
        raise TypeError(
            f"`model` is of type {type(model).__name__}, and holds no arrays. Pass a "
            "model that already has its parameters (build a Keras model, or call it "
            "once), or a pytree of arrays."
        )
    return ModelSummary(rows)


def _find_rows(model: Any) -> Iterator[ArrayRow]:
    walk = Walk([(model, "")])
    slots = walk.slots.values()
    has_variables = any(slot.variable is not None for slot in slots)
    if not has_variables:
        rows = list(_find_rows_of_tree(model))
        if rows:
            yield from rows
            return

    kinds = _find_kinds(walk)
    for slot in slots:
        columns = zip(slot.paths, slot.read(), slot.is_of_optimizer(), strict=True)
        for path, array, is_of_optimizer in columns:
            if slot.variable is None:
                # A scalar in an attribute is a loss, a rate or a count.
                is_parameter = _is_number(array) and array.shape != ()
                is_parameter &= not (has_variables or is_of_optimizer)
                yield _row(path, array, "array", is_parameter)
            elif slot.key in kinds:
                yield _row(path, array, *kinds[slot.key])


def _find_rows_of_tree(model: Any) -> Iterator[ArrayRow]:
    """Yields the arrays of a pytree, which may be abstract.

    Objects of classes that JAX does not know are leaves of the pytree.
    """
    for keys, leaf in jax.tree_util.tree_leaves_with_path(model):
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            yield _row(join_keys("", keys), leaf, "array", _is_number(leaf))


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
    size = count * array.dtype.itemsize
    return ArrayRow(path, shape, str(array.dtype), kind, is_parameter, count, size)


def _is_number(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
