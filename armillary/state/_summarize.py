"""What a model consists of: its arrays, their shapes and sizes, as a table.

Only shapes and dtypes are looked at, so abstract arrays do as well, and no device is
touched. Also reads a global step, whatever holds it.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator
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


class StepCounter:
    """Reads a global step, which may wait for the device."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __call__(self) -> int:
        return self.snapshot()()

    def snapshot(self) -> Callable[[], int]:
        """Returns what gives the step as it is now; a program takes no scalar over."""
        step = self._read()
        return lambda: int(np.asarray(step))


def as_step_counter(global_step: Any, name: str = "global_step") -> StepCounter:
    """Returns what reads the current global step, the argument `name`."""
    if _keras.is_variable(global_step):
        return StepCounter(functools.partial(_keras.value_of, global_step))
    if _nnx.is_variable(global_step):
        return StepCounter(global_step.get_value)
    if callable(global_step):
        return StepCounter(global_step)
    raise TypeError(
        f"`{name}` is {global_step!r} of type {type(global_step).__name__}, but "
        "it must be a variable that the steps advance, or a function that returns the "
        "step. Use `optimizer.step`, `armillary.create_global_step()`, or "
        "`lambda: trainer.step`."
    )


@dataclass(frozen=True)
class ArrayRow:
    """One array of a model.

    Attributes:
        path: Where it is, such as `encoder/dense/kernel`.
        shape: Its shape, over all devices.
        dtype: Its dtype, by name.
        kind: The type of its variable, such as `"Param"`; `"array"` without one.
        is_parameter: Whether it is trained, as far as its kind tells: an `nnx.Param`, a
            weight of a Keras layer that is no statistic of batches, or, in a pytree, an
            array of real or complex numbers.
        count: How many numbers it holds.
        bytes: How much memory they take, once.
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
    """How many numbers the parameters of one part hold, and how much memory."""

    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """What `summarize` found: the arrays, each once. Printed, it is a table."""

    rows: tuple[ArrayRow, ...]

    @property
    def parameters(self) -> list[ArrayRow]:
        """The rows of parameters."""
        return [row for row in self.rows if row.is_parameter]

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        return _sum("parameters", self.parameters).count

    @property
    def bytes(self) -> int:
        """How much memory the parameters take, once."""
        return _sum("parameters", self.parameters).bytes

    @property
    def modules(self) -> list[ModuleSize]:
        """The parts that the model divides into first, the largest in front."""
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
    count, size = sum(row.count for row in rows), sum(row.bytes for row in rows)
    return ModuleSize(name, count, size)


@hides_frames
def summarize(model: Any) -> ModelSummary:
    """Returns the arrays of a model, with their shapes, dtypes and sizes.

    For example `print(armillary.summarize(model))`. No device is touched. Of a large
    model that is nowhere yet, the abstract one will do: that of `nnx.eval_shape`.

    Args:
        model: An NNX or Keras module, an Equinox module or any other pytree of arrays
            or `jax.ShapeDtypeStruct`, or an object that holds such things.

    Raises:
        TypeError: If there is no array in it.
    """
    rows = tuple(_find_rows(model))
    if not rows:
        raise TypeError(
            f"`model` is of type {type(model).__name__}, in which there are no arrays. "
            "Pass a model that has its parameters (build a Keras model, or call it "
            "once), or a pytree of arrays."
        )
    return ModelSummary(rows)


def _find_rows(model: Any) -> Iterator[ArrayRow]:
    walk = Walk([(model, "")])
    slots = walk.slots.values()
    has_variables = any(slot.variable is not None for slot in slots)
    # A pytree may hold abstract arrays. What JAX does not know, such as an object of
    # the user's, is a leaf of it.
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
    shape, dtype = tuple(array.shape), array.dtype
    count = math.prod(shape)
    size = count * dtype.itemsize
    return ArrayRow(path, shape, str(dtype), kind, is_parameter, count, size)


def _is_number(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.inexact))
