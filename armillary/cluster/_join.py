"""Joins this process to the others of its job, once, and sets up their connections.

All processes meet at the address of process 0 before JAX does the same, because JAX
would not name the missing ones. Then JAX's coordination service listens at this
address. Two more connections are made: the lifeline, a tree whose root is process 0,
and Gloo's, through which processes on CPUs exchange values.
"""

import contextlib
import json
import resource
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from armillary._launcher import notify_launcher
from armillary._logging import logger
from armillary._process import Process, set_process
from armillary.cluster._communication import (
    CommunicationOptions,
    apply_alone,
    apply_options,
)
from armillary.cluster._gloo import connect_gloo, keep_gloo_on, uses_gloo
from armillary.cluster._peers import ALONE, Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.cluster.resolvers._spec import ProcessPlan, is_loopback, split_address
from armillary.errors import ClusterError, PeerError
from armillary.lifeline._ending import JOIN, START, Phase, delay_aborts
from armillary.lifeline._lifeline import Lifeline, get_lifeline, set_lifeline
from armillary.lifeline._lines import find_line
from armillary.lifeline._tree import (
    Ends,
    connect,
    find_neighbors,
    listen,
    receive_arrivals,
    wait_for_arrivals,
)

_LIFELINE_KEY = "armillary/lifeline"
_JOIN_SECONDS = 300.0
# The lifeline names no process, so it comes after the error that does.
_MORE_SECONDS = 30.0
_SILENT_SECONDS = 10.0
"""The time of joining after which a line in the log says who is missing."""
_MAX_NAMED = 5
_PARENT_SECONDS = 60
_CHILDREN_SECONDS = 75.0
_REACH = (
    "Processes must reach each other on all ports: open them between these machines "
    "(firewall, network policy), look at its output, and start all processes again."
)
# JAX's error if it got no arguments and has detected no job around this process.
_NO_JOB = "coordinator_address should be defined"
_TIMEOUT_SECONDS = 1800.0
"""The time for which XLA waits on CPUs by default."""


class _Joined(NamedTuple):
    """The arguments with which the process joined."""

    arguments: Mapping[str, Any]
    options: CommunicationOptions
    peers: Peers


_joined: _Joined | None = None


def get_peers() -> Peers:
    """Returns the processes of the job, or `ALONE` if this one has joined no others."""
    return ALONE if _joined is None else _joined.peers


def expire_boundary() -> None:
    """Marks the values that processes exchanged between two loops as out of date."""
    if _joined is not None:
        _joined.peers.boundary.expire()


def join_cluster(
    resolver: ClusterResolver, options: CommunicationOptions | None = None
) -> Peers:
    """Joins the processes of a resolver's cluster, and waits until all have joined."""
    # JAX offers neither its key-value store nor the use of its devices in public.
    from jax._src import distributed  # noqa: TID251

    global _joined
    options = options or CommunicationOptions()
    plan = resolver.process_plan()
    if not plan.is_distributed:
        if plan.is_training:  # An evaluator exchanges no values, on any platform.
            apply_alone(options)
        return ALONE
    arguments = dict(plan.initialize_arguments())
    if _joined is not None:
        _check_again(arguments, options, _joined)
        return _joined.peers

    if jax.distributed.is_initialized():
        _check_left_out(options)
    elif not _start_jax(plan, arguments, options):
        return ALONE

    index = jax.process_index()
    count = jax.process_count()
    _check_plan(plan, index, count)
    set_process(Process(index, count))
    get_lifeline().close()
    service = distributed.global_state
    assert service.client is not None and service.coordinator_address is not None
    lifeline = start_lifeline(service.client, index, count, service.coordinator_address)
    lifeline.watch(options.timeout_seconds, lambda: Phase(START))
    notify_launcher("joined")

    timeout_seconds = options.timeout_seconds or _TIMEOUT_SECONDS
    peers = Peers(index, count, timeout_seconds, lifeline)
    connect_gloo(peers)
    _joined = _Joined(arguments, options, peers)
    return peers


def _start_jax(
    plan: ProcessPlan, arguments: Mapping[str, Any], options: CommunicationOptions
) -> bool:
    """Lets JAX join the processes; returns False if this one turns out to be alone."""
    from jax._src import xla_bridge  # noqa: TID251

    apply_options(options)
    if xla_bridge.backends_are_initialized():
        is_left_to_jax = plan.num_processes is None
        if is_left_to_jax and jax.process_count() == 1:
            return False  # JAX has its devices already, all on one machine.
        raise ClusterError(
            "The strategy was made after JAX's devices had been used, but "
            "processes must join first. Make the strategy before every array and "
            "every `jax.devices()`."
        )
    notify_launcher("joining")
    seconds = options.timeout_seconds or _JOIN_SECONDS
    alone = get_lifeline()
    with (
        alone.watching(seconds + _MORE_SECONDS, lambda: Phase(JOIN)),
        _logging_long_wait(arguments, seconds) as note,
    ):
        _meet(arguments, seconds, note)
        has_joined = _initialize(arguments)
    if not has_joined:
        notify_launcher("joined")
    return has_joined


def _check_again(
    arguments: Mapping[str, Any], options: CommunicationOptions, joined: _Joined
) -> None:
    """Raises if a second strategy describes another cluster than the first one."""
    if (arguments, options) != (joined.arguments, joined.options):
        raise ClusterError(
            f"`cluster_resolver` gives {arguments} with {options}, but this "
            f"process has joined its job with {joined.arguments} and "
            f"{joined.options}. "
            "Use the same resolver and options for all strategies."
        )


def _check_left_out(options: CommunicationOptions) -> None:
    """Raises if options are given after the program itself has started JAX."""
    if options != CommunicationOptions():
        raise ClusterError(
            f"`communication_options` is {options}, but this program called "
            "`jax.distributed.initialize` before, and XLA must know the options by "
            "then. Remove the call: the strategy makes it."
        )


def _check_plan(plan: ProcessPlan, index: int, count: int) -> None:
    """Raises if JAX was started with numbers that differ from the resolver's."""
    has_count = plan.num_processes in (None, count)
    has_index = plan.process_id in (None, index)
    if not (has_count and has_index):
        raise ClusterError(
            f"`cluster_resolver` says that this is process {plan.process_id} of "
            f"{plan.num_processes}, but JAX was started as process {index} of {count}. "
            "Describe the same cluster to all processes, and leave "
            "`jax.distributed.initialize` to the strategy."
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

    names = [f"process {index}" for index in missing[:_MAX_NAMED]]
    if missing[_MAX_NAMED:]:
        names.append(f"and {len(missing) - _MAX_NAMED} more")
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
        late = wait_for_arrivals(host, port, index, seconds, note)
    else:
        interface = host if "coordinator_bind_address" in arguments else None
        try:
            listener = listen(interface, port)
        except OSError:
            return  # JAX needs the port too, and raises an error about it.
        late = receive_arrivals(listener, count, seconds, note)
    note(late)
    if not late:
        return

    first, *others = late
    more = f", nor have {len(others)} others" if others else ""
    reason = (
        f"Process {first} of {count} has not joined for {seconds:g} s{more}, "
        f"while process {index} waits at {find_line(JOIN)}. Look at its output, "
        f"check that it reaches process 0 at {address}, or allow more time with "
        "`CommunicationOptions(timeout_seconds=...)`."
    )
    set_process(Process(index, count))
    get_lifeline().conclude(reason, cause=first)
    raise PeerError(reason)


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
    if is_one_machine and uses_gloo():
        keep_gloo_on(split_address(arguments["coordinator_address"])[0])
    return True


def start_lifeline(store: Any, index: int, count: int, address: str) -> Lifeline:
    """Connects this process to its parent in the tree, and waits for its children."""
    parent, _, children = find_neighbors(index, count)
    host, port = split_address(address)
    # Like JAX's service, process 0 listens only on loopback if its address is there.
    at = host if index or is_loopback(address) else None
    connection = None
    listener = None
    # Other programs may connect to the port, and only the children know the token.
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

    delay_aborts()
    lifeline = Lifeline(index, count, Ends(connection, listener, token, host))
    set_lifeline(lifeline)
    lifeline.start()
    for child in lifeline.wait_for_children(_CHILDREN_SECONDS):
        raise ClusterError(
            f"Process {child} of {count} has not reached process {index} at "
            f"{host}:{port} for {_CHILDREN_SECONDS:g} seconds. {_REACH}"
        )
    return lifeline
