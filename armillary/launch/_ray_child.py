"""A worker on a machine of a Ray cluster, as the launcher sees it."""

import asyncio
import contextlib
import os
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from armillary.launch import _exec
from armillary.launch._child import Process


class Place(NamedTuple):
    """Where a worker will run."""

    address: str
    machine: str
    port: int
    host: Any


class RayChild(Process):
    """A worker on a machine of a Ray cluster, and the actor that is its parent."""

    def __init__(
        self,
        ray: Any,
        label: str,
        place: Place,
        arguments: Sequence[str],
        environment: Mapping[str, str],
    ) -> None:
        super().__init__(label)
        self._ray, self._place = ray, place
        started = place.host.start.remote(
            _exec.__file__, [sys.executable, *arguments], environment, os.getcwd()
        )
        self.stdout = _RemoteStream(self, "stdout")
        self.stderr = _RemoteStream(self, "stderr")
        self._tasks = {asyncio.create_task(self._watch(started))}

    def look(self) -> None:
        """Does nothing: no SIGCHLD tells of this worker."""

    def kill(self) -> None:
        """Ends the worker, if it runs, with its actor."""
        if not self.ended.done():
            self._ray.kill(self._place.host)
            self._end(-signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        if not self.ended.done():
            task = asyncio.create_task(self._send(number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def read(self, stream: str) -> bytes:
        """Returns what the worker says next; nothing at the end."""
        try:
            return await self._place.host.read.remote(stream)
        except self._ray.exceptions.RayActorError:
            return b""

    async def _send(self, number: int) -> None:
        # `_watch` tells of a worker that is lost.
        with contextlib.suppress(self._ray.exceptions.RayError):
            await self._place.host.send_signal.remote(number)

    async def _watch(self, started: Any) -> None:
        try:
            await started
            returncode, seconds = await self._place.host.wait.remote()
        except self._ray.exceptions.RayError as error:
            is_silent = isinstance(error, self._ray.exceptions.ActorUnavailableError)
            why = "nothing answers there." if is_silent else shorten_error(error)
            where = f"{self._place.machine} ({self._place.address})"
            self._end(-signal.SIGKILL, f"on {where}: {why}")
        else:
            self._end(returncode, seconds=seconds)


class _RemoteStream:
    """What a worker writes to one of its streams."""

    def __init__(self, child: RayChild, name: str) -> None:
        self._child, self._name = child, name

    async def read(self) -> bytes:
        return await self._child.read(self._name)

    def close(self) -> None:
        """Does nothing: the stream is the actor's."""


def shorten_error(error: BaseException) -> str:
    """Returns what Ray says of an error, in a line."""
    # In front of the last line stand the names that Ray gave to the actor.
    last = str(error).strip().rpartition("\n")[2]
    return f"Ray says: {textwrap.shorten(last, 240)}" if last else "no answer."
