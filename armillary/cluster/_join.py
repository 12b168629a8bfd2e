"""Joins this process to the others of its job, once, and sets up their connections.

All processes meet at the address of process 0 before JAX does the same, because JAX
would not name the missing ones. Then JAX's coordination service listens at this
address. Two more connections are made: the lifeline, a tree whose root is process 0,
and Gloo's, through which processes on CPUs exchange values.
"""

import contextlib
import enum
import json
import math
import os
import resource
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from armillary._checks import check_not_negative_int, check_one_of, check_seconds
from armillary._jax_compat import XLA_LIMITS_PROGRAMS, find_unknown_flags
from armillary._launcher import tell
from armillary._logging import logger
from armillary._process import Process, set_process
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.cluster.resolvers._spec import is_loopback, split_address
from armillary.errors import ClusterError, PeerError
from armillary.lifeline._ending import JOIN, START, Phase, put_off_aborts
from armillary.lifeline._lifeline import Lifeline, get_lifeline, set_lifeline
from armillary.lifeline._lines import find_line
from armillary.lifeline._tree import (
    Ends,
    attend,
    connect,
    find_neighbors,
    listen,
    receive_all,
)

GPU_PLATFORMS = ("cuda", "gpu", "rocm")
PLATFORMS = ("cpu", *GPU_PLATFORMS, "tpu")
_LIFELINE_KEY = "armillary/lifeline"
_JOIN_SECONDS, _MORE_SECONDS = 300.0, 30.0
_SILENT_SECONDS = 10.0
"""The time of joining after which a line in the log says who is missing."""
_MOST_NAMED = 5
_PARENT_SECONDS, _CHILDREN_SECONDS = 60, 75.0
_REACH = (
    "Processes must reach each other on all ports: open them between these machines "
    "(firewall, network policy), look at its output, and start all processes again."
)
# JAX's error if it got no arguments and has detected no job around this process.
_NO_JOB = "coordinator_address should be defined"
_TIMEOUT_SECONDS = 1800.0
"""The time for which XLA waits on CPUs by default."""


class CommunicationImplementation(enum.StrEnum):
    """The library that carries values between processes, as in `tf.distribute`.

    `AUTO` leaves the choice to XLA: Gloo on CPUs, NCCL on GPUs, and their own network
    on TPUs. `RING` asks for a ring, as Gloo makes one, and is for CPUs only. `NCCL` is
    for GPUs only.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclass(frozen=True)
class CommunicationOptions:
    """Options for the exchange of values between processes.

    The names are the same as in `tf.distribute.experimental.CommunicationOptions`.
    There, the options are hints. Here, an option that XLA cannot follow is an error.
    The strategy that receives the options sets XLA's flags when it joins the others.

    Args:
        bytes_per_pack: The size of the packs into which XLA joins small collective
            operations. XLA does not cut larger ones. 0 leaves it to XLA. GPUs only.
        timeout_seconds: The longest wait for the other processes, in an operation or
            in the start before the first controller. It is more than 0, and is rounded
            up to whole seconds. None is 5 minutes for the start, and leaves the rest to
            XLA: 30 minutes on CPUs and no limit on GPUs. On GPUs, XLA limits the
            meeting of the processes and (from JAX 0.9.2) each run of a compiled
            program, computation included. Then it ends the process, so allow for the
            longest loop. Not on TPUs.
        implementation: A `CommunicationImplementation`, or its name.

    Raises:
        ValueError: If an option is not a value of its kind.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        check_not_negative_int("bytes_per_pack", self.bytes_per_pack)
        if self.timeout_seconds is not None:
            fix = (
                "Use, for example, `timeout_seconds=120`, or None for XLA's own limit."
            )
            check_seconds("timeout_seconds", self.timeout_seconds, fix)
        choices = [str(choice) for choice in CommunicationImplementation]
        check_one_of("implementation", self.implementation, choices)
        implementation = CommunicationImplementation(self.implementation)
        # The dataclass is frozen, and the field must hold one type.
        object.__setattr__(self, "implementation", implementation)

    def _find_flags(self, platform: str) -> dict[str, str]:
        """Returns the flags by which XLA follows these options, and their values."""
        kind = "gpu" if platform in GPU_PLATFORMS else platform
        kinds = {"RING": ["cpu"], "NCCL": ["gpu"]}.get(self.implementation, [kind])
        for name, value, followed_on in (
            ("implementation", str(self.implementation), kinds),
            ("bytes_per_pack", self.bytes_per_pack or None, ["gpu"]),
            ("timeout_seconds", self.timeout_seconds, ["cpu", "gpu"]),
        ):
            if value is not None and kind not in followed_on:
                raise ValueError(
                    f"`{name}` is {value!r}, which XLA follows only on "
                    f"{' and '.join(followed_on)}, but the platform is {kind!r}. "
                    f"Leave `{name}` out."
                )
        flags: dict[str, str] = {}
        if self.bytes_per_pack:
            for operation in ("all_reduce", "all_gather", "reduce_scatter"):
                name = f"xla_gpu_{operation}_combine_threshold_bytes"
                flags[name] = str(self.bytes_per_pack)
        if self.timeout_seconds is not None:
            seconds = str(math.ceil(self.timeout_seconds))
            if kind == "cpu":
                return {"xla_cpu_collective_timeout_seconds": seconds}
            # The first flag does not end a process that waits inside NCCL
            # (https://github.com/jax-ml/jax/issues/38503); the second one does.
            flags["xla_gpu_nccl_termination_timeout_seconds"] = seconds
            if XLA_LIMITS_PROGRAMS:
                flags["xla_gpu_execution_terminate_timeout"] = f"{seconds}s"
        return flags


class _Joined(NamedTuple):
    """The arguments with which the process joined."""

    arguments: Mapping[str, Any]
    options: CommunicationOptions
    peers: Peers


_joined: _Joined | None = None


def get_peers() -> Peers | None:
    """Returns the processes of the job, or None if this one has joined no others."""
    return None if _joined is None else _joined.peers


def expire_boundary() -> None:
    """Marks the values that processes exchanged between two loops as out of date."""
    if _joined is not None:
        _joined.peers.boundary.expire()


def join_cluster(
    resolver: ClusterResolver, options: CommunicationOptions | None = None
) -> Peers | None:
    """Joins the processes of a resolver's cluster, and waits until all have joined."""
    # JAX offers neither its key-value store nor the use of its devices in public.
    from jax._src import distributed, xla_bridge  # noqa: TID251

    global _joined
    plan = resolver.process_plan()
    if not plan.is_distributed:
        if plan.is_training:  # An evaluator exchanges no values, on any platform.
            _apply_alone(options or CommunicationOptions())
        return None
    options = options or CommunicationOptions()
    arguments = dict(plan.initialize_arguments())
    if _joined is not None:
        if (arguments, options) != (_joined.arguments, _joined.options):
            raise ClusterError(
                f"`cluster_resolver` gives {arguments} with {options}, but this "
                f"process has joined its job with {_joined.arguments} and "
                f"{_joined.options}. "
                "Use the same resolver and options for all strategies."
            )
        return _joined.peers
    if not jax.distributed.is_initialized():
        _apply(options)
        is_late = xla_bridge.backends_are_initialized()
        is_left_to_jax = plan.num_processes is None
        if is_late and is_left_to_jax and jax.process_count() == 1:
            return None  # JAX has its devices already, all on one machine.
        if is_late:
            raise ClusterError(
                "The strategy was made after JAX's devices had been used, but "
                "processes must join first. Make the strategy before every array and "
                "every `jax.devices()`."
            )
        tell("joining")
        seconds = options.timeout_seconds or _JOIN_SECONDS
        alone = get_lifeline()
        with (
            alone.watching(seconds + _MORE_SECONDS, lambda: Phase(JOIN)),
            _logging_long_wait(arguments, seconds) as note,
        ):
            _meet(arguments, seconds, note)
            has_joined = _initialize(arguments)
        if not has_joined:
            tell("joined")
            return None
    elif options != CommunicationOptions():
        raise ClusterError(
            f"`communication_options` is {options}, but this program called "
            "`jax.distributed.initialize` before, and XLA must know the options by "
            "then. Remove the call: the strategy makes it."
        )
    index = jax.process_index()
    count = jax.process_count()
    if plan.num_processes not in (None, count) or plan.process_id not in (None, index):
        raise ClusterError(
            f"`cluster_resolver` says that this is process {plan.process_id} of "
            f"{plan.num_processes}, but JAX was started as process {index} of {count}. "
            "Describe the same cluster to all processes, and leave "
            "`jax.distributed.initialize` to the strategy."
        )
    set_process(Process(index, count))
    get_lifeline().close()
    service = distributed.global_state
    assert service.client is not None and service.coordinator_address is not None
    lifeline = start_lifeline(service.client, index, count, service.coordinator_address)
    lifeline.watch(options.timeout_seconds, lambda: Phase(START))
    tell("joined")
    timeout_seconds = options.timeout_seconds or _TIMEOUT_SECONDS
    peers = Peers(index, count, timeout_seconds, lifeline)
    _connect_gloo(peers)
    _joined = _Joined(arguments, options, peers)
    return peers


def _apply(options: CommunicationOptions) -> None:
    """Sets what JAX must know before it starts its devices."""
    if options == CommunicationOptions():
        return
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    platform = str(platforms or "").partition(",")[0]
    if platform not in PLATFORMS:
        raise ClusterError(
            f"`jax_platforms` is {platforms!r}, but the platform decides which of the "
            "`communication_options` XLA can follow. Set the variable "
            "`JAX_PLATFORMS`, for example to `cuda`, or leave the options out."
        )
    values = options._find_flags(platform)
    if unknown := find_unknown_flags(values):
        raise ClusterError(
            f"`communication_options` is {options}. These options need the flag "
            f"`{unknown[0]}`, which the XLA of JAX {jax.__version__} does not know. "
            "Leave the options out, or install a release of JAX that Armillary is "
            "tested with (docs/which_jax.md)."
        )
    flags = [f"--{name}={value}" for name, value in values.items()]
    # XLA takes the last one of two values.
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])


def _apply_alone(options: CommunicationOptions) -> None:
    """Checks options in a job of one process, and sets what XLA can still follow.

    Raises:
        ClusterError: If XLA must know an option before it starts its devices, and they
            have been used.
        ValueError: If the platform cannot follow an option.
    """
    from jax._src import xla_bridge  # noqa: TID251

    if options == CommunicationOptions():
        return
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    platform = str(platforms or "").partition(",")[0]
    if platform in PLATFORMS and not xla_bridge.backends_are_initialized():
        _apply(options)
        return
    # A limit on waiting needs no flag here, because there is nobody to wait for.
    options._find_flags(jax.default_backend())
    if options.bytes_per_pack:
        raise ClusterError(
            f"`bytes_per_pack` is {options.bytes_per_pack}, which XLA must know before "
            "it starts its devices. Make the strategy before every array and every "
            "`jax.devices()`, and set the variable `JAX_PLATFORMS`, for example to "
            "`cuda`."
        )


@contextlib.contextmanager
def _logging_long_wait(
    arguments: Mapping[str, Any], seconds: float
) -> Iterator[Callable[[list[int]], None]]:
    """Logs one line if the wait for the others is long.

    Yields a function that receives the processes that are missing by now.

    Args:
        arguments: The arguments of `jax.distributed.initialize`.
        seconds: The longest wait.
    """
    is_first = arguments.get("process_id") == 0
    missing = list(range(1, arguments["num_processes"])) if is_first else [0]

    def note(now: list[int]) -> None:
        missing[:] = now

    def log() -> None:
        if missing:  # Otherwise all have come, and JAX connects them.
            logger.warning("%s", _describe_wait(arguments, seconds, missing))

    # The main thread waits in C code while JAX starts its service.
    timer = threading.Timer(_SILENT_SECONDS, log)
    timer.daemon = True
    timer.start()
    try:
        yield note
    finally:
        timer.cancel()


def _describe_wait(
    arguments: Mapping[str, Any], seconds: float, missing: Sequence[int]
) -> str:
    """Returns the line for the log of a process that waits for others to join."""
    waited = f"has waited for {_SILENT_SECONDS:g} s for"
    address = arguments.get("coordinator_address")
    if not address:
        limit = min(_JOIN_SECONDS, seconds + _MORE_SECONDS)
        return (
            f"This process {waited} JAX to find and join the other processes of its "
            f"job. It waits for at most {limit:g} s. Check that this program has "
            "started on all machines of the job."
        )

    names = [f"process {index}" for index in missing[:_MOST_NAMED]]
    if missing[_MOST_NAMED:]:
        names.append(f"and {len(missing) - _MOST_NAMED} more")
    return (
        f"Process {arguments['process_id']} of {arguments['num_processes']} {waited} "
        f"{', '.join(names)}. All processes join at {address}, the address of "
        f"process 0 (the coordinator). This process waits for at most {seconds:g} s. "
        "Check that the missing processes have started, and that they reach this "
        "address."
    )


def _meet(
    arguments: Mapping[str, Any], seconds: float, note: Callable[[list[int]], None]
) -> None:
    """Waits until all processes are there, or raises an error that names the missing.

    Args:
        arguments: The arguments of `jax.distributed.initialize`.
        seconds: The longest wait.
        note: Receives the processes that are missing by now.
    """
    # Each connection needs an open file, even one from outside the job. The soft limit
    # only protects programs that use `select`, so it is raised to the hard limit, which
    # an administrator sets.
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    address = arguments.get("coordinator_address")
    index = arguments.get("process_id")
    if not address or index is None:
        return  # JAX finds them.

    host, port = split_address(address)
    count = arguments["num_processes"]
    if index:
        late = attend(host, port, index, seconds, note)
    else:
        at = host if "coordinator_bind_address" in arguments else None
        try:
            listener = listen(at, port)
        except OSError:
            return  # JAX needs the port too, and raises an error about it.
        late = receive_all(listener, count, seconds, note)
    note(late)
    if late:
        more = f", nor have {len(late) - 1} others" if late[1:] else ""
        text = (
            f"Process {late[0]} of {count} has not joined for {seconds:g} s{more}, "
            f"while process {index} waits at {find_line(JOIN)}. Look at its output, "
            f"check that it reaches process 0 at {address}, or allow more time with "
            "`CommunicationOptions(timeout_seconds=...)`."
        )
        set_process(Process(index, count))
        get_lifeline().conclude(text, cause=late[0])
        raise PeerError(text)


def _initialize(arguments: Mapping[str, Any]) -> bool:
    """Starts JAX's coordination; returns False if JAX finds no job to join.

    Without arguments, JAX itself looks for a job.
    """
    # JAX's own preemption service swallows SIGTERM, even if nobody uses it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments)
    except ValueError as error:
        if arguments or _NO_JOB not in str(error):
            raise
        return False

    is_one_machine = "coordinator_bind_address" in arguments
    if is_one_machine and _uses_gloo():
        keep_gloo_on(split_address(arguments["coordinator_address"])[0])
    return True


def _uses_gloo() -> bool:
    return jax.config.jax_cpu_collectives_implementation == "gloo"  # pyright: ignore[reportAttributeAccessIssue]


def keep_gloo_on(host: str) -> None:
    """Makes Gloo listen at an address of this machine, once it starts."""
    # By default Gloo listens at the address of the machine's name, which other machines
    # may reach. JAX has no option for that, and its functions for a client are private.
    from jax._src import distributed, xla_bridge  # noqa: TID251
    from jax._src.lib import _jax  # noqa: TID251

    if not hasattr(xla_bridge, "make_cpu_client"):
        logger.warning(
            "Armillary does not know how JAX %s makes its CPU devices. So Gloo "
            "listens at the address to which the name of this machine resolves.",
            jax.__version__,
        )
        return

    def make_client() -> object:
        client = distributed.global_state.client
        gloo = _jax.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory("cpu", make_client, fail_quietly=False)


def _connect_gloo(peers: Peers) -> None:
    """Lets the processes connect to each other, if they compute on CPUs."""
    # By itself Gloo connects at the first operation, and gives up after 30 seconds. By
    # then, one process may still compile the program that the others already run.
    if jax.default_backend() != "cpu" or not _uses_gloo():
        return
    mesh = Mesh(np.array(jax.devices()), ("device",))
    row = jax.make_array_from_callback(
        (mesh.size,),
        NamedSharding(mesh, PartitionSpec("device")),
        lambda index: np.zeros(1, np.int32),
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    connect = jax.jit(lambda x: x.sum(), out_shardings=everywhere).lower(row).compile()
    peers.gather("the first meeting", "")
    jax.block_until_ready(connect(row))


def start_lifeline(store: Any, index: int, count: int, address: str) -> Lifeline:
    """Connects this process to its parent in the tree, and waits for its children."""
    parent, _, children = find_neighbors(index, count)
    host, port = split_address(address)
    # Like JAX's service, process 0 listens only on loopback if its address is there.
    at = host if index or is_loopback(address) else None
    connection = None
    listener = None
    token = secrets.token_hex(16)
    try:
        if parent is not None:
            key = f"{_LIFELINE_KEY}/{parent}"
            timeout = 1000 * _PARENT_SECONDS
            entry = json.loads(store.blocking_key_value_get(key, timeout))
            host, port, parents_token = entry
            connection = connect(host, port, parents_token, index)
            at = host = connection.getsockname()[0]
        if children:
            listener = listen(at)
            port = listener.getsockname()[1]
            entry = json.dumps([host, port, token])
            store.key_value_set(f"{_LIFELINE_KEY}/{index}", entry)
    except (OSError, jax.errors.JaxRuntimeError) as error:
        raise ClusterError(
            f"Process {index} of {count} cannot reach process {parent or 0} at "
            f"{host}:{port} ({type(error).__name__}: {error}). {_REACH}"
        ) from error
    put_off_aborts()
    lifeline = Lifeline(index, count, Ends(connection, listener, token))
    set_lifeline(lifeline)
    lifeline.start()
    for child in lifeline.wait_for_children(_CHILDREN_SECONDS):
        raise ClusterError(
            f"Process {child} of {count} has not reached process {index} at "
            f"{host}:{port} for {_CHILDREN_SECONDS:g} seconds. {_REACH}"
        )
    return lifeline
