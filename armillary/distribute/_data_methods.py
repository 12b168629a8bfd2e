"""The methods of a strategy that divide data, or values, among its replicas."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from armillary._checks import check_instance, check_takes
from armillary._traceback import hides_frames
from armillary.data._dataset import DistributedDataset
from armillary.data._iterator import DistributedIterator
from armillary.data._layout import InputContext, InputOptions, first_replicas
from armillary.data.sources._arrays import ArrayDataset, from_arrays
from armillary.data.sources._libraries import as_source
from armillary.data.sources._source import Source
from armillary.distribute._placed import Placed
from armillary.state._adapters import follow_strategies
from armillary.typing import PyTree

OPTIONS_FIX = 'Use `armillary.data.InputOptions(remainder="exact")`.'


class ValueContext(NamedTuple):
    """The argument of a function of `distribute_values_from_function`.

    Attributes:
        replica_id_in_sync_group: The replica that gets the value.
        num_replicas_in_sync: The number of replicas.
    """

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


class DataMethods(Placed):
    """The part of a strategy that makes its distributed datasets."""

    # Whether this process trains. An evaluator does not share in the workers' data.
    _trains = True

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns a dataset that splits each *global* batch over replicas.

        Each process reads the data, and keeps the rows of its own devices. From sources
        of `from_arrays`, `from_random_access` and similar functions, it reads only
        these rows. Pass the same data, in the same order, to all processes. Such
        sources are compared between processes.

        Args:
            dataset: Anything `armillary.data.as_source` takes.
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        check_instance("options", options, InputOptions | None, OPTIONS_FIX)
        follow_strategies()  # `fit` may read it.
        source = as_source(dataset)
        self._check_dataset(source)
        return DistributedDataset(source, self.layout, options=options)

    def _check_dataset(self, source: Source) -> None:
        """Raises if a source for all processes differs between them."""

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each replica's batches from a user's function.

        The datasets of several processes may differ in length. Training ends with the
        shortest dataset, and a complete evaluation uses every example of all of them.
        A trainer under a `ParameterServerStrategy` calls `dataset_fn` again on each
        worker.

        Under a `ShardedStrategy` over several processes, each input pipeline gives one
        batch to each step, of the size `get_per_replica_batch_size(...)`. Processes
        whose devices hold the same examples, such as processes along a `tensor` axis,
        are one pipeline: they must read the same data, and are compared.

        Args:
            dataset_fn: Called once in each process with its `InputContext`. As in
                `tf.distribute`, it returns a dataset batched with the *per-replica*
                batch size (see `InputContext.get_per_replica_batch_size`).
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.

        Raises:
            ValueError: Under a `ShardedStrategy`, if its mesh gives no equal shares of
                a batch to the processes.
        """
        check_takes("dataset_fn", dataset_fn, "input_context")
        check_instance("options", options, InputOptions | None, OPTIONS_FIX)
        dataset = DistributedDataset(
            dataset_fn(self.input_context),
            self.layout.of_pipelines(),
            per_replica_batches=True,
            options=options,
        )
        dataset.dataset_fn = dataset_fn
        dataset.ignores_state = not self._trains
        return dataset

    def distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PyTree:
        """Returns a `PerReplica` with the result of `value_fn` for each replica.

        Each process calls `value_fn` for its own replicas.

        Args:
            value_fn: Gets a `ValueContext` and returns that replica's value, a pytree
                of arrays of the same shapes for all replicas.

        Returns:
            The values, on the replicas' devices. On one replica, its value itself.
        """
        check_takes("value_fn", value_fn, "context")
        layout = self.layout
        count = self.num_replicas_in_sync
        values = [
            value_fn(ValueContext(replica, count)) for replica in layout.local_replicas
        ]
        if not layout.stacked:
            return layout.place(values[0])
        if count == 1:
            return layout.replicate(values[0])
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *values)
        return layout.wrap(layout.place(stacked), first_replicas(count))

    @hides_frames
    def make_numpy_dataset(
        self,
        arrays: PyTree,
        *,
        batch_size: int,
        shuffle_seed: int | None = None,
        repeat: bool = False,
        drop_remainder: bool = False,
    ) -> ArrayDataset:
        """Returns a dataset of the rows of `arrays`; see `armillary.data.from_arrays`.

        To spread its batches over the replicas, give it to `distribute_dataset`. A
        dataset here has batches, so the batch size is an argument, where a program for
        TensorFlow calls `dataset.batch`.

        Args:
            arrays: As in `from_arrays`.
            batch_size: Examples in one batch of all replicas together.
            shuffle_seed: As in `from_arrays`.
            repeat: As in `from_arrays`.
            drop_remainder: As in `from_arrays`.

        Returns:
            The dataset.
        """
        return from_arrays(
            arrays,
            batch_size=batch_size,
            shuffle_seed=shuffle_seed,
            repeat=repeat,
            drop_remainder=drop_remainder,
        )

    def make_dataset_iterator(self, dataset: Any) -> DistributedIterator:
        """Returns an iterator that splits each *global* batch over replicas.

        It is `iter(strategy.distribute_dataset(dataset))`, for programs written for
        TensorFlow 1. Its `initialize` begins the next pass over the data.

        Args:
            dataset: Anything `armillary.data.as_source` takes.

        Returns:
            An iterator for `next`, for `experimental_run`, or for a `for` loop.
        """
        return iter(self.distribute_dataset(dataset))

    def make_input_fn_iterator(
        self, input_fn: Callable[[InputContext], Any]
    ) -> DistributedIterator:
        """Returns an iterator over the dataset that a function returns.

        It is `iter(strategy.distribute_datasets_from_function(input_fn))`, for programs
        written for TensorFlow 1.

        Args:
            input_fn: As `dataset_fn` of `distribute_datasets_from_function`.

        Returns:
            An iterator for `next`, for `experimental_run`, or for a `for` loop.
        """
        return iter(self.distribute_datasets_from_function(input_fn))
