"""TPU pods: what the environment of a TPU machine tells about its slice."""

from armillary.cluster._environment import EnvironmentResolver
from armillary.cluster._plan import ProcessPlan
from armillary.cluster._spec import ClusterSpec, check_port, split_address
from armillary.cluster._variables import (
    Environ,
    check_below,
    find_environ,
    find_name,
    has_variables,
    make_cluster,
    number_ports,
    read_int,
    read_text,
)

DEFAULT_PORT = 8482
WORKER_FIX = "It is the index of this machine in its slice, which the scheduler sets."
SLICE_FIX = "It is about the slices of a job, and its scheduler sets it."
HOSTS_FIX = (
    "Set it to the machines of the slice, separated by commas, such as `t1v-0,t1v-1`, "
    "and `MEGASCALE_COORDINATOR_ADDRESS` to the first machine of slice 0."
)
HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


class TPUClusterResolver(EnvironmentResolver):
    """Reads what a TPU machine is told about the machines of its slice.

    `TPU_WORKER_HOSTNAMES`, or `TPU_PROCESS_ADDRESSES` instead of it, lists the machines
    of the slice, and `TPU_WORKER_ID` says which of them this is. If a job has several
    slices, `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS` join them: the workers of slice 0 come first, and
    `cluster_spec` holds the addresses that are known here.

    A machine that Google Compute Engine started has none of these variables. Then the
    plan leaves everything to JAX, which asks the metadata server.

    Args:
        port: The port of the coordination service on worker 0.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If the machines are listed and another variable is missing or
            malformed.
        ValueError: If `port` is not the number of a port.
    """

    def __init__(
        self, port: int = DEFAULT_PORT, *, environ: Environ | None = None
    ) -> None:
        check_port("port", port)
        environ = find_environ(environ)
        self._num_processes: int | None = None
        if not self.is_present(environ):
            super().__init__(ClusterSpec({}), None, None)
            return
        hosts_name = find_name(environ, HOSTS, HOSTS_FIX)
        # The ports that may stand there belong to the TPU runtime.
        hosts = [_drop_port(host.strip()) for host in environ[hosts_name].split(",")]
        addresses = number_ports(hosts, port)
        # A machine on its own may be told that it is, and no more.
        is_told = len(addresses) > 1 or has_variables(environ, "TPU_WORKER_ID")
        worker = read_int(environ, "TPU_WORKER_ID", WORKER_FIX) if is_told else 0
        what = f"the number of machines in `{hosts_name}`"
        check_below("TPU_WORKER_ID", worker, len(addresses), what)
        num_slices, slice_id = _read_slices(environ)
        first = slice_id * len(addresses)
        known = {first + index: address for index, address in enumerate(addresses)}
        if num_slices > 1:
            known[0] = _read_coordinator(environ, port)
        self._num_processes = num_slices * len(addresses)
        cluster_spec = make_cluster({"worker": known}, f"`{hosts_name}`", HOSTS_FIX)
        super().__init__(cluster_spec, "worker", first + worker)

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the machines of a slice are listed."""
        return any(has_variables(environ, name) for name in HOSTS)

    def process_plan(self) -> ProcessPlan:
        """Returns what this process needs to join the others, or leaves it to JAX."""
        if self._num_processes is None or self.task_id is None:
            return ProcessPlan(num_processes=None, process_id=None)
        return ProcessPlan(
            task_id=self.task_id,
            num_processes=self._num_processes,
            process_id=self.task_id,
            coordinator_address=self.cluster_spec().task_address("worker", 0),
        )


def _read_slices(environ: Environ) -> tuple[int, int]:
    if not has_variables(environ, "MEGASCALE_NUM_SLICES"):
        return 1, 0
    num_slices = read_int(environ, "MEGASCALE_NUM_SLICES", SLICE_FIX, minimum=1)
    slice_id = read_int(environ, "MEGASCALE_SLICE_ID", SLICE_FIX)
    what = "the value of `MEGASCALE_NUM_SLICES`"
    check_below("MEGASCALE_SLICE_ID", slice_id, num_slices, what)
    return num_slices, slice_id


def _read_coordinator(environ: Environ, port: int) -> str:
    name = "MEGASCALE_COORDINATOR_ADDRESS"
    return f"{_drop_port(read_text(environ, name, SLICE_FIX))}:{port}"


def _drop_port(item: str) -> str:
    head, colon, tail = item.rpartition(":")
    return split_address(item)[0] if colon and tail.isdecimal() and head else item
