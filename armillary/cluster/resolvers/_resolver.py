"""The interface of every resolver, and the resolvers that are given all answers."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping

from armillary.cluster.resolvers._plan import ProcessPlan, plan_process
from armillary.cluster.resolvers._spec import ClusterSpec
from armillary.cluster.resolvers._task import check_task


class ClusterResolver(ABC):
    """Tells a process about its cluster, as in `tf.distribute.cluster_resolver`.

    A resolver of your own returns the tasks of the cluster from `cluster_spec` and sets
    `task_type` and `task_id`. One that does not know all addresses overrides
    `process_plan` instead of relying on `cluster_spec`.
    """

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster; none if this process is on its own."""

    @property
    def task_type(self) -> str | None:
        """The job of this process, such as `"worker"`, or None if it is not known."""
        return None

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if it is not known."""
        return None

    @property
    def environment(self) -> str:
        """Always empty here; `tf.distribute` names a kind of data center."""
        return ""

    @property
    def local_device_ids(self) -> tuple[int, ...] | None:
        """The GPUs of the machine that are for this process, or None for all."""
        return None

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others.

        Raises:
            ValueError: If this process is not a task of the cluster, or the cluster is
                not fit for training.
        """
        return plan_process(
            self.cluster_spec(), self.task_type, self.task_id, self.local_device_ids
        )

    def num_accelerators(self) -> Mapping[str, int]:
        """Returns how many devices other than CPUs this process has, by platform.

        It starts JAX's devices, so call it after the processes have joined.
        """
        import jax

        platforms = (device.platform for device in jax.local_devices())
        return Counter(name.upper() for name in platforms if name != "cpu")


class KnownResolver(ClusterResolver):
    """Holds the answers that it found, or was given, when it was made."""

    def __init__(
        self, cluster_spec: ClusterSpec, task_type: str | None, task_id: int | None
    ) -> None:
        self._cluster_spec = cluster_spec
        self._task_type = task_type
        self._task_id = task_id

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster whose addresses are known."""
        return self._cluster_spec

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._task_id


class SimpleClusterResolver(KnownResolver):
    """Returns what it was given.

    Args:
        cluster_spec: The tasks of the cluster. A mapping is made into a `ClusterSpec`.
        task_type: The job of this process: `"chief"`, `"worker"`, `"ps"` or
            `"evaluator"`.
        task_id: The index of this process in its job.
        environment: What `environment` returns.
        num_accelerators: What `num_accelerators` returns, such as `{"GPU": 8}`. None
            counts the devices when asked.

    Raises:
        TypeError: If `cluster_spec` cannot be made into a `ClusterSpec`.
        ValueError: If `task_type` and `task_id` do not name a task of the cluster.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, list[str]],
        task_type: str | None = None,
        task_id: int | None = None,
        *,
        environment: str = "",
        num_accelerators: Mapping[str, int] | None = None,
    ) -> None:
        cluster_spec = ClusterSpec(cluster_spec)
        if task_type is not None or task_id is not None:
            check_task(cluster_spec, task_type, task_id)
        super().__init__(cluster_spec, task_type, task_id)
        self._environment = environment
        self._num_accelerators = num_accelerators

    @property
    def environment(self) -> str:
        """The environment that was given."""
        return self._environment

    def num_accelerators(self) -> Mapping[str, int]:
        """Returns the numbers that were given, or counts."""
        if self._num_accelerators is None:
            return super().num_accelerators()
        return dict(self._num_accelerators)
