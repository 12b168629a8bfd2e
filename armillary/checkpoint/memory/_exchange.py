"""Sends shares between the processes of a job: a small server, and its clients.

A request is one line of JSON that begins with the token of the server. Bytes of a file
follow the line of a copy, and the answer to a read.
"""

import contextlib
import hmac
import json
import secrets
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from armillary.checkpoint.memory._share import (
    Place,
    describe_share,
    find_damage,
    parse_share,
    reserved,
)
from armillary.cluster.resolvers._spec import is_loopback
from armillary.lifeline._tree import listen

_SECONDS = 60.0
"""The longest silence of a connection."""
_BLOCK_BYTES = 4 << 20
_MOST_LINE = 1 << 16


class Address(NamedTuple):
    """The server of a process."""

    host: str
    port: int
    token: str


class ShareServer:
    """Offers the shares below a folder to other processes, and takes copies."""

    def __init__(self, folder: Path, host: str, index: int) -> None:
        is_local = is_loopback(f"{host}:0")
        # Like its lifeline, process 0 may have an address that is not of a local
        # interface.
        interface = host if is_local or index else None
        self._server = _Server(listen(interface), folder, index)
        port = self._server.server_address[1]
        self.address = Address(host, port, self._server.token)
        thread = threading.Thread(
            target=self._server.serve_forever, name="armillary-memory", daemon=True
        )
        thread.start()

    def close(self) -> None:
        """Stops the server."""
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True

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
        token = self.rfile.readline(_MOST_LINE).strip()
        if not hmac.compare_digest(token, self.server.token.encode()):
            return
        try:
            while line := self.rfile.readline(_MOST_LINE):
                request = json.loads(line)
                place = Place(*map(int, request["place"]))
                if request["word"] == "copy":
                    self._copy(place, request["size"], request["text"])
                else:
                    self._read(place, request["offset"], request["size"])
        except (OSError, ValueError) as error:
            # The rest of a share may be unread, so no other request follows.
            self._answer(f"{type(error).__name__}: {error}")

    def _answer(self, problem: str) -> None:
        self.wfile.write(json.dumps({"problem": problem}).encode() + b"\n")

    def _copy(self, place: Place, size: int, text_size: int) -> None:
        """Writes a share of another process."""
        place = place._replace(holder=self._index)
        file = self._folder / place.data
        with reserved(file, size) as stream:
            self._receive(stream, size)
        share = parse_share(self.rfile.read(text_size).decode())
        problem = find_damage(file, share.parts)
        if problem is None:
            describe_share(file.parent, share)
        self._answer(problem or "")

    def _receive(self, stream: Any, size: int) -> None:
        while size:
            block = self.rfile.read(min(size, _BLOCK_BYTES))
            if not block:
                raise ConnectionError("the connection ended within a share")
            stream.write(block)
            size -= len(block)

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
        host, port, token = address
        self._socket = socket.create_connection((host, port), _SECONDS)
        self._stream = self._socket.makefile("rwb")
        self._stream.write(token.encode() + b"\n")

    def copy(self, folder: Path, place: Place) -> None:
        """Sends a complete share of this process.

        Raises:
            OSError: If the other process does not write it.
        """
        text = (folder / place.description).read_bytes()
        file = folder / place.data
        size = file.stat().st_size
        self._ask("copy", place, size=size, text=len(text))
        with file.open("rb") as stream:
            shutil.copyfileobj(stream, self._stream, _BLOCK_BYTES)
        self._stream.write(text)
        self._receive_answer()

    def read(self, place: Place, offset: int, size: int) -> bytes:
        """Returns bytes of a share that the other process holds."""
        self._ask("read", place, offset=offset, size=size)
        self._receive_answer()
        count = int(self._stream.readline(_MOST_LINE))
        content = self._stream.read(count)
        if len(content) != count or count != size >= 0:
            raise ConnectionError(f"`{place.data}` ended after {len(content)} bytes")
        return content

    def read_description(self, place: Place) -> str:
        """Returns the description of a share that the other process holds."""
        return self.read(place, 0, -1).decode()

    def _ask(self, word: str, place: Place, **fields: int) -> None:
        request = {"word": word, "place": place, **fields}
        self._stream.write(json.dumps(request).encode() + b"\n")
        self._stream.flush()

    def _receive_answer(self) -> None:
        self._stream.flush()
        line = self._stream.readline(_MOST_LINE)
        if not line:
            raise ConnectionError("the other process has closed the connection")
        problem = json.loads(line)["problem"]
        if problem:
            raise OSError(problem)

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
