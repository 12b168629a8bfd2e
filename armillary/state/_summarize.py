"""What a model consists of: its arrays, their shapes and sizes, as a table.

Only shapes and dtypes are looked at, so abstract arrays do as well, and no device is
touched.

Reads a global step, whatever holds it.
"""

import functools
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import numpy as jnp

from armillary._format import format_bytes
from armillary._traceback import hides_frames
from armillary.state import _keras, _nnx
from armillary.state._slots import Role, Slot, join_keys
from armillary.state._walk import Walk

if TYPE_CHECKING:
    from rich.table import Table


class StepCounter:
    """Reads a global step, which `read` returns as an array or a number."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self._read = read

    def __call__(self) -> int:
        """Returns the current step; waits for the device if it must."""
        return int(np.asarray(self._read()))

    def snapshot(self) -> Callable[[], int]:
        """Returns what gives the step as it is now, which may wait for the device.

        A program takes no scalar over, so that the array stays good.
        """
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


_WIDTH = 88


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
    """The parameters of one part of a model.

    Attributes:
        name: The path of the part.
        count: How many numbers its parameters hold.
        bytes: How much memory they take.
    """

    name: str
    count: int
    bytes: int


@dataclass(frozen=True)
class ModelSummary:
    """What `summarize` found. Printed, it is a table.

    Attributes:
        rows: The arrays, each once.
    """

    rows: tuple[ArrayRow, ...]

    @property
    def parameters(self) -> list[ArrayRow]:
        """The rows of parameters."""
        return [row for row in self.rows if row.is_parameter]

    @property
    def count(self) -> int:
        """How many numbers the parameters hold."""
        return sum(row.count for row in self.parameters)

    @property
    def bytes(self) -> int:
        """How much memory the parameters take, once."""
        return sum(row.bytes for row in self.parameters)

    @property
    def modules(self) -> list[ModuleSize]:
        """The parts that the model divides into first, the largest in front."""
        places = [row.path.split("/") for row in self.parameters]
        inner = [place[:-1] for place in places]
        columns = itertools.takewhile(
            lambda names: len(set(names)) == 1, zip(*inner, strict=False)
        )
        depth = 1 + len(list(columns))
        counts: dict[str, list[int]] = {}
        for row, place in zip(self.parameters, places, strict=True):
            total = counts.setdefault("/".join(place[:-1][:depth] or place), [0, 0])
            total[0] += row.count
            total[1] += row.bytes
        sizes = [ModuleSize(name, *total) for name, total in counts.items()]
        return sorted(sizes, key=lambda size: -size.count)

    def __rich__(self) -> "Table":
        from rich.table import Table

        others = [row for row in self.rows if not row.is_parameter]
        lines = [("parameters", self.count, self.bytes)]
        if others:
            sizes = (sum(row.count for row in others), sum(row.bytes for row in others))
            lines.append(("other state", *sizes))
        names, counts, sizes = zip(*lines, strict=True)
        table = Table(show_footer=True)
        table.add_column("array", "\n".join(names), overflow="fold")
        for header in ("shape", "dtype", "kind"):
            table.add_column(header)
        shown = "\n".join(f"{count:,}" for count in counts)
        table.add_column("count", shown, justify="right")
        table.add_column("size", "\n".join(map(format_bytes, sizes)), justify="right")
        for row in self.rows:
            shape = str(row.shape)
            size = format_bytes(row.bytes)
            table.add_row(row.path, shape, row.dtype, row.kind, f"{row.count:,}", size)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=_WIDTH, highlight=False, markup=False).print(self)
        return text.getvalue().rstrip("\n")


@hides_frames
def summarize(model: Any) -> ModelSummary:
    """Returns the arrays of a model, with their shapes, dtypes and sizes.

    For example `print(armillary.summarize(model))`. No device is touched. Of a large
    model that is nowhere yet, the abstract one will do::

        armillary.summarize(nnx.eval_shape(lambda: Model(rngs=nnx.Rngs(0))))

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


def _find_rows(model: Any) -> list[ArrayRow]:
    walk = Walk([(model, "")])
    slots = list(walk.slots.values())
    if any(isinstance(slot, _nnx.NnxSlot | _keras.KerasSlot) for slot in slots):
        # The optimizer, metrics and seeds of a compiled Keras model are left out.
        weights = _keras_weights(walk)
        slots = [
            slot
            for slot in slots
            if not isinstance(slot, _keras.KerasSlot) or slot.key in weights
        ]
        return list(_rows_of_slots(slots, has_variables=True))
    # A pytree, which may hold abstract arrays. What JAX does not know, such as an
    # object of the user's, is a leaf of it.
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    rows = [
        _row(join_keys("", keys), leaf, "array", _is_number(leaf.dtype))
        for keys, leaf in leaves
        if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)
    ]
    return rows or list(_rows_of_slots(slots, has_variables=False))


def _rows_of_slots(slots: Iterable[Slot], *, has_variables: bool) -> Iterator[ArrayRow]:
    for slot in slots:
        columns = zip(slot.paths, slot.read(), slot.is_of_optimizer(), strict=True)
        for path, array, is_of_optimizer in columns:
            kind, is_parameter = "array", False
            if isinstance(slot, _nnx.NnxSlot):
                kind = type(slot.variable).__name__
                is_parameter = _is_param(slot.variable)
            elif isinstance(slot, _keras.KerasSlot):
                kind, is_parameter = "weight", slot.role is Role.PLAIN
            elif not (has_variables or is_of_optimizer):
                # A scalar in an attribute is a loss, a rate or a count.
                is_parameter = _is_number(array.dtype) and array.shape != ()
            yield _row(path, array, kind, is_parameter)


def _keras_weights(walk: Walk) -> set[int]:
    layers = getattr(_keras.keras_module(), "Layer", ())
    return {
        id(weight)
        for node in walk.nodes.values()
        if isinstance(node.value, layers)
        for weight in node.value.weights
    }


def _row(path: str, array: Any, kind: str, is_parameter: bool) -> ArrayRow:
    shape, dtype = tuple(array.shape), array.dtype
    count = math.prod(shape)
    return ArrayRow(
        path, shape, str(dtype), kind, is_parameter, count, count * dtype.itemsize
    )


def _is_number(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _is_param(variable: Any) -> bool:
    from flax import nnx

    return isinstance(variable, nnx.Param)
