"""What strategies over the devices of several processes share."""

import numbers
from typing import Any

import jax
from jax.core import Tracer

from armillary._checks import check_instance
from armillary._jaxpr import is_in_trace
from armillary._logging import logger
from armillary.cluster._communication import CommunicationOptions
from armillary.cluster._join import join_cluster
from armillary.cluster.resolvers._resolve import resolve_cluster
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.data._dataset import DistributedDataset
from armillary.data._input_options import InputOptions
from armillary.data.sources._indexed import IndexedDataset
from armillary.data.sources._source import as_source
from armillary.distribute._global_arrays import as_local, is_array, is_divided
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._same_values import (
    check_same_arguments,
    check_same_data,
)
from armillary.distribute.replica._values import is_per_replica
from armillary.typing import PyTree


class JoinedStrategy(Strategy):
    """A strategy that joins the processes of its job, if there are several."""

    _cluster_resolver: ClusterResolver
    _unit = "replica"
    """What each process has some of."""

    def _join(
        self,
        cluster_resolver: ClusterResolver | None,
        communication_options: CommunicationOptions | None,
    ) -> None:
        """Sets `peers`. It must come before anything that uses a device."""
        fix = "Use one of `armillary.cluster`, or leave it out."
        if cluster_resolver is not None:
            check_instance("cluster_resolver", cluster_resolver, ClusterResolver, fix)
        if (options := communication_options) is not None:
            check_instance("communication_options", options, CommunicationOptions, fix)
        self._cluster_resolver = cluster_resolver or resolve_cluster()
        self.peers = join_cluster(self._cluster_resolver, communication_options)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver that described the cluster."""
        return self._cluster_resolver

    def distribute_dataset(
        self, dataset: Any, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Returns a dataset that splits each *global* batch over replicas.

        Each process reads all of it, and keeps the rows of its own devices: give the
        same data, in the same order, to all. What `from_arrays` and its like give is
        compared; any other data are not. Of arrays only the rows of its devices, and
        those that are compared, are touched. See `Strategy.distribute_dataset` for what
        it takes.
        """
        if self.peers is not None and isinstance(dataset, IndexedDataset):
            check_same_data(self.peers, dataset)
        distributed = super().distribute_dataset(dataset, options)
        if self.peers is not None:
            logger.info(
                "data | %s: one data set for all; each of %d processes reads its "
                "batches and keeps the rows of its own %ss (%s)",
                as_source(dataset).name,
                self.peers.count,
                self._unit,
                self._describe_shares(),
            )
        return distributed

    def _collect(self, value: PyTree) -> PyTree:
        if self.peers is not None and not is_in_trace():
            flat = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_per_replica)
            arrays = {
                f"value{jax.tree_util.keystr(path)}": _array_of(leaf)
                for path, leaf in flat
            }
            shared = {
                name: array
                for name, array in arrays.items()
                if is_array(array) or isinstance(array, numbers.Number)
                if not is_divided(array)
            }
            if shared:
                check_same_arguments(self.peers, shared)

        def collect(leaf: Any) -> Any:
            array = _array_of(leaf)
            is_here = not isinstance(array, jax.Array) or isinstance(array, Tracer)
            if is_here or array.is_fully_addressable:
                return leaf
            self.dispatch.wait()
            local = as_local(array)
            return jax.tree.map(lambda _: local, leaf)

        return jax.tree.map(collect, value, is_leaf=is_per_replica)

    def _describe_shares(self) -> str:
        """Returns how many replicas, or devices, the processes have."""
        assert self.peers is not None and self._mesh is not None
        counts = [0] * self.peers.count
        for device in self._mesh.devices.flat:
            counts[device.process_index] += 1
        each = f"{counts[0]} each" if len(set(counts)) == 1 else f"{counts}"
        return f"{sum(counts)} {self._unit}s, {each}"


def _array_of(leaf: Any) -> Any:
    return leaf.array if is_per_replica(leaf) else leaf


def order_devices(devices: Any) -> list[Any]:
    """Returns devices with those of a process side by side, alike in each process."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))
