"""Writes what all processes say, line by line, and what the launcher says.

One thread reads each stream and writes its lines. So a paused terminal pauses the
processes that write to it, costs no memory, and does not keep the launcher from passing
on a signal.
"""

import asyncio
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from io import BufferedReader, FileIO
from queue import Queue
from typing import TextIO

from armillary._logging import is_terminal

TAIL_LINES = 15
"""Lines of a failed process's stderr that are shown again at the end."""
MAX_LINE = 32 * 1024
"""Characters after which a line without an end is passed on all the same."""

_LAUNCHER = "launcher"
_BOLD = 1
# Cyan, green, magenta, yellow, blue, and two of them brighter (ECMA-48, SGR).
_COLORS = (36, 32, 35, 33, 34, 96, 92)
_DRAIN_SECONDS = 5.0
_POLL_SECONDS = 0.02


def read_lines(file: BufferedReader) -> Iterator[str]:
    """Returns the lines that a terminal shows of what is in a file, and closes it."""
    # Of a progress bar, which returns to the start of its line, the last state is kept.
    with io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as lines:
        while line := lines.readline(MAX_LINE):
            yield line.rstrip("\r\n").rpartition("\r")[2]


class StreamSink:
    """Writes to stdout or stderr of the launcher, with colored labels on a terminal."""

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
        except OSError:  # A reader that went away (`| head`) must not end the job.
            self._descriptor = None


class Output:
    """Writes the lines of all processes and of the launcher."""

    def __init__(self, logs: Mapping[str, FileIO] | None = None) -> None:
        self._logs = dict(logs or {})
        self._stdout, self._stderr = StreamSink(sys.stdout), StreamSink(sys.stderr)
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._said: Queue[str] = Queue()
        # Daemons, so that Ctrl-C ends the launcher while its terminal is paused.
        threading.Thread(target=self._write_said, daemon=True).start()

    def say(self, text: str) -> None:
        """Writes lines of the launcher itself to stderr."""
        self._said.put(text)

    def add(
        self, label: str, stdout: BufferedReader, stderr: BufferedReader
    ) -> "deque[str]":
        """Writes what a process says; returns the last lines of its stderr."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        nothing: deque[str] = deque(maxlen=0)
        for stream in ((stdout, self._stdout, nothing), (stderr, self._stderr, tail)):
            thread = threading.Thread(
                target=self._write_lines, args=(label, *stream), name=label, daemon=True
            )
            self._threads.append(thread)
            thread.start()
        return tail

    async def wait(self, seconds: float, labels: Collection[str] | None = None) -> bool:
        """Waits until streams, of some processes or all, are written; says if so."""
        end = time.monotonic() + seconds
        while is_late := not self._is_written(labels):
            if time.monotonic() > end:
                break
            await asyncio.sleep(_POLL_SECONDS)
        return not is_late

    async def drain(
        self, labels: Collection[str] | None = None, *, seconds: float = _DRAIN_SECONDS
    ) -> bool:
        """Waits for streams of processes that have ended; returns whether it need not.

        A process that left its worker's group may hold a stream open for longer.
        """
        is_written = await self.wait(seconds, labels)
        if not is_written and not self._lock.locked():
            late = [t for t in self._threads if labels is None or t.name in labels]
            self._threads = [t for t in self._threads if t not in late]
        return is_written

    async def finish(self) -> None:
        """Drains all streams, and closes the log files."""
        # The last lines say what went wrong: a reader that pauses still gets them.
        while not await self.drain() and self._lock.locked():
            pass
        logs, self._logs = self._logs, {}
        for log in logs.values():
            log.close()

    def _is_written(self, labels: Collection[str] | None) -> bool:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if labels is None:
            return not self._threads and not self._said.unfinished_tasks
        return not any(thread.name in labels for thread in self._threads)

    def _write_said(self) -> None:
        while True:
            for line in self._said.get().splitlines():
                self._write(self._stderr, _LAUNCHER, line)
            self._said.task_done()

    def _write_lines(
        self, label: str, file: BufferedReader, sink: StreamSink, tail: "deque[str]"
    ) -> None:
        for line in read_lines(file):
            tail.append(line)
            self._write(sink, label, line)

    def _write(self, sink: StreamSink, label: str, line: str) -> None:
        with self._lock:
            sink.write(label, line)
            if (log := self._logs.get(label)) is None:
                return
            try:
                _write_all(log.fileno(), f"{line}\n".encode())
            except OSError as error:
                del self._logs[label]
                log.close()
                why = f"cannot write {log.name} any more ({error})"
                self._stderr.write(_LAUNCHER, f"{why}; the job goes on without.")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            # Another user of the same terminal may have made it non-blocking.
            select.select([], [descriptor], [])
