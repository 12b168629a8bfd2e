"""Writes what all processes say, line by line, and what the launcher says.

The event loop reads, and one thread writes. Each stream waits until its last piece is
written before it is read again. So a paused terminal pauses the processes that write to
it, costs no memory, and does not keep the launcher from passing on a signal.

Whole lines of text from pieces of bytes.
"""

import asyncio
import codecs
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from io import FileIO
from queue import SimpleQueue
from typing import NamedTuple, Protocol, TextIO

from armillary._logging import is_terminal

MAX_LINE = 32 * 1024
"""Characters after which a line without an end is passed on all the same."""


class LineSplitter:
    """Turns the bytes that a process writes into the lines that a terminal shows.

    Bytes that are not UTF-8 become replacement characters. Of a progress bar, which
    returns to the start of its line, the last state before the line ends is kept.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = ""

    def feed(self, data: bytes) -> list[str]:
        """Returns the lines that `data` completes, without their ends."""
        *lines, rest = (self._partial + self._decoder.decode(data)).split("\n")
        shown = _show(rest)
        # A return at the very end may belong to "\r\n", so it decides nothing yet.
        if rest.endswith("\r"):
            shown += "\r"
        while len(shown) > MAX_LINE:
            lines.append(shown[:MAX_LINE])
            shown = shown[MAX_LINE:]
        self._partial = shown
        return [_show(line) for line in lines]

    def flush(self) -> list[str]:
        """Returns what is left when nothing more comes: one line or none."""
        rest = self._partial + self._decoder.decode(b"", final=True)
        self._partial = ""
        return [_show(rest)] if rest else []


def _show(line: str) -> str:
    return line.rstrip("\r").rpartition("\r")[2]


TAIL_LINES = 15
"""Lines of a failed process's stderr that are shown again at the end."""

_LAUNCHER = "launcher"
_BOLD = 1
# Cyan, green, magenta, yellow, blue, and two of them brighter (ECMA-48, SGR).
_COLORS = (36, 32, 35, 33, 34, 96, 92)
_READ_SIZE = 64 * 1024
_DRAIN_SECONDS = 5.0


class Stream(Protocol):
    """Where to read what a process says."""

    async def read(self) -> bytes:
        """Returns what comes next, and nothing at the end."""
        ...

    def close(self) -> None:
        """Ends reading."""


class _Pipe:
    """The stream of a process on this machine, which it closes."""

    def __init__(self, file: FileIO) -> None:
        self._file, self._reader = file, asyncio.StreamReader()
        self._transport: asyncio.ReadTransport | None = None

    async def read(self) -> bytes:
        if self._transport is None:
            self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(self._reader), self._file
            )
        return await self._reader.read(_READ_SIZE)

    def close(self) -> None:
        (self._transport or self._file).close()


class StreamSink:
    """Writes to stdout or stderr of the launcher, with colored labels on a terminal.

    A reader that went away (`armillary launch ... | head`) must not end the training,
    so lines are dropped from then on.
    """

    def __init__(self, stream: TextIO | None) -> None:
        # Python has no stream where the launcher was started with a closed one.
        self._descriptor = None if stream is None else stream.fileno()
        self._encoding = "utf-8" if stream is None else stream.encoding
        self._is_colored = (
            is_terminal(stream)
            and os.environ.get("TERM", "dumb") != "dumb"
            and not os.environ.get("NO_COLOR")
        )

    def write(self, label: str, line: str) -> None:
        """Writes `line` behind `[label]`, or drops it if nobody can read it."""
        if self._descriptor is None:
            return
        prefix = f"[{label}]"
        if self._is_colored:
            number = label.rpartition(" ")[2]
            is_worker = number.isdecimal()
            code = _COLORS[int(number) % len(_COLORS)] if is_worker else _BOLD
            prefix = f"\x1b[{code}m{prefix}\x1b[0m"
        text = f"{prefix} {line}\n"
        try:
            _write_all(self._descriptor, text.encode(self._encoding, "replace"))
        except OSError:
            self._descriptor = None


class _Piece(NamedTuple):
    """Lines to write, all of one stream, and whom to tell when they are written."""

    sink: StreamSink
    label: str
    lines: list[str]
    written: "Future[None]"


class Output:
    """Writes the lines of all processes and of the launcher; a context manager.

    Args:
        logs: Unbuffered files to append to, by the label of their process. They are
            closed at the end.
    """

    def __init__(self, logs: Mapping[str, FileIO] | None = None) -> None:
        self._logs = dict(logs or {})
        self._stdout, self._stderr = StreamSink(sys.stdout), StreamSink(sys.stderr)
        self._pumps: set[asyncio.Task[None]] = set()
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._num_posted = self._num_written = 0
        # A daemon, so that Ctrl-C ends the launcher while its terminal is paused.
        self._thread = threading.Thread(target=self._write_all, daemon=True)

    def __enter__(self) -> "Output":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        self._pieces.put(None)
        if kind is None:
            self._thread.join()

    def say(self, text: str) -> None:
        """Writes lines of the launcher itself to stderr."""
        self._post(self._stderr, _LAUNCHER, text.splitlines())

    def add(
        self, label: str, stdout: FileIO | Stream, stderr: FileIO | Stream
    ) -> "deque[str]":
        """Takes over the streams of a process and closes them when they end."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        nothing: deque[str] = deque(maxlen=0)
        for file, sink, lines in (
            (stdout, self._stdout, nothing),
            (stderr, self._stderr, tail),
        ):
            stream = _Pipe(file) if isinstance(file, FileIO) else file
            pump = asyncio.create_task(
                self._pump(label, stream, sink, lines), name=label
            )
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        return tail

    async def wait(
        self, seconds: float, labels: Collection[str] | None = None
    ) -> set[asyncio.Task[None]]:
        """Waits until streams have ended and are written; returns those that did not.

        They are those of the processes with `labels`; `None` means all.
        """
        pumps = {
            pump for pump in self._pumps if labels is None or pump.get_name() in labels
        }
        return (await asyncio.wait(pumps, timeout=seconds))[1] if pumps else set()

    async def drain(
        self, labels: Collection[str] | None = None, *, seconds: float = _DRAIN_SECONDS
    ) -> bool:
        """Waits until the streams of processes that have ended are written.

        A process that left its worker's group may hold a stream open for longer than
        `seconds`. It is not listened to any more.
        """
        late = await self.wait(seconds, labels)
        if late and self._num_posted == self._num_written:
            for pump in late:
                pump.cancel()
            late = await self.wait(seconds, labels)
        return not late

    async def finish(self) -> None:
        """Drains all streams, for as long as that takes.

        The last lines say what went wrong: a reader that pauses still gets them.
        """
        while not await self.drain():
            pass

    def _post(self, sink: StreamSink, label: str, lines: list[str]) -> "Future[None]":
        piece = _Piece(sink, label, lines, Future())
        # Once it is marked as running, nobody can cancel it.
        piece.written.set_running_or_notify_cancel()
        self._num_posted += 1
        self._pieces.put(piece)
        return piece.written

    async def _pump(
        self, label: str, stream: Stream, sink: StreamSink, tail: "deque[str]"
    ) -> None:
        splitter = LineSplitter()
        try:
            while data := await stream.read():
                lines = splitter.feed(data)
                tail.extend(lines)
                await asyncio.wrap_future(self._post(sink, label, lines))
        finally:
            rest = splitter.flush()
            tail.extend(rest)
            written = self._post(sink, label, rest)
            stream.close()
        await asyncio.wrap_future(written)

    def _write_all(self) -> None:
        while (piece := self._pieces.get()) is not None:
            for line in piece.lines:
                piece.sink.write(piece.label, line)
                if piece.label in self._logs:
                    self._write_log(piece.label, line)
            self._num_written += 1
            piece.written.set_result(None)
        for log in self._logs.values():
            log.close()

    def _write_log(self, label: str, line: str) -> None:
        log = self._logs[label]
        try:
            _write_all(log.fileno(), f"{line}\n".encode())
        except OSError as error:
            del self._logs[label]
            log.close()
            self._stderr.write(
                _LAUNCHER,
                f"cannot write {log.name} any more ({error}); the job goes on without.",
            )


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another user of the same terminal may have made it non-blocking.
            select.select([], [descriptor], [])
