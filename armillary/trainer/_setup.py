"""The data, options and last loop of a step, as trainers and evaluators hold them."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from armillary._checks import check_instance
from armillary._copy_refusal import OfOneProcess, refuse_copy
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._source import Source, gives_single_examples
from armillary.distribute._strategy import Strategy
from armillary.trainer._datasets import (
    check_is_no_iterator,
    distribute,
    flatten_datasets,
)
from armillary.trainer._options import LoopOptions
from armillary.typing import PyTree


@dataclass
class Setup(OfOneProcess):
    """The data, options and loop of a step, separate from the user's attributes."""

    _why_not_copied = "its loop has threads and programs of this process"
    _copy_instead = (
        "Make a new object in the process that uses it, and give it the state: save "
        "and restore a `Checkpoint`, or copy a model by `nnx.clone`."
    )

    datasets: PyTree
    options: Any
    steps_per_loop: int | None = None
    loop: Any = None  # the last loop, a `Loop` or a `strategy.loop_class`
    has_warned: bool = False  # about data that resumes or ends in an unexpected way
    # The distributed datasets, and the nest from which they were made: its datasets and
    # its structure, because the program may put another dataset into the same nest.
    _parts: Sequence[DistributedDataset] | None = None
    _nest: PyTree = None
    _leaves: Sequence[Any] = ()
    _structure: Any = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self.loop is not None:
            raise refuse_copy("A trainer or an evaluator that has run steps", self)
        return object.__reduce_ex__(self, protocol)

    def distribute(self, strategy: Strategy) -> Sequence[DistributedDataset]:
        """Returns the datasets distributed by a strategy, and keeps their positions."""
        layout = strategy.layout
        before = self._find_parts()
        if before is not None and all(
            part.layout.of_strategy() == layout for part in before
        ):
            return before

        leaves, structure = flatten_datasets(self.datasets)
        parts = [distribute(leaf, strategy) for leaf in leaves]
        old_parts = self._parts if self._nest is self.datasets else None
        if old_parts is not None and structure == self._structure:
            pairs = zip(leaves, self._leaves, old_parts, parts, strict=True)
            for leaf, old_leaf, old, new in pairs:
                # A dataset that the user distributed is the same object before and
                # after.
                is_kept = leaf is old_leaf and old is not new
                if is_kept and old.is_repositionable:
                    new.set_state(old.get_state())
        self._parts = parts
        self._nest = self.datasets
        self._leaves = leaves
        self._structure = structure
        return parts

    def hold(self, strategy: Strategy) -> Sequence[DistributedDataset]:
        """Returns the datasets as they are distributed, by a strategy if they are not.

        Their positions are the same under every strategy. A save may be outside of the
        strategy that trains, and must not end the loop.
        """
        parts = self._find_parts()
        return self.distribute(strategy) if parts is None else parts

    def _find_parts(self) -> Sequence[DistributedDataset] | None:
        """Returns the distributed datasets, or `None` if the nest holds other ones."""
        if self._parts is None or self._nest is not self.datasets:
            return None
        if len(self._leaves) == 1 and self._leaves[0] is self._nest:
            return self._parts  # It may be a list of many batches, slow to flatten.
        leaves, structure = flatten_datasets(self.datasets)
        is_same = structure == self._structure
        if not is_same or not all(map(operator.is_, leaves, self._leaves)):
            return None
        return self._parts


def make_setup(
    argument: str,
    datasets: PyTree,
    options: LoopOptions | None,
    kind: type,
) -> Setup:
    """Returns the `Setup` for the datasets that a user gave as `argument`."""
    if options is not None:
        fix = f"Write `options=armillary.{kind.__name__}(...)`."
        check_instance("options", options, kind, fix)
    leaves, _ = flatten_datasets(datasets)
    for leaf in leaves:
        check_is_no_iterator(argument, leaf)
        if isinstance(leaf, tuple) and not leaf:
            raise TypeError(
                f"`{argument}` is (), which holds no dataset. Pass a dataset, or "
                "None for a step that makes its own data."
            )
        gives_batches = isinstance(leaf, Iterable | Callable | Source)
        if not gives_batches or isinstance(leaf, str | bytes | bytearray | dict):
            kind_of_leaf = type(leaf).__name__
            if gives_single_examples(leaf):
                raise TypeError(
                    f"`{argument}` has {leaf!r:.80} of type {kind_of_leaf}, which "
                    "gives single examples by index, but it must hold datasets. Use "
                    "`armillary.data.from_random_access(dataset, batch_size=...)`."
                )
            fix = "Use"
            if isinstance(datasets, list) and isinstance(datasets[0], dict):
                fix = (
                    "A list of rows becomes an array for each column: `arrays = {name: "
                    "np.array([float(row[name]) for row in rows]) for name in names}`. "
                    "Then use"
                )
            raise TypeError(
                f"`{argument}` has {leaf!r:.80} of type {kind_of_leaf}, but it "
                f"must hold datasets. {fix} `armillary.data.from_arrays(arrays, "
                "batch_size=...)`, or an iterable of batches."
            )
    return Setup(datasets, options or kind())
