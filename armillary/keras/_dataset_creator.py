"""A function that makes the data of `fit` in the process that reads them."""

from collections.abc import Callable
from typing import Any

from armillary._checks import check_instance, check_takes
from armillary.data._layout import InputContext, InputOptions
from armillary.distribute._data_methods import OPTIONS_FIX


class DatasetCreator:
    """Makes the data of `model.fit` (`tf.keras.utils.experimental.DatasetCreator`).

    Under a `ParameterServerStrategy` each worker calls the function, and reads its own
    data. Under any other strategy this process calls it once, with an `InputContext` of
    one pipeline and one replica, because `fit` divides global batches by itself::

        def dataset_fn(context):
            size = context.get_per_replica_batch_size(64)
            return armillary.data.from_arrays((x, y), batch_size=size, repeat=True)

        creator = armillary.keras.DatasetCreator(dataset_fn)
        model.fit(creator, epochs=10, steps_per_epoch=20)

    Workers take batches when they are free, so no worker knows how many it will need.
    Under a `ParameterServerStrategy` the data therefore has to repeat, and `fit` needs
    `steps_per_epoch`: the steps of all workers together.

    Args:
        dataset_fn: Function of one `armillary.data.InputContext`. It returns
            anything that a strategy distributes: batches `(x, y)` or
            `(x, y, sample_weight)`.
        input_options: How each worker treats its batches.

    Raises:
        TypeError: If `dataset_fn` cannot be called, or `input_options` is not an
            `InputOptions`.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        check_takes("dataset_fn", dataset_fn, "input_context")
        check_instance("input_options", input_options, InputOptions | None, OPTIONS_FIX)
        self.dataset_fn = dataset_fn
        self.input_options = input_options

    def __call__(self, context: InputContext | None = None) -> Any:
        """Returns the dataset of one pipeline, by default the only one."""
        return self.dataset_fn(InputContext() if context is None else context)
