"""Kubernetes: an indexed Job whose pods find each other by name."""

from armillary.cluster.resolvers._process_plan import ProcessPlan
from armillary.cluster.resolvers._scheduler import (
    Environ,
    ScheduledResolver,
    check_below,
    find_environ,
    has_variables,
    make_address,
    read_int,
    read_text,
)
from armillary.cluster.resolvers._spec import HIGHEST_PORT
from armillary.errors import ClusterError

DEFAULT_PORT = 2222
NUM_NAME = "ARMILLARY_NUM_PROCESSES"
INDEX_FIX = (
    "Kubernetes sets it in the pods of a Job with `completionMode: Indexed`. Use that "
    "mode."
)
NUM_FIX = (
    "It is the number of pods that train together. Set it in the pod template to the "
    "Job's `completions`."
)
SERVICE_FIX = (
    "It is the name of a headless Service, through which the pods find each other. Set "
    "it in the pod template to the pods' `subdomain`."
)


class KubernetesClusterResolver(ScheduledResolver):
    """Reads the index of a pod and works out the name of the first one.

    Pod `i` of an indexed Job is called `JOB-i.SERVICE` if the pods' `subdomain` is the
    name of a headless Service that selects them. Kubernetes sets `JOB_COMPLETION_INDEX`
    and the pod's `HOSTNAME`; the pod template sets `ARMILLARY_NUM_PROCESSES` and
    `ARMILLARY_SERVICE_NAME`, and `ARMILLARY_PORT` if it is not to be 2222. All pods are
    workers, and must run at once. The Kubernetes API is not asked, so no permission is
    needed.

    Args:
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, or the index is not below
            the number of pods.
    """

    def __init__(self, *, environ: Environ | None = None) -> None:
        environ = find_environ(environ)
        num_processes = read_int(environ, NUM_NAME, NUM_FIX, minimum=1)
        index = read_int(environ, "JOB_COMPLETION_INDEX", INDEX_FIX)
        what = f"the value of `{NUM_NAME}`"
        check_below("JOB_COMPLETION_INDEX", index, num_processes, what)
        service = read_text(environ, "ARMILLARY_SERVICE_NAME", SERVICE_FIX)
        address = make_address(
            f"{_read_job_name(environ, index)}-0.{service}",
            _read_port(environ),
            "`HOSTNAME` and `ARMILLARY_SERVICE_NAME`",
            "Set the second to the name of the headless Service.",
        )
        super().__init__(
            ProcessPlan(
                task_id=index,
                num_processes=num_processes,
                process_id=index,
                coordinator_address=address,
            )
        )

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether this is a pod of an indexed Job that trains together.

        The index alone says nothing: the pods may be independent runs. And where
        torchrun started this process in a pod, its variables tell more.
        """
        return has_variables(
            environ, "JOB_COMPLETION_INDEX", NUM_NAME
        ) and not has_variables(environ, "TORCHELASTIC_RUN_ID")


def _read_port(environ: Environ) -> int:
    if not has_variables(environ, "ARMILLARY_PORT"):
        return DEFAULT_PORT
    fix = "Set it to a free port of the pods from 1 to 65535, such as 2222."
    port = read_int(environ, "ARMILLARY_PORT", fix, minimum=1)
    check_below("ARMILLARY_PORT", port, HIGHEST_PORT + 1, "the number of ports")
    return port


def _read_job_name(environ: Environ, index: int) -> str:
    fix = "It is the name of this pod, which Kubernetes sets."
    hostname = read_text(environ, "HOSTNAME", fix)
    # The name of a pod may include the domain.
    job, _, number = hostname.partition(".")[0].rpartition("-")
    if not job or number != str(index):
        raise ClusterError(
            f"`HOSTNAME` is {hostname!r}, but pod {index} of an indexed Job is called "
            f"by the Job's name and `-{index}`. Leave the pods' `hostname` to "
            "Kubernetes."
        )
    return job
