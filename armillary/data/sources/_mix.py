"""Mixtures of sources: one endless order of rows, with weights that change at steps.

The number of a row decides everything about it. The weights give its source, and the
earlier rows of this source. These rows give the epoch of the source, and a place in the
order of that epoch. So a process finds each row without reading the rows before it.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from armillary._checks import (
    check_not_negative_int,
    check_positive_int,
    list_lines,
)
from armillary.data.sources._arrays import (
    ArrayDataset,
    IndexedDataset,
    IndexedIterator,
    fingerprint,
)
from armillary.data.sources._batch import is_nest_of_arrays, named_leaves
from armillary.data.sources._examples import check_is_plain
from armillary.data.sources._random_access import RandomAccessDataset
from armillary.data.sources._shuffle import make_order
from armillary.data.sources._take import check_rows, empty_aligned, name_rows
from armillary.data.sources._weights import Schedule, check_weights
from armillary.errors import DatasetStateError
from armillary.typing import Batch, PyTree

_MAX_LETTERS = 200
"""The letters of weights that processes send each other."""
_PLAIN = (1, None, False, False)
"""The options of a dataset of which only the examples are used."""


def mix(
    sources: Mapping[str, Any],
    weights: Any = None,
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    num_threads: int = 1,
) -> "MixedDataset":
    """Returns an endless dataset that takes its rows from several sources.

    Weights may change at steps::

        data = armillary.data.mix(
            {"web": web, "code": code},
            {0: [0.7, 0.3], 10_000: [0.5, 0.5]},
            batch_size=256,
            shuffle_seed=0,
        )

    The weights decide the source of each row without random draws. The rows of each
    source are always within 2 rows of its share, even if weights change at each step.
    With constant weights and up to three sources, they are within 1 row. Each source
    has epochs of its own, and an order for each of them. It repeats a row only after
    all of its rows.

    A position is the number of rows that were used. It is valid for any number of
    processes and replicas. Weights of later steps may be different in a resumed run,
    and so may the batch size, if weights have not changed at an earlier step. Keep one
    iterator: each `iter` begins another pass, at step 0 of the weights.

    Args:
        sources: The sources by name. A source is a pytree of arrays, as in
            `from_arrays`; examples by number, as in `from_random_access`, such as
            results of `pack` and `select`; or a dataset of `from_arrays` and similar
            functions, of which only the examples are used. All examples must have the
            same structure, shapes and dtypes.
        weights: The weight of each source, as a list in the order of `sources`, or as
            a dictionary by name. A dictionary by step has such weights for each step
            from which they are used, and begins with step 0. A step is one batch. If a
            function with an `InputContext` returns the mixture, it is one batch of a
            replica. Weights need no sum of 1. By default, they are the numbers of
            examples.
        batch_size: As in `from_arrays`.
        shuffle_seed: Seed of the orders of all sources. With None, each source keeps
            its order.
        num_threads: As in `from_random_access`, for sources of examples by number.

    Returns:
        A dataset that never ends.

    Raises:
        TypeError: If `sources` is not a dictionary of sources, examples of the sources
            have different types, or `weights` is of a wrong type.
        ValueError: If a source has no example, a source is a dataset with an order of
            its own, or weights, steps or another argument are wrong.
    """
    return MixedDataset(sources, weights, batch_size, shuffle_seed, num_threads)


class MixedDataset(IndexedDataset):
    """Rows of several sources in batches; made by `mix`, which documents it."""

    name = "mixture"
    has_own_order = True

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Any,
        batch_size: int,
        shuffle_seed: int | None,
        num_threads: int,
    ) -> None:
        num_threads = check_positive_int("num_threads", num_threads)
        is_named = isinstance(sources, Mapping) and all(
            isinstance(name, str) for name in sources
        )
        if not is_named or not sources:
            raise TypeError(
                f"`sources` is {sources!r:.80} of type {type(sources).__name__}, but "
                "it must be a dictionary with at least one source and its name, such "
                'as `{"web": web, "code": code}`.'
            )
        self._sources = {
            name: _as_indexed(source, f"sources[{name!r}]", num_threads)
            for name, source in sources.items()
        }
        sizes = [source.num_examples for source in self._sources.values()]
        # The number of the first example of each source, and of all examples.
        self._starts = np.cumsum([0, *sizes])
        super().__init__(
            "sources", int(self._starts[-1]), batch_size, shuffle_seed, True, False
        )
        names = list(self._sources)
        checked = check_weights(sizes if weights is None else weights, names)
        self._schedule = Schedule(checked, self.batch_size)
        self.rows_at_once = max(
            source.rows_at_once for source in self._sources.values()
        )
        _check_types({n: source.row_types for n, source in self._sources.items()})

    def count_rows(self, num_steps: int) -> dict[str, int]:
        """Returns the number of rows of each source in the first steps.

        Args:
            num_steps: The number of batches.
        """
        num_steps = check_not_negative_int("num_steps", num_steps)
        return self.count_used(num_steps * self.batch_size)

    def count_used(self, num_rows: int) -> dict[str, int]:
        """Returns the number of rows of each source among the first `num_rows`."""
        counts = self._schedule.count(num_rows)
        return dict(zip(self._sources, counts, strict=True))

    @functools.cached_property
    def row_types(self) -> PyTree:
        return next(iter(self._sources.values())).row_types

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the rows of these numbers, which count all sources in turn."""
        owners = np.searchsorted(self._starts, rows, side="right") - 1
        types, structure = jax.tree.flatten(self.row_types)
        leaves = [empty_aligned((len(rows), *row.shape), row.dtype) for row in types]
        for number, name in enumerate(self._sources):
            own = np.flatnonzero(owners == number)
            if not len(own):
                continue
            part = self._read_source(name, rows[own] - self._starts[number])
            for leaf, read in zip(leaves, jax.tree.leaves(part), strict=True):
                leaf[own] = read
        return structure.unflatten(leaves)

    def _read_source(self, name: str, rows: np.ndarray) -> Batch:
        """Returns rows of one source.

        Raises:
            TypeError: If they do not have the types of the first example. NumPy would
                repeat a row of one number, and convert numbers.
        """
        part = self._sources[name].read_rows(rows)
        argument = f"sources[{name!r}]"
        check_rows(part, self.row_types, lambda: name_rows(argument, rows))
        return part

    def make_order(self, epoch: int) -> Any:
        """Returns the order of all rows; `epoch` counts the passes of a program."""
        return _MixedOrder(self._schedule, self._starts, self.shuffle_seed, epoch)

    def iterate(
        self, epoch: int, read_rows: Callable[[np.ndarray], Batch]
    ) -> IndexedIterator:
        return _MixedIterator(self, epoch, read_rows)

    def fingerprints(self) -> dict[str, Any]:
        """Returns the fingerprints of each source, and their names."""
        found: dict[str, Any] = {"sources": list(self._sources)}
        for name, source in self._sources.items():
            found[f"{name}: examples"] = source.num_examples
            for part, text in source.fingerprints().items():
                found[f"{name}: {part}"] = text
        return found

    @property
    def shared_options(self) -> dict[str, Any]:
        # Not in the order of a position, because later weights may change in a
        # resumed run: the state counts the used rows of each source instead.
        weights = repr(self._schedule.values)
        shown = f"{weights:.{_MAX_LETTERS}}"
        if shown != weights:
            shown += f"... {fingerprint(weights.encode())}"
        return {**super().shared_options, "weights": shown}


def _as_indexed(source: Any, argument: str, num_threads: int) -> IndexedDataset:
    """Returns the examples of a source as rows with numbers."""
    if isinstance(source, IndexedDataset):
        check_is_plain(source, argument)
        return source
    if is_nest_of_arrays(source):
        return ArrayDataset(source, *_PLAIN, argument=argument)
    return RandomAccessDataset(
        source, *_PLAIN, num_threads=num_threads, argument=argument
    )


def _check_types(by_name: Mapping[str, PyTree]) -> None:
    """Raises if the examples of the sources differ in their types.

    Raises:
        TypeError: If structure, shapes or dtypes are different.
    """
    described: dict[str, str] = {}
    structures: set[Any] = set()
    for name, types in by_name.items():
        leaves = [
            f"{path}: {leaf.dtype} {leaf.shape}" for path, leaf in named_leaves(types)
        ]
        described[name] = ", ".join(leaves)
        structures.add(jax.tree.structure(types))
    if len(structures) > 1 or len(set(described.values())) > 1:
        lines = [f"{name}: {text}" for name, text in described.items()]
        raise TypeError(
            "`sources` have examples of different types, but all examples must have "
            f"the same structure, shapes and dtypes:\n{list_lines(lines)}\n"
            "Convert the examples: select the same names, give numbers a dtype, as in "
            "`np.asarray(value, np.float32)`, and bring sequences to one length, as "
            "`armillary.data.pack` does."
        )


class _MixedOrder:
    """The numbers of the rows of a mixture, in an order without end.

    Args:
        schedule: The source of each row.
        starts: The number of the first example of each source, and of all examples.
        seed: The seed of the orders of all sources.
        passes: The number of the pass over the mixture, which has orders of its own.
    """

    def __init__(
        self, schedule: Schedule, starts: np.ndarray, seed: int | None, passes: int
    ) -> None:
        self._schedule = schedule
        self._starts: list[int] = starts.tolist()
        self._seed = seed
        self._passes = passes
        # The epoch that each source is in, and its order.
        self._orders: dict[int, tuple[int, Sequence[int]]] = {}

    def __getitem__(self, rows: slice) -> np.ndarray:
        sources, earlier = self._schedule.choose(rows.start, rows.stop)
        numbers = np.empty(len(sources), np.int64)
        for source in np.unique(sources).tolist():
            own = np.flatnonzero(sources == source)
            numbers[own] = self._starts[source] + self._take(source, earlier[own])
        return numbers

    def _take(self, source: int, earlier: np.ndarray) -> np.ndarray:
        """Returns the rows of a source that follow a number of its earlier rows."""
        size = self._starts[source + 1] - self._starts[source]
        epochs, places = np.divmod(earlier, size)
        if self._seed is None:
            return places
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            order = np.asarray(self._find_order(source, size, epoch))
            places[here] = order[places[here]]
        return places

    def _find_order(self, source: int, size: int, epoch: int) -> Sequence[int]:
        kept = self._orders.get(source)
        if kept is None or kept[0] != epoch:
            order = make_order(size, self._seed, epoch, source, self._passes)
            kept = self._orders[source] = (epoch, order)
        return kept[1]


class _MixedIterator(IndexedIterator):
    """Yields batches of a mixture; a position also counts the rows of each source."""

    _dataset: "MixedDataset"

    def get_state(self) -> dict[str, Any]:
        _, index = self._place
        return {**super().get_state(), "used": self._dataset.count_used(index)}

    def set_state(self, state: dict[str, Any]) -> None:
        index = state["index"]
        used = self._dataset.count_used(index)
        saved = state["used"]
        if saved != used:
            lines = [
                f"{name}: {saved.get(name, 0)} in the state, {used.get(name, 0)} in "
                "the program"
                for name in {**saved, **used}
                if saved.get(name, 0) != used.get(name, 0)
            ]
            raise DatasetStateError(
                f"`state` is a place in a mixture after {index} rows, which other "
                f"weights have chosen. The used rows of each source:\n"
                f"{list_lines(lines)}\n"
                "Pass the weights and the batch size that the state was saved with, "
                "and change only weights of later steps."
            )
        self._go_to(state["epoch"], index)
