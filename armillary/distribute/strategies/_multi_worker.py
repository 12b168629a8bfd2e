"""Synchronous training on the devices of several processes."""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from armillary._checks import answers_old_names
from armillary._logging import logger
from armillary.cluster._communication import CommunicationOptions
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._input_context import InputContext
from armillary.data._input_options import InputOptions
from armillary.data._layout import BatchLayout
from armillary.distribute.strategies._layouts import ReplicaLayout
from armillary.distribute.strategies._mirrored import MirroredStrategy
from armillary.distribute.strategies._processes import JoinedStrategy, order_devices


@answers_old_names(
    communication="Write `communication_options=armillary.cluster.CommunicationOptions("
    "implementation=...)`, as in `tf.distribute` since 2.4."
)
class MultiWorkerMirroredStrategy(JoinedStrategy, MirroredStrategy):
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
        reduce_dtype: As for `MirroredStrategy`.

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
        *,
        reduce_dtype: Any = None,
    ) -> None:
        self._join(cluster_resolver, communication_options)
        devices = order_devices(self._find_devices(self.peers is not None))
        super().__init__(devices, reduce_dtype=reduce_dtype)

    def _find_devices(self, is_joined: bool) -> Sequence[Any]:
        """Returns the devices of this process, or of all if it has joined them."""
        return jax.devices() if is_joined else jax.local_devices()

    @property
    def layout(self) -> BatchLayout:
        """One row of a batch on each device, given by the process that has it."""
        return ReplicaLayout(self._replica_mesh, self.peers)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Returns a dataset that takes each replica's batch from its process's own.

        The data sets of the processes may differ in length: training ends with the
        shortest one, and a complete evaluation uses every example of all.
        See `Strategy.distribute_datasets_from_function` for what it takes.
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

    def __repr__(self) -> str:
        platform = self._replica_mesh.devices.flat[0].platform
        where = "1 process" if self.peers is None else f"{self.peers.count} processes"
        replicas = f"{self.num_replicas_in_sync} x {platform}"
        return f"{type(self).__name__}({replicas}, {where})"
