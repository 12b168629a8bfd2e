"""TPU pods: what the environment of a TPU machine tells about its slice."""

from armillary._checks import answers_old_names
from armillary.cluster.resolvers._resolver import (
    Environ,
    ScheduledResolver,
    check_below,
    find_environ,
    find_name,
    has_variables,
    make_address,
    read_int,
    read_text,
)
from armillary.cluster.resolvers._spec import ProcessPlan, check_port

DEFAULT_PORT = 8482
WORKER_FIX = "It is the index of this machine in its slice, which the scheduler sets."
SLICE_FIX = "It is about the slices of a job, and its scheduler sets it."
HOSTS_FIX = (
    "Set it to the machines of the slice, separated by commas, such as `t1v-0,t1v-1`."
)
HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
COORDINATOR = "MEGASCALE_COORDINATOR_ADDRESS"


_ON_THE_TPU = "Leave it out: the program runs on the machines of the TPU itself."


@answers_old_names(
    zone=_ON_THE_TPU,
    project=_ON_THE_TPU,
    job_name="Leave it out: the machines of the TPU are the workers.",
    coordinator_name="Leave it out: worker 0 is the coordinator.",
    coordinator_address="Leave it out, or use `port`: worker 0 is the coordinator.",
    credentials=_ON_THE_TPU,
    service=_ON_THE_TPU,
    discovery_url=_ON_THE_TPU,
)
class TPUClusterResolver(ScheduledResolver):
    """Reads the variables that describe the machines of a TPU slice.

    `TPU_WORKER_HOSTNAMES`, or `TPU_PROCESS_ADDRESSES` instead of it, lists the machines
    of the slice, and `TPU_WORKER_ID` says which of them this is. If a job has several
    slices, `MEGASCALE_NUM_SLICES`, `MEGASCALE_SLICE_ID` and
    `MEGASCALE_COORDINATOR_ADDRESS` join them: the workers of slice 0 come first.

    A machine that Google Compute Engine started has none of these variables. Then the
    plan leaves everything to JAX, which asks the metadata server.

    Args:
        port: The port of the coordination service on worker 0.
        tpu: May be `""` or `"local"`, as in TensorFlow's guides: the TPU that the
            program runs on, which is the only one it can use.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If the machines are listed and another variable is missing or
            malformed.
        ValueError: If `port` is not the number of a port, or `tpu` names another TPU.
    """

    def __init__(
        self,
        port: int = DEFAULT_PORT,
        *,
        tpu: str | None = None,
        environ: Environ | None = None,
    ) -> None:
        check_port("port", port)
        if tpu is not None and str(tpu) not in ("", "local"):
            raise ValueError(
                f"`tpu` is {tpu!r}, but a program uses the TPU on whose machines it "
                "runs, and no other. Start it on every machine of that TPU, and leave "
                "`tpu` out."
            )
        environ = find_environ(environ)
        if not self.is_present(environ):
            super().__init__(ProcessPlan(num_processes=None, process_id=None))
            return
        name = find_name(environ, HOSTS, HOSTS_FIX)
        hosts = environ[name].split(",")
        # A single machine may only know that it is alone.
        is_told = len(hosts) > 1 or has_variables(environ, "TPU_WORKER_ID")
        worker = read_int(environ, "TPU_WORKER_ID", WORKER_FIX) if is_told else 0
        what = f"the number of machines in `{name}`"
        check_below("TPU_WORKER_ID", worker, len(hosts), what)
        num_slices, slice_id = _read_slices(environ)
        first = hosts[0].strip()
        if num_slices > 1:
            name, first = COORDINATOR, read_text(environ, COORDINATOR, SLICE_FIX)
        fix = HOSTS_FIX if num_slices == 1 else SLICE_FIX
        process_id = slice_id * len(hosts) + worker
        super().__init__(
            ProcessPlan(
                task_id=process_id,
                num_processes=num_slices * len(hosts),
                process_id=process_id,
                coordinator_address=make_address(
                    _drop_port(first), port, f"`{name}`", fix
                ),
            )
        )

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the machines of a slice are listed."""
        return any(has_variables(environ, name) for name in HOSTS)


def _read_slices(environ: Environ) -> tuple[int, int]:
    if not has_variables(environ, "MEGASCALE_NUM_SLICES"):
        return 1, 0
    num_slices = read_int(environ, "MEGASCALE_NUM_SLICES", SLICE_FIX, minimum=1)
    slice_id = read_int(environ, "MEGASCALE_SLICE_ID", SLICE_FIX)
    what = "the value of `MEGASCALE_NUM_SLICES`"
    check_below("MEGASCALE_SLICE_ID", slice_id, num_slices, what)
    return num_slices, slice_id


def _drop_port(host: str) -> str:
    """Returns a host without the port, which is that of the TPU runtime."""
    head, _, port = host.rpartition(":")
    is_address = port.isdecimal() and (head.startswith("[") or ":" not in head)
    return head if head and is_address else host
