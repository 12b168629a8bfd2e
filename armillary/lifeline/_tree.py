"""The connections of the processes of a job, over which they send each other messages.

A message is one JSON text a line. The kernel closes the connection of a process that
ends, and of a machine that no longer answers.
"""

import asyncio
import contextlib
import hmac
import json
import os
import socket
from collections.abc import Callable
from typing import Any

_SILENCE_SECONDS = 12
"""How long a machine may not answer before it counts as gone."""
_CONNECT_SECONDS = 10.0
_GREETING_SECONDS = 30.0
_MOST_BYTES = 1 << 24  # Of one message.
_INDEX_DIGITS = 8
_CHIEF = 0


class Tree:
    """The connections of one process, all used in one thread."""

    def __init__(
        self,
        index: int,
        endpoint: socket.socket,
        token: str,
        note: Callable[[int, dict[str, Any] | None], None],
    ) -> None:
        # In process 0 the others connect there, and say the token first.
        self.endpoint = endpoint
        self._index, self._token = index, token
        self._note = note  # Takes in a message; `None` is the end of a connection.
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._work: asyncio.Server | asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Begins to listen to the others."""
        options: dict[str, Any] = {"sock": self.endpoint, "limit": _MOST_BYTES}
        if self._index == _CHIEF:
            self._work = await asyncio.start_server(self._welcome, **options)
        else:
            reader, writer = await asyncio.open_connection(**options)
            work = self._read(_CHIEF, reader, writer)
            self._work = asyncio.create_task(work)

    def send(self, message: dict[str, Any]) -> None:
        """Sends to all who are connected; what cannot go now goes later."""
        data = json.dumps(message).encode() + b"\n"
        for writer in self._writers.values():
            writer.write(data)

    def close(self) -> None:
        """Listens to no more processes."""
        if isinstance(self._work, asyncio.Server):
            self._work.close()

    def let_go(self) -> None:
        """Ends the connections of a forked child, which would outlive a dead parent."""
        writers = self._writers.values()
        sockets = [writer.get_extra_info("socket") for writer in writers]
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (self.endpoint, *sockets):
            if each.fileno() >= 0:
                os.dup2(nothing, each.fileno())
        os.close(nothing)

    async def _welcome(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        token = self._token.encode()
        with contextlib.closing(writer):
            work = reader.readexactly(_INDEX_DIGITS + len(token))
            try:
                greeting = await asyncio.wait_for(work, _GREETING_SECONDS)
                index = int(greeting[:_INDEX_DIGITS])
            except (OSError, EOFError, ValueError, TimeoutError):
                return  # A stranger.
            if hmac.compare_digest(greeting[_INDEX_DIGITS:], token):
                await self._read(index, reader, writer)

    async def _read(
        self, index: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Notes what a process says, until its connection ends."""
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # There is always something that it has to confirm.
            option = socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_SECONDS
            writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, *option)
        self._writers[index] = writer
        try:
            with contextlib.suppress(OSError, ValueError):
                while line := await reader.readline():
                    self._note(index, json.loads(line))
        finally:
            self._writers.pop(index).close()
        self._note(index, None)


def listen(host: str | None) -> socket.socket:
    """Returns a socket that accepts connections at a free port."""
    if host is None and socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", 0), family=family, dualstack_ipv6=True)
    family, *_, address = socket.getaddrinfo(host or "0.0.0.0", 0)[0]
    return socket.create_server(address[:2], family=family)


def connect(host: str, port: int, token: str, index: int) -> socket.socket:
    """Returns the connection of process `index` to process 0, which has greeted it."""
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    connection.sendall(f"{index:0{_INDEX_DIGITS}}{token}".encode())
    connection.setblocking(False)
    return connection
