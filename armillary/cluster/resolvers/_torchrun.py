"""torchrun, and the schedulers that set the same variables."""

from armillary._checks import check_positive_int
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
    take_share,
)
from armillary.cluster.resolvers._spec import check_port
from armillary.errors import ClusterError

FIX = "Start the program with `torchrun`, which sets it for each process."


class TorchrunClusterResolver(ScheduledResolver):
    """Reads the variables that torchrun and schedulers like it set.

    These are `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`, and `LOCAL_RANK`
    and `LOCAL_WORLD_SIZE` where several processes run on one machine. All processes are
    workers.

    Where torchrun keeps `MASTER_PORT` for itself (`TORCHELASTIC_USE_AGENT_STORE` is
    `True`), JAX's coordination service takes the next port.

    Args:
        port: The port of the coordination service, which must be free where `RANK` is
            0. By default as above.
        gpus_per_task: How many GPUs of its machine each process takes, the process with
            `LOCAL_RANK` 0 the first ones. By default one, if there are several
            processes on the machine, and otherwise all that it sees.
        environ: The environment to read, by default that of this process.

    Raises:
        ClusterError: If a variable is missing or malformed, or a rank is not below its
            size.
        ValueError: If an argument is not a number of the kind it must be.
    """

    def __init__(
        self,
        port: int | None = None,
        *,
        gpus_per_task: int | None = None,
        environ: Environ | None = None,
    ) -> None:
        if port is not None:
            check_port("port", port)
        if gpus_per_task is not None:
            check_positive_int("gpus_per_task", gpus_per_task)
        environ = find_environ(environ)
        rank = read_int(environ, "RANK", FIX)
        num_processes = read_int(environ, "WORLD_SIZE", FIX, minimum=1)
        check_below("RANK", rank, num_processes, "the value of `WORLD_SIZE`")
        super().__init__(
            ProcessPlan(
                task_id=rank,
                num_processes=num_processes,
                process_id=rank,
                coordinator_address=_read_address(environ, port),
                local_device_ids=_read_devices(environ, gpus_per_task),
            )
        )

    @classmethod
    def is_present(cls, environ: Environ) -> bool:
        """Returns whether the rank and the number of processes are set."""
        return has_variables(environ, "RANK", "WORLD_SIZE")


def _read_address(environ: Environ, port: int | None) -> str:
    host = read_text(environ, "MASTER_ADDR", FIX)
    if port is None:
        port = read_int(environ, "MASTER_PORT", FIX, minimum=1)
        if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port += 1
    return make_address(
        host,
        port,
        "`MASTER_ADDR` and `MASTER_PORT`",
        "Set them to a host and a free port of the process with `RANK` 0.",
    )


def _read_devices(
    environ: Environ, gpus_per_task: int | None
) -> tuple[int, ...] | None:
    if not has_variables(environ, "LOCAL_RANK"):
        if gpus_per_task is None:
            return None
        raise ClusterError(
            f"`gpus_per_task` is {gpus_per_task}, but `LOCAL_RANK` is not set, so the "
            "processes of a machine cannot share its GPUs out. Leave `gpus_per_task` "
            "out, or start the program with `torchrun`."
        )
    local_rank = read_int(environ, "LOCAL_RANK", FIX)
    if has_variables(environ, "LOCAL_WORLD_SIZE"):
        num_local = read_int(environ, "LOCAL_WORLD_SIZE", FIX, minimum=1)
        what = "the value of `LOCAL_WORLD_SIZE`"
        check_below("LOCAL_RANK", local_rank, num_local, what)
        if num_local == 1 and gpus_per_task is None:
            return None
    return take_share(local_rank, gpus_per_task or 1)
