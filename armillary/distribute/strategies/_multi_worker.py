"""Synchronous training on the devices of several processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from armillary._checks import answers_old_names, check_instance
from armillary._logging import logger
from armillary.cluster._communication import CommunicationOptions
from armillary.cluster._join import join_cluster
from armillary.cluster.resolvers._resolve import resolve_cluster
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._input_context import InputContext
from armillary.data._layout import BatchLayout
from armillary.data._options import InputOptions
from armillary.data.sources._indexed import IndexedDataset
from armillary.data.sources._source import as_source
from armillary.distribute._global_arrays import everywhere
from armillary.distribute.program._same_values import check_same_data
from armillary.distribute.replica._values import PerReplica, ReduceOp, is_per_replica
from armillary.distribute.strategies._layouts import ProcessLayout
from armillary.distribute.strategies._mirrored import MirroredStrategy
from armillary.typing import PyTree


@answers_old_names(
    communication="Write `communication_options=armillary.cluster.CommunicationOptions("
    "implementation=...)`, as in `tf.distribute` since 2.4."
)
class MultiWorkerMirroredStrategy(MirroredStrategy):
    """One replica per device of all processes, with equal variables on all of them.

    As `tf.distribute.MultiWorkerMirroredStrategy`: the same program runs in every
    process, and this strategy joins them. A program for `MirroredStrategy` runs under
    it unchanged, and gives the same numbers as one process with the same
    number of devices. Make it before anything uses a device::

        strategy = armillary.MultiWorkerMirroredStrategy()

    Every process must run the same steps, loops and saves. Process 0, the chief, alone
    writes log lines, summaries and files. In a job of a single process, and in an
    evaluator, it is a `MirroredStrategy` over the devices of this process.

    Args:
        cluster_resolver: Tells which process this is, and where the others are. By
            default `armillary.cluster.resolve_cluster()` finds out.
        communication_options: How values are exchanged between devices, and how long
            processes wait for each other.

    Raises:
        ClusterError: If a device was used before, or this process has joined another
            cluster.
        TypeError: If an argument is of another type.
        ValueError: If the platform cannot follow `communication_options`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
    ) -> None:
        fix = "Use one of `armillary.cluster`, or leave it out."
        if cluster_resolver is not None:
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver, fix)
        if (options := communication_options) is not None:
            check_instance("communication_options", options, CommunicationOptions, fix)
        self._cluster_resolver = cluster_resolver or resolve_cluster()
        self.peers = join_cluster(self._cluster_resolver, communication_options)
        super().__init__(
            sorted(
                self._find_devices(self.peers is not None),
                key=lambda device: (device.process_index, device.id),
            )
        )
        whole = everywhere(self._replica_mesh)
        # Made once: JAX compiles anew for each function object.
        self._replicate = jax.jit(lambda rows: rows, out_shardings=whole)

    def _find_devices(self, is_joined: bool) -> Sequence[Any]:
        """Returns the devices of this process, or of all if it has joined them."""
        return jax.devices() if is_joined else jax.local_devices()

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that described the cluster."""
        return self._cluster_resolver

    @property
    def layout(self) -> BatchLayout:
        """One row of a batch on each device, given by the process that has it."""
        if self.peers is None:
            return super().layout
        return ProcessLayout(self._replica_mesh, self.peers)

    def reduce(
        self, reduce_op: ReduceOp | str, value: PyTree, axis: int | None = None
    ) -> PyTree:
        """Combines the values of all replicas into one, the same in every process.

        All processes must call it. See `Strategy.reduce` for what it takes.
        """
        return super().reduce(reduce_op, self._collect(value), axis)

    def gather(self, value: PyTree, axis: int) -> PyTree:
        """Joins the values of all replicas along an axis, the same in every process.

        All processes must call it. See `Strategy.gather` for what it takes.
        """
        return super().gather(self._collect(value), axis)

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns a dataset that splits each *global* batch over replicas.

        Each process reads all of it, and keeps the rows of its own replicas: give the
        same data, in the same order, to all. What `from_arrays` and its like give is
        compared; any other data are not. Of arrays only the rows of its replicas are
        touched.

        Args:
            dataset: Anything `armillary.data.as_source` takes.
            options: How to treat remainders, and how far to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        if self.peers is not None and isinstance(dataset, IndexedDataset):
            check_same_data(self.peers, dataset)
        distributed = super().distribute_dataset(dataset, options)
        if self.peers is not None:
            logger.info(
                "data | %s: one data set for all; each of %d processes reads its "
                "batches and keeps the rows of its own replicas (%s)",
                as_source(dataset).name,
                self.peers.count,
                self._describe_shares(),
            )
        return distributed

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each replica's batch from its process's own.

        The data sets of the processes may differ in length: training ends with the
        shortest one, and a complete evaluation uses every example of all.

        Args:
            dataset_fn: Called once in each process with its `InputContext`; see
                `Strategy.distribute_datasets_from_function`.
            options: How to treat remainders, and whether to read ahead.

        Returns:
            A dataset to iterate with `for` or `next`, or to give to a trainer.
        """
        dataset = super().distribute_datasets_from_function(dataset_fn, options)
        if self.peers is None:
            # An evaluator restores what several workers saved, and trains on nothing.
            dataset.ignores_state = (
                not self._cluster_resolver.process_plan().is_training
            )
        else:
            logger.info(
                "data | a data set for each of %d processes, which reads it for its "
                "own replicas (%s)",
                self.peers.count,
                self._describe_shares(),
            )
        return dataset

    def _collect(self, value: PyTree) -> PyTree:
        """Returns values of all replicas as arrays of this process."""

        def collect(leaf: PerReplica) -> PerReplica:
            self.dispatch.wait()
            rows = self._replicate(leaf.array)
            self.dispatch.started(rows)
            local = jnp.asarray(np.asarray(rows))
            return jax.tree.map(lambda _: local, leaf)

        return _map_global(collect, value)

    def _describe_shares(self) -> str:
        assert self.peers is not None
        counts = [0] * self.peers.count
        for device in self._replica_mesh.devices.flat:
            counts[device.process_index] += 1
        each = f"{counts[0]} each" if len(set(counts)) == 1 else f"{counts}"
        return f"{self.num_replicas_in_sync} replicas, {each}"

    def __repr__(self) -> str:
        platform = self._replica_mesh.devices.flat[0].platform
        where = "1 process" if self.peers is None else f"{self.peers.count} processes"
        replicas = f"{self.num_replicas_in_sync} x {platform}"
        return f"{type(self).__name__}({replicas}, {where})"


def _is_global(leaf: Any) -> bool:
    """Returns whether a leaf holds values that this process cannot see."""
    return (
        is_per_replica(leaf)
        and isinstance(leaf.array, jax.Array)
        and not isinstance(leaf.array, Tracer)
        and not leaf.array.is_fully_addressable
    )


def _map_global(fn: Callable[[PerReplica], PerReplica], value: PyTree) -> PyTree:
    return jax.tree.map(
        lambda leaf: fn(leaf) if _is_global(leaf) else leaf,
        value,
        is_leaf=is_per_replica,
    )
