"""Synchronous training on the devices of several processes, or of a TPU slice."""

import importlib.util
import numbers
import os
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.core import Tracer

from armillary._checks import check_instance
from armillary._jaxpr import is_in_trace
from armillary._planned import is_planning
from armillary.cluster._communication import (
    CommunicationImplementation,
    CommunicationOptions,
)
from armillary.cluster._join import join_cluster
from armillary.cluster._peers import ALONE, Peers
from armillary.cluster.resolvers._resolver import (
    ClusterResolver,
    SimpleClusterResolver,
    check_is_no_server,
)
from armillary.cluster.resolvers._schedulers import ScheduledResolver, resolve_cluster
from armillary.data.sources._arrays import find_indexed
from armillary.data.sources._source import Source
from armillary.distribute._global_arrays import as_local, is_array_or_number, is_divided
from armillary.distribute._strategy import Strategy
from armillary.distribute.program._compare import check_same, check_same_data
from armillary.distribute.replica._axis import DEFAULT_AXIS_NAME, check_axis_name
from armillary.distribute.replica._cross_device import CrossDeviceOps
from armillary.distribute.replica._values import (
    array_of,
    is_per_replica,
)
from armillary.distribute.strategies._layouts import as_devices
from armillary.distribute.strategies._single import MirroredStrategy
from armillary.errors import ClusterError
from armillary.typing import PyTree


class JoinedStrategy(Strategy):
    """A strategy that joins the processes of its job, if there are several."""

    _cluster_resolver: ClusterResolver
    _peers: Peers = ALONE

    def _join(
        self,
        cluster_resolver: ClusterResolver | None,
        communication_options: CommunicationOptions | None,
    ) -> None:
        """Joins the processes of the job, before anything uses a device."""
        _check_no_implementation(cluster_resolver)
        fix = "Use one of `armillary.cluster`, or leave it out."
        kind = ClusterResolver | None
        check_instance("cluster_resolver", cluster_resolver, kind, fix)
        kind = CommunicationOptions | None
        check_instance("communication_options", communication_options, kind, fix)
        if is_planning():
            # The plan of a job is made by one process, wherever it runs.
            self._cluster_resolver = SimpleClusterResolver({})
            return

        # Before anything uses a device.
        self._cluster_resolver = cluster_resolver or resolve_cluster()
        check_is_no_server(self._cluster_resolver)
        self._peers = join_cluster(self._cluster_resolver, communication_options)
        plan = self._cluster_resolver.process_plan()
        is_found_alone = self._peers.is_alone and plan.num_processes is None
        if is_found_alone and isinstance(self._cluster_resolver, ScheduledResolver):
            self._cluster_resolver.hold_alone()

        self._trains = not self._peers.is_alone or plan.is_training

    @property
    def cluster_resolver(self) -> ClusterResolver:
        return self._cluster_resolver

    def _check_dataset(self, source: Source) -> None:
        dataset = None if self._peers.is_alone else find_indexed(source)
        if dataset is not None:
            check_same_data(self._peers, dataset)

    def _collect(self, value: PyTree) -> PyTree:
        """Returns values of all processes as arrays of this process.

        Values that replicas share are compared first: no error would show a difference.
        """
        if not self._peers.is_alone and not is_in_trace():
            shared = _find_shared(value)
            if shared:
                check_same(self._peers, "the values for `reduce` or `gather`", shared)

        def collect(leaf: Any) -> Any:
            array = array_of(leaf)
            is_here = not isinstance(array, jax.Array) or isinstance(array, Tracer)
            if is_here or array.is_fully_addressable:
                return leaf
            self.dispatch.wait()
            local = as_local(array)
            return jax.tree.map(lambda _: local, leaf)

        return jax.tree.map(collect, value, is_leaf=is_per_replica)


def _find_shared(value: PyTree) -> dict[str, Any]:
    """Returns the arrays and numbers that each process has completely, by path."""
    shared: dict[str, Any] = {}
    leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=is_per_replica)
    for keys, leaf in leaves:
        array = array_of(leaf)
        is_number = isinstance(array, numbers.Number)
        is_compared = is_number or is_array_or_number(array)
        if is_compared and not is_divided(array):
            path = jax.tree_util.keystr(keys)
            shared[f"value{path}"] = array
    return shared


def _check_no_implementation(cluster_resolver: Any) -> None:
    """Raises if the first argument is a communication, as in old TensorFlow guides."""
    choices = list(CommunicationImplementation)
    if isinstance(cluster_resolver, str) and cluster_resolver.upper() in choices:
        name = str(cluster_resolver).upper()
        raise TypeError(
            f"`cluster_resolver` is {cluster_resolver!r}, which is a way to exchange "
            "values, and so an option. Write `communication_options="
            f'armillary.cluster.CommunicationOptions(implementation="{name}")`.'
        )


def order_devices(devices: Any) -> list[Any]:
    """Returns devices ordered by process, in the same order in each process."""
    return sorted(devices, key=lambda device: (device.process_index, device.id))


class MultiWorkerMirroredStrategy(JoinedStrategy, MirroredStrategy):
    """One replica per device of all processes, with equal variables on all of them.

    As `tf.distribute.MultiWorkerMirroredStrategy`: the same program runs in every
    process, and this strategy joins them. A program for `MirroredStrategy` runs under
    it unchanged, and gives the same numbers as one process with as many devices. If
    there are several processes, make it before anything uses a device::

        strategy = armillary.MultiWorkerMirroredStrategy()

    Every process must run the same steps, loops and saves. Only process 0, the chief,
    writes log lines, summaries and files. In a job of a single process, and in an
    evaluator, it is a `MirroredStrategy` over the devices of this process.

    Args:
        cluster_resolver: Describes this process and the other processes. By default,
            `armillary.cluster.resolve_cluster()` finds the resolver.
        communication_options: The way to exchange values between devices, and the time
            that processes wait for each other.
        cross_device_ops: As for `MirroredStrategy`. `HierarchicalCopyAllReduce()` takes
            the devices of each process as a group.
        axis_name: As for `MirroredStrategy`.

    Raises:
        ClusterError: If a device was used before the processes joined, this process has
            joined another cluster, or it is a `ps`.
        TypeError: If an argument is of the wrong type.
        ValueError: If the platform cannot follow `communication_options`, or
            `axis_name` is empty.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
    ) -> None:
        check_axis_name(axis_name)
        self._join(cluster_resolver, communication_options)
        devices = order_devices(self._find_devices(not self._peers.is_alone))
        super().__init__(devices, cross_device_ops, axis_name=axis_name)

    def _find_devices(self, is_joined: bool) -> Sequence[Any]:
        return jax.devices() if is_joined else as_devices("devices", None)

    def __repr__(self) -> str:
        count = self._peers.count
        return self._show(f", {count} process{'' if count == 1 else 'es'}")


class TPUStrategy(MultiWorkerMirroredStrategy):
    """One replica per TPU core, with equal variables on all of them.

    As `tf.distribute.TPUStrategy`: a `MultiWorkerMirroredStrategy` of the machines of a
    slice. Nothing must be connected or initialized before. On a single machine, the
    program may call `jax.devices()` first. On several machines, make the strategy
    first.

    Args:
        resolver: Describes this machine and the other machines. By default,
            `armillary.cluster.resolve_cluster()` finds the resolver.
        axis_name: As for `MirroredStrategy`.

    Raises:
        ClusterError: If JAX has no TPU here, a device was used before the machines of a
            job joined, this process has joined another cluster, or it is a `ps`.
        TypeError: If `resolver` or `axis_name` is of the wrong type.
        ValueError: If `axis_name` is empty.
    """

    _kind = "tpu"

    def __init__(
        self,
        resolver: ClusterResolver | None = None,
        *,
        axis_name: str = DEFAULT_AXIS_NAME,
    ) -> None:
        check_axis_name(axis_name)
        fix = "Use one of `armillary.cluster`, or leave it out."
        check_instance("resolver", resolver, ClusterResolver | None, fix)
        # Check before joining, which would wait for other machines in vain.
        needs_tpu = self._kind == "tpu" and not is_planning()
        reason = _why_there_is_no_tpu() if needs_tpu else None
        if reason is not None:
            _refuse(reason)
        super().__init__(resolver, axis_name=axis_name)

    def _find_devices(self, is_joined: bool) -> Sequence[Any]:
        if is_planning():
            return as_devices("devices", None)
        find = jax.devices if is_joined else jax.local_devices
        try:
            return find(backend=self._kind)
        except RuntimeError as error:
            _refuse(f"({error})", error)


def _why_there_is_no_tpu() -> str | None:
    """Returns the reason why JAX cannot have a TPU; None if it may have one."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "tpu" not in platforms.split(","):
        return f"(`JAX_PLATFORMS` allows only {platforms})"

    is_installed = importlib.util.find_spec("libtpu") is not None
    if not is_installed and "TPU_LIBRARY_PATH" not in os.environ:
        return "(the package `libtpu` is not installed)"
    return None


def _refuse(reason: str, cause: Exception | None = None) -> NoReturn:
    raise ClusterError(
        f"`TPUStrategy` needs a TPU, but JAX found none {reason}. On a TPU machine, "
        "install `armillary[tpu]` and leave `JAX_PLATFORMS` unset. On any other "
        "machine, use `armillary.MultiWorkerMirroredStrategy()`."
    ) from cause
