"""The nest of datasets of a step, and its distributed datasets."""

from collections.abc import Iterator
from typing import Any

import jax

from armillary._checks import counted
from armillary.data._dataset import DistributedDataset
from armillary.data._iterator import DistributedIterator
from armillary.distribute._strategy import Strategy
from armillary.typing import PyTree


def flatten_datasets(nest: PyTree) -> tuple[list[Any], Any]:
    """Flattens a nest of datasets.

    A list that holds arrays is a single dataset, and its items are the batches. `None`
    is a nest without datasets, for a step that makes its own data.
    """
    if nest is None:
        return [], jax.tree.structure(None)
    leaves, structure = jax.tree.flatten(nest, is_leaf=_is_dataset)
    if not leaves or any(hasattr(leaf, "dtype") for leaf in leaves):
        return [nest], jax.tree.structure(0)
    return leaves, structure


def _is_dataset(value: Any) -> bool:
    if not isinstance(value, list | tuple):
        # JAX warns of iterators unless `is_leaf` returns true for them.
        return isinstance(value, Iterator)
    leaves = jax.tree.leaves(value, is_leaf=lambda part: isinstance(part, Iterator))
    return any(hasattr(leaf, "dtype") for leaf in leaves)


def check_is_no_iterator(name: str, dataset: Any) -> None:
    """Raises if a dataset is an iterator over a distributed dataset."""
    if isinstance(dataset, DistributedIterator):
        raise TypeError(
            f"`{name}` is an iterator over a distributed dataset, but it must be the "
            "dataset itself. Write `dataset` instead of `iter(dataset)`: each loop "
            "continues where the last loop ended, and a checkpoint has the position."
        )


def distribute(dataset: Any, strategy: Strategy) -> DistributedDataset:
    """Returns a distributed dataset; the strategy distributes other datasets."""
    check_is_no_iterator("dataset", dataset)
    if not isinstance(dataset, DistributedDataset):
        return strategy.distribute_dataset(dataset)
    if dataset.layout.of_strategy() != strategy.layout:
        raise ValueError(
            "The dataset was distributed over "
            f"{counted(dataset.layout.num_replicas, 'replica')} by another strategy "
            f"than {strategy!r}, under which the step runs. Run the step under the "
            "strategy of the dataset: with `strategy=strategy` for the `Controller`, "
            "`controller.train(...)` and `controller.evaluate()` do so, and so does "
            "`predict`. Without a controller, write `with strategy.scope():`. Or pass "
            "the dataset from before `distribute_dataset`."
        )
    return dataset
