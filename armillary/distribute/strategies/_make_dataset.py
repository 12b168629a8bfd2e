"""One call from whatever holds data to a dataset that a trainer takes."""

import contextlib
import functools
import inspect
from collections.abc import Collection
from typing import Any

from armillary._checks import check_instance
from armillary.data._dataset import DistributedDataset
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute._strategy import Strategy
from armillary.distribute.replica._context import get_strategy


def make_distributed_dataset(
    strategy: Strategy | None,
    dataset_or_fn: Any,
    *args: Any,
    input_options: InputOptions | None = None,
    **kwargs: Any,
) -> DistributedDataset:
    """Distributes a data set, or what a function returns, over a strategy's replicas.

    After `orbit.utils.make_distributed_dataset`. Three forms::

        make_distributed_dataset(strategy, dataset)                 # global batches
        make_distributed_dataset(strategy, make_data, batch_size=256)   # the same
        make_distributed_dataset(strategy, make_shard, batch_size=256)  # per replica

    where the last function takes an `input_context`, by which it knows its share, and
    returns batches of the *per-replica* size
    (`input_context.get_per_replica_batch_size(batch_size)`). In Orbit the batches of
    every function are of the per-replica size; here those of one without an
    `input_context` are global ones.

    Args:
        strategy: The strategy, or `None` for the one in effect (`get_strategy()`).
        dataset_or_fn: Anything `armillary.data.as_source` takes, batched with the
            global batch size; or a function that returns such a data set.
        *args: Positional arguments for the function.
        input_options: How to treat remainders, and how far to read ahead.
        **kwargs: Keyword arguments for the function.

    Returns:
        A dataset to iterate, or to give to a trainer or an evaluator.

    Raises:
        TypeError: If arguments are given without a function to pass them to, or do not
            fit the function.
    """
    fix = "Use a strategy such as `armillary.MirroredStrategy()`."
    check_instance("strategy", strategy, Strategy | None, fix)
    fix = 'Use `armillary.InputOptions(remainder="exact")`.'
    check_instance("input_options", input_options, InputOptions | None, fix)
    if strategy is None:
        strategy = get_strategy()
    is_function = callable(dataset_or_fn) and not hasattr(dataset_or_fn, "__iter__")
    if not is_function:
        if args or kwargs:
            given = [*(repr(arg) for arg in args), *kwargs]
            raise TypeError(
                f"`make_distributed_dataset` got {', '.join(given)} for a function, "
                f"but `dataset_or_fn` is a {type(dataset_or_fn).__name__}. Pass a "
                "function that makes the data set, or leave the arguments out."
            )
        return strategy.distribute_dataset(dataset_or_fn, input_options)
    names: Collection[str] = ()
    with contextlib.suppress(ValueError):  # Some builtins tell nothing.
        names = inspect.signature(dataset_or_fn).parameters
    if "input_context" in names:

        def make_shard(context: InputContext) -> Any:
            return dataset_or_fn(*args, input_context=context, **kwargs)

        return strategy.distribute_datasets_from_function(make_shard, input_options)
    made = dataset_or_fn(*args, **kwargs)
    if inspect.isgenerator(made):
        # A generator function can begin again; the generator it made cannot.
        made = functools.partial(dataset_or_fn, *args, **kwargs)
    return strategy.distribute_dataset(made, input_options)
