"""Datasets as arguments of `fit`, `evaluate` and `predict` of Keras.

Keras takes batches from adapters. Here are the adapters for Armillary's datasets, and
the checks of the other arguments.
"""

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from armillary.data._dataset import DistributedDataset
from armillary.data.sources._arrays import IndexedDataset
from armillary.keras._dataset_creator import DatasetCreator
from armillary.keras._generators import copy_batches
from armillary.parameter_server._strategy import ParameterServerStrategy

if TYPE_CHECKING:
    from armillary.distribute._strategy import Strategy

STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}
"""The methods that take datasets, and the argument that bounds the batches of `x`."""

# The arguments that Keras takes next to arrays. A dataset has them in its batches.
_NEXT_TO_ARRAYS = ("y", "sample_weight", "class_weight")


def adapt_datasets(arguments: dict[str, Any], strategy: "Strategy", name: str) -> None:
    """Replaces Armillary's datasets by adapters from which Keras takes batches.

    Args:
        arguments: The arguments of the call, which change in place.
        strategy: The strategy that distributes the data.
        name: The method of the model, such as `"fit"`.
    """
    import keras

    dataset = arguments.get("x")
    others = [arguments.get(argument) for argument in _NEXT_TO_ARRAYS]
    if name == "fit" and _is_of_workers(dataset, strategy):
        _check_others(others, name)
        num_steps = arguments.get(STEPS[name])
        arguments["x"] = _adapt_for_workers(dataset, strategy, num_steps)
    else:
        _adapt_one(arguments, "x", dataset, others, STEPS[name], strategy, name)

    validation_data = arguments.get("validation_data")
    dataset, *others = keras.utils.unpack_x_y_sample_weight(validation_data)
    steps_name = "validation_steps"
    _adapt_one(
        arguments, "validation_data", dataset, others, steps_name, strategy, name
    )


def _adapt_one(
    arguments: dict[str, Any],
    key: str,
    dataset: Any,
    others: list[Any],
    steps_name: str,
    strategy: "Strategy",
    name: str,
) -> None:
    """Replaces one argument, if it is a dataset that this process reads."""
    if isinstance(dataset, DatasetCreator):
        _check_others(others, name)
        dataset = arguments[key] = dataset()
    if isinstance(dataset, IndexedDataset):
        dataset = strategy.distribute_dataset(dataset)
    if isinstance(dataset, DistributedDataset):
        _check_others(others, name)
        _check_dataset(dataset, name, steps_name, arguments.get(steps_name))
        arguments[key] = _as_adapter(dataset)


def copy_generated(arguments: dict[str, Any]) -> None:
    """Replaces generators by generators whose batches have arrays of their own."""
    for name in ("x", "validation_data"):
        data = arguments.get(name)
        if inspect.isgenerator(data):
            arguments[name] = copy_batches(data)


def _is_of_workers(dataset: Any, strategy: "Strategy") -> bool:
    """Returns whether each worker of parameter servers reads a dataset of its own."""
    if not isinstance(strategy, ParameterServerStrategy):
        return False
    if isinstance(dataset, DistributedDataset):
        return dataset.dataset_fn is not None
    return isinstance(dataset, DatasetCreator)


def _adapt_for_workers(dataset: Any, strategy: Any, steps: Any) -> Any:
    from armillary.keras._scheduled import make_worker_data

    if not steps:
        raise ValueError(
            f"`steps_per_epoch` is {steps!r}, but the data of `model.fit` is made on "
            f"the workers of {strategy!r}, so the end of an epoch is unknown. Pass the "
            "number of steps of all workers together, such as `steps_per_epoch=100`."
        )
    is_creator = isinstance(dataset, DatasetCreator)
    options = dataset.input_options if is_creator else dataset.options
    return make_worker_data(dataset.dataset_fn, options, strategy)


def _check_others(others: list[Any], name: str) -> None:
    """Raises if an argument is passed that must be part of the dataset."""
    for argument, value in zip(_NEXT_TO_ARRAYS, others, strict=False):
        if value is not None:
            raise ValueError(
                f"`model.{name}` was given `{argument}` together with a dataset. "
                f"Leave `{argument}` out, and let the dataset make batches `(x, y)` "
                "or `(x, y, sample_weight)`."
            )


def _check_dataset(
    dataset: DistributedDataset, name: str, steps_name: str, steps: Any
) -> None:
    """Raises if a dataset cannot be read whole."""
    if dataset.per_replica_batches or dataset.options.place_on_device:
        raise ValueError(
            f"`model.{name}` was given a dataset of per-replica batches, or one that "
            "stays on the device, but Keras divides global batches itself. Use "
            "`strategy.distribute_dataset`, or pass the dataset as it is."
        )
    if dataset.is_endless and not steps:
        raise ValueError(
            f"`model.{name}` was given a dataset that repeats its data without end. "
            f"Make it without `repeat=True`, or pass `{steps_name}=`."
        )


def _as_adapter(dataset: DistributedDataset) -> Any:
    """Returns an adapter from which Keras takes the global batches."""
    from keras.src.trainers.data_adapters import data_adapter

    base: Any = data_adapter.DataAdapter

    class SourceAdapter(base):
        """Reads the source of a distributed dataset, one pass for each epoch."""

        has_own_arrays = True  # Nobody writes to its batches.
        num_batches = dataset.num_global_batches
        batch_size = None
        partial_batch_size = None
        has_partial_batch = None
        _epoch = 0

        def get_jax_iterator(self) -> Iterator[Any]:
            batches = dataset.global_batches(self._epoch)
            for number, batch in enumerate(batches, start=1):
                # ORDER: the epoch counts before its last batch is given away, because
                # Keras does not read further after it.
                if number == self.num_batches:
                    self._epoch += 1
                yield batch
            if self.num_batches is None:
                self._epoch += 1

    return SourceAdapter()
