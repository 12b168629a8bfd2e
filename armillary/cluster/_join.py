"""Joins this process to the others of its job, once.

Three connections are made: JAX's coordination service, the lifeline, at the address
where the processes met, and Gloo's, through which processes on CPUs exchange values.
"""

import contextlib
import json
import os
import resource
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.backend import register_backend_factory
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from armillary._logging import logger
from armillary._process import Process, set_process
from armillary.cluster._communication import (
    PLATFORMS,
    CommunicationImplementation,
    CommunicationOptions,
)
from armillary.cluster._peers import Peers
from armillary.cluster.resolvers._resolver import ClusterResolver
from armillary.cluster.resolvers._spec import is_loopback, split_address
from armillary.errors import ClusterError
from armillary.lifeline._ending import put_off_aborts
from armillary.lifeline._lifeline import Lifeline, set_lifeline
from armillary.lifeline._link import Link, connect, listen

_LIFELINE_KEY = "armillary/lifeline"
_LIFELINE_TIMEOUT_SECONDS = 60
_TIMEOUT_SECONDS = 1800.0
"""How long XLA waits on CPUs, where nothing else is said."""


def keep_gloo_on(host: str) -> None:
    """Makes Gloo listen at an address of this machine, once it starts."""
    # By default it listens at the address of the machine's name, which others may
    # reach, and JAX has no option for it. All that makes a client is private.
    from jax._src import distributed, xla_bridge  # noqa: TID251
    from jax._src.lib import _jax  # noqa: TID251

    is_known = hasattr(xla_bridge, "make_cpu_client")
    if not (is_known and hasattr(_jax, "make_gloo_tcp_collectives")):
        logger.warning(
            "JAX %s makes its CPU devices in another way than the versions that this "
            "library knows, so Gloo listens where the name of this machine points to.",
            jax.__version__,
        )
        return

    def make_client() -> object:
        if jax.config.jax_cpu_collectives_implementation != "gloo":  # pyright: ignore[reportAttributeAccessIssue]
            return xla_bridge.make_cpu_client()
        return xla_bridge.make_cpu_client(
            _jax.make_gloo_tcp_collectives(
                distributed_client=distributed.global_state.client, hostname=host
            )
        )

    register_backend_factory("cpu", make_client, fail_quietly=False)


def connect_gloo(peers: Peers) -> None:
    """Lets the processes connect to each other, if they compute on CPUs."""
    # Gloo does so at the first operation, and gives up after 30 seconds,
    # while one process may still compile what the others run already.
    implementation = jax.config.jax_cpu_collectives_implementation  # pyright: ignore[reportAttributeAccessIssue]
    if jax.default_backend() != "cpu" or implementation != "gloo":
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


def start_lifeline(
    store: Any, index: int, count: int, coordinator_address: str
) -> Lifeline | None:
    """Returns what tells of the end of the other processes, once it is connected."""
    # As JAX's service does, process 0 listens on loopback if its address is there.
    host, listener = split_address(coordinator_address)[0], None
    try:
        if index == 0:
            token = secrets.token_hex(16)
            listener = listen(host if is_loopback(coordinator_address) else None)
            port = listener.getsockname()[1]
            store.key_value_set(_LIFELINE_KEY, json.dumps([port, token]))
            link = Link(listener, token)
        else:
            timeout = 1000 * _LIFELINE_TIMEOUT_SECONDS
            text = store.blocking_key_value_get(_LIFELINE_KEY, timeout)
            port, token = json.loads(text)
            link = connect(host, port, token, index)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        if listener is not None:
            listener.close()
        logger.warning(
            "no connection that tells of dead and stuck processes (%s: %s). They are "
            "noticed by JAX's own heartbeat, which takes longer. Let the processes "
            "reach %s on all ports.",
            type(error).__name__,
            error,
            host,
        )
        return None
    put_off_aborts()
    lifeline = Lifeline(index, count, link)
    lifeline.start()
    return lifeline


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
    """Says that what processes told each other between two loops is out of date."""
    if _joined is not None:
        _joined.peers.boundary.expire()


def join_cluster(
    resolver: ClusterResolver, options: CommunicationOptions | None = None
) -> Peers | None:
    """Joins the processes that a resolver tells of, and waits until all are there."""
    global _joined
    plan = resolver.process_plan()
    if not plan.is_distributed:
        return None
    options = options or CommunicationOptions()
    arguments = dict(plan.initialize_arguments())
    if _joined is not None:
        if (arguments, options) != (_joined.arguments, _joined.options):
            raise ClusterError(
                f"`cluster_resolver` says {arguments} with {options}, but this process "
                f"has joined its job with {_joined.arguments} and {_joined.options}. A "
                "process joins once: use the same resolver and options for all "
                "strategies."
            )
        return _joined.peers
    if not jax.distributed.is_initialized():
        _apply(options)
        _initialize(arguments)
    elif options != CommunicationOptions():
        raise ClusterError(
            f"`communication_options` is {options}, but this program called "
            "`jax.distributed.initialize` before, and XLA must know them first. Leave "
            "the call out: the strategy makes it."
        )
    index, count = jax.process_index(), jax.process_count()
    if plan.num_processes not in (None, count) or plan.process_id not in (None, index):
        raise ClusterError(
            f"`cluster_resolver` says that this is process {plan.process_id} of "
            f"{plan.num_processes}, but JAX was started as process {index} of {count}. "
            "Describe the same cluster to all processes, and leave "
            "`jax.distributed.initialize` to the strategy."
        )
    timeout_seconds = options.timeout_seconds or _TIMEOUT_SECONDS
    set_process(Process(index, count))
    client, address = _get_service()
    lifeline = start_lifeline(client, index, count, address)
    if lifeline is not None:
        set_lifeline(lifeline)
    peers = Peers(client, index, count, timeout_seconds, lifeline)
    connect_gloo(peers)
    _joined = _Joined(arguments, options, peers)
    return peers


def _initialize(arguments: Mapping[str, Any]) -> None:
    # Each connection is a file, also that of a stranger. The hard limit is the
    # administrator's, the soft one is for programs that use `select`.
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # JAX's own preemption service swallows SIGTERM, even if nobody uses it.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(**arguments)
        if "coordinator_bind_address" in arguments:  # All are on this machine.
            keep_gloo_on(split_address(arguments["coordinator_address"])[0])
    except RuntimeError as error:
        if "before any JAX" not in str(error):
            raise
        raise ClusterError(
            "The strategy was made after JAX's devices had been used, "
            "but processes must join before. Make the strategy first, ahead of every "
            "array and every `jax.devices()`."
        ) from error


def _apply(options: CommunicationOptions) -> None:
    """Sets what JAX must know before it starts its devices."""
    if options == CommunicationOptions():
        return
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    platform = str(platforms or "").partition(",")[0]
    if platform not in PLATFORMS:
        raise ClusterError(
            f"`jax_platforms` is {platforms!r}, but which options can be followed "
            "depends on the platform, and JAX's devices cannot be asked before the "
            "processes have joined. Set the variable `JAX_PLATFORMS`, for example to "
            "`cuda`, or leave `communication_options` out."
        )
    words = os.environ.get("XLA_FLAGS", "").split()
    parts = (word.lstrip("-").partition("=") for word in words)
    present = {name: value for name, _, value in parts}
    for name, value in options.xla_flags(platform).items():
        if present.get(name, value) != value:
            raise ValueError(
                f"`XLA_FLAGS` sets `--{name}={present[name]}`, but the communication "
                f"options need `--{name}={value}`. Remove the flag, or leave the "
                "option out."
            )
        if name not in present:
            words.append(f"--{name}={value}")
    os.environ["XLA_FLAGS"] = " ".join(words)
    if options.implementation == CommunicationImplementation.RING:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")


def _get_service() -> tuple[Any, str]:
    """Returns the client of JAX's coordination service, and its address."""
    # JAX has no public way to its key-value store.
    from jax._src import distributed  # noqa: TID251

    state = distributed.global_state
    assert state.client is not None and state.coordinator_address is not None
    return state.client, state.coordinator_address
