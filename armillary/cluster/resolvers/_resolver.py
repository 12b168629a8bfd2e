"""The interface of every resolver, and the resolvers that are given all answers.

The common part of the resolvers that read the variables of a scheduler.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from armillary._checks import check_instance
from armillary.cluster.resolvers._spec import (
    ClusterSpec,
    ProcessPlan,
    check_address,
    check_task,
    plan_process,
)
from armillary.errors import ClusterError


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


Environ = Mapping[str, str]


class ScheduledResolver(ClusterResolver):
    """Holds the plan that the variables gave when the resolver was made.

    Args:
        plan: What this process needs to join the others.
        chief_job: The job of process 0.
    """

    def __init__(self, plan: ProcessPlan, chief_job: str = "worker") -> None:
        self._plan = plan
        address = plan.coordinator_address
        self._cluster_spec = ClusterSpec({chief_job: [address]} if address else {})

    @classmethod
    @abstractmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether this process seems to have been started this way."""

    def cluster_spec(self) -> ClusterSpec:
        """Returns the one task whose address is known: process 0."""
        return self._cluster_spec

    @property
    def task_type(self) -> str | None:
        """The job of this process, or None if JAX finds out."""
        return None if self._plan.process_id is None else self._plan.task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job, or None if JAX finds out."""
        return None if self._plan.process_id is None else self._plan.task_id

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others."""
        return self._plan


def take_share(index: int, size: int) -> tuple[int, ...]:
    """Returns the device ids of the process number `index` on its machine."""
    return tuple(range(index * size, (index + 1) * size))


def find_environ(environ: Environ | None) -> Environ:
    """Returns `environ`, or the environment of this process."""
    fix = "Use a dictionary of strings, or leave it out."
    check_instance("environ", environ, Mapping | None, fix)
    return os.environ if environ is None else environ


def has_variables(environ: Environ, *names: str) -> bool:
    """Returns whether all the variables are set and not empty."""
    return all(environ.get(name, "").strip() for name in names)


def find_name(environ: Environ, names: Sequence[str], purpose: str) -> str:
    """Returns the first of `names` that is set: they hold the same, the best first."""
    for name in names:
        if has_variables(environ, name):
            return name
    listed = " and ".join(f"`{name}`" for name in names)
    are = "is" if len(names) == 1 else "are"
    raise ClusterError(f"{listed} {are} not set. {purpose}")


def read_text(environ: Environ, name: str, purpose: str) -> str:
    """Returns the value of a variable that must be set."""
    return environ[find_name(environ, [name], purpose)].strip()


def read_int(environ: Environ, name: str, purpose: str, *, minimum: int = 0) -> int:
    """Returns the value of a variable that must be an integer."""
    text = read_text(environ, name, purpose)
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < minimum:
        raise ClusterError(
            f"`{name}` is {text!r}, but it must be an integer of at least {minimum}. "
            f"{purpose}"
        )
    return int(text)


def check_below(name: str, value: int, limit: int, what: str) -> None:
    """Raises if an index is not below the number of what it counts, which is `what`."""
    if value >= limit:
        raise ClusterError(
            f"`{name}` is {value}, but it must be below {limit}, {what}. Set it to an "
            f"index from 0 to {limit - 1}, or correct the number."
        )


def make_address(host: str, port: int, variables: str, fix: str) -> str:
    """Returns the address of process 0; an IPv6 address may lack its brackets."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    try:
        return check_address("coordinator_address", f"{host}:{port}")
    except ValueError as error:
        raise ClusterError(
            f"{variables} cannot be used to reach process 0. {error} {fix}"
        ) from error
