"""Finds numbers of rows that count one replica's examples, but mean the whole batch.

A constant such as `jnp.arange(num_rows)` numbers the examples of a replica, from 0 on
every replica. These are also the numbers of the rows of the batch on one device, but
not on several: the first example of the second replica is not row 0 of the batch. So
three things train on wrong pairs of examples, without an error in JAX::

    a table has examples of this replica along one axis, and gathered examples along
    another, and a constant chooses an entry for each row, such as the labels of a
    contrastive loss, `jnp.eye` or `jnp.diag`

    views of the examples are concatenated and then gathered, so the gathered rows are
    sorted by replicas and not by views, and a slice or a constant tells views apart

    numbers in the batch choose rows of the batch, of which a replica has only its own

The axes of each value show this, as in `_draws`.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from armillary._dataflow import union
from armillary._jaxpr import walk_equations
from armillary.distribute.analysis._example_axes import axes_of_result
from armillary.distribute.analysis._replica_dataflow import ReplicaDataflow

_CUTS = ("slice", "split")
# Operations between a number of the batch and its use as an index. JAX adds the size of
# an axis to a negative index.
_OF_INDICES = (
    *("convert_element_type", "copy", "copy_p", "reshape", "squeeze", "slice"),
    *("broadcast_in_dim", "transpose", "add", "sub", "max", "min", "clamp", "rem"),
    *("select_n", "lt", "ge", "and", "or"),
)


class RowFacts(NamedTuple):
    """The known facts about the rows of a value.

    Axes are counted from the last axis, -1. So they stay the same if a loop takes a
    value apart along its first axis.

    Attributes:
        own: The axes along which the examples of this replica lie, in their order.
        joined: The axes along which views of these examples were concatenated.
        gathered: The axes along which the examples of all replicas lie.
        mixed: The gathered axes that were joined before.
        picked: The axes along which a slice of the gathered examples lies.
        numbers: The axes along which a constant has different values.
        is_constant: Whether the value depends on no input.
        is_index: Whether the value is a whole number of the batch.
        is_row: Whether the value is the number of a gathered row.
    """

    own: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    mixed: frozenset[int] = frozenset()
    picked: frozenset[int] = frozenset()
    numbers: frozenset[int] = frozenset()
    is_constant: bool = False
    is_index: bool = False
    is_row: bool = False


_AXES = ("own", "joined", "gathered", "mixed", "picked", "numbers")
_INPUT = RowFacts()
_CONSTANT = RowFacts(is_constant=True)


class OwnNumbers(NamedTuple):
    """A line at which numbers of own rows choose among gathered rows."""

    line: str


class MixedRows(NamedTuple):
    """A line at which rows are told apart whose views were joined and then gathered."""

    line: str


class ChosenRows(NamedTuple):
    """A line at which numbers of the batch choose among the rows of a share."""

    line: str


PositionFinding = OwnNumbers | MixedRows | ChosenRows


def find_positions(
    program: core.ClosedJaxpr, is_split: Sequence[bool], axis_name: str
) -> list[PositionFinding]:
    """Returns the lines at which rows of a share stand for rows of the whole batch.

    Args:
        program: The program of one replica.
        is_split: For each input, whether it is a part of a batch, examples first.
        axis_name: The axis of replicas.
    """
    # Most steps neither gather examples nor choose rows.
    names = {equation.primitive.name for equation in walk_equations(program)}
    if not any(name.startswith(("all_gather", "gather")) for name in names):
        return []

    inputs: list[RowFacts] = []
    for variable, is_own in zip(program.jaxpr.invars, is_split, strict=True):
        inputs.append(_facts_of_share(variable.aval) if is_own else _INPUT)
    search = _PositionDataflow(axis_name)
    search.run(program, inputs)
    return sorted(search.found, key=_kind_and_line)


def _kind_and_line(finding: PositionFinding) -> tuple[str, str]:
    return type(finding).__name__, finding.line


def _facts_of_share(value: Any) -> RowFacts:
    """Returns the facts about a share of a batch, or about a part of the state."""
    shape = value.shape
    if not shape or shape[0] < 2:
        return _INPUT  # A single example cannot be confused with another one.
    first_axis = -len(shape)
    is_whole = jnp.issubdtype(value.dtype, jnp.integer)
    return RowFacts(own=frozenset({first_axis}), is_index=is_whole)


class _PositionDataflow(ReplicaDataflow[RowFacts]):
    """Follows rows through the program of one replica.

    Attributes:
        found: The lines to warn of.
    """

    nothing = _CONSTANT
    mixes_scatters = True

    def __init__(self, axis_name: str) -> None:
        super().__init__(axis_name)
        self._num_replicas = 1
        # For the indices of several axes, the facts about the index of each axis.
        self._columns: dict[Any, list[RowFacts]] = {}
        self.found: set[PositionFinding] = set()

    def fact_of(self, constant: Any) -> RowFacts:
        if not isinstance(constant, np.ndarray):
            return _INPUT
        num_axes = constant.ndim
        numbers: set[int] = set()
        for axis in range(num_axes):
            if _varies(constant, axis):
                numbers.add(axis - num_axes)
        return _CONSTANT._replace(numbers=frozenset(numbers))

    def join(self, facts: Iterable[RowFacts]) -> RowFacts:
        several = set(facts)
        if len(several) < 2:
            return several.pop() if several else _CONSTANT
        axes: dict[str, frozenset[int]] = {}
        for name in _AXES:
            axes[name] = union(getattr(rows, name) for rows in several)
        # A constant added to a number of the batch gives a number of the batch.
        is_index = all(rows.is_index or rows.is_constant for rows in several)
        return RowFacts(
            **axes,
            is_constant=all(rows.is_constant for rows in several),
            is_index=is_index,
            is_row=any(rows.is_row for rows in several),
        )

    def decide(self, equation: Any, decides: RowFacts) -> RowFacts:
        del equation
        return _CONSTANT if decides.is_constant else _INPUT

    def follow_reduction(
        self, equation: Any, operands: list[RowFacts], by_ops: str
    ) -> list[RowFacts]:
        is_gather = equation.primitive.name.startswith("all_gather")
        if by_ops or not is_gather:
            return [_INPUT] * len(equation.outvars)
        self._num_replicas = equation.params["axis_size"]

        results: list[RowFacts] = []
        for variable, rows in zip(equation.invars, operands, strict=True):
            num_axes = variable.aval.ndim
            results.append(_gather(equation, num_axes, rows))
        return results

    def follow_exchange(
        self, equation: Any, operands: list[RowFacts]
    ) -> list[RowFacts]:
        del operands
        return [_INPUT] * len(equation.outvars)

    def follow_source(self, equation: Any, operands: list[RowFacts]) -> RowFacts:
        del equation, operands
        return _INPUT

    def follow_draw(self, equation: Any, operands: list[RowFacts]) -> list[RowFacts]:
        del operands
        return [_INPUT] * len(equation.outvars)

    def mix(self, equation: Any, operands: list[RowFacts]) -> RowFacts:
        """Returns the facts of a result, and notes rows that are confused."""
        name = equation.primitive.name
        if name == "iota":
            return _number_rows(equation)
        before = self.join(operands)
        if not equation.outvars:  # as of a print
            return before

        moved = [_move(equation, i, facts) for i, facts in enumerate(operands)]
        if not self.is_backward(equation):
            self._look_at(equation, operands, moved)

        result = self.join(moved)
        if name == "concatenate":
            self._columns[equation.outvars[0]] = operands
            joined = result.joined | _join_views(equation, operands)
            result = result._replace(joined=joined)
        # A pair is noted where it is made, and not again where it is used.
        result = result._replace(picked=result.picked - result.own)

        is_constant = before.is_constant
        is_of_indices = name in _OF_INDICES
        keeps_row = before.is_row and is_of_indices
        return result._replace(
            numbers=result.numbers if is_constant else frozenset(),
            is_constant=is_constant,
            is_index=before.is_index and not is_constant and is_of_indices,
            is_row=keeps_row or _finds_row(equation, operands),
        )

    def _look_at(
        self, equation: Any, operands: list[RowFacts], moved: list[RowFacts]
    ) -> None:
        """Notes an operation that takes rows of a share for rows of the batch.

        Args:
            equation: The operation.
            operands: The facts about its operands.
            moved: The same facts along the axes of the result.
        """
        name = equation.primitive.name
        line = self.line(equation)
        if name in _CUTS and self._cuts_mixed(equation, operands[0]):
            self.found.add(MixedRows(line))
        if name == "gather" and _chooses_rows(equation, operands):
            self.found.add(ChosenRows(line))

        if name.startswith(("gather", "scatter")):
            self._look_at_indices(equation, operands, line)
            return
        for rows, other in itertools.permutations(moved, 2):
            if _pairs_by_number(rows, other):
                self.found.add(OwnNumbers(line))

    def _cuts_mixed(self, equation: Any, rows: RowFacts) -> bool:
        """Returns whether rows of several replicas are cut off, as if for one view."""
        before = equation.invars[0].aval.shape
        after = equation.outvars[0].aval.shape
        for axis in rows.mixed:
            # Parts of the size of a share put the rows of the replicas in order.
            share_size = before[axis] // self._num_replicas
            if share_size < after[axis] < before[axis]:
                return True
        return False

    def _look_at_indices(
        self, equation: Any, operands: list[RowFacts], line: str
    ) -> None:
        """Notes constant indices that choose a gathered row for each other row."""
        table = operands[0]
        num_axes = equation.invars[0].aval.ndim
        columns = self._columns_of(equation, operands[1])
        for axis, column in columns.items():
            is_gathered = axis - num_axes in table.gathered
            if not is_gathered or not column.is_constant:
                continue
            for other_axis, rows in _rows_of_indices(equation, columns):
                # Only if the indices change from row to row, each row has its own.
                is_for_each_row = bool(rows & column.numbers)
                if other_axis == axis or not is_for_each_row:
                    continue
                if other_axis - num_axes in table.own:
                    self.found.add(OwnNumbers(line))
                elif table.mixed and other_axis not in columns:
                    self.found.add(MixedRows(line))

    def _columns_of(self, equation: Any, indices: RowFacts) -> dict[int, RowFacts]:
        """Returns the facts about the indices along each axis of a table, if known."""
        numbers = equation.params["dimension_numbers"]
        is_gather = equation.primitive.name == "gather"
        name = "start_index_map" if is_gather else "scatter_dims_to_operand_dims"
        axes = getattr(numbers, name)
        if len(axes) == 1:
            return {axes[0]: indices}
        # JAX concatenates the indices along several axes.
        columns = self._columns.get(equation.invars[1], [])
        return dict(zip(axes, columns, strict=False))


def _varies(value: np.ndarray, axis: int) -> bool:
    """Returns whether the numbers of an array change along an axis."""
    if value.shape[axis] < 2:
        return False
    first = value.take([0], axis)
    return bool((value != first).any())


def _join_views(equation: Any, operands: list[RowFacts]) -> frozenset[int]:
    """Returns the axis along which several views of the examples were concatenated."""
    axis = equation.params["dimension"] - equation.invars[0].aval.ndim
    num_views = sum(axis in operand.own for operand in operands)
    return frozenset({axis} if num_views > 1 else ())


def _gather(equation: Any, num_axes: int, facts: RowFacts) -> RowFacts:
    """Returns the facts about a value whose examples all replicas have gathered."""
    along = equation.params["all_gather_dimension"]
    is_tiled = equation.params["tiled"]
    gathered: set[int] = set()
    mixed: set[int] = set()
    for axis in facts.own | facts.joined:
        place = axis + num_axes
        num_result = num_axes
        if is_tiled and place != along:
            continue  # The examples lie along another axis than the replicas.
        if not is_tiled:
            # The replicas are a new axis, before which the other axes stay.
            num_result += 1
            if place >= along:
                place += 1
        gathered.add(place - num_result)
        if axis in facts.joined:
            mixed.add(place - num_result)
    return RowFacts(gathered=frozenset(gathered), mixed=frozenset(mixed))


def _number_rows(equation: Any) -> RowFacts:
    """Returns the facts about the numbers from 0 along one axis (`iota`)."""
    shape = equation.outvars[0].aval.shape
    axis = equation.params["dimension"]
    if shape[axis] == 1:
        return _CONSTANT
    from_last = axis - len(shape)
    return _CONSTANT._replace(numbers=frozenset({from_last}))


def _move(equation: Any, index: int, facts: RowFacts) -> RowFacts:
    """Returns the facts about an operand along the axes of the result."""
    has_axes = any(getattr(facts, kind) for kind in _AXES)
    if not has_axes:
        return facts  # Below, a token would have no shape.
    name = equation.primitive.name
    shape = equation.invars[index].aval.shape
    result = equation.outvars[0].aval.shape

    def move(axes: Iterable[int]) -> Iterator[tuple[int, int]]:
        """Yields the new axes, and how much longer they are."""
        for axis in axes:
            if axis + len(shape) < 0:
                continue  # A loop has taken the value apart along this axis.
            new_axes: Iterable[int] = [axis]
            if name != "split":
                new_axes = axes_of_result(equation, index, axis)
            for new_axis in new_axes:
                yield new_axis, result[new_axis] - shape[axis]

    def keep(axes: Iterable[int]) -> frozenset[int]:
        return frozenset(axis for axis, gained in move(axes) if gained == 0)

    def keep_all(axes: Iterable[int]) -> frozenset[int]:
        return frozenset(axis for axis, gained in move(axes) if gained >= 0)

    picked = keep(facts.picked)
    if name in _CUTS:
        shortened = {axis for axis, gained in move(facts.gathered) if gained < 0}
        picked |= shortened
    return facts._replace(
        own=keep(facts.own),
        joined=keep(facts.joined),
        gathered=keep_all(facts.gathered),
        mixed=keep_all(facts.mixed),
        picked=picked,
        numbers=frozenset(axis for axis, _ in move(facts.numbers)),
    )


def _chooses_rows(equation: Any, operands: list[RowFacts]) -> bool:
    """Returns whether numbers of the batch choose among the rows of this replica."""
    rows, indices = operands
    num_axes = equation.invars[0].aval.ndim
    axes = equation.params["dimension_numbers"].start_index_map
    if len(axes) != 1 or not indices.is_index:
        return False
    return axes[0] - num_axes in rows.own


def _finds_row(equation: Any, operands: list[RowFacts]) -> bool:
    """Returns whether an operation finds the number of a gathered row."""
    if equation.primitive.name not in ("argmax", "argmin"):
        return False
    num_axes = equation.invars[0].aval.ndim
    gathered = operands[0].gathered
    return any(axis - num_axes in gathered for axis in equation.params["axes"])


def _pairs_by_number(rows: RowFacts, other: RowFacts) -> bool:
    """Returns whether an operation pairs own rows with gathered rows by their number.

    Args:
        rows: The facts about one operand, along the axes of the result.
        other: The facts about the other operand.
    """
    if rows.own & other.picked:
        return True
    has_gathered = rows.is_row or bool(rows.gathered)
    has_own_numbers = other.is_constant and bool(rows.own & other.numbers)
    return has_gathered and has_own_numbers


def _rows_of_indices(
    equation: Any, columns: dict[int, RowFacts]
) -> Iterator[tuple[int, frozenset[int]]]:
    """Yields the axes of a table with a row for each index, and the index's axis."""
    numbers = equation.params["dimension_numbers"]
    is_gather = equation.primitive.name == "gather"
    name = "start_indices" if is_gather else "scatter_indices"
    num_axes = equation.invars[1].aval.ndim
    paired = getattr(numbers, f"{name}_batching_dims")
    for axis, row_axis in zip(numbers.operand_batching_dims, paired, strict=True):
        yield axis, frozenset({row_axis - num_axes})
    for axis, column in columns.items():
        yield axis, column.numbers if column.is_constant else frozenset()
