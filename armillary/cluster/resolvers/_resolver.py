"""The interface of every resolver, and the resolvers that are given all answers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from armillary.cluster.resolvers._process_plan import ProcessPlan, plan_process
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

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others.

        Raises:
            ValueError: If this process is not a task of the cluster, or the cluster is
                not fit for training.
        """
        return plan_process(self.cluster_spec(), self.task_type, self.task_id)


class SimpleClusterResolver(ClusterResolver):
    """Returns what it was given.

    Args:
        cluster_spec: The tasks of the cluster. A mapping is made into a `ClusterSpec`.
        task_type: The job of this process: `"chief"`, `"worker"`, `"ps"` or
            `"evaluator"`.
        task_id: The index of this process in its job.

    Raises:
        TypeError: If `cluster_spec` cannot be made into a `ClusterSpec`.
        ValueError: If `task_type` and `task_id` do not name a task of the cluster.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec | Mapping[str, Sequence[str]],
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        self._cluster_spec = ClusterSpec(cluster_spec)
        if task_type is not None or task_id is not None:
            check_task(self._cluster_spec, task_type, task_id)
        self._task_type, self._task_id = task_type, task_id

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the cluster."""
        return self._cluster_spec

    @property
    def task_type(self) -> str | None:
        """The job of this process."""
        return self._task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job."""
        return self._task_id
