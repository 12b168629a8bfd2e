"""Connections between process 0 and the others: one JSON text a line.

A socket tells of the end of the process at its other side, because the kernel closes
it, and of the end of its machine or network, because the kernel asks for signs of life.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
import time
import weakref
from collections.abc import Callable
from typing import Any

_SILENCE_SECONDS = 12
"""How long a machine may not answer before it counts as gone."""
_CONNECT_SECONDS = 10.0
_GREETING_SECONDS = 30.0
_MOST_BYTES = 1 << 24
_INDEX_DIGITS = 8

Note = Callable[[int, dict[str, Any] | None], None]
"""Takes the number of a process, and what it said, or `None` if it is gone."""


class Link:
    """The connections of one process, used by the event loop of one thread.

    Args:
        endpoint: Where the others connect, in process 0; its connection to process 0,
            in the others.
        token: What a process must say first; empty in the others.
    """

    def __init__(self, endpoint: socket.socket, token: str = "") -> None:
        self._endpoint = _keep(endpoint)
        self._token = token
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, note: Note) -> None:
        """Begins to listen to the other processes; notes everything that they say."""
        if self._token:
            self._start(self._accept(note))
            return
        reader, self._writers[0] = await _open_streams(self._endpoint)
        self._start(self._read(0, reader, note))

    def send(self, message: dict[str, Any]) -> None:
        """Sends to all; what cannot go now goes later."""
        data = json.dumps(message).encode() + b"\n"
        for writer in self._writers.values():
            # A process that has read nothing for that long is sent no more.
            if writer.transport.get_write_buffer_size() < _MOST_BYTES:
                writer.write(data)

    async def flush(self, timeout_seconds: float) -> None:
        """Waits until everything has been handed to the kernel, or a time is over."""
        end = time.monotonic() + timeout_seconds
        while time.monotonic() < end and any(
            writer.transport.get_write_buffer_size()
            for writer in self._writers.values()
        ):
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Closes all connections; the processes at their other ends notice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers.values():
            writer.close()
        self._endpoint.close()

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, note: Note) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._endpoint)
            except OSError:  # For example, too many open files.
                await asyncio.sleep(1.0)
                continue
            self._start(self._welcome(connection, note))

    async def _welcome(self, connection: socket.socket, note: Note) -> None:
        """Learns which process has connected; a stranger is shown out."""
        reader, writer = await _open_streams(_keep(connection))
        token = self._token.encode()
        try:
            greeting = await asyncio.wait_for(
                reader.readexactly(_INDEX_DIGITS + len(token)), _GREETING_SECONDS
            )
            index = int(greeting[:_INDEX_DIGITS])
        except (OSError, EOFError, ValueError, TimeoutError):
            writer.close()
            return
        if not hmac.compare_digest(greeting[_INDEX_DIGITS:], token):
            writer.close()
            return
        self._writers[index] = writer
        await self._read(index, reader, note)

    async def _read(self, index: int, reader: asyncio.StreamReader, note: Note) -> None:
        with contextlib.suppress(OSError, ValueError):
            while line := await reader.readline():
                note(index, json.loads(line))
        self._writers.pop(index).close()
        note(index, None)


def listen(host: str | None) -> socket.socket:
    """Returns a socket that accepts connections at a free port."""
    if host is None:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        return socket.create_server(("", 0), family=family, dualstack_ipv6=both)
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address[:2], family=family)


def connect(host: str, port: int, index: int, token: str) -> Link:
    """Returns the link of process `index` to process 0, which listens at a port."""
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    connection.sendall(f"{index:0{_INDEX_DIGITS}}{token}".encode())
    return Link(connection)


async def _open_streams(
    connection: socket.socket,
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Returns the streams of a connection whose end the kernel will notice."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", (_SILENCE_SECONDS - 4) // 2),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_SECONDS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return await asyncio.open_connection(sock=connection, limit=_MOST_BYTES)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _keep(endpoint: socket.socket) -> socket.socket:
    """Returns a socket that a forked child closes: it would outlive a dead parent."""
    _sockets.add(endpoint)
    return endpoint


def _close_in_child() -> None:
    for endpoint in list(_sockets):
        endpoint.close()


os.register_at_fork(after_in_child=_close_in_child)
