"""Connects the lifeline of a job, at the address where its processes met."""

import json
import secrets
from typing import Any

import jax

from armillary._logging import logger
from armillary.cluster._peers import KeyValueStore
from armillary.cluster.resolvers._process_plan import is_loopback
from armillary.cluster.resolvers._spec import split_address
from armillary.lifeline._ending import put_off_aborts
from armillary.lifeline._lifeline import Lifeline
from armillary.lifeline._link import Link, connect, listen

_KEY = "armillary/lifeline"
_TIMEOUT_SECONDS = 60


def start_lifeline(
    store: KeyValueStore, index: int, count: int, coordinator_address: str
) -> Lifeline | None:
    """Returns what tells of the end of the other processes, once it is connected.

    Process 0 listens on the loopback interface if the coordinator's address is there,
    and on all interfaces otherwise, as JAX's coordination service does. Who connects
    must know a token, which is given out by that service.
    """
    host = split_address(coordinator_address)[0]
    try:
        if index == 0:
            link = _listen(store, host if is_loopback(coordinator_address) else None)
        else:
            link = _connect(store, host, index)
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
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


def _listen(store: KeyValueStore, host: str | None) -> Link:
    token = secrets.token_hex(16)
    try:
        listener = listen(host)
    except OSError:
        # The others wait for it in any case.
        store.key_value_set(_KEY, json.dumps([0, token]))
        raise
    try:
        store.key_value_set(_KEY, json.dumps([listener.getsockname()[1], token]))
    except BaseException:
        listener.close()
        raise
    return Link(listener, token)


def _connect(store: KeyValueStore, host: str, index: int) -> Link:
    text: Any = store.blocking_key_value_get(_KEY, 1000 * _TIMEOUT_SECONDS)
    port, token = json.loads(text)
    if not port:
        raise OSError("process 0 cannot listen")
    return connect(host, port, index, token)
