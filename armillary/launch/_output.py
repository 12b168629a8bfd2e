"""Writes the output of all processes, line by line, and the lines of the launcher.

Each stream has a thread. So a paused terminal pauses the processes that write to it,
but the launcher still passes on signals.
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

TAIL_LINES = 15
"""Lines of a failed process's stderr that are shown again at the end."""
MAX_LINE = 32 * 1024
"""The number of characters after which a line is passed on before its end."""

_LAUNCHER = "launcher"
_DRAIN_SECONDS = 5.0
_POLL_SECONDS = 0.02


def read_output_lines(file: BufferedReader) -> Iterator[str]:
    """Yields the lines of a file as a terminal shows them, and closes the file."""
    # A progress bar returns to the start of its line; only its last state is kept.
    with io.TextIOWrapper(file, "utf-8", "replace", newline="\n") as lines:
        while line := lines.readline(MAX_LINE):
            yield line.rstrip("\r\n").rpartition("\r")[2]


class LabeledOutput:
    """Writes the lines of all processes and of the launcher, each after a label."""

    def __init__(self, logs: Mapping[str, FileIO] | None = None) -> None:
        self._logs = dict(logs or {})
        self._open: dict[str, int] = {}
        for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            # It is `None` if the launcher was started with a closed stream.
            if stream:
                self._open[name] = stream.fileno()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._own_lines: Queue[str] = Queue()
        # The threads are daemons, so that Ctrl-C ends the launcher even if its terminal
        # is paused.
        threading.Thread(target=self._write_own_lines, daemon=True).start()

    def write(self, text: str) -> None:
        """Writes lines of the launcher itself to stderr."""
        self._own_lines.put(text)

    def add(
        self, label: str, stdout: BufferedReader, stderr: BufferedReader
    ) -> "deque[str]":
        """Writes the output of a process; returns the last lines of its stderr."""
        tail: deque[str] = deque(maxlen=TAIL_LINES)
        nothing: deque[str] = deque(maxlen=0)
        for stream in (("stdout", stdout, nothing), ("stderr", stderr, tail)):
            thread = threading.Thread(
                target=self._write_lines,
                args=(label, *stream),
                name=label,
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()
        return tail

    async def drain(
        self, labels: Collection[str] | None = None, seconds: float = _DRAIN_SECONDS
    ) -> None:
        """Waits, for a limited time, for the end of the streams of some processes.

        A process that left its worker's group may hold a stream open for longer.
        """
        end = time.monotonic() + seconds
        while self._has_more(labels) and time.monotonic() < end:
            await asyncio.sleep(_POLL_SECONDS)

    async def finish(self) -> None:
        """Drains all streams, and closes the log files."""
        await self.drain()
        # The last lines show the error, so the launcher waits for a paused reader.
        while self._has_more() and self._lock.locked():
            await self.drain()
        # A thread may still write, so the files are out of its reach before they close.
        logs = self._logs
        self._logs = {}
        for log in logs.values():
            log.close()

    def _has_more(self, labels: Collection[str] | None = None) -> bool:
        """Returns whether streams of some processes, or of all, are open."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if labels is not None:
            return any(thread.name in labels for thread in self._threads)
        has_own_lines = self._own_lines.unfinished_tasks > 0
        return bool(self._threads) or has_own_lines

    def _write_own_lines(self) -> None:
        while True:
            for line in self._own_lines.get().splitlines():
                self._write("stderr", _LAUNCHER, line)
            self._own_lines.task_done()

    def _write_lines(
        self,
        label: str,
        name: str,
        file: BufferedReader,
        tail: "deque[str]",
    ) -> None:
        for line in read_output_lines(file):
            tail.append(line)
            self._write(name, label, line)

    def _write(self, name: str, label: str, line: str) -> None:
        """Writes a line to a stream of the launcher, and to the log of the process."""
        with self._lock:
            try:
                if name in self._open:
                    _write_all(self._open[name], f"[{label}] {line}\n")
            except OSError:  # A reader that has ended (`| head`) must not end the job.
                del self._open[name]
            try:
                if label in self._logs:
                    _write_all(self._logs[label].fileno(), f"{line}\n")
            except OSError as error:
                log = self._logs.pop(label)
                log.close()
                self.write(f"cannot write {log.name} any more ({error}).")


def _write_all(descriptor: int, text: str) -> None:
    """Writes a text, also to a pipe or a terminal that is full at the moment."""
    data = text.encode()
    while data:
        try:
            num_written = os.write(descriptor, data)
            data = data[num_written:]
        except BlockingIOError:
            # Another user of the same terminal may have made it non-blocking.
            select.select([], [descriptor], [])
