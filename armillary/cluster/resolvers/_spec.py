"""Which tasks a cluster has, by job, and where each one is reached."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from armillary._checks import check_positive_int

ADDRESS = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})"
)
HIGHEST_PORT = 65_535


class ClusterSpec:
    """Holds the addresses of a cluster's tasks, as `tf.train.ClusterSpec` does.

    A *job* is a named list of *tasks* that do the same; each task is one process, with
    an address::

        cluster = armillary.cluster.ClusterSpec({
            "chief": ["10.0.0.1:2222"],
            "worker": ["10.0.0.2:2222", "10.0.0.3:2222"],
        })
        cluster.task_address("worker", 1)  # "10.0.0.3:2222"

    Args:
        cluster: Mapping from the name of each job to the addresses of its tasks. An
            address is a host, or an IPv6 address in brackets, a colon and a port. A job
            without tasks is left out. Another `ClusterSpec` is copied.

    Raises:
        TypeError: If `cluster` is not a mapping, or a job is not a list of strings.
        ValueError: If a job has no name, an address is malformed, or two tasks have the
            same one.
    """

    def __init__(self, cluster: "Mapping[str, Sequence[str]] | ClusterSpec") -> None:
        if isinstance(cluster, ClusterSpec):
            cluster = cluster.as_dict()
        self._tasks = read_tasks("cluster", cluster)

    def as_dict(self) -> dict[str, list[str]]:
        """Returns the addresses of the tasks of each job."""
        return {job: list(tasks) for job, tasks in self._tasks.items()}

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order in which they were given."""
        return list(self._tasks)

    def task_indices(self, job_name: str) -> list[int]:
        """Returns the indices of the tasks of a job, from 0.

        Raises:
            ValueError: If the cluster has no job of that name.
        """
        return list(range(len(self._get_tasks(job_name))))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Returns the address of one task.

        Raises:
            ValueError: If the cluster has no such job, or the job no such task.
        """
        tasks = self._get_tasks(job_name)
        if task_index not in range(len(tasks)):
            raise ValueError(
                f"`task_index` is {task_index!r}, but the tasks of job {job_name!r} "
                f"are {_list_values(range(len(tasks)))}. Use one of these."
            )
        return tasks[task_index]

    def _get_tasks(self, job_name: str) -> list[str]:
        if job_name not in self._tasks:
            known = _list_values(self._tasks) if self._tasks else "none at all"
            raise ValueError(
                f"`job_name` is {job_name!r}, but the jobs of this cluster are "
                f"{known}. Use one of `cluster_spec.jobs`."
            )
        return self._tasks[job_name]

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClusterSpec):
            return NotImplemented
        return self._tasks == other._tasks

    def __hash__(self) -> int:
        return hash(frozenset((job, *tasks) for job, tasks in self._tasks.items()))

    def __repr__(self) -> str:
        return f"ClusterSpec({self.as_dict()!r})"


def read_tasks(name: str, cluster: Any) -> dict[str, list[str]]:
    """Returns the addresses of the tasks of each job, after checking them.

    Messages call the cluster `name`.

    Raises:
        TypeError: If something has the wrong type.
        ValueError: If something has the right type and cannot be used.
    """
    if not isinstance(cluster, Mapping):
        raise TypeError(
            f"`{name}` is {cluster!r} of type {type(cluster).__name__}, but it must be "
            "a mapping from jobs to addresses. "
            'Use, for example, `{"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}`.'
        )
    tasks = {job: _read_job(name, job, value) for job, value in cluster.items()}
    tasks = {job: addresses for job, addresses in tasks.items() if addresses}
    owners: dict[str, str] = {}
    for job, addresses in tasks.items():
        for index, address in enumerate(addresses):
            if address in owners:
                raise ValueError(
                    f"`{name}` gives {address!r} to both {owners[address]} and "
                    f"{job} {index}, but each task is a process with an address of its "
                    "own. Give one of them another host or another port."
                )
            owners[address] = f"{job} {index}"
    return tasks


def _read_job(name: str, job: Any, value: Any) -> list[str]:
    if not isinstance(job, str) or not job:
        raise ValueError(
            f"`{name}` has the job {job!r}, but a job is named by a string that is not "
            'empty. Use a name such as `"worker"`.'
        )
    name = f'{name}["{job}"]'
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TypeError(
            f"`{name}` is {value!r} of type {type(value).__name__}, but it must be a "
            "list of addresses. "
            'Use, for example, `["10.0.0.1:2222", "10.0.0.2:2222"]`.'
        )
    return [check_address(f"{name}[{index}]", task) for index, task in enumerate(value)]


def check_address(name: str, value: Any) -> str:
    """Returns `value`, or raises if it is not the address of a task.

    Raises:
        TypeError: If `value` is not a string.
        ValueError: If it is not a host, a colon and a port.
    """
    if not isinstance(value, str):
        raise TypeError(
            f"`{name}` is {value!r} of type {type(value).__name__}, but it must be a "
            'string that holds a host and a port. Use, for example, `"10.0.0.1:2222"`.'
        )
    match = ADDRESS.fullmatch(value)
    if match is None or not 1 <= int(match["port"]) <= HIGHEST_PORT:
        raise ValueError(
            f"`{name}` is {value!r}, but it must be a host, a colon and a port from 1 "
            f"to {HIGHEST_PORT}, with IPv6 addresses in brackets. "
            'Use, for example, `"10.0.0.1:2222"`.'
        )
    return value


def check_port(name: str, value: Any) -> int:
    """Returns `value`, or raises if it is not the number of a port.

    Raises:
        ValueError: If `value` is not an integer from 1 to 65535.
    """
    if check_positive_int(name, value) > HIGHEST_PORT:
        raise ValueError(
            f"`{name}` is {value!r}, but ports go up to {HIGHEST_PORT}. Use, for "
            f"example, `{name}=2222`."
        )
    return int(value)


def split_address(address: str) -> tuple[str, int]:
    """Returns the host, an IPv6 address without its brackets, and the port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _list_values(values: Any) -> str:
    return ", ".join(repr(value) for value in values)
