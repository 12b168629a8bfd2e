"""A table of a model's arrays with their shapes and sizes.

Only shapes and dtypes are read. So the arrays may be abstract, and no device is used.
"""

import collections
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._format import as_text, format_bytes, make_table
from armillary._traceback import hides_frames
from armillary.state import _keras, _nnx
from armillary.state._slots import Role, join_keys
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
        inner = [row.path.split("/")[:-1] for row in self.parameters]
        columns = (set(names) for names in zip(*inner, strict=False))
        shared = 1 + len(
            list(itertools.takewhile(lambda each: len(each) == 1, columns))
        )
        parts: dict[str, list[ArrayRow]] = collections.defaultdict(list)
        for row, places in zip(self.parameters, inner, strict=True):
            parts["/".join(places[:shared]) or row.path].append(row)
        sizes = [_sum(name, rows) for name, rows in parts.items()]
        return sorted(sizes, key=lambda size: -size.count)

    def __rich__(self) -> "Table":
        sums = [_sum("parameters", self.parameters)]
        if others := [row for row in self.rows if not row.is_parameter]:
            sums.append(_sum("other state", others))

        def size(of: ArrayRow | ModuleSize) -> tuple[str, str]:
            return f"{of.count:,}", format_bytes(of.bytes)

        rows = [(r.path, str(r.shape), r.dtype, r.kind, *size(r)) for r in self.rows]
        totals = [(each.name, "", "", "", *size(each)) for each in sums]
        head = ["array", "shape", "dtype", "kind", "count", "size"]
        return make_table(head, rows, totals, numbers=head[-2:])

    def __str__(self) -> str:
        return as_text(self.__rich__(), width=88)


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
    # A pytree may hold abstract arrays. Objects of classes that JAX does not know are
    # leaves of it.
    leaves = [] if has_variables else jax.tree_util.tree_leaves_with_path(model)
    kinds = jax.Array | np.ndarray | jax.ShapeDtypeStruct
    arrays = [(keys, leaf) for keys, leaf in leaves if isinstance(leaf, kinds)]
    for keys, leaf in arrays:
        yield _row(join_keys("", keys), leaf, "array", _is_number(leaf))
    # The optimizer, metrics and seeds of a compiled Keras model are left out.
    layers = getattr(_keras.keras_module(), "Layer", ())
    nodes = (node.value for node in walk.nodes.values())
    found = (node.weights for node in nodes if isinstance(node, layers))
    weights = {id(weight) for each in found for weight in each}
    for slot in () if arrays else slots:
        columns = zip(slot.paths, slot.read(), slot.is_of_optimizer(), strict=True)
        for path, array, is_of_optimizer in columns:
            if isinstance(slot, _nnx.NnxSlot):
                kind = type(slot.variable)
                yield _row(path, array, kind.__name__, slot.is_parameter())
            elif slot.variable is None:
                # A scalar in an attribute is a loss, a rate or a count.
                is_parameter = _is_number(array) and array.shape != ()
                is_parameter &= not (has_variables or is_of_optimizer)
                yield _row(path, array, "array", is_parameter)
            elif slot.key in weights:
                yield _row(path, array, "weight", slot.role is Role.PLAIN)


def _row(path: str, array: Any, kind: str, is_parameter: bool) -> ArrayRow:
    shape = tuple(array.shape)
    count = math.prod(shape)
    size = count * array.dtype.itemsize
    return ArrayRow(path, shape, str(array.dtype), kind, is_parameter, count, size)


def _is_number(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
