"""The connections of the processes of a job: a tree, so that no process has many.

Each process is connected to a parent and to at most eight children. Messages go up, and
the answer comes down. A message is one line of JSON. The kernel closes the connection
of a process that ends, and of a machine that no longer answers.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import queue
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_ARITY = 8
_SILENCE_SECONDS = 12
"""The time without an answer after which a machine counts as gone."""
_CONNECT_SECONDS = 10.0
_GREETING_SECONDS = 30.0
_INDEX_DIGITS = 8
_NEWS_SECONDS = 1.0
_PAUSE_SECONDS = 0.02

# The first index, the index after the last one, and the entry that the processes sent.
Span = tuple[int, int, list[str]]


class Ends(NamedTuple):
    """The first sockets of a process, and the token that its children must send."""

    connection: socket.socket | None = None
    listener: socket.socket | None = None
    token: str = ""
    # The address under which the other processes reach this one.
    host: str = "127.0.0.1"


class Tree:
    """The place of one process in the tree; other threads use only `answers`."""

    def __init__(self, index: int, count: int, ends: Ends | None = None) -> None:
        self.ends = ends or Ends()
        self.parent, self.members, self.children = find_neighbors(index, count)
        self.links: dict[int, Any] = {}  # Objects that can `write` to a neighbor.
        self.answers: queue.SimpleQueue[list[Span]] = queue.SimpleQueue()
        self.note: Callable[[int, str, Any], None] = lambda *_: None
        self._index = index
        # The entries of a round that are not passed on yet.
        self._entries: list[Span] = []
        self._num_entries = 0
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Begins to listen to the parent and the children."""
        loop = asyncio.get_running_loop()
        connection, listener, *_ = self.ends
        if connection is not None:
            make = functools.partial(_Connection, self, self.parent)
            await loop.create_connection(make, sock=connection)
        if listener is not None:
            make = functools.partial(_Connection, self)
            self._server = await loop.create_server(make, sock=listener)

    def send(self, indices: Iterable[int | None], kind: str, value: Any) -> None:
        """Sends a message to connected neighbors; a busy connection sends it later."""
        self._write(indices, json.dumps([kind, value]).encode())

    def add_entry(self, entry: list[str]) -> None:
        """Adds this process's entry to a round, which ends when all have: `answers`."""
        self._add([(self._index, self._index + 1, entry)])

    def pass_on(self) -> None:
        """Sends the entries so far to the parent, although some are missing."""
        if self._entries and self.parent is not None:
            self.send([self.parent], "entries", self._entries)
            self._entries = []

    def answer(self, spans: list[Span]) -> None:
        """Ends the round in all processes below, and gives them its entries."""
        self._send_down(spans, json.dumps(["all", spans]).encode())

    def find_missing(self) -> list[int]:
        """Returns the processes without an entry in this round."""
        present: set[int] = set()
        for start, stop, _ in self._entries:
            present.update(range(start, stop))
        return [index for index in self.members if index not in present]

    def take(self, index: int, line: bytes) -> None:
        """Handles one message of a neighbor."""
        kind, value = json.loads(line)
        if kind == "entries":
            self._add(value)
        elif kind == "all":
            self._send_down(value, line)
        else:
            self.note(index, kind, value)

    def close(self) -> None:
        """Ends the connections, without a further call of `note`."""
        self.note = lambda *_: None
        connections = (self._server, *self.links.values())
        for connection in connections:
            if connection is not None:
                connection.close()

    def release_in_child(self) -> None:
        """Ends the connections of a forked child, which would outlive a dead parent."""
        links = self.links.values()
        sockets = [link.get_extra_info("socket") for link in links]
        # The objects in the child still use the descriptors, so the descriptors stay
        # open, but lead nowhere.
        nothing = os.open(os.devnull, os.O_RDWR)
        for end in (self.ends.connection, self.ends.listener, *sockets):
            if end is not None and end.fileno() >= 0:
                os.dup2(nothing, end.fileno())
        os.close(nothing)

    def _add(self, spans: list[Span]) -> None:
        """Adds entries to a round, and ends the round if it is complete."""
        self._entries = _join_spans([*self._entries, *spans])
        self._num_entries += sum(stop - start for start, stop, _ in spans)
        is_complete = self._num_entries >= len(self.members)
        if not is_complete:
            return
        if self.parent is None:
            self.answer(self._entries)
        else:
            self.pass_on()

    def _send_down(self, spans: list[Span], line: bytes) -> None:
        """Ends the round here and in all processes below; `line` has its entries."""
        # ORDER: the next round begins here before it begins in a child.
        self._entries = []
        self._num_entries = 0
        self._write(self.children, line)
        self.answers.put(spans)

    def _write(self, indices: Iterable[int | None], line: bytes) -> None:
        """Sends a line to the neighbors among these that are connected."""
        message = line + b"\n"
        for index in indices:
            if index in self.links:
                self.links[index].write(message)


class _Connection(asyncio.Protocol):
    """A connection to a neighbor, or one that is closed if no token comes in time."""

    def __init__(self, tree: Tree, index: int | None = None) -> None:
        self._tree = tree
        self._index = index
        self._data = b""

    def connection_made(self, transport: Any) -> None:
        """Adds a known neighbor; an unknown caller must send the token in time."""
        self._transport = transport
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Reports are sent all the time, so there is always one to confirm.
            milliseconds = 1000 * _SILENCE_SECONDS
            link = transport.get_extra_info("socket")
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        if self._index is not None:
            self._tree.links[self._index] = transport
        else:
            loop = asyncio.get_running_loop()
            loop.call_later(_GREETING_SECONDS, self._close_if_unknown)

    def data_received(self, data: bytes) -> None:
        """Handles complete lines; the rest waits for more data."""
        self._data += data
        if self._index is None:
            self._accept_child()
        if self._index is not None and b"\n" in self._data:
            # The rest after the last line is the begin of the next message.
            *lines, self._data = self._data.split(b"\n")
            for line in lines:
                self._tree.take(self._index, line)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._index is not None:
            del self._tree.links[self._index]
            self._tree.note(self._index, "gone", None)

    def _accept_child(self) -> None:
        """Accepts a child that sends its number and the token, once both are there."""
        token = self._tree.ends.token.encode()
        size = _INDEX_DIGITS + len(token)
        if len(self._data) < size:
            return
        number = self._data[:_INDEX_DIGITS]
        received = self._data[_INDEX_DIGITS:size]
        index = int(number) if number.isdigit() else -1
        is_missed = index in self._tree.children and index not in self._tree.links
        has_token = hmac.compare_digest(received, token)
        if not has_token or not is_missed:
            self._close_if_unknown()
            return

        self._index = index
        self._data = self._data[size:]
        self._tree.links[index] = self._transport

    def _close_if_unknown(self) -> None:
        if self._index is None:
            self._transport.close()


def find_neighbors(index: int, count: int) -> tuple[int | None, range, list[int]]:
    """Returns the parent of a process, the process with all below it, its children."""
    # The processes below a process have the next indices, so that equal entries of
    # neighbors become one short `Span`.
    parent = None
    members = range(count)
    # From process 0 down to the process: a branch, and the parts below its first one.
    while True:
        num_members = len(members)
        num_below = num_members - 1
        size = -(-num_below // _ARITY) or 1  # of a part, rounded up
        parts = [members[i : i + size] for i in range(1, num_members, size)]
        if members.start == index:
            children = [part.start for part in parts]
            return parent, members, children
        parent = members.start
        members = next(part for part in parts if index in part)


def _join_spans(spans: list[Span]) -> list[Span]:
    """Joins neighboring spans with equal entries."""
    joined: list[Span] = []
    for start, stop, entry in sorted(spans, key=lambda span: span[0]):
        first = start
        if joined:
            last_first, last_stop, last_entry = joined[-1]
            if last_stop == start and last_entry == entry:
                first = last_first
                joined.pop()
        joined.append((first, stop, entry))
    return joined


def listen(host: str | None, port: int = 0) -> socket.socket:
    """Returns a socket that accepts connections at a port, or at a free one."""
    if host is None and socket.has_dualstack_ipv6():
        family = socket.AF_INET6
        return socket.create_server(("", port), family=family, dualstack_ipv6=True)
    family, *_, address = socket.getaddrinfo(host or "0.0.0.0", port)[0]
    return socket.create_server(address[:2], family=family)


def connect(host: str, port: int, token: str, index: int) -> socket.socket:
    """Connects process `index` to its parent, and sends the token."""
    connection = socket.create_connection((host, port), _CONNECT_SECONDS)
    connection.sendall(f"{index:0{_INDEX_DIGITS}}{token}".encode())
    connection.setblocking(False)
    return connection


def receive_arrivals(
    listener: socket.socket,
    count: int,
    seconds: float,
    note: Callable[[list[int]], None] = lambda missing: None,
) -> list[int]:
    """Waits in process 0 for the others; returns the processes that are missing.

    Args:
        listener: The socket to which the others connect. It is closed afterwards.
        count: The number of processes, with this one.
        seconds: The longest wait.
        note: Receives the processes that are missing, about once per second.
    """
    end = time.monotonic() + seconds
    missing = set(range(1, count))
    arrived: dict[Any, int] = {}
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.enter_context(listener)
        selector.register(listener, selectors.EVENT_READ)
        while missing and time.monotonic() < end:
            for key, _ in selector.select(_NEWS_SECONDS):
                link: Any = key.fileobj
                if link is listener:
                    connection, _ = listener.accept()
                    stack.enter_context(connection)
                    connection.setblocking(False)
                    selector.register(connection, selectors.EVENT_READ)
                    continue

                number = _receive_number(link)
                if number:
                    # A caller from outside the job counts as process 0, which is never
                    # missing.
                    index = int(number) if number.isdigit() else 0
                    arrived[link] = index
                    missing.discard(index)
                else:
                    # A process that has gone away is missing again.
                    selector.unregister(link)
                    index = arrived.pop(link, 0)
                    missing |= {index} - {0}

            late = sorted(missing)
            is_over = time.monotonic() >= end
            news = json.dumps([is_over, late]).encode() + b"\n"
            for link in arrived:
                with contextlib.suppress(OSError):
                    link.send(news)
            note(late)
    return sorted(missing)


def _receive_number(link: socket.socket) -> bytes:
    """Returns the number that a process has sent; nothing if it has gone away."""
    try:
        return link.recv(_INDEX_DIGITS)
    except OSError:
        return b""


def wait_for_arrivals(
    host: str,
    port: int,
    index: int,
    seconds: float,
    note: Callable[[list[int]], None] = lambda missing: None,
) -> list[int]:
    """Waits at process 0 until all have come; returns the missing processes.

    Args:
        host: The host of process 0.
        port: The port of process 0.
        index: The number of this process.
        seconds: The longest wait.
        note: Receives the missing processes whenever process 0 sends them.
    """
    end = time.monotonic() + seconds
    # As long as no news has come, only process 0 is known to be missing.
    late = [0]
    while (left := end - time.monotonic()) > 0:
        data = b""
        # If the connection fails, process 0 is not there yet, or it has met all others
        # and has closed its port for JAX's service.
        with (
            contextlib.suppress(OSError),
            socket.create_connection((host, port), min(left, _CONNECT_SECONDS)) as link,
        ):
            link.sendall(f"{index:0{_INDEX_DIGITS}}".encode())
            link.settimeout(left)
            while received := link.recv(1 << 16):
                data += received
                if not data.startswith(b"["):
                    return []  # The service is there.
                *lines, data = data.split(b"\n")
                if lines:
                    is_over, late = json.loads(lines[-1])
                    note(late)
                    if is_over:
                        return late
        time.sleep(_PAUSE_SECONDS)
    return late
