"""Sends shares between the processes of a job: a small server, and its clients.

A request is one line of JSON that begins with the token of the server. Bytes of a file
follow the line of a copy, and the answer to a read. The server always reads a copy to
its end, so that its answer arrives even if it cannot write the copy.
"""

import contextlib
import hmac
import json
import os
import secrets
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from armillary.checkpoint.memory._share import (
    Place,
    describe_share,
    explain,
    find_damage,
    parse_share,
    reserved,
)
from armillary.cluster.resolvers._spec import is_loopback
from armillary.lifeline._tree import listen

_SECONDS = 60.0
"""The longest silence of a connection."""
_LOOK_SECONDS = 0.5
"""The time between two looks of a server whether it has been closed."""
_BLOCK_BYTES = 4 << 20
_MAX_LINE = 1 << 16


class Address(NamedTuple):
    """The server of a process."""

    process: int
    host: str
    port: int
    token: str


class ShareServer:
    """Offers the shares below a folder to other processes, and takes copies.

    It ends when it is closed, or when no object refers to it any more.
    """

    def __init__(self, folder: Path, host: str, index: int) -> None:
        is_local = is_loopback(f"{host}:0")
        # Like its lifeline, process 0 may have an address that is not of a local
        # interface.
        interface = host if is_local or index else None
        server = _Server(listen(interface), folder, index)
        port = server.server_address[1]
        self.address = Address(index, host, port, server.token)
        ended = threading.Event()
        self._thread = threading.Thread(
            target=_serve,
            args=(server, ended),
            name="armillary-memory",
            daemon=True,
        )
        self._thread.start()
        # It waits for nothing, because Python may call it in the thread of the server.
        self._end = weakref.finalize(self, ended.set)

    def close(self) -> None:
        """Ends the thread of the server, which closes the socket."""
        self._end()
        self._thread.join()


def _serve(server: "_Server", ended: threading.Event) -> None:
    """Answers requests until the end. It refers to the server's socket alone."""
    with server:
        while not ended.is_set():
            server.handle_request()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    timeout = _LOOK_SECONDS

    def __init__(self, listener: socket.socket, folder: Path, index: int) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_address = listener.getsockname()
        self.folder = folder
        self.index = index
        self.token = secrets.token_hex(16)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Does nothing: the client gets the error, or it has gone."""


class _Handler(socketserver.StreamRequestHandler):
    timeout = _SECONDS

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        self._folder = self.server.folder
        self._index = self.server.index
        token = self.rfile.readline(_MAX_LINE).strip()
        if not hmac.compare_digest(token, self.server.token.encode()):
            return
        try:
            while line := self.rfile.readline(_MAX_LINE):
                request = json.loads(line)
                place = Place(*map(int, request["place"]))
                if request["word"] == "copy":
                    self._copy(place, request["size"], request["text"])
                else:
                    self._read(place, request["offset"], request["size"])
        except (OSError, ValueError) as error:
            # The connection is at an unknown place, so no other request follows.
            self._answer(explain(error))

    def _answer(self, problem: str) -> None:
        self.wfile.write(json.dumps({"problem": problem}).encode() + b"\n")

    def _copy(self, place: Place, size: int, text_size: int) -> None:
        """Writes a share of another process."""
        place = place._replace(holder=self._index)
        file = self._folder / place.data
        self._num_unread = size + text_size
        try:
            with reserved(file, size) as stream:
                while self._num_unread > text_size:
                    most = self._num_unread - text_size
                    stream.write(self._receive(min(most, _BLOCK_BYTES)))
            share = parse_share(self._receive(text_size).decode())
            problem = find_damage(file, share.parts)
            if problem is None:
                describe_share(file.parent, share)
        except (OSError, ValueError) as error:
            problem = explain(error)
            # If the connection closed now, the other process could not read the answer.
            while self._num_unread:
                self._receive(min(self._num_unread, _BLOCK_BYTES))
        self._answer(problem or "")

    def _receive(self, size: int) -> bytes:
        """Returns the next bytes of a copy."""
        block = self.rfile.read(size)
        if len(block) < size:
            raise ConnectionError("the connection ended within a share")
        self._num_unread -= size
        return block

    def _read(self, place: Place, offset: int, size: int) -> None:
        """Sends bytes of a share; size -1 is its description."""
        if size < 0:
            content = (self._folder / place.description).read_bytes()
        else:
            with (self._folder / place.data).open("rb") as stream:
                stream.seek(offset)
                content = stream.read(size)
        self._answer("")
        self.wfile.write(f"{len(content)}\n".encode())
        self.wfile.write(content)


class Connection:
    """A connection to the server of another process."""

    def __init__(self, address: Address) -> None:
        process, host, port, token = address
        self._who = f"process {process} at `{host}`"
        with self._naming():
            self._socket = socket.create_connection((host, port), _SECONDS)
        self._stream = self._socket.makefile("rwb")
        self._send(token.encode() + b"\n")

    def copy(self, folder: Path, place: Place, note: Callable[[int], None]) -> None:
        """Sends a complete share of this process.

        It calls `note` with the number of bytes whenever it has sent some.

        Raises:
            OSError: If the other process does not write it.
        """
        text = (folder / place.description).read_bytes()
        with (folder / place.data).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            self._ask("copy", place, size=size, text=len(text))
            while block := stream.read(_BLOCK_BYTES):
                self._send(block)
                note(len(block))
        self._send(text)
        self._receive_answer()

    def read(self, place: Place, offset: int, size: int) -> bytes:
        """Returns bytes of a share that the other process holds.

        Raises:
            OSError: If the other process does not have them.
        """
        self._ask("read", place, offset=offset, size=size)
        self._receive_answer()
        with self._naming():
            count = int(self._stream.readline(_MAX_LINE))
            content = self._stream.read(count)
        if len(content) != count or count != size >= 0:
            raise ConnectionError(
                f"`{place.data}` of {self._who} ended after {len(content)} bytes"
            )
        return content

    def read_description(self, place: Place) -> str:
        """Returns the description of a share that the other process holds."""
        return self.read(place, 0, -1).decode()

    def _ask(self, word: str, place: Place, **fields: int) -> None:
        request = {"word": word, "place": place, **fields}
        self._send(json.dumps(request).encode() + b"\n")

    def _send(self, content: bytes) -> None:
        with self._naming():
            self._stream.write(content)

    def _receive_answer(self) -> None:
        with self._naming():
            self._stream.flush()
            line = self._stream.readline(_MAX_LINE)
            if not line:
                raise ConnectionError("it has closed the connection")
        problem = json.loads(line)["problem"]
        if problem:
            raise OSError(f"{self._who}: {problem}")

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Adds the other process to an error of the connection."""
        try:
            yield
        except OSError as error:
            problem = f"{self._who} does not answer ({explain(error)})"
            raise ConnectionError(problem) from error

    def close(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(OSError):
            self._stream.close()
        self._socket.close()


@contextlib.contextmanager
def connected(address: Address) -> Iterator[Connection]:
    """Opens a connection, and closes it at the end."""
    connection = Connection(address)
    try:
        yield connection
    finally:
        connection.close()
