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
    """The connections of one process, used by the event loop of one thread."""

    def __init__(self, endpoint: socket.socket, token: str = "") -> None:
        # In process 0 the others connect there, and say the token first.
        self._endpoint, self._token = endpoint, token
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._work: Any = None
        _links.add(self)

    async def open(self, note: Note) -> None:
        """Begins to listen to the other processes; notes everything that they say."""
        if not self._token:
            streams = await asyncio.open_connection(
                sock=self._endpoint, limit=_MOST_BYTES
            )
            self._work = asyncio.create_task(self._read(0, *streams, note))
            return

        async def welcome(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            with contextlib.closing(writer):
                index = await self._find_out(reader)
                if index is not None:
                    await self._read(index, reader, writer, note)

        self._work = await asyncio.start_server(
            welcome, sock=self._endpoint, limit=_MOST_BYTES
        )

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
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        if isinstance(self._work, asyncio.Server):
            self._work.close()
        self._endpoint.close()
        await asyncio.sleep(0)  # The loop closes what is to be closed.

    async def _find_out(self, reader: asyncio.StreamReader) -> int | None:
        """Returns which process has connected; `None` for a stranger."""
        token = self._token.encode()
        work = reader.readexactly(_INDEX_DIGITS + len(token))
        try:
            greeting = await asyncio.wait_for(work, _GREETING_SECONDS)
            index = int(greeting[:_INDEX_DIGITS])
        except (OSError, EOFError, ValueError, TimeoutError):
            return None
        return index if hmac.compare_digest(greeting[_INDEX_DIGITS:], token) else None

    async def _read(
        self,
        index: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        note: Note,
    ) -> None:
        """Notes what a process says, until its connection ends."""
        _ask_for_signs_of_life(writer.get_extra_info("socket"))
        self._writers[index] = writer
        try:
            with contextlib.suppress(OSError, ValueError):
                while line := await reader.readline():
                    note(index, json.loads(line))
        finally:
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


def connect(host: str, port: int, token: str, index: int) -> Link:
    """Returns the link of process `index` to process 0, which listens at a port."""
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    connection.sendall(f"{index:0{_INDEX_DIGITS}}{token}".encode())
    connection.setblocking(False)
    return Link(connection)


def _ask_for_signs_of_life(connection: Any) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 4),
        ("TCP_KEEPINTVL", 2),
        ("TCP_KEEPCNT", (_SILENCE_SECONDS - 4) // 2),
        ("TCP_USER_TIMEOUT", 1000 * _SILENCE_SECONDS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Ends the connections of a forked child, which would outlive a dead parent."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for link in list(_links):
        writers = link._writers.values()
        sockets = (writer.get_extra_info("socket") for writer in writers)
        for endpoint in (link._endpoint, *sockets):
            if endpoint.fileno() >= 0:
                os.dup2(nothing, endpoint.fileno())
    os.close(nothing)


os.register_at_fork(after_in_child=_let_go_in_child)
